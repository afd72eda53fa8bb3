"""From a config to the parts of an experiment: data, backbone, the world a method sees, images, and the clients' side.

A worker process, a node and a loaded run build the same parts from the same config, so this knows nothing of engines or run files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fedprompt import config as configuration
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.load import load_backbone
from fedprompt.backbones.sentence_encoder import SentenceEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.client.client_states import ClientStates
from fedprompt.client.novel_classes import require_names
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config
from fedprompt.core import registry
from fedprompt.core.client_sampling import absences, away_by_round, sample_newcomers
from fedprompt.core.method import Method, World
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_both
from fedprompt.errors import ConfigError, DataError, broken
from fedprompt.features.image_bank import ImageBank
from fedprompt.features.item_store import check_kind, open_store
from fedprompt.federation.compatibility import check_protections
from fedprompt.io.files import cache_directory
from fedprompt.privacy.accounting import Plan
from fedprompt.privacy.budget import Terms
from fedprompt.random_streams import SERVER, stream


class Prepared(NamedTuple):
    """What every run starts from."""

    source: Source
    manifest: Manifest
    backbone: ViT
    world: World


class ExperimentFactory:
    """Builds the parts of one experiment. Settings that cannot work are refused before the first image is decoded."""

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        self.config = registry.completed(config if isinstance(config, Config) else configuration.parse(config))
        self.method: Method = registry.build(self.config.method, self.config.variant)
        self.cache: Path = cache_directory(self.config.output.cache)

    def prepare(self) -> Prepared:
        """Data, partition, backbone and the world a method sees, with its roles declared."""
        config = self.config
        source, novel = open_both(config.data, self.cache)
        manifest = make_manifest(source, config.data, config.partition, config.seed)
        if config.federation.evaluate_on == "validation" and manifest.clients.validation is None:
            rule = "have validation images for federation.evaluate_on: validation, or data.validation be given"
            raise DataError(broken("partition.manifest", rule, "none"))
        backbone = self.backbone()
        check_kind(source, backbone)
        world = self.world(backbone, source.class_names, manifest.clients.names)
        if novel is not None:
            require_names(self.method, world, novel, backbone, config)
        return Prepared(source, manifest, backbone, world)

    def backbone(self) -> ViT:
        backbone, engine = load_backbone(self.config.backbone, self.cache), self.config.engine
        backbone = backbone.compiled() if engine.compile is True else backbone
        return backbone.recomputing() if engine.recompute else backbone

    def world(self, backbone: ViT, class_names: tuple[str, ...], client_names: Sequence[str]) -> World:
        """What the method may know, with its roles declared; settings that do not fit are refused."""
        config, shape = self.config, backbone.shape
        world = World(
            shape.width,
            backbone.depth,
            shape.tokens,
            shape.patch,
            class_names,
            client_names,
            epochs=config.train.epochs,
            rounds=config.federation.rounds,
            newcomers=sample_newcomers(config.seed, len(client_names), config.federation.held_out),
            language=backbone.language(class_names) if isinstance(backbone, DualEncoder) else None,
            device=backbone.device,
            dtype=backbone.dtype,
            blank=cache(backbone.blank_tokens),
            has_cls=shape.has_cls,
            frame=backbone.frame,
            operations=backbone.operations,
        )
        if self.method.uses_text:
            _ = world.text  # raises where there is none
        if config.train.augmented and isinstance(backbone, SentenceEncoder):
            raise ConfigError(broken("train.random_crop and train.random_flip", "be absent for sentences", True))
        self.method.check(world, config.train)
        absences(config.federation, client_names, world.newcomers)  # raises where they cannot be met
        world = replace(world, roles=self.method.init(world, stream(config.seed, 0, SERVER, "init")))
        check_protections(config, self.method, world)
        return world

    def bank(self, source: Source, manifest: Manifest, backbone: ViT) -> ImageBank:
        """Every client's images as the backbone wants them."""
        pixels = open_store(source, backbone, self.config.data.resize, self.cache)
        return ImageBank(source, manifest, pixels, backbone, self.config.engine)

    def client_runtime(self, source: Source, world: World, bank: ImageBank, states: ClientStates) -> ClientRuntime:
        """The clients' side of the experiment, on the terms of privacy it asks for."""
        runtime = ClientRuntime(self.config, world, self.method, bank, states, source.domain_names)
        runtime.terms = privacy_terms(self.config, world, runtime.steps)
        return runtime

    def privacy_plans(self) -> tuple[Terms, list[Plan]]:
        """What the privacy of the experiment costs after every round, without a round of training."""
        source, manifest, backbone, world = self.prepare()
        nothing = ClientStates(lambda client: None)
        terms = self.client_runtime(source, world, self.bank(source, manifest, backbone), nothing).terms
        if terms is None:
            raise ConfigError(broken("privacy", "be given: there is nothing to compute", None))
        away = away_by_round(self.config.federation, world.client_names, world.newcomers)
        return terms, terms.plans(self.config, bool(world.roles.statistics("start")), away)


def privacy_terms(config: Config, world: World, steps: Callable[[int], int]) -> Terms | None:
    """The terms of privacy of a run; `steps` counts the training steps of a client."""
    surveys = bool(world.roles.statistics("start"))
    away = away_by_round(config.federation, world.client_names, world.newcomers)
    return Terms.of(config, world.participants, surveys, steps, away)
