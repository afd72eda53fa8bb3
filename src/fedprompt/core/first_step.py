"""The size of the first gradients of a run, by group of tensors: whether rates fit the tensors that they move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedprompt.core.recipe import group_of
from fedprompt.tensors import Tensors

TOO_SHORT, TOO_LONG = 1e-5, 1.0  # a first step relative to the tensors
MOST_STEPS = 5  # within which a gradient should be there: behind a head of zeros there is none in the first one


@dataclass(frozen=True)
class FirstStep:
    """Norms over a group of tensors of one client."""

    gradient: float
    """Before it was clipped."""
    tensors: float
    step: float
    """What the optimiser has changed."""

    @property
    def relative(self) -> float | None:
        """The step against the tensors; None where they start at zero."""
        return self.step / self.tensors if self.tensors else None


Measured = Callable[[Mapping[str, FirstStep]], None]


class Gauge:
    """Measures the first steps of a client in which its tensors have gradients, and tells them once."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._found: dict[str, FirstStep] = {}
        self._told: set[str] = set()
        self._steps = 0

    def add(self, before: Tensors, gradients: Tensors, stepped: Tensors, last: bool) -> None:
        """One step. It is told of all groups of tensors together: when all have gradients, or after a few steps."""
        new = {name: each for name, each in gradients.items() if group_of(name) not in self._told}
        if not new:
            return
        missing = {name: each for name, each in new.items() if not self._has(group_of(name))}
        self._found |= first_steps(before, missing, stepped)
        self._steps += 1
        if last or self._steps == MOST_STEPS or all(self._has(group_of(name)) for name in new):
            self._measured(self._found)
            self._told.update(self._found)
            self._found, self._steps = {}, 0

    def _has(self, group: str) -> bool:
        return group in self._found and self._found[group].gradient > 0


def first_steps(before: Tensors, gradients: Tensors, stepped: Tensors) -> dict[str, FirstStep]:
    """Of the first client of tensors (N, ...) with the clients in front."""
    squares: dict[str, list[float]] = {}
    for name, gradient in gradients.items():
        total = squares.setdefault(group_of(name), [0.0, 0.0, 0.0])
        for place, tensor in enumerate((gradient[0], before[name][0], stepped[name][0] - before[name][0])):
            total[place] += float(tensor.detach().double().square().sum())
    return {group: FirstStep(*(each**0.5 for each in total)) for group, total in squares.items()}


def described(steps: Mapping[str, FirstStep]) -> str:
    """`first gradients: prompt 0.31 (norm 7.7), head 12.4 (norm 0)`."""
    found = ", ".join(f"{group} {each.gradient:.3g} (norm {each.tensors:.3g})" for group, each in steps.items())
    return f"first gradients: {found}"


def odd_steps(steps: Mapping[str, FirstStep], warming: bool) -> list[str]:
    """Warnings about first steps that are longer than their tensors, or next to nothing; those of a warm-up are short."""
    found = []
    for group, each in steps.items():
        if each.relative is not None and each.relative > TOO_LONG:
            how = f"{each.relative:.2g} times as long as the tensors themselves: try a smaller"
        elif each.relative is not None and 0 < each.relative < TOO_SHORT and not warming:
            how = f"only {each.relative:.1g} of the length of the tensors: try a larger"
        else:
            continue
        found.append(f"the first step of {group} is {how} rate of `{group}*` in train.lrs")
    return found
