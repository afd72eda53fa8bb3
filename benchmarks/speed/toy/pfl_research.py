"""The toy job in pfl-research: `FederatedAveraging` on its simulated backend."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from job import BATCH, CLIENTS, COHORT, RATE, ROUNDS, Watch, from_modules, network, read, serve, to_modules
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

job = read(sys.argv[1])
users = [Dataset(raw_data=[job.inputs[client], job.labels[client]]) for client in range(CLIENTS)]


class Network(torch.nn.Module):
    """What pfl-research wants of a model: a loss and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.layers.load_state_dict(to_modules(job.start))

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(inputs, labels).item() * len(labels), len(labels))}


class AfterTheFirst(TrainingProcessCallback):
    """Starts the watch when the first round is over, the only one that pfl-research evaluates."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if central_iteration == 0:
            self._watch.start()
        return False, Metrics()


def run(watch: Watch) -> dict[str, float]:
    module = Network()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", range(CLIENTS)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1 + ROUNDS,
            evaluation_frequency=1 + ROUNDS,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        callbacks=[AfterTheFirst(watch)],
        send_metrics_to_platform=False,
    )
    watch.stop()
    return job.score(from_modules(module.layers.state_dict()))


serve(run)
