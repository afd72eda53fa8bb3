"""What a run would refuse, found without a run: the checks of `fedprompt validate`.

Nothing is downloaded. What needs weights that are not on this machine is left to the run, and a note says so.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fedprompt.assets import ASSETS
from fedprompt.backbones.catalog import NAMED
from fedprompt.backbones.hub_download import is_hub_id
from fedprompt.backbones.image_sizes import with_image_size
from fedprompt.backbones.vit import ViT
from fedprompt.client.factory import ExperimentFactory
from fedprompt.config import BackboneConfig, Config
from fedprompt.core.method import require_text_tower
from fedprompt.data.partition.client_names import NumberedNames
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.manifest import Manifest
from fedprompt.data.sources.open import open_both
from fedprompt.errors import BackboneError, ConfigError, broken
from fedprompt.experiment.experiment import check_extensions

STAND_INS = ("class 0", "class 1")  # where the classes are not known before the data are opened


class Checked(NamedTuple):
    """A config that nothing is known against."""

    config: Config
    """With all settings spelled out."""
    notes: list[str]
    """What was not checked."""


class Rehearsal:
    """Checks configs one after the other. A backbone that several of them have is loaded once."""

    def __init__(self, deep: bool = False) -> None:
        """With `deep`, the data are opened and divided among the clients."""
        self._deep = deep
        self._backbones: dict[str, ViT | None] = {}
        self._divided: dict[str, Manifest] = {}

    def check(self, config: Config) -> Checked:
        """Raise what a run of the config would raise before its first step."""
        check_extensions(config)
        with suppress(BackboneError):  # a hub id that cannot be reached: the size of its images is not known
            config, _ = with_image_size(config)
        factory = ExperimentFactory(config)
        names, clients = self._classes_and_clients(factory)
        backbone = self._backbone(factory)
        if backbone is not None:
            factory.world(backbone, names, clients)
            return Checked(factory.config, [])
        name = config.backbone.name
        require_text_tower(not factory.method.uses_text or name not in NAMED or NAMED[name].text)
        return Checked(
            factory.config, [f"backbone {name!r} is not on this machine: method and backbone are not checked"]
        )

    def _classes_and_clients(self, factory: ExperimentFactory) -> tuple[tuple[str, ...], NumberedNames | list[str]]:
        config = factory.config
        if self._deep:
            key = repr((config.data, config.partition, config.seed))
            if key not in self._divided:
                source, _ = open_both(config.data, factory.cache)
                self._divided[key] = make_manifest(source, config.data, config.partition, config.seed)
            manifest = self._divided[key]
            return manifest.class_names, list(manifest.clients.names)
        if config.partition.scheme == "manifest" and config.partition.manifest is not None:
            manifest = Manifest.load(config.partition.manifest)
            return manifest.class_names, list(manifest.clients.names)
        known = None if config.data.classes is None else len(config.data.classes)
        if config.partition.scheme == "classes" and known is not None and config.partition.classes_per_client > known:
            rule = f"be at most the {known} classes of data.classes"
            raise ConfigError(broken("partition.classes_per_client", rule, config.partition.classes_per_client))
        return tuple(config.data.classes or STAND_INS), NumberedNames(config.partition.clients)

    def _backbone(self, factory: ExperimentFactory) -> ViT | None:
        """The backbone, if its weights are on this machine."""
        settings = factory.config.backbone
        key = repr(settings)
        if key not in self._backbones:
            self._backbones[key] = factory.backbone() if is_here(settings, factory.cache) else None
        return self._backbones[key]


def is_here(backbone: BackboneConfig, cache: Path) -> bool:
    """Whether a backbone can be loaded, or refused, without a download."""
    named = NAMED.get(backbone.name)
    if named is not None:
        return all((cache / ASSETS[asset].file).is_file() for asset in named.assets)
    return Path(backbone.name).expanduser().exists() or not is_hub_id(backbone.name)
