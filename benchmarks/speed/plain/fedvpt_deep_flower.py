"""The same program in Flower's simulation: `FedAvg` over one virtual node per client, which Ray runs in one actor.

One actor of one thread, as all other sides have. Ray's start counts, as that of every process does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from federated import Job, Params
from fedvpt_deep import opened
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

folder, scratch = sys.argv[1:]
clients = len(json.loads((Path(folder) / "job.json").read_text(encoding="utf-8"))["clients"])
client_app, server_app = ClientApp(), ServerApp()


def kept(own: Job, context: Context) -> Params:
    """The local tensors of a client."""
    return context.state["local"].to_torch_state_dict() if "local" in context.state else own.local


@client_app.train()
def train(message: Message, context: Context) -> Message:
    (own, method), client = opened(folder), int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"]) - 1
    shared = message.content["arrays"].to_torch_state_dict()
    upload, local = own.trained(method, client, number, shared, kept(own, context))
    context.state["local"] = ArrayRecord(local)
    images = len(own.clients[client]["train"].labels)
    content = {"arrays": ArrayRecord(upload), "metrics": MetricRecord({"num-examples": images})}
    return Message(content=RecordDict(content), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    (own, method), client = opened(folder), int(context.node_config["partition-id"])
    params = {**message.content["arrays"].to_torch_state_dict(), **kept(own, context)}
    found = {"average": own.accuracy(method, client, params), "num-examples": 1}
    return Message(content=RecordDict({"metrics": MetricRecord(found)}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    own = Job(Path(folder), images=False)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=clients)
    result = strategy.start(grid, ArrayRecord(own.shared), num_rounds=own.settings["rounds"])
    last = result.evaluate_metrics_clientapp[own.settings["rounds"]]
    print(json.dumps({"average": float(last["average"])}), flush=True)


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": 1,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": scratch,
            },
        },
    )
