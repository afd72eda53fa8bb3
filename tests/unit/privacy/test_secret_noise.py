"""Noise of a real federation: no generator that could be worked out is asked for it, and no two releases share a key."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_run import exported, sites_with, tiny_settings
from support import seeded
from torch.utils._python_dispatch import TorchDispatchMode

from fedprompt.backbones.weight_cache import identity
from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Server
from fedprompt.engines.remote import node
from fedprompt.engines.remote.protocol import Answer, Order, Setting
from fedprompt.errors import ConfigError
from fedprompt.experiment import Experiment
from fedprompt.privacy import keystream, mechanism
from fedprompt.privacy.budget import Terms
from fedprompt.privacy.discrete_gaussian import discrete_gaussian
from fedprompt.privacy.server_noise import ServerNoise
from fedprompt.random_streams import Stream

pytestmark = pytest.mark.unit

SECRET = 2**255 + 12345
NAMES = tuple(f"client_{place}" for place in range(4))


class Asked(Exception):
    """A generator was asked for a number."""


class NoTorch(TorchDispatchMode):
    """Raises at every operation of torch that draws: they all carry this tag."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Asked(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_generators() -> Iterator[None]:
    """Raises as soon as torch, numpy, `random` or a stream of the simulation is asked for a number."""

    def asked(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Asked(name)

        return call

    targets = [(np.random, name) for name in dir(np.random) if callable(getattr(np.random, name)) and name[0] != "_"]
    targets += [(random, name) for name in random.__all__ if name != "SystemRandom"]
    targets += [(torch, "Generator"), (Stream, "_bytes")]
    with NoTorch():
        torch.zeros(1).add(1)  # the first use of a mode imports much, and some of that makes generators
    with pytest.MonkeyPatch.context() as patch, NoTorch():
        for owner, name in targets:
            patch.setattr(owner, name, asked(f"{owner.__name__}.{name}"))
        yield


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(2),
        lambda: torch.normal(0.0, 1.0, (2,)),
        lambda: torch.empty(2).normal_(),
        lambda: torch.randperm(3),
        lambda: torch.Generator(),
        lambda: np.random.default_rng(),
        lambda: np.random.normal(),  # noqa: NPY002
        lambda: random.gauss(0, 1),
        lambda: seeded().words(1),
    ],
)
def test_the_trap_works(draw: Callable[[], Any]) -> None:
    with no_generators(), pytest.raises(Asked):
        draw()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> tuple[Order, dict[str, Path]]:
    """An order to take part in a private round, with shared tensors and statistics, and the images of the site it is for."""
    folder = tmp_path_factory.mktemp("ground")
    privacy = {"noise": 1.0, "clip": 1e-3, "clips": {"*": 5.0}}
    settings = tiny_settings(folder / "runs", "ground", method={"name": "pep_fedpt"}, privacy=privacy)
    made = Experiment(settings)
    config = made.config.model_dump(mode="json", exclude={"engine", "output"})
    source, _, backbone, world = made.factory.prepare()
    setting = Setting("a" * 32, config, identity(backbone), source.class_names, NAMES)
    server = Server(world.roles.shared, world.roles.server)
    received = made.method.download(world, server, 1)
    return Order("work", setting, 1, train=1, keep_as=5, received=received), exported(settings, folder / "files")


def answered(ground: tuple[Order, dict[str, Path]], folder: Path, **changes: Any) -> LocalUpdate:
    order, files = ground
    site = sites_with({"client_1": files["client_1"]}, folder)["client_1"]
    answer = Answer.from_bytes(site.answer(replace(order, **changes).to_bytes()))
    found = answer.reply(10**7)
    assert found is not None, answer.failure
    return found


@contextmanager
def trapped_release(caught: list[str]) -> Iterator[None]:
    """No generators from the moment a site's update is clipped until its bytes are made."""
    bounded, pack = mechanism.bounded, wire.pack
    trap = no_generators()

    def clipped(*args: Any) -> Any:
        found = bounded(*args)
        trap.__enter__()
        caught.append("clipped")
        return found

    def packed(reply: LocalUpdate) -> bytes:
        blob = pack(reply)
        trap.__exit__(None, None, None)
        caught.append("packed")
        return blob

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "bounded", clipped)
        patch.setattr(wire, "pack", packed)
        try:
            yield
        finally:
            if caught and caught[-1] == "clipped":
                trap.__exit__(None, None, None)


@pytest.mark.parametrize(("kind", "train"), [("work", 1), ("survey", None)])
def test_a_site_asks_no_generator_between_clipping_and_sending(
    ground: Any, tmp_path: Path, kind: str, train: int | None
) -> None:
    caught: list[str] = []
    with trapped_release(caught):
        found = answered(ground, tmp_path, kind=kind, train=train)
    assert caught == ["clipped", "packed"]
    assert found.upload


def test_the_same_site_with_a_stream_would_be_caught(
    ground: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "unknown_noise", lambda round, client: seeded())
    with trapped_release([]), pytest.raises(AssertionError):
        answered(ground, tmp_path)
    assert "Asked: Stream._bytes" in capsys.readouterr().err


def test_every_release_of_a_site_has_a_new_key(ground: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []
    made = keystream.Keystream.__init__
    monkeypatch.setattr(keystream.Keystream, "__init__", lambda self, key: (keys.append(key), made(self, key))[1])
    answered(ground, tmp_path / "a", kind="survey", train=None)
    for place in range(3):
        answered(ground, tmp_path / f"b{place}")
    assert len(keys) == 4
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {32}


# -- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> ServerNoise:
    privacy = {"noise": 0.8, "clip": 0.5, "noise_at": "server", "quantile": 0.5}
    settings = tiny_settings(tmp_path_factory.mktemp("server"), "server", privacy=privacy)
    made = Experiment(settings)
    world = made.factory.prepare().world
    terms = Terms.of(made.config, world.participants, 0, lambda client: 1)
    assert terms is not None
    return ServerNoise(made.config, world, terms, SECRET)


def replies(noise: ServerNoise, moved: float = 0.01) -> list[LocalUpdate]:
    upload = {name: tensor + moved for name, tensor in noise.world.roles.shared.items()}
    return [LocalUpdate(client, 1, {**upload, mechanism.WITHIN: torch.tensor(1.0)}, 1) for client in range(3)]


def server_of(noise: ServerNoise, **changes: Any) -> Server:
    return Server(**{"shared": noise.world.roles.shared, "own": {}, **changes})


def test_the_server_of_a_private_run_asks_no_generator(noise: ServerNoise) -> None:
    with no_generators():
        total = noise.total(replies(noise), server_of(noise), "round", 0.5)
        clip = noise.next_clip(replies(noise), 1, 0.5)
    assert set(total) == {*noise.world.roles.shared}
    assert clip is not None
    with no_generators(), pytest.raises(Asked):  # noise of a simulation follows from the seed
        replace(noise, secret=None).total(replies(noise), server_of(noise), "round", 0.5)


def drawn(noise: ServerNoise, came: list[LocalUpdate], server: Server, clip: float) -> np.ndarray:
    """The noise of a round in steps of its grid."""
    parts = mechanism.groups(noise.world.roles, "round", noise.terms.settings, clip)
    total = noise.total(came, server, "round", clip)
    still = mechanism.noised_sum(
        [reply.upload for reply in came], server.shared, parts, noise.terms.expected, 0.0, seeded()
    )
    return np.concatenate([((total[name] - still[name]) / clip).double().flatten().numpy() for name in sorted(total)])


def test_no_two_releases_of_a_server_share_their_noise(noise: ServerNoise) -> None:
    """Whatever differs between two releases, their noise does; what does not differ is one release, made again."""
    shared = noise.world.roles.shared
    moved = {name: tensor + 1e-3 for name, tensor in shared.items()}
    first = drawn(noise, replies(noise), server_of(noise), 0.5)
    assert np.array_equal(first, drawn(noise, replies(noise), server_of(noise), 0.5))
    others = {
        "updates": drawn(noise, replies(noise, 0.011), server_of(noise), 0.5),
        "clients": drawn(noise, replies(noise)[:2], server_of(noise), 0.5),
        "round": drawn(noise, replies(noise), server_of(noise, round=1), 0.5),
        "start": drawn(noise, replies(noise), server_of(noise, shared=moved), 0.5),
        "bound": drawn(noise, replies(noise), server_of(noise), 0.5 + 2**-40),
        "secret": drawn(replace(noise, secret=SECRET + 1), replies(noise), server_of(noise), 0.5),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(first, other)[0, 1]) < 6 / len(first) ** 0.5, name
        assert np.isclose(first, other, atol=1e-4).mean() < 0.02, name


def test_a_derived_key_depends_on_every_part_and_where_it_ends() -> None:
    told: list[tuple[int, tuple[bytes, ...]]] = [
        (SECRET, (b"a", b"b")),
        (SECRET, (b"ab",)),
        (SECRET, (b"a", b"", b"b")),
        (SECRET, (b"b", b"a")),
        (SECRET, ()),
        (SECRET ^ 1, (b"a", b"b")),
    ]
    words = [tuple(keystream.derived_keystream(secret, *parts).words(4).tolist()) for secret, parts in told]
    assert len({word for each in words for word in each}) == 4 * len(told)
    assert words[0] == tuple(keystream.derived_keystream(SECRET, b"a", b"b").words(4).tolist())


def test_without_the_package_secret_noise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(ConfigError, match=r"secret noise must have the package cryptography, try: pip install"):
        keystream.new_keystream()


def linear_complexity(bits: np.ndarray) -> int:
    """How many bits of a sequence give all others by a linear rule over GF(2) (Berlekamp and Massey)."""
    rule, before, length, since, seen = 1, 1, 0, 1, 0
    for place, bit in enumerate(bits.tolist()):
        seen = seen << 1 | bit
        if (rule & seen).bit_count() & 1:
            rule, last = rule ^ before << since, rule
            if 2 * length <= place:
                length, before, since = place + 1 - length, last, 0
        since += 1
    return length


def test_noise_follows_no_linear_rule() -> None:
    """What the attack on torch's generator lived on: 19937 bits of a Mersenne Twister give all that follow."""
    count = 41_000
    torchs = torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(1)).numpy() >> 31
    assert linear_complexity(torchs) == 19937
    noise = discrete_gaussian(count, 1.3 * 2**40, keystream.new_keystream())
    for bits in (noise < 0, noise >> 38 & 1, noise & 1):
        assert abs(linear_complexity(bits.astype(np.int64)) - count / 2) < 30
