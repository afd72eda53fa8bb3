"""`engine.kind: flower-simulation`: every client is a node that Flower simulates in Ray processes on this machine.

Flower has deprecated the function used here and recommends `flwr run`, but that leaves a SuperLink running on the machine
and does not report errors to this process. The version of Flower is pinned.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from importlib.util import find_spec
from threading import Event
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedprompt.config import EngineConfig
from fedprompt.engines.flower.transport import GridPost, Work, answered, order_in
from fedprompt.errors import ConfigError, RunError, broken

if TYPE_CHECKING:
    from fedprompt.engines.remote.node import SimulatedNode

if find_spec("ray") is None:
    rule = "be another kind where Ray is not installed"
    raise ConfigError(broken("engine.kind", rule, "flower-simulation") + ": pip install 'fedprompt[flower-simulation]'")

AHEAD = 2  # open orders per Ray process

client_app = ClientApp()
_node: SimulatedNode | None = None  # of this process


@client_app.train()
def _train(message: Message, context: Context) -> Message:
    """How a Ray process handles an order. It prepares once and can then act as any client."""
    global _node
    if _node is None:
        import torch

        from fedprompt.engines.remote.node import SimulatedNode

        torch.set_num_threads(1)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        _node = SimulatedNode()
    return answered(message, _node.answer(order_in(message)))


def simulate(clients: int, settings: EngineConfig, work: Work) -> None:
    """Run `work` with a connection to this number of simulated nodes; its errors are raised here."""
    processes = settings.workers or os.cpu_count() or 1
    server_app = ServerApp()
    raised: list[BaseException] = []
    over = Event()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            work(GridPost(grid, settings.deadline, window=AHEAD * processes, over=over.is_set))
        except BaseException as error:
            raised.append(error)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        run_simulation(
            server_app,
            client_app,
            clients,
            backend_config={
                "init_args": {"num_cpus": processes, "include_dashboard": False, "logging_level": logging.ERROR},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    except (ImportError, RuntimeError) as error:  # Flower reports only that there was an error
        raise RunError(f"Flower's simulation did not run: {_first(error)}") from error
    finally:
        over.set()  # Ctrl-C reaches only this thread
        _end_ray()
    for stopped_by in raised:
        raise stopped_by


def _first(error: BaseException) -> BaseException:
    """The error that led to this one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def _end_ray() -> None:
    import ray

    with suppress(Exception):
        ray.shutdown()
