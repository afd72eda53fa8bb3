"""Class names that a federation never trains on: the world with those names, and which methods can work in it."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.config import Config
from fedprompt.core.method import Method, World
from fedprompt.core.roles import Roles
from fedprompt.data.sources.base import Source
from fedprompt.errors import ConfigError, broken
from fedprompt.random_streams import SERVER, stream


def renamed_world(world: World, class_names: tuple[str, ...], backbone: ViT) -> World:
    """The same world with other classes."""
    language = backbone.language(class_names) if isinstance(backbone, DualEncoder) else None
    return replace(world, class_names=class_names, language=language)


def require_names(method: Method, world: World, novel: Source, backbone: ViT, config: Config) -> None:
    """Raise where a method could not tell novel classes apart after training: before it, and with the reason.

    A method says so itself, or the size of one of its tensors does: it changes when there are more classes.
    """
    field, given, none = (
        ("data.novel", config.data.novel, "0")
        if config.data.novel
        else ("data.other_set", config.data.other_set, "absent")
    )
    label = config.label
    if not method.names_any_class:
        rule = f"be {none} for {label}, which knows only the classes it was trained on"
        raise ConfigError(broken(field, rule, given))
    method.check(renamed_world(world, novel.class_names, backbone), config.train)  # novel names may be longer
    larger = replace(renamed_world(world, (*world.class_names, *novel.class_names), backbone), roles=Roles())
    others = _sizes(method.init(larger, stream(config.seed, 0, SERVER, "init")))
    bound = [name for name, size in _sizes(world.roles).items() if others.get(name) != size]
    if bound:
        rule = (
            f"be {none} for {label} with these settings: the size of {', '.join(bound)} follows the number of classes"
        )
        raise ConfigError(broken(field, rule, given))


def _sizes(roles: Roles) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in {**roles.shared, **roles.local, **roles.server}.items()}
