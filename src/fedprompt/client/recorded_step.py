"""The arithmetic of a step as a list of torch's own operations, recorded once and played again in every later step.

A small step of many clients costs more in Python, `vmap` and autograd than in arithmetic. All three only decide which
operations are done, and with equal shapes they decide the same every time: methods are pure functions, and their draws
come from outside. So the operations of one step are noted while it runs. Playing them gives the same bits.

What cannot be noted so is refused (`NotRecordable`), and the step runs as before: operations that look at a value to
decide what to do, that draw numbers, or that write into a tensor they were given.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
LOOKS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}  # at values, which a device must compute first
RENAMED = {aten.detach.default, aten.alias.default}  # the same numbers in the same place
SAME_IF_SHAPED_ALIKE = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor}
OF_SHAPES_ONLY = {aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default, aten.new_ones.default}
NOT_IN_PLACE = {aten.masked_fill_.Scalar: aten.masked_fill.Scalar}
MOST_PROGRAMS = 32  # that are kept
SEEN_BEFORE = 1  # steps of the same shapes before one is recorded

Compiler = Callable[[torch.fx.GraphModule], Callable[..., Any]]
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
    made: set[int] = field(default_factory=set)  # constants that the step makes itself
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

    def is_fixed(self, value: Tensor) -> bool:
        """Whether a tensor is the same in every step."""
        return self.fixed[self.place(value)]

    def is_own(self, place: int) -> bool:
        """Whether a value was made by an operation of the step, in a place of its own."""
        made = [each.call for each in self.operations.values() if each.result == place]
        return place in self.made or any(isinstance(each, OpOverload) and not each.is_view for each in made)

    def is_read(self, place: int) -> bool:
        """Whether an operation of later steps reads a value."""
        value = self.values[place]
        return any(
            place in each.arguments or any(value is option for option in each.options.values())
            for each in self.operations.values()
        )

    def call(self, call: Any, arguments: tuple[int, ...], options: Mapping[str, Any], result: Any) -> int:
        """Note a call; the number of its result."""
        if call in OF_SHAPES_ONLY or all(self.fixed[place] for place in arguments):
            place = self.add(result, fixed=True)
            self.made.add(place)
            return place
        told = {name: id(value) if isinstance(value, Tensor) else value for name, value in options.items()}
        key = (call, arguments, repr(sorted(told.items())))
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
        random = draws(func, args, kwargs)
        named = any(isinstance(value, Tensor) and not self._notes.is_fixed(value) for value in kwargs.values())
        if random or named or looks_at_values(func, args):
            raise NotRecordable(str(func))
        if func._schema.is_mutable:
            return self._filled(func, args, kwargs)
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

    def _filled(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A tensor of the step's own that is written into before anything reads it, such as a mask."""
        notes, anew = self._notes, NOT_IN_PLACE.get(func)
        place = notes.place(args[0])
        if anew is None or not notes.is_own(place) or notes.is_read(place):
            raise NotRecordable(str(func))
        arguments = tuple(notes.place(each) for each in args)
        found = func(*args, **kwargs)
        if all(notes.fixed[each] for each in arguments):
            return found
        notes.places[id(found)] = notes.call(anew, arguments, kwargs, found)
        return found

    def _kept(self, results: Sequence[Tensor]) -> tuple[tuple[int, ...], set[int], list[Operation]]:
        """The results, what they need, and the operations that lead to them, from the last to the first."""
        notes = self._notes
        wanted = tuple(notes.place(each) for each in results)
        needed, kept = set(wanted), []
        for each in reversed(notes.operations.values()):
            if each.result in needed:
                needed.update(each.arguments)
                kept.append(each)
        return wanted, needed, kept

    def graph(self, inputs: int, results: Sequence[Tensor]) -> torch.fx.GraphModule:
        """The same as `program`, for a compiler."""
        notes, (wanted, _, kept) = self._notes, self._kept(results)
        module, graph = torch.nn.Module(), torch.fx.Graph()
        nodes: dict[int, Any] = {place: graph.placeholder(f"input_{place}") for place in range(inputs)}

        def node(place: int) -> Any:
            value = notes.values[place]
            if place not in nodes and isinstance(value, list | tuple):  # such as indices that never change
                return [node(notes.place(each)) for each in value]
            if place not in nodes and isinstance(value, Tensor):
                module.register_buffer(f"constant_{place}", value)
                nodes[place] = graph.get_attr(f"constant_{place}")
            return nodes.get(place, value)

        for each in reversed(kept):
            arguments = tuple(node(place) for place in each.arguments)
            if each.call is _together:
                nodes[each.result] = list(arguments)
                continue
            options = {
                n: node(notes.place(value)) if isinstance(value, Tensor) else value for n, value in each.options.items()
            }
            nodes[each.result] = graph.call_function(each.call, arguments, options)
        graph.output(tuple(node(place) for place in wanted))
        return torch.fx.GraphModule(module, graph)

    def program(self, inputs: int, results: Sequence[Tensor]) -> Program:
        """What leads to these results, and nothing else."""
        notes, (wanted, needed, kept) = self._notes, self._kept(results)
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


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers. Fused attention could, and does not without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    dropout = [each for each in func._schema.arguments if each.name == "dropout_p"]
    return not dropout or given.get("dropout_p", dropout[0].default_value) != 0.0


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
    results, recorder = noted(step, inputs)
    return results, recorder.program(len(inputs), results)


def noted(step: Step, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Recorder]:
    """The results of a step on these inputs, and the notes of how they came about."""
    own = [each.detach() for each in inputs]  # one object for each input, though some may be the same tensor
    recorder = Recorder(own)
    with recorder:
        results = step(own)
    return results, recorder


class RecordedSteps:
    """Programs by what a step does and by the shapes it does it with.

    With a `compiler` they are compiled, unless that fails on this machine: then they run as they are, with one warning.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._programs: dict[tuple[Any, ...], Step | int | None] = {}
        self._compiler = compiler

    def run(self, key: tuple[Any, ...], step: Step, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a step. `key` says what it does; the shapes of the inputs are added here."""
        key = (*key, *((each.shape, each.stride(), each.dtype) for each in inputs))
        known = self._programs.get(key, 0)
        if callable(known):
            return known(inputs)
        if known is None or (known < SEEN_BEFORE and len(self._programs) < MOST_PROGRAMS):
            if known is not None:
                self._programs[key] = known + 1
            return step(inputs)
        if key not in self._programs:
            return step(inputs)
        try:
            results, recorder = noted(step, inputs)
            self._programs[key] = self._playable(recorder, inputs, results)
        except NotRecordable:
            self._programs[key] = None
            results = step(inputs)
        return results

    def _playable(self, recorder: Recorder, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Step:
        """What makes such results of inputs with such shapes."""
        plain = recorder.program(len(inputs), results)
        if self._compiler is None:
            return plain
        try:
            compiled = self._compiler(recorder.graph(len(inputs), results))
            with torch.no_grad():
                compiled(*inputs)  # compiled now, so that it fails now
        except Exception as error:  # a compiler that is missing or broken shows in many ways
            self._compiler = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"engine.compile has no effect, for torch.compile fails here: {reason}", stacklevel=2)
            return plain

        def play(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            with torch.no_grad():
                found: Sequence[Tensor] = compiled(*inputs)
            return found

        return play


def compiler(backend: str = "inductor") -> Compiler:
    """torch.compile for graphs of fixed shapes."""

    def compiled(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(MOST_PROGRAMS, torch._dynamo.config.recompile_limit)
        found: Callable[..., Any] = torch.compile(graph, fullgraph=True, dynamic=False, backend=backend)
        return found

    return compiled
