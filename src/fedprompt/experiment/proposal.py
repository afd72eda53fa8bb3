"""A first config for somebody's own images: partition, backbone and method, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedprompt import config as configuration
from fedprompt.backbones.catalog import B16, DINOV2_SMALL, NAMED
from fedprompt.config import Config
from fedprompt.core import registry
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.sources.base import NO_DOMAINS, Source
from fedprompt.errors import FedpromptError

MOST_TRAINING = 2000  # images of a first run
MOST_CLIENTS = 6  # where the data do not say how many there are
FEWEST_IMAGES = 20  # of a client for training
SHARE = 0.8  # of training images in a set without a split
SMALL, SMALL_TEST = 800, 0.4  # training images of a small set, and the share of it that becomes test images
STEPS = 5  # in an epoch of a client, at least
ALPHA = 0.5
ROUNDS = 10
HEAD = "shared_then_finetune"


@dataclass(frozen=True)
class Wishes:
    """What the user has decided; None where a proposal is wanted."""

    scheme: str | None = None
    clients: int | None = None
    backbone: str | None = None
    method: str | None = None
    compare: bool | None = None


@dataclass(frozen=True)
class Choice:
    """A value, and why."""

    value: Any
    reason: str


GIVEN = "as you chose"


class Proposal:
    """What is proposed for a source, piece by piece: each may depend on the choices before it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._classes = len(source.class_names)
        self._domains = 0 if source.domain_names == NO_DOMAINS else len(source.domain_names)
        self._splits = source.splits is not None
        self._training = int(np.sum(source.splits == "train")) if self._splits else int(SHARE * len(source))

    def limits(self) -> dict[str, Choice]:
        """How many images of every cell a first run takes: all of a small set."""
        if not self._splits and self._training <= SMALL:
            return {
                "test_fraction": Choice(
                    SMALL_TEST, "of a small set more than the usual fifth: accuracies are less coarse"
                )
            }
        cells = len(np.unique(self.source.domains * self._classes + self.source.labels))
        if self._training <= MOST_TRAINING:
            return {}
        each = max(MOST_TRAINING // cells, 5)
        reason = f"of {self._training:,} training images a first run takes some; delete both lines for all"
        return {"train_per_cell": Choice(each, reason), "test_per_cell": Choice(max(each // 2, 2), "")}

    def scheme(self) -> Choice:
        if self._domains > 1:
            some = ", ".join(self.source.domain_names[:3]) + (", ..." if self._domains > 3 else "")
            return Choice("domains", f"the images have {self._domains} domains ({some}): every client has its own")
        if self._classes >= 3 and self._training >= 3 * FEWEST_IMAGES:
            return Choice("dirichlet", "there are no domains: clients differ in how often they see each class")
        return Choice("iid", "these are too few images or classes for clients that differ")

    def clients(self, scheme: str) -> Choice:
        if scheme == "domains" and self._domains > 1:
            return Choice(self._domains, "one for each domain")
        fitting = max(min(MOST_CLIENTS, self._used() // FEWEST_IMAGES), 2)
        return Choice(fitting, f"about {self._used() // fitting} training images each")

    def backbone(self, method: str | None) -> Choice:
        if method is not None and reads_names(method):
            return Choice(
                B16.name, "the method reads class names; this is a stand-in for CLIP, which no package registry has"
            )
        return Choice(DINOV2_SMALL.name, "good features from a package registry alone, and fast on a CPU")

    def method(self, backbone: str, scheme: str) -> Choice:
        if backbone in NAMED and NAMED[backbone].text:
            return Choice("promptfl_ft", "words around the class names that all share, then fitted to each client")
        if scheme in ("domains", "dirichlet_in_domains"):
            return Choice("pfedbayespt", "clients differ in style: it makes prompts for every image")
        return Choice("fedvpt_deep", "prompts in every block, which all clients share")

    def head(self, method: str) -> Choice | None:
        """The classifier of the method; None where it has none of its own, or is the client that works alone.

        A head of the client's own is weak where clients are alike, an averaged one where they see other classes. Averaged and
        then fitted is close to the better of the two in both cases (docs/discussion.md, "The first proposal").
        """
        if method == "local" or "head" not in {field.name for field in fields(registry.methods()[method])}:
            return None
        return Choice(HEAD, "an averaged classifier, fitted to each client before its test")

    def baselines(self, method: str) -> list[Choice]:
        """What to compare the method with."""
        if reads_names(method):
            names = [("coop", "every client alone"), ("promptfl", "one prompt for all")]
        else:
            names = [("local", "every client alone"), ("head_tune", "one model for all")]
        return [Choice(name, reason) for name, reason in names if name != method]

    def settings(self, source: str, wishes: Wishes) -> dict[str, Any]:
        """The settings of a config, without names of methods."""
        assert wishes.clients is not None
        chosen: dict[str, Any] = {
            "data": {"source": source, **{name: choice.value for name, choice in self.limits().items()}},
            "partition": {"scheme": wishes.scheme, "clients": wishes.clients},
            "backbone": {"name": wishes.backbone},
            "train": {"batch_size": self._batch_size(wishes.clients)},
            "federation": {"rounds": ROUNDS},
        }
        if wishes.scheme in ("dirichlet", "dirichlet_in_domains"):
            chosen["partition"] |= {"alpha": ALPHA, "min_train": 5}
        if wishes.scheme == "classes":
            chosen["partition"]["classes_per_client"] = max(2, -(-self._classes // wishes.clients))
        if wishes.backbone == DINOV2_SMALL.name:
            chosen["backbone"]["stem"] = 8
        return chosen

    def divisible(self, settings: dict[str, Any]) -> FedpromptError | None:
        """Why the images cannot be divided so; None where they can."""
        config: Config = configuration.parse({key: settings[key] for key in ("data", "partition")})
        try:
            make_manifest(self.source, config.data, config.partition, config.seed)
        except FedpromptError as error:
            return error
        return None

    def _used(self) -> int:
        small = "test_fraction" in self.limits()
        return int(self._training * (1 - SMALL_TEST) / SHARE) if small else min(self._training, MOST_TRAINING)

    def _batch_size(self, clients: int) -> int:
        each = max(self._used() // clients, 1)
        return next((size for size in (32, 16, 8) if size * STEPS <= each), 4)


def reads_names(method: str) -> bool:
    """Whether it needs a text tower."""
    return registry.build({"name": method}).uses_text
