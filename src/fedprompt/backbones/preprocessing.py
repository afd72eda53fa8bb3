"""The mean and standard deviation that images are normalised with: the backbone's own, or those of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedprompt.backbones.catalog import Triple
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json


def folder_preprocessing(folder: Path) -> tuple[Triple, Triple] | None:
    """Mean and standard deviation from preprocessor_config.json; None when the config has to say them."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if not values.get("do_normalize", True) or "image_mean" not in values or "image_std" not in values:
            return None
        mean, std = (triple(values[key]) for key in ("image_mean", "image_std"))
        factor = float(values.get("rescale_factor", 1 / 255))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BackboneError(
            f"{str(path)!r} must state image_mean and image_std as three numbers each: {error}"
        ) from error
    if abs(factor * 255 - 1) > 1e-3:
        raise BackboneError(
            broken(f"rescale_factor in {str(path)!r}", "be 1/255, the only scaling fedprompt does", factor)
        )
    return mean, std


def triple(values: Any) -> Triple:
    """Three numbers."""
    first, second, third = map(float, values)
    return first, second, third


def preprocessing(config: BackboneConfig, own: tuple[Triple, Triple] | None) -> tuple[Triple, Triple]:
    """Mean and standard deviation: the backbone's own, with which configured ones must agree, else the configured."""
    mean, std = (
        _agreed(f"backbone.{field}", given, own and own[index])
        for index, (field, given) in enumerate((("mean", config.mean), ("std", config.std)))
    )
    if min(std) <= 0:
        raise BackboneError(broken("backbone.std", "be positive", std))
    return mean, std


def _agreed(field: str, given: Triple | None, own: Triple | None) -> Triple:
    if given is None and own is None:
        raise BackboneError(
            f"{field} must be given for weights that carry no preprocessing, got none "
            "(often 0.5 0.5 0.5 for ViT, ImageNet's for DeiT and DINO; a wrong guess costs accuracy silently)"
        )
    if given is not None and own is not None and any(abs(a - b) > 1e-4 for a, b in zip(given, own, strict=True)):
        raise BackboneError(f"{field} must be the backbone's own {own}, got {given}")
    result = own if own is not None else given
    assert result is not None
    return result
