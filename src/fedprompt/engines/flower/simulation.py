"""`engine.kind: flower-simulation`: every client a node that Flower simulates in processes of Ray, on this machine.

Flower calls its function for this deprecated in favour of `flwr run`, which would leave a SuperLink behind on the machine
and could not tell this process what went wrong. The version of Flower is pinned.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedprompt.config import EngineConfig
from fedprompt.engines.flower.transport import GridPost, Work, answered, order_in
from fedprompt.errors import RunError

if TYPE_CHECKING:
    from fedprompt.engines.remote.node import SimulatedNode

AHEAD = 2  # orders under way for every process of Ray

client_app = ClientApp()
_node: SimulatedNode | None = None  # of this process


@client_app.train()
def _train(message: Message, context: Context) -> Message:
    """What a process of Ray does with an order. It prepares once and then plays any client."""
    global _node
    if _node is None:
        import torch

        from fedprompt.engines.remote.node import SimulatedNode

        torch.set_num_threads(1)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        _node = SimulatedNode()
    return answered(message, _node.answer(order_in(message)))


def simulate(clients: int, settings: EngineConfig, work: Work) -> None:
    """Do `work` with a post that reaches so many simulated nodes; what it raises is raised here."""
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
    except (ImportError, RuntimeError) as error:  # Flower says no more than that there was one
        raise RunError(f"Flower's simulation did not run: {_first(error)}") from error
    finally:
        over.set()  # an interrupt reaches this thread alone
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
