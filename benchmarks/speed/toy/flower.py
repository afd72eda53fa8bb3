"""The toy job in Flower's simulation: `FedAvg` over virtual nodes that Ray runs, one actor on every core.

Ray and its actors start once; the rounds of every job are steady ones.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import BATCH, CLIENTS, COHORT, RATE, ROUNDS, Watch, from_modules, network, read, serve, to_modules

data, scratch = sys.argv[1:]
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    job, client = read(data), int(context.node_config["partition-id"])
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, labels = job.inputs[client], job.labels[client]
    for batch in torch.randperm(len(labels)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    job = read(data)

    def run(watch: Watch) -> dict[str, float]:
        def after_round(number: int, arrays: ArrayRecord) -> None:
            if number == 1:
                watch.start()

        strategy = FedAvg(fraction_train=COHORT / CLIENTS, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        start = ArrayRecord(to_modules(job.start))
        result = strategy.start(grid, start, num_rounds=1 + ROUNDS, evaluate_fn=after_round)
        watch.stop()
        return job.score(from_modules(result.arrays.to_torch_state_dict()))

    serve(run)


run_simulation(
    server_app,
    client_app,
    num_supernodes=CLIENTS,
    backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": scratch},
    },
)
