"""`engine.kind`: which engine a run has, opened before the run is prepared and closed when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

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
    """Make an engine known under a name: `engine: {kind: ...}` in a config.

    It is called with the config and gives a context manager, which is entered before data and backbone are prepared and
    left when the run is over. What that yields is called once with the clients' side of the run (`ClientRuntime`) and with
    digests of the backbone and the partition, and gives an `Engine`. Keyword-only parameters are its settings: those of the
    section come from there, all others from its `options`.
    """
    return ENGINES.registrar(name)


def opener(config: Config) -> Callable[[], AbstractContextManager[MakeEngine]]:
    """The engine a config asks for, not yet opened."""
    kind = config.engine.kind
    found = ENGINES.get(kind)
    given = arguments(config.engine, "engine", kind, found)
    return lambda: found(config, **given)


@register_engine("in-process")
@contextmanager
def in_process(config: Config, *, workers: int) -> Iterator[MakeEngine]:
    """Clients in this process, or shared out among `engine.workers` processes."""
    if not workers:
        yield lambda runtime, ground: InProcess(runtime)
        return
    with WorkerPool(workers) as crew:  # they import while this process prepares
        yield lambda runtime, ground: Workers(runtime, crew, ground)
        crew.assert_frozen()
