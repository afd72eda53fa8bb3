"""Base-to-novel generalisation: a federation that learned some classes is asked about others.

The last `data.novel` of the classes never reach the federation. After the last round every client's parameters, at the
configured point of evaluation, are tested on

    Local   its own test images               logits over the base classes, as in every round
    Base    all test images of base classes   the same logits
    Novel   all test images of novel classes  logits over the novel class names alone

    HM = 2 / (1/Base + 1/Novel),   HM3 = 3 / (1/Local + 1/Base + 1/Novel),   each figure the unweighted mean over clients
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedprompt.backbones.dual import DualEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.config import Config
from fedprompt.data.base import Source
from fedprompt.data.manifest import Manifest
from fedprompt.data.split import train_and_test
from fedprompt.data.transforms import ImageStore
from fedprompt.engines.client import ClientRuntime
from fedprompt.engines.images import CommonImages
from fedprompt.errors import ConfigError, broken
from fedprompt.evaluation.novel_figures import EVENT, NovelFigures, harmonic_mean
from fedprompt.federation.store import RunStore
from fedprompt.method import Method, World
from fedprompt.roles import Roles, Tensors
from fedprompt.streams import SERVER, stream


@dataclass(frozen=True)
class BaseToNovel:
    """Two more test sets for the clients of one federation."""

    federation: ClientRuntime
    base: ClientRuntime
    novel: ClientRuntime

    @classmethod
    def prepare(
        cls, federation: ClientRuntime, source: Source, manifest: Manifest, novel: Source, backbone: ViT, cache: Path
    ) -> BaseToNovel:
        config, size = federation.config, backbone.shape.image_size

        def runtime(world: World, images: Source, indices: np.ndarray) -> ClientRuntime:
            pixels = ImageStore(images, size, config.data.resize, cache)
            bank = CommonImages.of(images, indices, pixels, backbone, config.engine)
            return ClientRuntime(config, world, federation.method, bank, federation.states, images.domain_names)

        return cls(
            federation,
            runtime(federation.world, source, base_test(source, manifest, config)),
            runtime(
                renamed_world(federation.world, novel.class_names, backbone),
                novel,
                train_and_test(novel, config.data)[1],
            ),
        )

    def measure(
        self,
        round: int,
        clients: Sequence[int],
        download: Callable[[int], Tensors],
        local: dict[int, float],
        told: Callable[[int], None] = lambda done: None,
    ) -> NovelFigures:
        """All figures after a round; `local` are the accuracies on the clients' own images, by client number."""
        found: dict[str, list[float]] = {"local": [local[client] for client in clients], "base": [], "novel": []}
        for done, client in enumerate(clients, start=1):
            received = download(client)
            for name, runtime, elsewhere in (("base", self.base, None), ("novel", self.novel, self.novel.world)):
                params = self.federation.fitted(round, client, received, elsewhere)
                found[name].append(runtime.test(round, client, params).accuracy)
            told(done)
        means = {name: statistics.fmean(values) for name, values in found.items()}
        return {
            **means,
            "hm": harmonic_mean(means["base"], means["novel"]),
            "hm3": harmonic_mean(*means.values()),
            "classes": {"base": self.base.world.classes, "novel": self.novel.world.classes},
            "images": {"base": len(self.base.bank.images(0, "test")), "novel": len(self.novel.bank.images(0, "test"))},
            "clients": {
                self.base.world.client_names[c]: {k: v[i] for k, v in found.items()} for i, c in enumerate(clients)
            },
        }


def remember(store: RunStore, round: int, figures: NovelFigures) -> None:
    """One entry in the run file: it is all there, or not there at all."""
    store.note(round, None, EVENT, json.dumps(figures))


def base_test(source: Source, manifest: Manifest, config: Config) -> np.ndarray:
    """Test images of the base classes, whoever holds them. A manifest that was read decides itself what is for testing."""
    if config.partition.scheme == "manifest":
        return np.unique(manifest.clients.test.values)
    return train_and_test(source, config.data)[1]


def renamed_world(world: World, class_names: tuple[str, ...], backbone: ViT) -> World:
    """The same world with other classes."""
    language = backbone.language(class_names) if isinstance(backbone, DualEncoder) else None
    return replace(world, class_names=class_names, language=language)


def require_names(method: Method, world: World, novel: Source, backbone: ViT, config: Config) -> None:
    """Raise where a method could not tell novel classes apart after training: before it, and with the reason.

    A method says so itself, or the size of one of its tensors does: it changes when there are more classes.
    """
    label, share = config.label, config.data.novel
    if not method.names_any_class:
        rule = f"be 0 for {label}, which knows only the classes it was trained on"
        raise ConfigError(broken("data.novel", rule, share))
    method.check(renamed_world(world, novel.class_names, backbone), config.train)  # novel names may be longer
    larger = replace(renamed_world(world, (*world.class_names, *novel.class_names), backbone), roles=Roles())
    others = _sizes(method.init(larger, stream(config.seed, 0, SERVER, "init")))
    bound = [name for name, size in _sizes(world.roles).items() if others.get(name) != size]
    if bound:
        rule = f"be 0 for {label} with these settings: the size of {', '.join(bound)} follows the number of classes"
        raise ConfigError(broken("data.novel", rule, share))


def _sizes(roles: Roles) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in {**roles.shared, **roles.local, **roles.server}.items()}
