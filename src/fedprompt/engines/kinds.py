"""`engine.kind`: the engine of a run, opened before the run is prepared and closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from fedprompt.backbones.assemble import compute_device
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config
from fedprompt.config.plugin_options import arguments
from fedprompt.config.registries import ENGINES
from fedprompt.engines.in_process import InProcess
from fedprompt.engines.workers import WorkerPool, Workers
from fedprompt.federation.loop import Engine

MakeEngine = Callable[[ClientRuntime, list[str]], Engine]
Opener = TypeVar("Opener", bound=Callable[..., AbstractContextManager[Any]])


def register_engine(name: str) -> Callable[[Opener], Opener]:
    """Register an engine under a name: `engine: {kind: ...}` in a config.

    The function takes the config and returns a context manager, which is entered before data and backbone are prepared
    and left at the end of the run. The context manager yields a function. It is called once with the clients' side of the
    run (`ClientRuntime`) and the digests of the backbone and the partition, and returns an `Engine`. Keyword-only
    parameters are the engine's settings: fields of the section `engine` if they exist there, else entries of `options`.
    """
    return ENGINES.registrar(name)


def opener(config: Config) -> Callable[[], AbstractContextManager[MakeEngine]]:
    """The engine that a config selects, not yet opened."""
    kind = config.engine.kind
    found = ENGINES.get(kind)
    given = arguments(config.engine, "engine", kind, found)
    return lambda: found(config, **given)


@register_engine("in-process")
@contextmanager
def in_process(config: Config, *, workers: int, devices: list[str]) -> Iterator[MakeEngine]:
    """Clients in this process, or distributed over `engine.workers` processes, on `engine.devices`."""
    for name in devices:
        compute_device(name, "engine.devices")
    if not (workers or devices):
        yield lambda runtime, ground: InProcess(runtime)
        return
    with WorkerPool(workers or len(devices), devices) as pool:  # workers import modules while this process prepares
        yield lambda runtime, ground: Workers(runtime, pool, ground)
        pool.assert_frozen()
