"""Model folders of type `clip` in the layout of `transformers`: both towers and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from fedprompt.backbones.assemble import assemble, check_tensors
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.key_mapping import CLIP_BLOCK, canonical, fused, renamed
from fedprompt.backbones.model_folder import MOST_BLOCKS, check_heads, folder_config, folder_shape, number, whole
from fedprompt.backbones.preprocessing import folder_preprocessing, preprocessing
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.text_tower import CausalTower, TextShape, TextTower, text_tensor_shapes
from fedprompt.backbones.tokenizer import Words
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_folder
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json

START, END = "<|startoftext|>", "<|endoftext|>"
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either is a whole tokenizer

_TOP = {
    r"embeddings\.token_embedding\.weight": "token.weight",
    r"embeddings\.position_embedding\.weight": "position.weight",
    r"final_layer_norm\.(weight|bias)": r"norm.\1",
}


def from_folder(folder: Path, settings: BackboneConfig) -> DualEncoder:
    """Both towers of a folder."""
    shape = folder_shape(folder)
    own = preprocessing(settings, folder_preprocessing(folder))
    tensors = read_folder(folder, settings.sha256)
    vision = assemble(canonical(tensors), shape, *own, settings)
    config = folder_config(folder).text_config
    if config.hidden_act not in ("gelu", "quick_gelu"):
        raise BackboneError(broken("hidden_act of the text tower", "be gelu or quick_gelu", config.hidden_act))
    text = TextShape(
        width=whole(config, "hidden_size"),
        depth=whole(config, "num_hidden_layers", most=MOST_BLOCKS),
        heads=whole(config, "num_attention_heads"),
        mlp_width=whole(config, "intermediate_size"),
        vocabulary=whole(config, "vocab_size"),
        positions=whole(config, "max_position_embeddings"),
        norm_eps=number(config, "layer_norm_eps"),
        activation=config.hidden_act,
    )
    check_heads(text.width, text.heads)
    return join_clip(tensors, text, vision, *folder_tokenizer(folder))


def join_clip(
    tensors: Mapping[str, Tensor],
    shape: TextShape,
    vision: ViT,
    tokenise: Callable[[str], Sequence[int]],
    start: int,
    end: int,
) -> DualEncoder:
    """A vision tower joined to the text tower and the projections among a CLIP's tensors."""
    missing = [
        name for name in ("visual_projection.weight", "text_projection.weight", "logit_scale") if name not in tensors
    ]
    if missing:
        raise BackboneError(f"the weights must be those of a whole CLIP, got no {missing[0]!r}")
    text = {name.removeprefix("text_model."): tensor for name, tensor in tensors.items() if "text_model." in name}
    text = {name: tensor for name, tensor in text.items() if not name.endswith("position_ids")}
    named = fused(renamed(text, _TOP, CLIP_BLOCK, "a CLIP"))
    check_tensors(named, text_tensor_shapes(shape, outer_norm="norm"))
    placed = {name: tensor.detach().to(vision.device, vision.dtype).contiguous() for name, tensor in named.items()}
    projections = [
        Projection({"linear.weight": tensors[f"{side}_projection.weight"].detach().to(vision.device, vision.dtype)})
        for side in ("text", "visual")
    ]
    tower = CausalTower(shape, placed, tokenise, start, end, projections[0])
    scale = float(tensors["logit_scale"].double().exp())
    return joined(vision, tower, projections[1], scale)


def joined(
    vision: ViT,
    text: TextTower,
    image_projection: Projection,
    scale: float,
    bias: float = 0.0,
    kind: type[DualEncoder] = DualEncoder,
) -> DualEncoder:
    """A dual encoder (of a kind that computes that image tower) of two towers."""
    return kind(
        vision.name,
        vision.shape,
        vision.mean,
        vision.std,
        vision.weights,
        vision.native_image_size,
        vision.stem,
        text=text,
        image_projection=image_projection,
        scale=scale,
        bias=bias,
    )


def folder_tokenizer(folder: Path) -> tuple[Words, int, int]:
    """The tokenizer beside the weights, and the ids of its start and end tokens."""
    from transformers import AutoTokenizer

    rule = f"the backbone folder {str(folder)!r} must hold its tokenizer (tokenizer.json, or vocab.json and merges.txt)"
    if not any(all((folder / name).is_file() for name in files) for files in _TOKENIZER_FILES):
        raise BackboneError(f"{rule}, got neither")  # transformers would create one with an empty vocabulary
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizer library raises nothing more special
        raise BackboneError(f"{rule}: {error}") from error
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if start is None or end is None:
        raise BackboneError(f"the tokenizer in {str(folder)!r} must have a token for the start and one for the end")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BackboneError(f"{rule}: it must be one of the tokenizers library, got {type(tokenizer).__name__}")
    return Words(backend), int(start), int(end)


def byte_pair_words(folder: Path) -> Words:
    """CLIP's tokenizer in a folder that does not say whose it is."""
    from transformers import CLIPTokenizer

    try:
        if (folder / "tokenizer.json").is_file():
            return Words.from_file(folder / "tokenizer.json")
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        if vocabulary.is_file() and merges.is_file():
            lines = [line.split() for line in merges.read_text("utf-8").splitlines()]
            pairs = [(line[0], line[1]) for line in lines if len(line) == 2 and line[0] != "#version:"]
            return Words(CLIPTokenizer(vocab=read_json(vocabulary, 2**24), merges=pairs).backend_tokenizer)
    except Exception as error:  # the tokenizer library raises nothing more special
        raise BackboneError(f"the tokenizer in {str(folder)!r} must be CLIP's: {error}") from error
    raise BackboneError(
        f"the backbone folder {str(folder)!r} must hold CLIP's tokenizer (tokenizer.json, or vocab.json and merges.txt), got "
        "neither: copy it from any other CLIP"
    )


@cache
def byte_tokenizer() -> tuple[Words, int, int]:
    """CLIP's own tokenizer without a single merge: every letter is a token, laid out as in the real vocabulary.

    256 bytes, the same with an end-of-word mark, then start and end, which have the two largest ids.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), START, END]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    return Words(tokenizer.backend_tokenizer), tokens.index(START), tokens.index(END)
