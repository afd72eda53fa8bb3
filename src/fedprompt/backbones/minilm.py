"""The sentence encoder all-MiniLM-L6-v2 as the text tower of the embedded dual encoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedprompt.backbones.assemble import check_tensors
from fedprompt.backbones.key_mapping import fused, renamed
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.text_tower import BidirectionalTower, TextShape, text_tensor_shapes
from fedprompt.backbones.tokenizer import Words
from fedprompt.errors import BackboneError

SHAPE = TextShape(width=384, depth=6, heads=12, mlp_width=1536, vocabulary=30522, positions=512, norm_eps=1e-12)
START, END = "[CLS]", "[SEP]"

_TOP = {
    r"embeddings\.word_embeddings\.weight": "token.weight",
    r"embeddings\.position_embeddings\.weight": "position.weight",
    r"embeddings\.token_type_embeddings\.weight": "kind.weight",
    r"embeddings\.LayerNorm\.(weight|bias)": r"embedding_norm.\1",
}
_IN_BLOCK = {
    r"attention\.self\.(query|key|value)\.(weight|bias)": r"\1.\2",
    r"attention\.output\.dense\.(weight|bias)": r"attention.out.\1",
    r"attention\.output\.LayerNorm\.(weight|bias)": r"norm1.\1",
    r"intermediate\.dense\.(weight|bias)": r"mlp.in.\1",
    r"output\.dense\.(weight|bias)": r"mlp.out.\1",
    r"output\.LayerNorm\.(weight|bias)": r"norm2.\1",
}


def minilm(
    tensors: Mapping[str, Tensor], tokenizer: Path, projection: Projection, device: torch.device, dtype: torch.dtype
) -> BidirectionalTower:
    """The tower of a checkpoint and a `tokenizer.json`."""
    named = bert_weights(tensors, "all-MiniLM-L6-v2")
    check_tensors(named, text_tensor_shapes(SHAPE, outer_norm="embedding_norm"))
    weights = {name: tensor.detach().to(device, dtype).contiguous() for name, tensor in named.items()}
    words = Words.from_file(tokenizer)
    start, end = words.number(START), words.number(END)
    if start is None or end is None:
        raise BackboneError(f"{str(tokenizer)!r} must know the tokens {START} and {END}")
    return BidirectionalTower(SHAPE, weights, words, start, end, projection)


def bert_weights(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors of a BERT by our names. Sentences are of the first of two kinds, which is added to the positions."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
    kept = {name: tensor for name, tensor in kept.items() if not name.startswith("pooler.")}
    named = fused(renamed(kept, _TOP, _IN_BLOCK, family))
    missing = [name for name in ("token.weight", "position.weight", "kind.weight") if name not in named]
    if missing or len(named["kind.weight"]) != 2:  # RoBERTa has one kind, and counts positions from 2
        raise BackboneError(
            f"the weights must be those of {family}, with embeddings of tokens, positions and two kinds"
        )
    named["position.weight"] = named["position.weight"] + named.pop("kind.weight")[0]
    return named
