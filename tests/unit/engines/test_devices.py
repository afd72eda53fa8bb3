"""`engine.devices`: every worker has one, also the worker that comes in the place of a dead one; copies to CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import run, shared_tensors

from fedprompt.config import parse
from fedprompt.engines import workers
from fedprompt.engines.framing import Frame
from fedprompt.errors import BackboneError, ConfigError
from fedprompt.tensors import to_device

pytestmark = pytest.mark.unit

EXPERIMENT = {"backbone": {"name": "tiny", "device": "cpu"}, "seed": 3}


class Noted(workers.Worker):
    """A worker without a process: what it is sent is kept."""

    def __init__(self, device: str | None = None) -> None:
        self.device, self._ground, self._preparing = device, None, 0
        self.frames: list[Frame] = []

    def _write(self, frame: Frame) -> None:
        self.frames.append(frame)

    def kill(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(workers, "Worker", Noted)

    def make(size: int, devices: list[str]) -> Any:
        pool = workers.WorkerPool(size, devices)
        pool.begin(Frame({"kind": "begin", "config": EXPERIMENT}), [])
        return pool

    return make


def placed(pool: Any) -> list[str]:
    return [worker.frames[0].header["config"]["backbone"]["device"] for worker in pool._workers]


def test_workers_take_the_devices_in_turn(pool_of: Any) -> None:
    with pool_of(3, ["cuda:0", "cuda:1"]) as pool:
        assert placed(pool) == ["cuda:0", "cuda:1", "cuda:0"]
        assert all(worker.frames[0].header["config"]["seed"] == 3 for worker in pool._workers)
    assert EXPERIMENT["backbone"] == {"name": "tiny", "device": "cpu"}


def test_without_devices_all_have_that_of_the_experiment(pool_of: Any) -> None:
    with pool_of(2, []) as pool:
        assert placed(pool) == ["cpu", "cpu"]


def test_the_place_of_a_dead_worker_is_taken_on_its_device(pool_of: Any) -> None:
    with pool_of(2, ["cuda:0", "cuda:1"]) as pool:
        pool._replaced(pool._workers[0])
        assert sorted(placed(pool)) == ["cuda:0", "cuda:1"]


@pytest.mark.slow
def test_a_run_on_two_devices_gives_what_one_process_gives(settings: Any) -> None:
    alone = run(settings(name="alone"))
    spread = run(settings(name="spread", engine={"devices": ["cpu", "cpu"]}))
    for name, tensor in shared_tensors(alone).items():
        torch.testing.assert_close(shared_tensors(spread)[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused_before_anything_starts(settings: Any) -> None:
    with pytest.raises(BackboneError, match=r"engine\.devices must be a device this torch can use, got 'cuda:7'"):
        run(settings(engine={"devices": ["cuda:7"]}))


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        ({"devices": ["gpu"]}, r"engine\.devices"),
        ({"devices": ["cpu"], "kind": "flower"}, "have no devices with kind flower"),
    ],
)
def test_devices_that_cannot_be_are_refused(settings: Any, engine: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(settings(engine=engine))


def test_devices_change_neither_hash_nor_stored_config_of_earlier_runs(settings: Any) -> None:
    plain, spread = parse(settings()), parse(settings(engine={"devices": ["cpu"]}))
    assert plain.digest() == spread.digest()
    assert "devices" not in plain.model_dump()["engine"]


class OnHost:
    """A tensor that says what is done with it: there is no CUDA here to copy to."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.done: list[Any] = []

    def pin_memory(self) -> OnHost:
        self.done.append("pinned")
        return self

    def to(self, device: torch.device, dtype: torch.dtype | None, **how: bool) -> OnHost:
        self.done.append((device.type, dtype, how))
        return self


def test_copies_to_cuda_come_from_pinned_memory_and_are_not_waited_for() -> None:
    tensor = OnHost()
    to_device(tensor, torch.device("cuda:1"), torch.float32)  # type: ignore[arg-type]
    assert tensor.done == ["pinned", ("cuda", torch.float32, {"non_blocking": True})]
    plain = torch.ones(2)
    assert to_device(plain, torch.device("cpu"), torch.float64).dtype == torch.float64
    assert to_device(plain, torch.device("cpu")) is plain
