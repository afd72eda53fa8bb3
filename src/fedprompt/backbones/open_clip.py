"""Folders in the layout of open_clip: `open_clip_config.json`, safetensors and a tokenizer (OpenAI, LAION, BiomedCLIP,
MobileCLIP).

Image towers: CLIP's own ViT, CLIP's ResNet (`clip_resnet.py`), a plain ViT of timm, and those of MobileCLIP
(`mobile_clip.py`). Text towers: CLIP's own, with or without its causal mask, and a BERT of `transformers` behind which one
row or the mean is projected. All that a config states beyond this is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprompt.backbones.assemble import assemble, check_tensors, infer_shape
from fedprompt.backbones.catalog import Triple
from fedprompt.backbones.clip import END, START, byte_pair_words, joined
from fedprompt.backbones.clip_resnet import ClipResNet, ResNetTower, resnet_tower
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.hub_download import OPEN_CLIP
from fedprompt.backbones.key_mapping import canonical, renamed, with_zero_biases
from fedprompt.backbones.minilm import END as BERT_END
from fedprompt.backbones.minilm import START as BERT_START
from fedprompt.backbones.minilm import bert_weights
from fedprompt.backbones.mobile_clip import MCiTower, MobileClipMCi, MobileClipViT, StemmedViT, mci_tower, stemmed_vit
from fedprompt.backbones.model_folder import check_heads
from fedprompt.backbones.preprocessing import preprocessing, triple
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.shape import Activation, ViTShape
from fedprompt.backbones.text_tower import (
    BidirectionalTower,
    CausalTower,
    FirstTokenTower,
    TextShape,
    TextTower,
    UnmaskedTower,
    text_tensor_shapes,
)
from fedprompt.backbones.tokenizer import Words
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_open_clip
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json

BERT_HEAD = 64  # width of a head in every published BERT; open_clip's config does not state it
_EPSILON = 1e-5  # of the norms of CLIP's own towers
_TIMM_EPSILON = 1e-6
_BERT_TOWERS = {"cls_last_hidden_state_pooler": FirstTokenTower, "mean_pooler": BidirectionalTower}

_TOP = {
    r"class_embedding": "cls",
    r"positional_embedding": "positions",
    r"conv1\.weight": "patch.weight",
    r"ln_pre\.(weight|bias)": r"ln_pre.\1",
    r"ln_post\.(weight|bias)": r"norm.\1",
}
_TEXT_TOP = {
    r"token_embedding\.weight": "token.weight",
    r"positional_embedding": "position.weight",
    r"ln_final\.(weight|bias)": r"norm.\1",
}
_IN_BLOCK = {
    r"ln_([12])\.(weight|bias)": r"norm\1.\2",
    r"attn\.in_proj_(weight|bias)": r"attention.in.\1",
    r"attn\.out_proj\.(weight|bias)": r"attention.out.\1",
    r"mlp\.c_fc\.(weight|bias)": r"mlp.in.\1",
    r"mlp\.c_proj\.(weight|bias)": r"mlp.out.\1",
}
# settings that matter to the architecture, and those that do not once the weights are there
_VISION_KEYS = {"image_size", "layers", "width", "patch_size", "head_width", "mlp_ratio", "pool_type"}
_TIMM_KEYS = {"image_size", "timm_model_name", "timm_pool", "timm_proj"}
_TEXT_KEYS = {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "pool_type", "no_causal_mask"}
_BERT_KEYS = {"hf_model_name", "hf_proj_type", "proj", "proj_type", "hf_pooler_type", "pooler_type", "context_length"}
_TRAINING = {"patch_dropout", "output_tokens", "timm_model_pretrained", "timm_drop", "timm_drop_path"}
_TRAINING |= {"hf_tokenizer_name", "hf_model_pretrained", "tokenizer_kwargs", "vocab_size", "width", "heads", "layers"}


_KINDS: dict[type[ViT], type[DualEncoder]] = {
    ResNetTower: ClipResNet,
    MCiTower: MobileClipMCi,
    StemmedViT: MobileClipViT,
}


def from_folder(folder: Path, settings: BackboneConfig) -> DualEncoder:
    """Both towers of a folder."""
    model, images = _configs(folder)
    own = preprocessing(settings, images)
    tensors = read_open_clip(folder, settings.sha256)
    if "logit_scale" not in tensors:
        raise BackboneError("the weights must be those of a whole CLIP, got no 'logit_scale'")
    activation: Activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    given = {name: tensor for name, tensor in tensors.items() if name.startswith("visual.")}
    other = {name.removeprefix("text."): tensor for name, tensor in tensors.items() if name not in given}
    other = {name: tensor for name, tensor in other.items() if name not in ("logit_scale", "logit_bias", "attn_mask")}
    seen = {name.removeprefix("visual."): tensor for name, tensor in given.items()}
    vision, into = _vision(model["vision_cfg"], seen, activation, own, settings)
    text = _text(folder, model["text_cfg"], other, activation, vision)
    scale = float(tensors["logit_scale"].double().exp())
    bias = float(tensors.get("logit_bias", torch.zeros(())))
    return joined(vision, text, into, scale, bias, _KINDS.get(type(vision), DualEncoder))


def _configs(folder: Path) -> tuple[dict[str, Any], tuple[Triple, Triple] | None]:
    """The model's part of open_clip_config.json, and mean and standard deviation if it states them."""
    path = folder / OPEN_CLIP
    try:
        values = read_json(path)
        model, images = values["model_cfg"], values.get("preprocess_cfg") or {}
        own = (triple(images["mean"]), triple(images["std"])) if {"mean", "std"} <= images.keys() else None
        parts = (model["vision_cfg"], model["text_cfg"])
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("vision_cfg and text_cfg must be objects")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackboneError(f"{str(path)!r} must state model_cfg with vision_cfg and text_cfg: {error!r}") from error
    _only(model, {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg", "custom_text"})
    return model, own


def _only(values: Mapping[str, Any], known: set[str]) -> None:
    """Raise where a config asks for more than is computed here."""
    asked = sorted(key for key, value in values.items() if key not in known | _TRAINING and value)
    if asked:
        raise BackboneError(broken(f"{asked[0]} in {OPEN_CLIP}", "be absent: it is not supported", values[asked[0]]))


def _whole(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name, default)
    if type(value) is not int or not 1 <= value <= 2**20:
        raise BackboneError(broken(f"{name} in {OPEN_CLIP}", f"be a whole number in 1..{2**20}", value))
    return value


def _one_of(values: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any) -> Any:
    value = values.get(name, default)
    if value not in known:
        raise BackboneError(broken(f"{name} in {OPEN_CLIP}", f"be one of {', '.join(map(repr, known))}", value))
    return value


def _hidden(values: Mapping[str, Any], width: int) -> int:
    ratio = values.get("mlp_ratio", 4.0)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 100:
        raise BackboneError(broken(f"mlp_ratio in {OPEN_CLIP}", "be a number in 0..100", ratio))
    return int(width * ratio)


def _blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("transformer.resblocks.", "blocks.", 1): tensor for name, tensor in tensors.items()}


def _linear(tensors: dict[str, Tensor], name: str, vision: ViT | None = None, turned: bool = False) -> Projection:
    """One linear map, taken out of the tensors. CLIP's own are stored as rows times matrix, the other way round."""
    weight = tensors.pop(name, None)
    if weight is None:
        raise BackboneError(f"the weights must be those of a whole CLIP, got no {name!r}")
    weight = weight.T if turned else weight
    return Projection({"linear.weight": weight.contiguous() if vision is None else _placed(weight, vision)})


def _placed(tensor: Tensor, vision: ViT) -> Tensor:
    return tensor.detach().to(vision.device, vision.dtype).contiguous()


def _vision(
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    activation: Activation,
    own: tuple[Triple, Triple],
    settings: BackboneConfig,
) -> tuple[ViT, Projection]:
    """The image tower and its projection."""
    if "_mci" in str(config.get("timm_model_name", "")):
        return _mobile(config, tensors, own, settings)
    if "timm_model_name" in config:
        vision = _timm(config, tensors, own, settings)
        into = _linear(tensors, "head.proj.weight", vision)
        return vision, into
    _only(config, _VISION_KEYS)
    _one_of(config, "pool_type", ("tok",), "tok")
    if isinstance(config.get("layers"), list):
        return resnet_tower(tensors, _whole(config, "image_size", 224), _whole(config, "head_width", 64), own, settings)
    width = _whole(config, "width", 768)
    head = _whole(config, "head_width", 64)
    check_heads(width, max(1, width // head))
    shape = ViTShape(
        width=width,
        depth=_whole(config, "layers", 12),
        heads=max(1, width // head),
        mlp_width=_hidden(config, width),
        patch=_whole(config, "patch_size", 16),
        image_size=_whole(config, "image_size", 224),
        norm_eps=_EPSILON,
        activation=activation,
        ln_pre=True,
    )
    into = _linear(tensors, "proj", turned=True)
    named = with_zero_biases(renamed(_blocks(tensors), _TOP, _IN_BLOCK, "a CLIP in the layout of open_clip"))
    vision = assemble(named, shape, *own, settings)
    return vision, Projection({"linear.weight": _placed(into.weights["linear.weight"], vision)})


def _mobile(
    config: Mapping[str, Any], tensors: dict[str, Tensor], own: tuple[Triple, Triple], settings: BackboneConfig
) -> tuple[ViT, Projection]:
    """An image tower of MobileCLIP, whose last layer is the projection."""
    _only(config, _TIMM_KEYS)
    _one_of(config, "timm_proj", ("", None), None)
    trunk = {name.removeprefix("trunk."): tensor for name, tensor in tensors.items() if name.startswith("trunk.")}
    if config["timm_model_name"] in ("fastvit_mci0", "fastvit_mci1", "fastvit_mci2"):
        _one_of(config, "timm_pool", ("avg",), "avg")
        return mci_tower(trunk, _whole(config, "image_size", 256), own, settings)
    _one_of(config, "timm_model_name", ("vit_base_mci_224",), None)
    _one_of(config, "timm_pool", ("token",), "token")
    return stemmed_vit(trunk, own, settings)


def _timm(
    config: Mapping[str, Any], tensors: dict[str, Tensor], own: tuple[Triple, Triple], settings: BackboneConfig
) -> ViT:
    """A plain ViT of timm, whose CLS row is projected linearly."""
    name = str(config["timm_model_name"])
    if not name.startswith(("vit_", "deit_")):
        raise BackboneError(broken(f"timm_model_name in {OPEN_CLIP}", "be a plain vision transformer", name))
    _only(config, _TIMM_KEYS)
    _one_of(config, "timm_pool", ("", "token"), "")
    _one_of(config, "timm_proj", ("linear",), "linear")
    trunk = {name.removeprefix("trunk."): tensor for name, tensor in tensors.items() if name.startswith("trunk.")}
    named = canonical(trunk)
    return assemble(named, infer_shape(named, _TIMM_EPSILON), *own, settings)


def _text(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], activation: Activation, vision: ViT
) -> TextTower:
    if "hf_model_name" in config:
        return _bert(folder, config, tensors, vision)
    _only(config, _TEXT_KEYS)
    _one_of(config, "pool_type", ("argmax",), "argmax")
    width = _whole(config, "width", 512)
    shape = TextShape(
        width=width,
        depth=_whole(config, "layers", 12),
        heads=_whole(config, "heads", 8),
        mlp_width=_hidden(config, width),
        vocabulary=_whole(config, "vocab_size", 49408),
        positions=_whole(config, "context_length", 77),
        norm_eps=_EPSILON,
        activation=activation,
    )
    check_heads(shape.width, shape.heads)
    into = _linear(tensors, "text_projection", vision, turned=True)
    named = renamed(_blocks(tensors), _TEXT_TOP, _IN_BLOCK, "a CLIP in the layout of open_clip")
    check_tensors(named, text_tensor_shapes(shape, outer_norm="norm"))
    words = byte_pair_words(folder)
    start, end = _ends(words, START, END)
    kind = UnmaskedTower if _one_of(config, "no_causal_mask", (True, False), False) else CausalTower
    return kind(shape, {name: _placed(tensor, vision) for name, tensor in named.items()}, words, start, end, into)


def _bert(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], vision: ViT) -> TextTower:
    """A BERT. Its sizes follow from its tensors."""
    kind = config.get("hf_pooler_type", config.get("pooler_type"))
    _one_of({"hf_pooler_type": kind}, "hf_pooler_type", tuple(_BERT_TOWERS), None)
    _only(config, _BERT_KEYS)
    body = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if "transformer." in name}
    named = bert_weights(body, f"a BERT, as {config['hf_model_name']!r} has to be")
    rows, width = named["token.weight"].shape
    positions = min(_whole(config, "context_length", 77), len(named["position.weight"]))
    named["position.weight"] = named["position.weight"][:positions]
    shape = TextShape(
        width=width,
        depth=len([name for name in named if name.endswith(".norm1.weight")]),
        heads=max(1, width // BERT_HEAD),
        mlp_width=len(named["blocks.0.mlp.in.bias"]),
        vocabulary=rows,
        positions=positions,
        norm_eps=1e-12,
    )
    check_tensors(named, text_tensor_shapes(shape, outer_norm="embedding_norm"))
    if not (folder / "tokenizer.json").is_file():
        raise BackboneError(f"the backbone folder {str(folder)!r} must hold tokenizer.json, got none")
    words = Words.from_file(folder / "tokenizer.json")
    start, end = _ends(words, BERT_START, BERT_END)
    placed = {name: _placed(tensor, vision) for name, tensor in named.items()}
    return _BERT_TOWERS[kind](shape, placed, words, start, end, _bert_projection(tensors, vision))


def _bert_projection(tensors: Mapping[str, Tensor], vision: ViT) -> Projection:
    """One linear map, or two with a GELU between them; neither has biases."""
    found = {name: _placed(tensor, vision) for name, tensor in tensors.items() if name.startswith("proj.")}
    if found.keys() == {"proj.weight"}:
        return Projection({"linear.weight": found["proj.weight"]})
    if found.keys() != {"proj.0.weight", "proj.2.weight"}:
        raise BackboneError(broken("the text projection", "be one linear map or two without biases", sorted(found)))
    hidden, output = found["proj.0.weight"], found["proj.2.weight"]
    return Projection(
        {
            "linear.weight": output.new_zeros(len(output), hidden.shape[1]),
            "hidden.weight": hidden,
            "hidden.bias": hidden.new_zeros(len(hidden)),
            "output.weight": output,
            "output.bias": output.new_zeros(len(output)),
        }
    )


def _ends(words: Words, start: str, end: str) -> tuple[int, int]:
    ids = words.number(start), words.number(end)
    if ids[0] is None or ids[1] is None:
        raise BackboneError(f"the tokenizer beside the weights must know the tokens {start} and {end}")
    return ids[0], ids[1]
