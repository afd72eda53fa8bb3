"""Base-to-novel generalisation: a federation that learned some classes is tested on others.

The last `data.novel` of the classes never reach the federation. After the last round every client's parameters, at the
configured point of evaluation, are tested on

    Local   its own test images               logits over the base classes, as in every round
    Base    all test images of base classes   the same logits
    Novel   all test images of novel classes  logits over the novel class names only

    HM = 2 / (1/Base + 1/Novel),   HM3 = 3 / (1/Local + 1/Base + 1/Novel),   each figure the unweighted mean over clients
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedprompt.backbones.vit import ViT
from fedprompt.client.factory import Prepared
from fedprompt.client.novel_classes import renamed_world
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config
from fedprompt.core.messages import Download
from fedprompt.core.method import World
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.partition.split import train_and_test
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_both
from fedprompt.features.image_bank import CommonImages
from fedprompt.features.item_store import open_store
from fedprompt.federation.loop import AfterLastRound
from fedprompt.federation.observer import Observer
from fedprompt.runs.final_figures import stored_results
from fedprompt.runs.novel_figures import EVENT, NovelFigures, harmonic_mean, stored_figures
from fedprompt.runs.store import RunStore
from fedprompt.tensors import Tensors


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
        config, among = federation.config, {"test_classes": "all"}  # a client's own classes are no matter here
        config = config.model_copy(update={"federation": config.federation.model_copy(update=among)})

        def runtime(world: World, images: Source, indices: np.ndarray) -> ClientRuntime:
            pixels = open_store(images, backbone, config.data.resize, cache)
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
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> NovelFigures:
        """All figures after a round; `local` are the accuracies on the clients' own images, by client number."""
        found: dict[str, list[float]] = {"local": [local[client] for client in clients], "base": [], "novel": []}
        for done, client in enumerate(clients, start=1):
            received = download(client)
            for name, runtime, elsewhere in (("base", self.base, None), ("novel", self.novel, self.novel.world)):
                params = self.federation.fitted(round, client, received, elsewhere)
                found[name].append(runtime.test(round, client, params).accuracy)
            on_progress(done)
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
    """One entry in the run file, written as a whole."""
    store.note(round, None, EVENT, json.dumps(figures))


def base_test(source: Source, manifest: Manifest, config: Config) -> np.ndarray:
    """Test images of the base classes, of all clients. A manifest from a file defines its own test images."""
    if config.partition.scheme == "manifest":
        return np.unique(manifest.clients.test.values)
    return train_and_test(source, config.data)[1]


def novel_test(
    runtime: ClientRuntime, prepared: Prepared, cache: Path, store: RunStore, observer: Observer
) -> AfterLastRound | None:
    """Run the tests after the last round if `data.novel` withheld some classes, unless they are done already."""
    config = runtime.config
    _, novel = open_both(config.data, cache) if config.data.tests_names else (None, None)
    if novel is None or stored_figures(store) is not None:
        return None
    test = BaseToNovel.prepare(runtime, prepared.source, prepared.manifest, novel, prepared.backbone, cache)

    def afterwards(round: int, clients: Sequence[int], download: Download) -> None:
        # the last round is always evaluated; where that was on validation images, the final test came before
        found = store.evaluations(round) if config.federation.evaluate_on == "test" else stored_results(store)
        local = {client: result["correct"] / result["samples"] for client, result in found.items()}

        def progress(done: int) -> None:
            observer.evaluated(round, done, len(clients))

        remember(store, round, test.measure(round, clients, download, local, progress))

    return afterwards
