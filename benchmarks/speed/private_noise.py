"""What secret noise costs: the discrete Gaussian of a ChaCha20 key stream against torch's normal numbers, which it replaced.

Three ratios, each of medians of CPU time of one thread, both ways in turn (A B A B ...) in one process:

* the noise of one release of 25 thousand numbers (100 kB), with a new key;
* one release: an update is bounded, noised and packed;
* a private round over sites without any training, the worst case: ten clients with one release each, then everything the
  server does with it (guard, aggregation, run.db). The old way differs in nothing but the noise. It is kept here alone.

    python benchmarks/speed/private_noise.py [--repeats 41] [--output benchmarks/speed/private_noise.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedprompt.config import parse
from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Method, World
from fedprompt.core.roles import Roles
from fedprompt.federation.loop import Federation, Observer
from fedprompt.privacy import mechanism
from fedprompt.privacy.budget import Terms
from fedprompt.privacy.discrete_gaussian import discrete_gaussian
from fedprompt.privacy.keystream import new_keystream
from fedprompt.privacy.mechanism import Group
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.runs.store import RoundRecord, RunStore
from fedprompt.tensors import Tensors

NUMBERS, CLIENTS, NOISE, CLIP = 25_000, 10, 1.3, 0.5
TARGET = 1.3  # the most that a private round may cost of what it did
WORDS = slice(24, 24 + 624 * 8)  # of the state of torch's generator

Noised = Callable[[Tensors, Tensors, Sequence[Group]], Tensors]


def sealed(key: bytes) -> torch.Generator:
    """As it was: a Mersenne Twister with its whole state from a hash. Not secure."""
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state().numpy().copy()
    state[WORDS].view("<u8")[:] = np.frombuffer(hashlib.shake_256(key).digest(624 * 4), dtype="<u4")
    generator.set_state(torch.from_numpy(state))
    return generator


def noised_before(upload: Tensors, received: Tensors, parts: Sequence[Group]) -> Tensors:
    """As it was: normal numbers in double precision on what is sent."""
    generator, result = sealed(secrets.token_bytes(32)), dict(upload)
    for part in parts:
        assert part.bound is not None
        for name, shape in part.shapes.items():
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
            exact = upload[name].detach().to("cpu", torch.float64)
            result[name] = (exact + NOISE * math.sqrt(len(parts)) * part.bound * drawn).to(upload[name].dtype)
    return result


def noised_now(upload: Tensors, received: Tensors, parts: Sequence[Group]) -> Tensors:
    return mechanism.noised(upload, received, parts, NOISE, new_keystream())


def draw_before() -> None:
    torch.randn(NUMBERS, dtype=torch.float64, generator=sealed(secrets.token_bytes(32)))


def draw_now() -> None:
    discrete_gaussian(NUMBERS, NOISE * 2.0**40, new_keystream())


@dataclass(frozen=True)
class Averaged(Method):
    """One shared tensor."""

    def init(self, world: World, generator: Stream) -> Roles:
        return Roles(shared={"prompt": generator.normal(NUMBERS)})


@dataclass
class Sites:
    """Clients that have trained already: what is left is what makes their updates private, and the message."""

    noised: Noised
    updates: list[torch.Tensor]
    parts: tuple[Group, ...]

    def survey(self, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        return iter(())

    def train(self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        for client in clients:
            received = download(client)
            yield wire.unpack(self.release(client, round, received), 10**7)

    def release(self, client: int, round: int, received: Tensors) -> bytes:
        upload = {"prompt": received["prompt"] + self.updates[client]}
        kept, _ = mechanism.bounded(upload, received, self.parts)
        return wire.pack(LocalUpdate(client, round, self.noised(kept, received, self.parts), 1))

    def evaluate(self, *args: Any) -> Iterator[Any]:
        return iter(())

    def discard(self, clients: Iterable[int]) -> None: ...

    def take_states(self) -> dict[int, bytes]:
        return {}


class Stopwatch(Observer):
    """CPU seconds between commits."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def committed(self, record: RoundRecord) -> None:
        self.ends.append(time.process_time())


def round_seconds(noised: Noised, rounds: int, folder: Path) -> list[float]:
    """Of every round of a federation but the first."""
    config = parse(
        {
            "name": "private",
            "federation": {"rounds": rounds, "evaluate_every": rounds},
            "privacy": {"noise": NOISE, "clip": CLIP},
            "output": {"directory": str(folder)},
        }
    )
    method, world = Averaged(), World(8, 1, 5, 4, ("a", "b"), tuple(f"site {place}" for place in range(CLIENTS)))
    world = replace(world, roles=method.init(world, stream(0, 0, SERVER, "init")))
    updates = [stream(0, 0, client, "update").normal(NUMBERS) for client in range(CLIENTS)]
    assert config.privacy is not None
    engine = Sites(noised, updates, mechanism.groups(world.roles, "round", config.privacy))
    terms = Terms.of(config, world.participants, 0, lambda client: 1)
    store, watch = RunStore.create(folder / "private", {"config": config.model_dump(mode="json")}), Stopwatch()
    try:
        Federation(config, world, method, engine, store, watch, terms).run()  # type: ignore[arg-type]
    finally:
        store.close()
    return list(np.diff(watch.ends))


def in_turn(before: Callable[[], object], now: Callable[[], object], repeats: int) -> dict[str, float]:
    """Medians in microseconds, and their ratio."""
    taken: dict[str, list[float]] = {"before": [], "now": []}
    for repeat in range(repeats + 1):
        for name, call in (("before", before), ("now", now)):
            begin = time.process_time_ns()
            call()
            if repeat:  # the first is the warm-up
                taken[name].append((time.process_time_ns() - begin) / 1e3)
    return summary(taken)


def summary(taken: dict[str, list[float]]) -> dict[str, float]:
    before, now = (statistics.median(taken[name]) for name in ("before", "now"))
    return {"before_us": round(before, 1), "now_us": round(now, 1), "ratio": round(now / before, 3)}


def rounds_in_turn(repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(5):
        for name, noised in (("before", noised_before), ("now", noised_now)):
            with tempfile.TemporaryDirectory() as folder:
                taken[name] += [1e6 * each for each in round_seconds(noised, max(3, repeats // 4), Path(folder))]
    return summary(taken)


def streams(repeats: int) -> dict[str, float]:
    """Microseconds to make a stream of a simulation, and torch's generator from a seed."""

    def each(make: Callable[[], object]) -> float:
        found = []
        for _ in range(repeats):
            begin = time.process_time_ns()
            for _ in range(1000):
                make()
            found.append((time.process_time_ns() - begin) / 1e6)
        return round(statistics.median(found), 2)

    return {
        "stream_us": each(lambda: stream(0, 1, 2, "noise")),
        "torch_generator_us": each(lambda: torch.Generator().manual_seed(1 << 40)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    received = {"prompt": stream(0, 0, SERVER, "init").normal(NUMBERS)}
    sites = {
        noised: Sites(noised, [stream(0, 0, 0, "update").normal(NUMBERS)], (Group({"prompt": (NUMBERS,)}, CLIP),))
        for noised in (noised_before, noised_now)
    }
    result = {
        "numbers": NUMBERS,
        "clients": CLIENTS,
        "repeats": options.repeats,
        "noise": in_turn(draw_before, draw_now, options.repeats),
        "release": in_turn(
            lambda: sites[noised_before].release(0, 1, received),
            lambda: sites[noised_now].release(0, 1, received),
            options.repeats,
        ),
        "round": rounds_in_turn(options.repeats),
        "target_of_round": TARGET,
        "make": streams(options.repeats),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
