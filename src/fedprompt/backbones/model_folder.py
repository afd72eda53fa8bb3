"""The config.json of a `transformers` model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from fedprompt.backbones.catalog import FAMILIES
from fedprompt.backbones.hub_download import OPEN_CLIP
from fedprompt.backbones.shape import CHANNELS, Activation, ViTShape
from fedprompt.backbones.weight_files import INDEX, WEIGHTS
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json

MOST_BLOCKS = 1000
MOST_LABELS = 100_000


def _check_labels(config: Any) -> None:
    """Raise if transformers would create names for millions of classes."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if key == "num_labels" and not (type(value) is int and 0 <= value <= MOST_LABELS):
            raise ValueError(broken("num_labels", f"be in 0..{MOST_LABELS}", value))
        _check_labels(value)


def folder_kind(folder: Path) -> str:
    """The family that reads a folder, by `model_type` in its config.json; an error where there is none.

    A folder may hold a model in both layouts; then that of `transformers` is read if its weights are there.
    """
    both = (folder / OPEN_CLIP).is_file()
    try:
        kind = read_json(folder / "config.json")["model_type"]
        if kind in FAMILIES and (not both or any((folder / name).is_file() for name in (WEIGHTS, INDEX))):
            return str(kind)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # `folder_config` says what is wrong
    if both:
        return "open_clip"
    return str(folder_config(folder).model_type)


def folder_config(folder: Path) -> Any:
    """config.json as `transformers` completes it. Of a family that is read here."""
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
    return config


def folder_shape(folder: Path) -> ViTShape:
    """The architecture at its trained resolution of a ViT, DeiT, DINO or DINOv2; of a CLIP, that of its vision tower."""
    config = folder_config(folder)
    config = config.vision_config if config.model_type == "clip" else config
    dinov2 = config.model_type.startswith("dinov2")
    gated = bool(dinov2 and config.use_swiglu_ffn)
    acted = activation(config)
    check_channels(config)
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
        patch=side(config.patch_size, "patch_size"),
        image_size=side(config.image_size, "image_size"),
        extra_tokens=_extra_tokens(config),
        norm_eps=number(config, "layer_norm_eps"),
        activation=acted,
        layer_scale=dinov2,
        ln_pre=config.model_type == "clip_vision_model",
        mlp="swiglu" if gated else "plain",
    )


def activation(config: Any) -> Activation:
    """The activation function of config.json."""
    given: Activation = config.hidden_act
    if given not in (known := get_args(Activation)):
        raise BackboneError(broken("hidden_act", f"be one of {', '.join(known)}", given))
    return given


def check_channels(config: Any) -> None:
    if config.num_channels != CHANNELS:
        raise BackboneError(broken("num_channels", f"be {CHANNELS}", config.num_channels))


def whole(config: Any, name: str, most: int = 2**20, least: int = 1) -> int:
    """A size in config.json, limited until the weights confirm it."""
    value = getattr(config, name, None)
    if type(value) is not int or not least <= value <= most:
        raise BackboneError(broken(f"{name} in config.json", f"be a whole number in {least}..{most}", value))
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


def side(value: Any, name: str) -> int:
    """The side of a square, given once or twice."""
    sides = list(value) if isinstance(value, list | tuple) else [value]
    if not sides or any(type(side) is not int or side != sides[0] or not 1 <= side <= 2**16 for side in sides):
        raise BackboneError(broken(name, "be one side in pixels, or two equal ones", value))
    return int(sides[0])
