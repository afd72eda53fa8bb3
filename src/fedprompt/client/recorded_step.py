"""The arithmetic of a step as a list of torch's own operations, recorded once and played again in every later step.

A small step of many clients costs more in Python, `vmap` and autograd than in arithmetic. All three only decide which
operations are done, and with equal shapes they decide the same every time: methods are pure functions, and their draws
come from outside. So the operations of one step are noted while it runs. Playing them gives the same bits.

What cannot be noted so is refused (`NotRecordable`), and the step runs as before: operations that look at a value to
decide what to do, that draw numbers, or that write into a tensor they were given.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
LOOKS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}  # at values, which a device must compute first
RENAMED = {aten.detach.default, aten.alias.default}  # the same numbers in the same place
SAME_IF_SHAPED_ALIKE = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor}
OF_SHAPES_ONLY = {aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_ones.default}
MOST_PROGRAMS = 32  # that are kept
SEEN_BEFORE = 1  # steps of the same shapes before one is recorded

Step = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class NotRecordable(Exception):
    """A step that must run as it is."""


@dataclass(frozen=True)
class Operation:
    """One call: an operation on numbered values gives another one."""

    call: Callable[..., Any]
    arguments: tuple[int, ...]
    options: Mapping[str, Any]
    result: int


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in their order, and the values that are known before: the inputs come first, then constants."""

    operations: tuple[tuple[Callable[..., Any], tuple[int, ...], int, tuple[int, ...]], ...]
    """What is called, on which values, where its result goes, and which values are not needed after it."""
    values: list[Any]
    results: tuple[int, ...]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        values = self.values.copy()
        values[: len(inputs)] = inputs
        with torch.no_grad():
            for call, arguments, result, finished in self.operations:
                values[result] = call(*[values[place] for place in arguments])
                for place in finished:
                    values[place] = None
        return [values[place] for place in self.results]


@dataclass
class _Notes:
    """What is known while a step is recorded."""

    values: list[Any] = field(default_factory=list)  # every value, which keeps tensors alive and their ids their own
    fixed: list[bool] = field(default_factory=list)  # whether a value is the same in every step
    places: dict[int, int] = field(default_factory=dict)  # of tensors, by id
    constants: dict[tuple[type, Any], int] = field(default_factory=dict)
    operations: dict[tuple[Any, ...], Operation] = field(default_factory=dict)  # by what they do, to do it once

    def add(self, value: Any, fixed: bool) -> int:
        self.values.append(value)
        self.fixed.append(fixed)
        if isinstance(value, Tensor):
            self.places[id(value)] = len(self.values) - 1
        return len(self.values) - 1

    def place(self, value: Any) -> int:
        """The number of an argument."""
        if isinstance(value, Tensor):
            known = self.places.get(id(value))
            return self.add(value, fixed=True) if known is None else known
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return self.call(_together, tuple(self.place(each) for each in value), {}, list(value))
        key = (type(value), repr(value))
        if key not in self.constants:
            self.constants[key] = self.add(value, fixed=True)
        return self.constants[key]

    def call(self, call: Any, arguments: tuple[int, ...], options: Mapping[str, Any], result: Any) -> int:
        """Note a call; the number of its result."""
        if call in OF_SHAPES_ONLY or all(self.fixed[place] for place in arguments):
            return self.add(result, fixed=True)
        key = (call, arguments, repr(sorted(options.items())))
        if key in self.operations:
            place = self.operations[key].result
            if isinstance(result, Tensor):
                self.values.append(result)  # a value of its own must live as long as its id is used
                self.fixed.append(True)
                self.places[id(result)] = place
            return place
        place = self.add(result, fixed=False)
        self.operations[key] = Operation(call, arguments, options, place)
        return place


def _together(*values: Any) -> list[Any]:
    return list(values)


class Recorder(TorchDispatchMode):
    """Notes the operations that are done while it is on."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = _Notes()
        for each in inputs:
            self._notes.add(each, fixed=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler for that, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        named = any(isinstance(value, Tensor) for value in kwargs.values())
        if func._schema.is_mutable or random or named or looks_at_values(func, args):
            raise NotRecordable(str(func))
        found, notes = func(*args, **kwargs), self._notes
        first = notes.place(args[0]) if args and isinstance(args[0], Tensor) else None
        if first is not None and _is_renamed(func, args, found):
            notes.values.append(found)
            notes.fixed.append(True)
            notes.places[id(found)] = first
            return found
        place = notes.call(func, tuple(notes.place(each) for each in args), kwargs, found)
        if isinstance(found, list | tuple):
            for number, each in enumerate(found):
                if isinstance(each, Tensor):
                    notes.call(operator.getitem, (place, notes.place(number)), {}, each)
        return found

    def program(self, inputs: int, results: Sequence[Tensor]) -> Program:
        """What leads to these results, and nothing else."""
        notes = self._notes
        wanted = tuple(notes.place(each) for each in results)
        needed, kept = set(wanted), []
        for each in reversed(notes.operations.values()):
            if each.result in needed:
                needed.update(each.arguments)
                kept.append(each)
        own = {each.result for each in kept} | set(range(inputs))
        seen, timed = set(wanted), []
        for each in kept:  # from the last to the first
            finished = tuple(place for place in dict.fromkeys(each.arguments) if place in own and place not in seen)
            seen.update(each.arguments)
            call = getattr(each.call, "_op", each.call)  # torch's own function, where there is a wrapper around it
            timed.append(
                (partial(call, **each.options) if each.options else call, each.arguments, each.result, finished)
            )
        constant = needed - own
        values = [value if place in constant else None for place, value in enumerate(notes.values)]
        return Program(tuple(reversed(timed)), values, wanted)


def looks_at_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether Python, or the shape of a result, depends on the numbers of a tensor: the host then waits for its device."""
    if func is aten.index.Tensor:
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return bool(LOOKS & set(func.tags))


def _is_renamed(func: Any, args: Sequence[Any], found: Any) -> bool:
    """Whether the result is the first argument itself, under another name."""
    before = args[0]
    if func in RENAMED:
        return True
    if func is aten.mul.Scalar:
        return bool(args[1] == 1 and before.dtype == found.dtype)
    return (
        func in SAME_IF_SHAPED_ALIKE
        and before.shape == found.shape
        and before.stride() == found.stride()
        and before.storage_offset() == found.storage_offset()
    )


def record(step: Step, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Program]:
    """The results of a step on these inputs, and the program that makes them of others with the same shapes."""
    own = [each.detach() for each in inputs]  # one object for each input, though some may be the same tensor
    recorder = Recorder(own)
    with recorder:
        results = step(own)
    return results, recorder.program(len(own), results)


class RecordedSteps:
    """Programs by what a step does and by the shapes it does it with."""

    def __init__(self) -> None:
        self._programs: dict[tuple[Any, ...], Program | int | None] = {}

    def run(self, key: tuple[Any, ...], step: Step, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a step. `key` says what it does; the shapes of the inputs are added here."""
        key = (*key, *((each.shape, each.stride(), each.dtype) for each in inputs))
        known = self._programs.get(key, 0)
        if isinstance(known, Program):
            return known(inputs)
        if known is None or (known < SEEN_BEFORE and len(self._programs) < MOST_PROGRAMS):
            if known is not None:
                self._programs[key] = known + 1
            return step(inputs)
        if key not in self._programs:
            return step(inputs)
        try:
            results, self._programs[key] = record(step, inputs)
        except NotRecordable:
            self._programs[key] = None
            results = step(inputs)
        return results
