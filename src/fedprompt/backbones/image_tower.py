"""Model folders that hold one image tower: ViT and DINO, DeiT, DINOv2 with and without registers, CLIP's vision tower."""

from __future__ import annotations

from pathlib import Path

from fedprompt.backbones.assemble import assemble
from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.model_folder import folder_shape
from fedprompt.backbones.preprocessing import folder_preprocessing, preprocessing
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_folder
from fedprompt.config import BackboneConfig


def from_folder(folder: Path, settings: BackboneConfig) -> ViT:
    """The transformer of a folder."""
    shape = folder_shape(folder)  # first, so that a model of another type is called that and not a list of odd tensors
    own = preprocessing(settings, folder_preprocessing(folder))
    return assemble(canonical(read_folder(folder, settings.sha256)), shape, *own, settings)
