"""Frozen vision transformers behind one interface. Importing this package does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedprompt.backbones.catalog import catalog

if TYPE_CHECKING:
    from fedprompt.backbones.vit import ViT
    from fedprompt.config import BackboneConfig

__all__ = ["catalog", "load_backbone"]


def load_backbone(config: BackboneConfig, cache: Path) -> ViT:
    """The frozen backbone of a config, at its resolution; see `fedprompt.backbones.load`."""
    from fedprompt.backbones.load import load_backbone as load

    return load(config, cache)
