"""Every method with clients that are reached by post: the same tensors and figures as in process, and nothing private in a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_run import (
    Recorder,
    assert_same_as_in_process,
    assert_same_figures,
    kept_tensors,
    node_folder,
    run_remotely,
    tiny_settings,
)
from support import Stopped, pool_tensors, server_tensors, shared_tensors
from support import run as run_here
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core import registry, wire
from fedprompt.core.messages import Failure
from fedprompt.core.method import Client, Progress, Stage, World
from fedprompt.core.roles import Roles
from fedprompt.engines.remote.node import SimulatedNode
from fedprompt.engines.remote.protocol import Order
from fedprompt.experiment import Experiment
from fedprompt.federation.loop import Observer
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.random_streams import Stream
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.matrix

CLIENTS = 4
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name}} for name in registry.methods()},
    **{
        f"fedvpt+{name}": {"method": {"name": "fedvpt", "head": "shared"}, "variant": {"name": name}}
        for name in registry.variants()
    },
}
PARTIAL = {"rounds": 3, "fraction": 0.5, "evaluate_every": 2, "evaluate_last": 1}
SURVEYED = {"pep_fedpt"}  # methods that ask every client for statistics before the first round
COPIES = {
    "pfedmoap": {"last_context"},
    "promptfl_amp": {"own.context"},
    "fedvpt+scaffold": {"scaffold.own.prompt", "scaffold.own.head.weight", "scaffold.own.head.bias"},
}  # kept tensors that are, by the paper's own rules, copies of what a client has just sent
SHORTEST = 8  # bytes of a tensor that cannot be in a message by chance


def settings(folder: Path, name: str, case: str = "pfedbayespt", **changes: Any) -> dict[str, Any]:
    """One of the cases on the tiny set, with the backbone it needs."""
    method = registry.methods()[CASES[case]["method"]["name"]] if case in CASES else FedVPT
    sections = {
        "backbone": {"name": "tiny-clip" if method().uses_text else "tiny"},
        "data": {"source": "tiny", "train_per_cell": 2, "test_per_cell": 1, "classes": ["disc", "square", "cross"]},
        # three steps: after two, the first of which leaves prompts alone, a personal copy can equal the shared prompt
        "train": {"lr": 0.05, "batch_size": 2, "momentum": 0.0},
        **CASES.get(case, {"method": {"name": case}}),
    }
    return tiny_settings(folder, name, **{**sections, **changes})


class Watched(SimulatedNode):
    """A node of whose disk a copy is made after every order."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.kept: dict[Path, bytes] = {}  # all states that ever were

    def answer(self, blob: bytes) -> bytes:
        answer = super().answer(blob)
        for file in self._folder.rglob("nodes/*/*/*.safetensors"):
            self.kept.setdefault(file, file.read_bytes())
        return answer


@dataclass(frozen=True)
class Pair:
    """The same experiment in process and by post."""

    case: str
    here: Run
    post: Run
    recorder: Recorder
    kept: list[Tensors]  # every state that a client had after training

    @property
    def messages(self) -> list[bytes]:
        return [blob for _, blob in self.recorder.orders + self.recorder.answers]


def watched(values: dict[str, Any], folder: Path) -> tuple[Run, Recorder, list[Tensors]]:
    node = Watched(folder)
    recorder = Recorder(node)
    run = run_remotely(values, recorder)
    return run, recorder, [wire.decode(blob) for blob in node.kept.values()]


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("runs")
    here = run_here(settings(folder, "here", request.param, federation=PARTIAL))
    values = settings(folder, "post", request.param, federation=PARTIAL)
    return Pair(request.param, here, *watched(values, folder))


@pytest.mark.sampled
def test_a_run_by_post_is_the_run_in_process(pair: Pair) -> None:
    """Half of the clients in a round, an evaluation every second round, and the last."""
    assert_same_as_in_process(pair.post, pair.here)
    assert pair.post.reader.events() == pair.here.reader.events()


def test_a_client_gets_one_message_for_its_training_and_the_evaluation_before_it(pair: Pair) -> None:
    """Rounds 1 and 2 train two clients; after round 2 all four are asked, two of them to train as well; round 3 is tested."""
    orders = [Order.from_bytes(blob) for _, blob in pair.recorder.orders]
    assert len(orders) == len(pair.recorder.answers) == (CLIENTS if pair.case in SURVEYED else 0) + 2 + 2 + 4 + 4
    trained = {order.train for order in orders if order.evaluate == 2}
    assert trained == {None, 3}
    cohorts = {record.round: record.cohort for record in pair.post.rounds()[1:]}
    for round, cohort in cohorts.items():
        assert sorted(order.client for order in orders if order.train == round) == cohort
    assert len({order.keep_as for order in orders if order.keep_as is not None}) == sum(map(len, cohorts.values()))


def test_no_message_holds_what_is_a_clients_own(pair: Pair) -> None:
    """No tensor that a client keeps, no pixels and no un-prompted features of any of its images, down or up."""
    everything = b"|".join(pair.messages)
    assert find_private(pair.kept, everything) == COPIES.get(pair.case, set())
    assert not [row for row in image_rows(pair.post.config.backbone.name) if row in everything]


def find_private(states: Iterable[Tensors], everything: bytes) -> set[str]:
    """The names of the tensors that were found."""
    return {name for state in states for name, tensor in state.items() if telling(tensor) and raw(tensor) in everything}


def telling(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= SHORTEST and bool(tensor.ne(0).any())


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@cache
def image_rows(backbone: str) -> list[bytes]:
    """The bytes of every client's images as they are kept: pixels, and features as methods may ask for them."""
    experiment = Experiment(settings(Path("unused"), "rows", backbone={"name": backbone}))
    source, manifest, loaded, _ = experiment.factory.prepare()
    bank, rows = experiment.factory.bank(source, manifest, loaded), []
    for client in range(CLIENTS):
        for part in ("train", "test"):
            images = bank.images(client, part)
            rows += [row.tobytes() for row in images.store.pixels(images.indices)]
            for name in ["cls", "image"] if backbone == "tiny-clip" else ["cls"]:
                rows += [raw(row) for row in images.features(name, torch.arange(len(images)))]
    return rows


@dataclass(frozen=True)
class Leaky(FedVPT):
    """Sends the head it declares to be local, in the name of a tensor it declares to be shared."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        return replace(roles, shared={**roles.shared, "scale": torch.zeros_like(roles.local["head.weight"])})

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("prompt", *world.roles.local), train.epochs),)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        return {**upload, "scale": local["head.weight"]}, local


def test_a_method_that_sends_its_own_under_another_name_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.METHODS._table, "leaky", Leaky)
    _, recorder, kept = watched(settings(tmp_path, "leaky", "leaky", federation={"rounds": 1}), tmp_path)
    assert find_private(kept, b"|".join(blob for _, blob in recorder.answers)) == {"head.weight"}


def test_features_and_pixels_would_be_found() -> None:
    images = 3 * len(Experiment(settings(Path("unused"), "rows")).factory.prepare()[0].class_names) * CLIENTS
    rows = image_rows("tiny")
    assert len(rows) == len(set(rows)) == 2 * images, "pixels and features of every image, no two alike"


@pytest.mark.parametrize("case", ["fedvpt", "pep_fedpt"])
def test_a_round_that_everybody_takes_part_in_costs_one_message_each(case: str, tmp_path: Path) -> None:
    """Plus one each for the evaluation after the last round, and for the survey where there is one."""
    recorder = Recorder()
    run_remotely(settings(tmp_path, case, case, federation={"rounds": 3}), recorder)
    assert len(recorder.orders) == CLIENTS * (3 + 1 + (case == "pep_fedpt"))


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"noise": 0.3, "clip": 0.5}},
        {"privacy": {"noise": 0.3, "clip": 0.5, "noise_at": "step"}},
        {"privacy": {"noise": 0.3, "clip": 0.5, "noise_at": "server", "quantile": 0.5}},
        {"federation": {"rounds": 2, "secure_sum": True}},
        {"federation": {"rounds": 2, "held_out": 0.25}},
        {"federation": {"rounds": 3, "away": {"client_1": [2, 2]}, "evaluate_at": "after_local"}},
        {"attack": {"kind": "sign_flip", "fraction": 0.25}, "aggregation": {"rule": "median"}},
    ],
    ids=["noise", "noise at steps", "noise at the server", "secure sum", "newcomer", "away", "attack"],
)
def test_protections_and_schedules_are_those_of_the_run_in_process(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"federation": {"rounds": 2}, **changes}
    here = run_here(settings(tmp_path, "here", **changes))
    post = run_remotely(settings(tmp_path, "post", **changes))
    assert_same_as_in_process(post, here)
    assert [event[1:3] for event in post.reader.events()] == [event[1:3] for event in here.reader.events()]


class Killed(Recorder):
    """Ends the run when so many answers have come; what the node kept for the last one is on its disk by then."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self._left = answers

    def deliver(self, orders: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes | Failure]]:
        for came in super().deliver(orders):
            self._left -= 1
            if not self._left:
                raise Stopped
            yield came


class KilledBeforeCommit(Observer):
    """Ends the run when everything about a round has come, and nothing is written yet."""

    def __init__(self, round: int) -> None:
        self._round = round

    def evaluated(self, round: int, done: int, of: int) -> None:
        if (round, done) == (self._round, of):
            raise Stopped


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("fedvpt", (Killed(1), Killed(9), KilledBeforeCommit(2))),
        ("pfedbayespt", (Killed(5),)),
        ("pfedmoap", (Killed(9),)),
        ("pep_fedpt", (Killed(2),)),
        ("fedvpt+scaffold", (KilledBeforeCommit(2),)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    case: str, kills: Sequence[Killed | KilledBeforeCommit], tmp_path: Path
) -> None:
    """In the survey, in the first message of round 1, in the middle of later rounds, just before a commit: bit by bit."""
    federation = {"rounds": 4, "fraction": 0.75}
    undisturbed = run_remotely(settings(tmp_path, "undisturbed", case, federation=federation))
    for number, kill in enumerate(kills):
        values = settings(tmp_path, f"killed-{number}", case, federation=federation)
        post, observer = (kill, None) if isinstance(kill, Killed) else (Recorder(), kill)
        with pytest.raises(Stopped):
            run_remotely(values, post, observer)
        resumed = run_remotely(values, Recorder())
        assert_equal(shared_tensors(resumed), shared_tensors(undisturbed))
        assert_equal(server_tensors(resumed), server_tensors(undisturbed))
        assert_equal(pool_tensors(resumed), pool_tensors(undisturbed))
        for client in range(CLIENTS):
            assert_equal(kept_tensors(resumed, client) or {}, kept_tensors(undisturbed, client) or {})
        assert_same_figures(resumed, undisturbed, within=0.0)


def test_a_node_keeps_two_states_of_a_client_at_most(tmp_path: Path) -> None:
    run = run_remotely(settings(tmp_path, "few", federation={"rounds": 4}))
    for client in range(CLIENTS):
        assert len(list((node_folder(run) / str(client)).iterdir())) <= 2


def assert_equal(first: dict[Any, Tensor], second: dict[Any, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
