"""The engine of many processes without the processes: every question and every answer is sent as bytes, and nothing changes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import content, local_tensors, run, shared_tensors, worst_difference

from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.messages import Failure, LocalUpdate
from fedprompt.engines import kinds
from fedprompt.engines.framing import HEADER_BYTES, Frame, Packing, Unpacking, read_frame, write_frame
from fedprompt.engines.worker_process import WorkerLoop
from fedprompt.errors import ConfigError, DivergenceError
from fedprompt.federation.loop import Observer
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
HEADERS = st.dictionaries(
    st.text(), PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(), PLAIN), max_size=4
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def bundles(draw: st.DrawFn) -> Tensors:
    """Tensors under any names in any order: parts of larger ones, empty ones, single numbers."""
    found = {}
    for name in draw(st.lists(st.text(max_size=5), unique=True, max_size=4)):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        values = torch.randn(*draw(st.lists(st.integers(0, 3), max_size=3)), 2, generator=generator)
        found[name] = (10 * values).round().to(draw(DTYPES))[..., 1]
    return found


def wired(frame: Frame) -> Frame:
    """A frame that has been through a pipe."""
    stream = io.BytesIO()
    write_frame(stream, frame)
    stream.seek(0)
    found = read_frame(stream)
    assert found is not None
    return found


@given(HEADERS, st.binary(max_size=50))
def test_a_frame_arrives_as_it_was_sent(header: dict[str, Any], tensors: bytes) -> None:
    assert wired(Frame(header, tensors)) == Frame(header, tensors)


@given(HEADERS, st.binary(max_size=20), st.data())
def test_a_frame_that_was_cut_off_is_none(header: dict[str, Any], tensors: bytes, data: st.DataObject) -> None:
    stream = io.BytesIO()
    write_frame(stream, Frame(header, tensors))
    whole = stream.getvalue()
    assert read_frame(io.BytesIO(whole[: data.draw(st.integers(0, len(whole) - 1))])) is None


def test_figures_that_are_no_numbers_arrive_too() -> None:
    found = wired(Frame({"nll": float("inf"), "worst": float("nan")})).header
    assert found["nll"] == float("inf")
    assert found["worst"] != found["worst"]


def test_a_frame_beyond_all_bounds_is_not_read() -> None:
    lengths = (HEADER_BYTES + 1).to_bytes(8, "little") + bytes(8)
    with pytest.raises(ValueError, match=f"header of a frame must have at most {HEADER_BYTES} bytes"):
        read_frame(io.BytesIO(lengths + b"{}"))


@given(st.lists(bundles(), max_size=3))
def test_tensors_arrive_in_their_order_and_with_all_their_bits(sent: list[Tensors]) -> None:
    packing = Packing()
    places = wired(Frame({"places": [packing.put(each) for each in sent]})).header["places"]
    arrived = Unpacking(packing.to_bytes())
    for each, found in zip(sent, (arrived.take(each) for each in places), strict=True):
        assert list(found) == list(each)
        for name, tensor in each.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_what_many_clients_receive_travels_once() -> None:
    prompt = torch.arange(1000.0)
    alone, together = Packing(), Packing()
    alone.put({"prompt": prompt})
    for client in range(50):
        together.put({"prompt": prompt.detach(), "own": torch.tensor(float(client))})
    assert len(together.to_bytes()) < 2 * len(alone.to_bytes())


def test_parts_of_one_tensor_are_told_apart() -> None:
    packing, square = Packing(), torch.arange(4.0).reshape(2, 2)
    places = packing.put({"rows": square, "columns": square.T, "first": square[0], "number": square[0, 0]})
    found = Unpacking(packing.to_bytes()).take(places)
    assert torch.equal(found["columns"], square.T)
    assert torch.equal(found["first"], square[0])
    assert found["number"].shape == ()


# -- runs -------------------------------------------------------------------------------------------------------------


class Loopback:
    """A crew without processes: a task is done when it is given."""

    size = 2

    def __init__(self) -> None:
        self.desk = WorkerLoop()
        self.tasks: list[Frame] = []

    def begin(self, experiment: Frame, ground: list[str]) -> None:
        assert self._answer(experiment).header == {"ground": ground}

    def submit(self, task: Frame) -> Future[Frame]:
        self.tasks.append(task)
        done: Future[Frame] = Future()
        done.set_result(self._answer(task))
        return done

    def assert_frozen(self) -> None:
        assert self._answer(Frame({"kind": "frozen"})).header == {}

    def _answer(self, question: Frame) -> Frame:
        return wired(self.desk.answer(wired(question)))


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    """The crew of every experiment that asks for workers."""
    crew = Loopback()
    monkeypatch.setattr(kinds, "WorkerPool", lambda size, devices: nullcontext(crew))
    return crew


def both(settings: Any, cohort: int, **changes: Any) -> tuple[Run, Run]:
    """A run without workers and one with, of clients that hold unequally many images."""
    partition = {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3, **changes.pop("partition", {})}
    common = {"partition": partition, **changes}
    return (
        run(settings(name="here", engine={"cohort": cohort}, **common)),
        run(settings(name="there", engine={"cohort": cohort, "workers": 2}, **common)),
    )


RUNS: dict[str, dict[str, Any]] = {
    "state": {"variant": {"name": "scaffold"}, "train": {"momentum": 0.0}},
    "draws": {"method": {"name": "pfedbayespt"}},
    "survey": {"method": {"name": "pep_fedpt"}, "train": {"clip_norm": 0.5}},
    "experts": {"method": {"name": "pfedmoap"}, "backbone": {"name": "tiny-clip"}},
    "noise": {"privacy": {"noise_at": "client", "target_epsilon": 50.0, "clip": 0.5}},
    "noisy steps": {"privacy": {"noise_at": "step", "noise": 0.5, "clip": 0.5}},
    "moving bound": {"privacy": {"noise_at": "server", "noise": 1.0, "quantile": 0.5}},
    "secure sum": {"federation": {"secure_sum": True}},
    "liars": {"attack": {"kind": "sign_flip", "fraction": 0.4}, "aggregation": {"rule": "median"}},
    "forgers": {"attack": {"kind": "nan", "fraction": 0.2}, "guard": {"quorum": 0.5}},
    "augmentation": {"method": {"name": "head_tune"}, "train": {"random_crop": 0.5, "random_flip": 0.5}},
    "newcomers": {"partition": {"clients": 8}, "federation": {"held_out": 0.5, "newcomer_epochs": 1}},
    "later": {"method": {"name": "fedvpt", "head": "local"}, "federation": {"evaluate_at": "after_local"}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_with_workers_a_run_has_the_same_bits(crew: Loopback, settings: Any, changes: dict[str, Any]) -> None:
    here, there = both(settings, 2, **changes)
    assert crew.tasks
    assert content(here) == content(there)


def test_a_round_that_nobody_was_drawn_for(crew: Loopback, settings: Any) -> None:
    here, there = both(settings, 2, federation={"sampling": "poisson", "fraction": 0.1})
    assert [record.cohort for record in there.rounds()[1:]].count([])
    assert content(here) == content(there)


def test_groups_of_other_sizes_change_nothing_but_the_rounding(crew: Loopback, settings: Any) -> None:
    here, there = both(settings, 5, method={"name": "fedvpt", "head": "local"})
    assert {len(task.header["clients"]) for task in crew.tasks} == {3, 2}  # half of the clients for each worker
    assert worst_difference(shared_tensors(here), shared_tensors(there)) < 1e-5
    for client in range(5):
        assert worst_difference(local_tensors(here, client), local_tensors(there, client)) < 1e-5


def test_a_worker_remembers_no_client(crew: Loopback, settings: Any) -> None:
    """What is refused is forgotten by one process alone: all that a client keeps comes with the task."""
    run(settings(engine={"workers": 2}, method={"name": "fedvpt", "head": "local"}))
    trained = [task for task in crew.tasks if task.header["kind"] == "train"]
    assert {
        each["state"] is None for task in trained if task.header["round"] == 1 for each in task.header["clients"]
    } == {True}
    assert all(each["state"] for task in trained if task.header["round"] == 2 for each in task.header["clients"])


class Noted(Observer):
    """Who was seen to train, to fail and to be tested."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def trained(self, round: int, reply: LocalUpdate) -> None:
        self.seen.append((round, reply.client, reply.loss, list(reply.upload)))

    def refused(self, round: int, failure: Failure) -> None:
        self.seen.append((round, failure))

    def evaluated(self, round: int, done: int, of: int) -> None:
        self.seen.append((round, done, of))


def test_a_client_that_diverges_fails_alone_and_is_told_of(
    crew: Loopback, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = ClientRuntime.train_together

    def astray(self: ClientRuntime, round: int, received: Mapping[int, Tensors]) -> list[LocalUpdate | DivergenceError]:
        replies = true(self, round, received)
        return [
            DivergenceError(f"lost in round {round}") if client == 1 else reply
            for client, reply in zip(received, replies, strict=True)
        ]

    monkeypatch.setattr(ClientRuntime, "train_together", astray)
    observers = Noted(), Noted()
    for workers, observer in zip((0, 2), observers, strict=True):
        made = settings(name=f"with{workers}", engine={"cohort": 2, "workers": workers}, guard={"quorum": 0.5})
        run(made, observer=observer)
    assert (1, Failure(1, "finite", "lost in round 1")) in observers[1].seen
    assert observers[0].seen == observers[1].seen


def test_a_method_that_no_config_describes_cannot_be_sent(settings: Any) -> None:
    class Unheard(FedVPT):
        pass

    for method in (Unheard(prompt_tokens=2), FedVPT(prompt_tokens=3)):
        with pytest.raises(
            ConfigError, match=r"engine\.workers must be 0 for a method that is not the config's own, got 2"
        ):
            run(settings(engine={"workers": 2}), method)
