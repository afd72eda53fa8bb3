"""A `transformers` model folder: architecture and preprocessing, read from the JSON files beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fedprompt.backbones.catalog import FAMILIES, Triple
from fedprompt.backbones.shape import CHANNELS, ViTShape
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json

MOST_BLOCKS = 1000
MOST_LABELS = 100_000
_ACTIVATIONS: dict[str, Literal["gelu", "quick_gelu"]] = {"gelu": "gelu", "quick_gelu": "quick_gelu"}


def _check_labels(config: Any) -> None:
    """Raise if transformers would create names for millions of classes."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key == "num_labels" and not (type(value) is int and 0 <= value <= MOST_LABELS):
            raise ValueError(broken("num_labels", f"be in 0..{MOST_LABELS}", value))
        _check_labels(value)


def folder_shape(folder: Path) -> ViTShape:
    """The architecture at its trained resolution, from config.json; of a CLIP, that of its vision tower."""
    from transformers import AutoConfig  # takes seconds to import, and the other ways do not need it

    try:
        _check_labels(read_json(folder / "config.json"))  # of a size and depth that is safe for transformers
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each model family checks its fields in its own way
        raise BackboneError(
            f"the backbone folder {str(folder)!r} must hold a config.json transformers can read: {error}"
        ) from error
    if config.model_type not in FAMILIES:
        raise BackboneError(
            broken(
                f"model_type in {str(folder / 'config.json')!r}", f"be one of {', '.join(FAMILIES)}", config.model_type
            )
        )
    config = config.vision_config if config.model_type == "clip" else config
    if config.hidden_act not in _ACTIVATIONS:
        raise BackboneError(broken("hidden_act", f"be one of {', '.join(_ACTIVATIONS)}", config.hidden_act))
    if config.num_channels != CHANNELS:
        raise BackboneError(broken("num_channels", f"be {CHANNELS}", config.num_channels))
    dinov2 = config.model_type.startswith("dinov2")
    gated = bool(dinov2 and config.use_swiglu_ffn)
    width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    check_heads(width, heads)
    hidden = int(width * number(config, "mlp_ratio")) if dinov2 else whole(config, "intermediate_size")
    if gated:
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8  # as DINOv2 rounds it
    return ViTShape(
        width=width,
        depth=whole(config, "num_hidden_layers", most=MOST_BLOCKS),
        heads=heads,
        mlp_width=hidden,
        patch=_side(config.patch_size, "patch_size"),
        image_size=_side(config.image_size, "image_size"),
        extra_tokens=_extra_tokens(config),
        norm_eps=number(config, "layer_norm_eps"),
        activation=_ACTIVATIONS[config.hidden_act],
        layer_scale=dinov2,
        ln_pre=config.model_type == "clip_vision_model",
        mlp="swiglu" if gated else "plain",
    )


def folder_preprocessing(folder: Path) -> tuple[Triple, Triple] | None:
    """Mean and standard deviation from preprocessor_config.json; None when the config has to say them."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if not values.get("do_normalize", True) or "image_mean" not in values or "image_std" not in values:
            return None
        mean, std = (_triple(values[key]) for key in ("image_mean", "image_std"))
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


def _triple(values: Any) -> Triple:
    first, second, third = map(float, values)
    return first, second, third


def whole(config: Any, name: str, most: int = 2**20) -> int:
    """A size in config.json, limited until the weights confirm it."""
    value = getattr(config, name, None)
    if type(value) is not int or not 1 <= value <= most:
        raise BackboneError(broken(f"{name} in config.json", f"be a whole number in 1..{most}", value))
    return value


def number(config: Any, name: str) -> float:
    """A positive number in config.json."""
    value = getattr(config, name, None)
    if not isinstance(value, int | float) or not 0 < value < 2**20:
        raise BackboneError(broken(f"{name} in config.json", "be a positive number", value))
    return float(value)


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise BackboneError(broken("num_attention_heads in config.json", f"divide the width {width}", heads))


def _extra_tokens(config: Any) -> int:
    if config.model_type == "deit":
        return 1
    return whole(config, "num_register_tokens") if config.model_type == "dinov2_with_registers" else 0


def _side(value: Any, name: str) -> int:
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if not sides or any(type(side) is not int or side != sides[0] or not 1 <= side <= 2**16 for side in sides):
        raise BackboneError(broken(name, "be one side in pixels, or two equal ones", value))
    return int(sides[0])
