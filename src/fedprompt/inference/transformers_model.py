"""One of our frozen backbones as a model of the `transformers` library, at the resolution it was used at.

Tensors are mapped by the inverse of the table that reads such models (`backbones/key_mapping.py`), so both agree by
construction, and a test compares their outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.errors import BackboneError
from fedprompt.tensors import Tensors

TOLERANCE = 1e-4  # largest allowed difference in the final norm's output, whose values are about 1


def architecture(shape: ViTShape) -> tuple[str, Any]:
    """The name of the class of `transformers` that computes such a backbone, and its config."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.mlp_width,
        "hidden_act": shape.activation,
        "layer_norm_eps": shape.norm_eps,
        "image_size": shape.image_size,
        "patch_size": shape.patch,
    }
    known = shape.rope_base is None and shape.has_cls and shape.activation != "gelu_pytorch_tanh"
    if known and shape.ln_pre and not (shape.extra_tokens or shape.layer_scale) and shape.mlp == "plain":
        return "CLIPVisionModel", transformers.CLIPVisionConfig(**common)
    if known and shape.layer_scale and not shape.ln_pre:
        del common["intermediate_size"]
        common |= {"mlp_ratio": _ratio(shape), "use_swiglu_ffn": shape.mlp == "swiglu"}
        if shape.extra_tokens:
            common["num_register_tokens"] = shape.extra_tokens
            return "Dinov2WithRegistersModel", transformers.Dinov2WithRegistersConfig(**common)
        return "Dinov2Model", transformers.Dinov2Config(**common)
    if known and shape.mlp == "plain" and not (shape.ln_pre or shape.layer_scale) and shape.extra_tokens < 2:
        kind = "DeiT" if shape.extra_tokens else "ViT"
        return f"{kind}Model", getattr(transformers, f"{kind}Config")(**common)
    raise BackboneError(f"the backbone must be a ViT, DeiT, DINOv2 or CLIP to be exported to transformers, got {shape}")


def _ratio(shape: ViTShape) -> int:
    """DINOv2 gives the width of its MLP as a multiple; a gated one takes two thirds of it, rounded up to a multiple of
    8.
    """
    for ratio in range(1, 17):
        hidden = shape.width * ratio
        if shape.mlp_width == (hidden if shape.mlp == "plain" else (int(hidden * 2 / 3) + 7) // 8 * 8):
            return ratio
    raise BackboneError(
        f"the width of the MLP must be possible for a DINOv2 of width {shape.width}, got {shape.mlp_width}"
    )


def parameter_names(shape: ViTShape) -> dict[str, str]:
    """Our name of every parameter of the `transformers` model; queries, keys and values are separate."""
    import transformers

    name, config = architecture(shape)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    ours = {each: next(iter(canonical({each: tensor})), "") for each, tensor in model.state_dict().items()}
    return {each: found for each, found in ours.items() if found}


def as_transformers(backbone: ViT) -> Any:
    """The model, in float32 on the CPU. Its positions are those of this resolution, so nothing is interpolated."""
    import transformers

    shape = backbone.shape
    name, config = architecture(shape)
    model = getattr(transformers, name)(config)
    state, known = model.state_dict(), parameter_names(shape)
    pieces = split_projections({each: tensor.float().cpu() for each, tensor in backbone.weights.items()}, shape)
    lead, position = pieces["lead"], pieces["position"]
    if not any(found == "patch.bias" for found in known.values()):
        position = position + pieces["patch.bias"]  # it is added to every patch in both cases
    pieces |= {"cls": lead[:1], "distillation": lead[1:], "registers": lead[1:]}  # their positions are already added
    for each, ours in known.items():
        if ours == "positions":
            spare = state[each].numel() // shape.width - len(position)
            state[each] = torch.cat([position.new_zeros(spare, shape.width), position]).view_as(state[each])
        else:
            state[each] = pieces[ours].reshape(state[each].shape)
    model.load_state_dict(state)
    return model.eval()


def split_projections(weights: Tensors, shape: ViTShape) -> Tensors:
    """All weights, plus the parts of stacked ones: queries, keys and values, and both halves of a gated MLP."""
    stacked = {
        "attention.in": ("query", "key", "value"),
        **({"mlp.in": ("gate", "up")} if shape.mlp == "swiglu" else {}),
    }
    found = dict(weights)
    for whole, parts in stacked.items():
        for name, tensor in weights.items():
            if f".{whole}." in name:
                pieces = zip(parts, tensor.chunk(len(parts)), strict=True)
                found |= {name.replace(whole, part): piece for part, piece in pieces}
    return found


def check_same(model: Any, backbone: ViT) -> float:
    """The largest difference between the two in CLS and patches after the final norm, for one noise image."""
    side = backbone.shape.image_size
    image = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model(image).last_hidden_state
        if hasattr(model, "post_layernorm"):
            hidden = model.post_layernorm(hidden)
        seen = backbone.run(backbone.embed(image.to(backbone.device, backbone.dtype)), reads=("cls", "patches"))
        theirs = torch.cat([hidden[:, :1], hidden[:, -backbone.shape.patches :]], dim=1)
        ours = torch.cat([seen["cls"].unsqueeze(1), seen["patches"]], dim=1).float().cpu()
    difference = float((theirs - ours).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(ours.abs().max())) or math.isnan(difference):
        raise BackboneError(f"the backbone in transformers must compute the same to {TOLERANCE}, got {difference:.2g}")
    return difference


def changed_parameters(changes: dict[str, Tensor], shape: ViTShape, stem: int) -> Tensors:
    """Changes of our weights, block 0 being the first after the stem, as changes of the parameters of the
    `transformers` model.
    """
    ours = {}
    for name, change in changes.items():
        kind, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        ours[f"blocks.{int(number) + stem}.{part}" if kind == "blocks" else name] = change.float().cpu()
    pieces = split_projections(ours, shape)
    found = {each: pieces[mine] for each, mine in parameter_names(shape).items() if mine in pieces}
    return {each: change.contiguous() for each, change in found.items() if bool(change.any())}
