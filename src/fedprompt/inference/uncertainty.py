"""What a run's uncertainty is worth: its clients answer their test images again, and images of classes they never saw.

A run file has counts of right answers only, so this needs the images. Scores that grow with uncertainty:

    confidence           1 - max_c p_c                   of the mean p over the draws
    entropy              H(p)
    mutual information   H(p) - mean over draws of H     how much the draws disagree; without draws there is none

Unknown classes are those of which a client has no training image: it is shown all test images of these classes that other
clients have. Novel classes are those of which no client has any, because `data.classes` or `data.novel` keeps them out: on
request every client is shown their test images. Images of all clients are counted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fedprompt.client.local_evaluation import among_classes_of
from fedprompt.client.step import forward, make_batch
from fedprompt.core.method import Method
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.open import withheld
from fedprompt.data.sources.subset import Selection
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.features.image_bank import Images
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.metrics.calibration import BINS, calibration_error
from fedprompt.metrics.one_against_rest import auroc
from fedprompt.metrics.scoring import entropy
from fedprompt.metrics.selective import Selective
from fedprompt.random_streams import Stream, stream
from fedprompt.runs.run import Run

Array = np.ndarray[Any, np.dtype[Any]]
SCORES = ("confidence", "entropy", "mutual information")
COVERAGE = 0.8


@dataclass(frozen=True, eq=False)
class Answers:
    """What all clients of a run say of their test images."""

    draws: Array
    """(V, n, C): class probabilities of every draw."""
    labels: Array
    unknown: Array
    """(V, m, C): of images whose class the client does not know."""
    novel: Array
    """(V, k, C): of images of classes that no client has."""

    @property
    def probabilities(self) -> Array:
        mean: Array = self.draws.mean(0)
        return mean

    @property
    def wrong(self) -> Array:
        found: Array = self.probabilities.argmax(-1) != self.labels
        return found

    def first(self, draws: int) -> Answers:
        """With fewer draws."""
        return Answers(self.draws[:draws], self.labels, self.unknown[:draws], self.novel[:draws])


def answers(run: Run, draws: int | None = None, novel: bool = False, **options: Any) -> Answers:
    """Of every client that the run has tested; with another number of draws if the method has any, and with `novel` also of
    images of classes that no client has.
    """
    if run.config.engine.kind == "flower":
        raise RunError(f"run {run.name!r} has its test images at its sites: measure there, with the client's model")
    opened = LoadedRun.open(run.directory, **options)
    try:
        opened.factory.method = with_draws(opened.method, draws)
        return _answers(opened, novel)
    finally:
        opened.close()


def _answers(opened: LoadedRun, novel: bool) -> Answers:
    run, bank = opened.run, opened.bank()
    tested = sorted(run.final_results() or run.evaluations(opened.round) or range(len(run.clients)))
    everyone = {number: bank.images(number, "test") for number in tested}
    shown = _of_novel_classes(opened) if novel else None
    known, labels, unknown, new = [], [], [], []
    for number, images in everyone.items():
        client = TrainedClient.open(opened, number)
        train = bank.images(number, "train")
        known.append(predicted(client, images, train, client.stream()))
        labels.append(images.labels.cpu().numpy())
        strange = _of_unknown_classes(train, list(everyone.values()))
        if len(strange):
            drawn = stream(run.config.seed, opened.round, number, "unknown classes")
            unknown.append(predicted(client, strange, train, drawn))
        if shown is not None:
            drawn = stream(run.config.seed, opened.round, number, "novel classes")
            new.append(predicted(client, shown, train, drawn))
    nothing = known[0][:, :0]
    others = (np.concatenate([nothing, *each], 1) for each in (unknown, new))
    return Answers(np.concatenate(known, 1), np.concatenate(labels), *others)


def with_draws(method: Method, draws: int | None) -> Method:
    """The same method without its own diagnostics, and with so many draws in a prediction."""
    own: Any = method
    names = {field.name for field in fields(own)}
    if draws is not None and draws < 1:
        raise ConfigError(broken("--draws", "be at least 1", draws))
    changes: dict[str, Any] = {"diagnose": False} if "diagnose" in names else {}
    if draws is not None and "predict_draws" in names:
        changes["predict_draws"] = draws
    changed: Method = replace(own, **changes)
    return changed


def _of_unknown_classes(train: Images, tests: Sequence[Images]) -> Images:
    indices = np.concatenate([each.indices for each in tests])
    labels = np.concatenate([each.labels.cpu().numpy() for each in tests])
    chosen = ~np.isin(labels, np.unique(train.labels.cpu().numpy()))
    return Images.of(train.tables, np.unique(indices[chosen]))


def _of_novel_classes(opened: LoadedRun) -> Images:
    """Test images of the classes that the settings of the run keep out."""
    opened.require_images()
    source = withheld(opened.config.data, opened.factory.cache)
    if source is None:
        rule = "be given with a run whose data.classes or data.novel keeps classes out of the federation"
        raise ConfigError(broken("--novel", rule, f"run {opened.run.name!r}, which has all classes"))
    tests = Selection(source, train_and_test(source, opened.config.data)[1], source.class_names)
    return opened.bank(tests).images(0, "test")


def predicted(client: TrainedClient, images: Images, train: Images, generator: Stream) -> Array:
    """(V, n, C) for images whose features are cached, in batches and among classes as in an evaluation."""
    found = []
    with torch.no_grad():
        for start in range(0, len(images), client.batch_size):
            positions = torch.arange(start, min(start + client.batch_size, len(images)))
            batch = make_batch(client.method, images, positions, training=False)
            noise = client.noise(len(positions), generator)
            seen = forward(client.method, client.world, client.params, images, positions, batch, noise)
            found.append(client.method.predict(client.world, client.params, seen, batch, noise))
    together = torch.cat(found, dim=1).to("cpu", torch.float64)
    if client.config.federation.test_classes == "own":
        together = among_classes_of(train.labels, together)
    probabilities: Array = together.numpy()
    return probabilities


def ensemble(members: Sequence[Answers]) -> Answers:
    """Several trained models as one: their probabilities are averaged like draws."""
    first = members[0]
    if any(not np.array_equal(each.labels, first.labels) for each in members):
        raise ConfigError(
            "the runs of an ensemble must have the same clients and test images: give all of them the same "
            "partition.seed, or one manifest"
        )
    draws, unknown, novel = (
        np.concatenate([getattr(each, name) for each in members]) for name in ("draws", "unknown", "novel")
    )
    return Answers(draws, first.labels, unknown, novel)


def scored(draws: Array) -> dict[str, Array]:
    """Every score of images with draws (V, n, C); `mutual information` only if there are several."""
    mean, each = torch.from_numpy(draws.mean(0)), torch.from_numpy(draws)
    total = entropy(mean)
    found = {"confidence": (1 - mean.max(-1).values).numpy(), "entropy": total.numpy()}
    if len(draws) > 1:
        found["mutual information"] = (total - entropy(each).mean(0)).clamp_min(0).numpy()
    return found


@dataclass(frozen=True, eq=False)
class Worth:
    """What one score of one run is worth."""

    score: str
    figures: dict[str, float]
    """`accuracy`, `ece`, `nll`; `errors`: AUROC of wrong answers; `aurc`; `selective`: accuracy on the most certain 80 %;
    `unknown`, `novel`: AUROC of images of unknown and of novel classes, if there are some.
    """
    curve: Array
    """Risk by coverage, at 1 %, ..., 100 %."""


def worth(found: Answers) -> list[Worth]:
    """Every score that the answers have."""
    probabilities, wrong = found.probabilities, found.wrong
    chosen = probabilities[np.arange(len(wrong)), found.labels].clip(np.finfo(np.float64).tiny)
    common = {
        "accuracy": 1 - float(wrong.mean()),
        "ece": _ece(probabilities, wrong),
        "nll": -float(np.log(chosen).mean()),
    }
    others = {"unknown": found.unknown, "novel": found.novel}
    strange = {kind: scored(draws) for kind, draws in others.items() if draws.shape[1]}
    result = []
    for name, values in scored(found.draws).items():
        selective = Selective.of(values, wrong)
        figures = {**common, "aurc": selective.aurc}
        if wrong.any() and not wrong.all():
            figures["errors"] = selective.auroc
        figures["selective"] = selective.accuracy_at(COVERAGE)
        for kind, scores in strange.items():
            is_strange = np.arange(len(values) + len(scores[name])) >= len(values)
            figures[kind] = auroc(is_strange, np.concatenate([values, scores[name]]))
        result.append(Worth(name, figures, selective.curve()))
    return result


def _ece(probabilities: Array, wrong: Array) -> float:
    confidence = probabilities.max(-1)
    index = np.minimum((confidence * BINS).astype(int), BINS - 1)
    columns = (np.ones_like(confidence), confidence, (~wrong).astype(np.float64))
    bins = np.stack([np.bincount(index, weights=each, minlength=BINS) for each in columns], -1)
    return calibration_error(bins.tolist())


def accuracy_by_draws(found: Answers) -> list[float]:
    """Accuracy if only the first 1, 2, ..., V draws are averaged: the paper's figure 1, without training again."""
    return [1 - float(found.first(count).wrong.mean()) for count in range(1, len(found.draws) + 1)]
