"""Training on augmented images: the same steps on other pixels, and nothing of them is stored."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from remote_run import assert_same_as_in_process, run_remotely
from rich.console import Console
from support import StopAfter, Stopped, content, experiment, local_tensors, run, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.client.client_states import ClientStates
from fedprompt.client.local_training import TrainingResult
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config, parse
from fedprompt.core.method import Batch, Seen, Server, Upload, World
from fedprompt.errors import ConfigError
from fedprompt.experiment.progress import LiveProgress
from fedprompt.features.feature_rows import MEMORY
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

METHODS: dict[str, dict[str, Any]] = {
    "tokens": {"method": {"name": "fedvpt"}},
    "features": {"method": {"name": "head_tune"}},
    "block inputs and draws": {"method": {"name": "pfedbayespt"}},
    "image features": {"method": {"name": "promptfl"}, "backbone": {"name": "tiny-clip"}},
    "image patches": {"method": {"name": "fedotp"}, "backbone": {"name": "tiny-clip"}},
    "later block": {"method": {"name": "pep_fedpt"}},
    "weights": {"method": {"name": "fedlora"}},
    "stem": {"method": {"name": "fedvpt"}, "backbone": {"stem": 1}},
}
AUGMENTED = {"random_crop": 0.4, "random_flip": 0.5}
RAGGED = {
    "data": {"train_per_cell": 2, "test_per_cell": 1},
    "partition": {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3},
}
STEPS = {"lr": 0.02, "batch_size": 4, "epochs": 2}


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(autouse=True)
def _nothing_from_other_tests() -> None:
    MEMORY.clear()


def difference(first: Run, second: Run) -> float:
    worst = [worst_difference(shared_tensors(first), shared_tensors(second))]
    worst += [
        worst_difference(local_tensors(first, client), local_tensors(second, client))
        for client in range(len(first.clients))
    ]
    return max(worst)


def runtime_of(settings: Any, method: Any = None) -> ClientRuntime:
    made = experiment(settings, method)
    source, manifest, backbone, world = made.factory.prepare()
    bank = made.factory.bank(source, manifest, backbone)
    return made.factory.client_runtime(source, world, bank, ClientStates(lambda client: None))


def received_by(runtime: ClientRuntime) -> Tensors:
    """What client 0 receives in round 1."""
    world, method = runtime.world, runtime.method
    server = Server(world.roles.shared, world.roles.server)
    if world.roles.statistics("start"):
        replies = [runtime.survey(client, method.download(world, server, client)) for client in range(world.clients)]
        server = method.survey(world, server, [Upload(reply.client, reply.upload, 0.25) for reply in replies])
    return dict(method.download(world, server, 0))


@pytest.mark.sampled
def test_crops_of_whole_images_train_as_images_that_are_not_augmented(settings: Any, changes: dict[str, Any]) -> None:
    plain = run(settings(name="plain", train=STEPS, **changes))
    whole = run(settings(name="whole", train={**STEPS, "random_crop": 1.0}, **changes))
    assert difference(plain, whole) <= 1e-5


@pytest.mark.sampled
def test_augmented_images_train_to_other_parameters(settings: Any, changes: dict[str, Any]) -> None:
    plain = run(settings(name="plain", train=STEPS, **changes))
    other = run(settings(name="other", train={**STEPS, **AUGMENTED}, **changes))
    assert difference(plain, other) > 1e-4


@pytest.mark.sampled
def test_an_augmented_cohort_as_one_batch_equals_one_client_at_a_time(settings: Any, changes: dict[str, Any]) -> None:
    shared = {**RAGGED, "train": {**STEPS, **AUGMENTED}, **changes}
    alone = run(settings(name="alone", engine={"cohort": 1}, **shared))
    for cohort in (3, "auto"):
        together = run(settings(name=f"by-{cohort}", engine={"cohort": cohort}, **shared))
        assert difference(alone, together) <= 1e-5
        for one, other in zip(alone.rounds(), together.rounds(), strict=True):
            assert (one.loss is None) == (other.loss is None)
            assert one.loss is None or one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)


def test_a_resumed_augmented_run_has_the_same_bits(settings: Any) -> None:
    values = settings(name="whole", method={"name": "head_tune"}, train={**STEPS, **AUGMENTED})
    stopped = {**values, "name": "stopped"}
    with pytest.raises(Stopped):
        run(stopped, observer=StopAfter(1))
    assert content(run(stopped, resume=True)) == content(run(values))


def test_clients_on_nodes_see_the_same_augmented_images(settings: Any) -> None:
    values = settings(train={**STEPS, **AUGMENTED}, method={"name": "head_tune"})
    assert_same_as_in_process(run_remotely({**values, "name": "post"}), run({**values, "name": "here"}))


def test_an_augmented_run_leaves_the_random_state_of_torch_alone(settings: Any) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = run(settings(name="first", train=AUGMENTED))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert content(first) == content(run(settings(name="second", train=AUGMENTED)))


@pytest.mark.sampled
def test_training_on_augmented_images_stores_no_feature(settings: Any, changes: dict[str, Any]) -> None:
    """Neither of augmented images nor of the others. Clients go one by one, and the images of the next are decoded ahead."""
    runtime = runtime_of(settings(train={**STEPS, **AUGMENTED}, engine={"cohort": 1}, **changes))
    received, params = received_by(runtime), {}
    for client in range(4):
        who = runtime._client(client, 1)
        params[client] = runtime.method.begin(runtime.world, who, received, runtime._local(client, who))
    before = rows_stored(runtime)
    trained = runtime._train_locally(runtime.method.stages(runtime.world, runtime.config.train), params, 1)
    runtime.bank.tables.settle()
    assert all(isinstance(each, TrainingResult) for each in trained.values())
    assert rows_stored(runtime) == before
    assert bool(before) == bool(runtime.world.roles.statistics("start"))  # prototypes are of the images themselves


def rows_stored(runtime: ClientRuntime) -> dict[str, list[int]]:
    """By feature, how many images have a row in memory and how many on disk."""
    tables = runtime.bank.tables
    everything = np.arange(len(tables.source))
    return {name: [int(rows.holds(everything).sum()) for rows in places] for name, places in tables._places.items()}


def test_the_same_training_without_augmentation_stores_features(settings: Any) -> None:
    runtime = runtime_of(settings(method={"name": "head_tune"}))
    runtime.train(1, 0, received_by(runtime))
    assert sum(rows_stored(runtime)["cls:3"]) > 0


def test_stored_features_after_an_augmented_run_are_those_of_the_images_themselves(settings: Any) -> None:
    """A run without augmentation that finds the cache of an augmented one has the bits of a run that finds none."""
    common: dict[str, Any] = {"method": {"name": "head_tune"}}
    run(settings(name="augmented", train={**STEPS, **AUGMENTED}, **common))
    warm = run(settings(name="warm", train=STEPS, **common))
    MEMORY.clear()
    cold = settings(name="cold", train=STEPS, **common)
    elsewhere = {**cold["output"], "cache": cold["output"]["cache"] + "-other"}
    assert content(warm) == content(run({**cold, "output": elsewhere}))


def test_evaluations_and_statistics_see_images_as_they_are(settings: Any) -> None:
    plain, other = (
        runtime_of(settings(method={"name": "pep_fedpt"}, train=train)) for train in ({}, {"random_crop": 0.1})
    )
    received = received_by(plain)
    for name, tensor in plain.survey(0, received).upload.items():
        assert torch.equal(other.survey(0, received).upload[name], tensor), name
    assert torch.equal(plain._client(0, 1).features("cls")[0], other._client(0, 1).features("cls")[0])
    params = plain.method.personalise(plain.world, plain._client(0, 1), received, plain._local(0, plain._client(0, 1)))
    assert plain.test(1, 0, params) == other.test(1, 0, params)
    assert plain._client(0, 1).loss(params) == other._client(0, 1).loss(params)


@pytest.mark.parametrize(("method", "passes"), [("head_tune", 1), ("fedvpt", 0), ("pep_fedpt", 1)])
def test_a_pass_for_features_counts_in_the_size_of_a_batch(settings: Any, method: str, passes: int) -> None:
    """Else sixteen clients whose features are not stored would go through the backbone at once."""
    rows = []
    for train in ({}, AUGMENTED):
        runtime = runtime_of(settings(method={"name": method}, train=train))
        who, images = runtime._client(0, 1), runtime.bank.images(0, "train")
        params = runtime.method.begin(runtime.world, who, received_by(runtime), runtime._local(0, who))
        rows.append(runtime.sizer.of(runtime.method, params, images, training=True).per_image)
        tested = runtime.sizer.of(runtime.method, params, images, training=False).per_image
        assert tested == rows[0]
    assert rows[1] - rows[0] == passes * runtime.world.tokens


@dataclass(frozen=True)
class Watching(FedVPT):
    """Writes down the features of the images of every step."""

    seen: list[Tensor] = field(default_factory=list, compare=False)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        self.seen.append(batch.features["cls"].clone())
        return super().loss(world, params, logits, seen, batch, noise)


@pytest.mark.parametrize(("train", "kinds"), [({}, 1), ({"random_crop": 0.3}, 6), ({"random_flip": 0.5}, 2)])
def test_an_image_is_another_one_in_every_epoch_and_round(settings: Any, train: dict[str, Any], kinds: int) -> None:
    """A client with one image, three epochs, two rounds: how many different images it saw."""
    method = Watching()
    values = settings(
        data={"train_per_cell": 1, "classes": ["triangle"]}, train={"epochs": 3, **train}, engine={"cohort": 1}
    )
    runtime = runtime_of(values, method)
    for round in (1, 2):
        runtime.train(round, 0, received_by(runtime))
    rows = torch.cat(method.seen)
    assert len(rows) == 6
    assert len(rows.mul(1e4).round().unique(dim=0)) == kinds


@pytest.mark.parametrize("name", ["random_crop", "random_flip"])
@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan")])
def test_shares_that_are_none_are_refused(settings: Any, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{name} must .*got"):
        parse(settings(train={name: value}))


def test_a_config_without_augmentation_says_nothing_of_it_that_an_old_run_file_lacks(settings: Any) -> None:
    train = parse(settings()).model_dump(mode="json")["train"]
    assert not {"random_crop", "random_flip"} & set(train)


def shown(config: Config) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    LiveProgress(console).started(config, ["a"], 0)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_rule_is_said_once_when_a_run_starts(settings: Any) -> None:
    line = "training images are augmented: their features are computed anew in every step"
    assert shown(parse(settings(train={"random_flip": 0.5}))).count(line) == 1
    assert line not in shown(parse(settings()))
