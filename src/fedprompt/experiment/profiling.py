"""Where the time of a round goes.

While a `Profile` is on, it records when the functions in `POINTS`, every function of every method, and the blocks
marked with `scope` begin and end. Every moment of a round then belongs to one phase (what the federation is doing) and
one place (whose code runs). The time of a place does not include the places it calls: the rest of a phase is the
framework itself.

The backward pass goes through method, backbone and method again in one call of autograd. Hooks on the inputs and
outputs of the frozen towers record when they begin and end; the rest of that call is the method's.

Off, the default, no function is changed and `scope` does nothing. On, no number is changed: results are the same to the
bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fedprompt.core import profiling_scope

FRAMEWORK = "framework"
BETWEEN = "between phases"
BACKWARD = " gradients"  # suffix of a tower's name: its backward pass
GRADIENTS = "method" + BACKWARD

# functions that belong to a place, as module, name inside it, place
POINTS = (
    ("fedprompt.backbones.vit", "ViT.embed", "backbone"),
    ("fedprompt.backbones.vit", "ViT.block_inputs", "backbone"),
    ("fedprompt.backbones.vit", "ViT.read_early", "backbone"),
    ("fedprompt.backbones.vit", "ViT.run", "backbone"),
    ("fedprompt.backbones.dual_encoder", "DualEncoder.run", "backbone"),
    ("fedprompt.backbones.text_tower", "TextTower.encode", "text tower"),
    ("fedprompt.features.image_bank", "ImageBank.features", "features"),
    ("fedprompt.features.image_bank", "ImageBank.tokens", "features"),
    ("fedprompt.features.image_bank", "Images.features", "features"),
    ("fedprompt.features.image_bank", "Images.tokens", "features"),
    ("fedprompt.data.cache.pixel_store", "ImageStore.pixels", "decode"),
    ("fedprompt.client.local_training", "optimizer_step", "optimiser"),
    ("fedprompt.federation.loop", "Federation._cohort", "sample"),
    ("torch.autograd", "grad", GRADIENTS),
)
TOWERS = ("backbone", "text tower")
# functions of a method that take time; what they are is in `fedprompt.core.method`
OF_METHODS = frozenset(
    {
        "survey",
        "statistics",
        "download",
        "enrol",
        "begin",
        "personalise",
        "stages",
        "noise",
        "prompts",
        "later",
        "logits",
        "loss",
        "after_step",
        "finish",
        "aggregate",
        "adaptation",
        "newcomer",
        "predict",
        "diagnostics",
    }
)


@dataclass
class Spent:
    """Time in one place, without the places it called."""

    seconds: float = 0.0
    calls: int = 0


@dataclass
class Round:
    """Times of one round, by phase and place."""

    number: int
    seconds: float = 0.0
    spent: dict[tuple[str, str], Spent] = field(default_factory=dict)
    clients: dict[str, int] = field(default_factory=dict)
    """How many took part in a phase."""
    watched: bool = False
    """Whether the operator profiler was on, which slows the round down."""


@dataclass(eq=False)
class _Open:
    name: str
    start: float
    inside: float = 0.0
    """Seconds of the places it called."""


@dataclass(frozen=True)
class Operator:
    """One kind of torch operation in the profiled round."""

    name: str
    calls: int
    seconds: float


class Profile:
    """Measures the rounds of a run while it is on: `with Profile() as profile: experiment.run()`."""

    MOST_OPERATORS: ClassVar[int] = 20

    def __init__(self, trace: Path | None = None) -> None:
        self.rounds: list[Round] = []
        self.operators: list[Operator] = []  # of one round, those that took longest
        self._trace = trace
        self._stack: list[_Open] = []
        self._thread = threading.get_ident()
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> Profile:
        if profiling_scope.measuring():
            raise RuntimeError("one profile is on already")
        try:
            self._install()
        except BaseException:
            self._uninstall()
            raise
        profiling_scope.measure_with(self.scope)
        return self

    def __exit__(self, *exception: object) -> None:
        profiling_scope.measure_with(None)
        self._uninstall()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        if not self._stack or threading.get_ident() != self._thread:  # not in a round; helpers of the main thread
            yield
            return
        opened = self._open(name)
        try:
            yield
        finally:
            self._close(opened)

    @contextmanager
    def _round(self, number: int) -> Iterator[None]:
        self.rounds.append(Round(number))
        self._stack = [_Open("round", time.perf_counter())]
        try:
            yield
        finally:
            self._close(self._stack[0])

    def _open(self, name: str) -> _Open:
        opened = _Open(name, time.perf_counter())
        self._stack.append(opened)
        return opened

    def _close(self, opened: _Open) -> None:
        """Close a place, and all open places inside it."""
        while opened in self._stack:
            now, last = time.perf_counter(), self._stack[-1]
            seconds = now - last.start
            names = [each.name for each in self._stack[1:]]
            phase, place = (names[0] if names else BETWEEN), (names[-1] if len(names) > 1 else FRAMEWORK)
            spent = self.rounds[-1].spent.setdefault((phase, place), Spent())
            spent.seconds += seconds - last.inside
            spent.calls += 1
            self._stack.pop()
            if self._stack:
                self._stack[-1].inside += seconds
            else:
                self.rounds[-1].seconds = seconds

    # from outside

    def _install(self) -> None:
        from fedprompt.federation.loop import Federation

        for module, path, place in POINTS:
            holder: Any = import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                holder = getattr(holder, part)
            self._replace(holder, name, self._timed(getattr(holder, name), place))
        for cls in _method_classes():
            for name in sorted(OF_METHODS):
                if name in vars(cls):
                    self._replace(cls, name, self._timed(vars(cls)[name], "method"))
        self._replace(Federation, "_round", self._timed_round(Federation._round))
        self._replace(Federation, "_commit", self._timed_commit(Federation._commit))
        self._replace(Federation, "_downloads", self._timed_downloads(Federation._downloads))

    def _replace(self, holder: Any, name: str, function: Callable[..., Any]) -> None:
        before = vars(holder)[name]
        self._restore.append(lambda: setattr(holder, name, before))
        setattr(holder, name, function)

    def _uninstall(self) -> None:
        while self._restore:
            self._restore.pop()()

    def _timed(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        tower = place in TOWERS

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.scope(place):
                found = function(*args, **kwargs)
            if tower and self._stack:
                self._watch_way_back(place, (args, kwargs), found)
            return found

        return timed

    def _watch_way_back(self, place: str, given: object, found: object) -> None:
        """The backward pass of a tower begins at its outputs, and ends when all inputs have their gradients."""
        ends = [tensor for tensor in _tensors(given) if tensor.requires_grad]
        starts = [tensor for tensor in _tensors(found) if tensor.requires_grad]
        opened: list[_Open] = []
        waiting = len(ends)

        def start(gradient: object) -> None:
            in_gradients = self._stack and self._stack[-1].name == GRADIENTS
            if not opened and in_gradients and threading.get_ident() == self._thread:
                opened.append(self._open(place + BACKWARD))

        def end(gradient: object) -> None:
            nonlocal waiting
            waiting -= 1
            if opened and not waiting:
                self._close(opened[0])

        with suppress(RuntimeError):  # hooks do not work inside a mapped function
            for tensor in starts if ends else ():
                tensor.register_hook(start)
            for tensor in ends if starts else ():
                tensor.register_hook(end)

    def _timed_round(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(federation: Any, server: Any, round: int) -> Any:
            last = round == federation.config.federation.rounds
            done = len(self.rounds)
            watched = done == 1 or (not done and last)  # the second, since the first one warms up
            try:
                with self._watching_operators() if watched else nullcontext(), self._round(round):
                    found = function(federation, server, round)
            except BaseException:
                del self.rounds[done:]  # a part of a round would count as a whole round
                raise
            self.rounds[-1].watched = watched
            return found

        return timed

    def _timed_commit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(federation: Any, server: Any, record: Any, results: Any, events: Any) -> Any:
            if self._stack:
                self.rounds[-1].clients = {"train": len(record.cohort), "evaluate": len(results)}
            with self.scope("commit"):
                return function(federation, server, record, results, events)

        return timed

    def _timed_downloads(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return self._timed(function(*args, **kwargs), "download")

        return timed

    @contextmanager
    def _watching_operators(self) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as found:
            yield
        averages = sorted(found.key_averages(), key=lambda each: -each.self_cpu_time_total)[: self.MOST_OPERATORS]
        if self._trace is not None:
            found.export_chrome_trace(str(self._trace))
        self.operators = [Operator(each.key, each.count, each.self_cpu_time_total / 1e6) for each in averages]


def _method_classes() -> Iterator[type]:
    """The base class of methods and all registered methods."""
    from fedprompt.core.method import Method

    known, found = set(), [Method]
    while found:
        cls = found.pop()
        if cls not in known:
            known.add(cls)
            found += cls.__subclasses__()
            yield cls


def _tensors(value: object) -> Iterator[Any]:
    """The tensors in arguments or results: in containers and dataclasses, such as prompts and backbones."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name))
