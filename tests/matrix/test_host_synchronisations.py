"""No step waits for its device: nothing in it reads a number of a tensor, which on a GPU stops the queue of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from every_method import CASES
from support import run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedprompt.client.local_training import LocalTraining
from fedprompt.client.recorded_step import looks_at_values

pytestmark = pytest.mark.matrix

LEAVES_DEVICE = ("cpu", "tolist", "numpy")  # of tensors of numbers; indices and draws are on the CPU anyway
PLAIN_STEPS = ("per_fedavg", "fedvpt+scaffold")  # refuse momentum


class Waits(TorchDispatchMode):
    """Counts the operations after which Python knows a number: `item`, `float`, `bool` and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if looks_at_values(func, args):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What waits for the device inside."""
    mode = Waits()

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *given: Any, **named: Any) -> Any:
            if tensor.is_floating_point():
                mode.found.append(name)
            return own(tensor, *given, **named)

        return call

    with monkeypatch.context() as patched, mode:
        for name in LEAVES_DEVICE:
            patched.setattr(torch.Tensor, name, noted(name, getattr(torch.Tensor, name)), raising=False)
        yield mode.found


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool(x[0] > 0),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.numpy(),
        lambda x: x.equal(x),
    ],
)
def test_a_look_at_a_number_is_noticed(look: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(monkeypatch) as found:
        (torch.ones(3) * 2).exp()
        assert not found
        look(torch.ones(3))
    assert found


@pytest.mark.sampled
@pytest.mark.parametrize("case", list(CASES))
def test_no_step_waits_for_its_device(case: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first round, in which the sizes of gradients are reported: all steps, from loaded images to new parameters."""
    step, stage = LocalTraining._slopes, LocalTraining._stage
    steps: list[int] = []
    waits: list[str] = []

    def slopes(self: LocalTraining, *given: Any, **named: Any) -> Any:
        steps.append(1)
        return step(self, *given, **named)

    def watched(self: LocalTraining, *given: Any, **named: Any) -> Any:
        if self._gauge is not None:
            return stage(self, *given, **named)
        with counted(monkeypatch) as found:
            result = stage(self, *given, **named)
        waits.extend(found)
        return result

    monkeypatch.setattr(LocalTraining, "_slopes", slopes)
    monkeypatch.setattr(LocalTraining, "_stage", watched)
    train = {"batch_size": 4, "momentum": 0.0 if case in PLAIN_STEPS else 0.9, "clip_norm": None}
    run(settings(train=train, federation={"rounds": 2}), CASES[case])
    assert steps or case == "zero_shot"
    assert waits == []
