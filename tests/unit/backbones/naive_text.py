"""Text encoders written the slow and obvious way, as an independent check of `fedprompt.backbones.text_tower`.

One sentence at a time, all positions of the tower, everything computed for every row. Class names are tokenised together
with their full stop, by a tokenizer that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedprompt.backbones.text_tower import PaddedTower, TextTower

Tokenise = Callable[[str], Sequence[int]]


def sentence(tower: TextTower, tokenise: Tokenise, context: Tensor, name: str, position: str) -> Tensor:
    """The embedded rows [start] context name . [end] of one class in one context (m, d), without positions."""
    table = tower.weights["token.weight"]
    ids = list(tokenise(name.replace("_", " ") + "."))
    inside = len(tokenise(name.replace("_", " ")))
    spoken = [table[token] for token in ids]
    words = list(context)
    half = len(words) // 2
    order = {
        "end": words + spoken,
        "middle": words[:half] + spoken[:inside] + words[half:] + spoken[inside:],
        "front": spoken[:inside] + words + spoken[inside:],
    }[position]
    first = [] if tower.start is None else [table[tower.start]]
    return torch.stack([*first, *order, table[tower.end]])


def normed(tower: TextTower, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    weight, bias = tower.weights[f"{name}.weight"], tower.weights[f"{name}.bias"]
    return centred / torch.sqrt(variance + tower.shape.norm_eps) * weight + bias


def attended(tower: TextTower, block: int, x: Tensor, mask: Tensor) -> Tensor:
    """Self-attention of one sentence (T, d), head by head; `mask` (T, T) is 0 where one may look and -inf elsewhere."""
    width, size = tower.shape.width, tower.shape.width // tower.shape.heads
    weight, bias = (tower.weights[f"blocks.{block}.attention.in.{part}"] for part in ("weight", "bias"))
    query, key, value = (x @ w.T + b for w, b in zip(weight.split(width), bias.split(width), strict=True))
    heads = []
    for start in range(0, width, size):
        columns = slice(start, start + size)
        scores = query[:, columns] @ key[:, columns].T / size**0.5 + mask
        heads.append(torch.softmax(scores, dim=-1) @ value[:, columns])
    weight, bias = (tower.weights[f"blocks.{block}.attention.out.{part}"] for part in ("weight", "bias"))
    return torch.cat(heads, dim=-1) @ weight.T + bias


def perceptron(tower: TextTower, block: int, x: Tensor) -> Tensor:
    w = {key: tower.weights[f"blocks.{block}.mlp.{key}"] for key in ("in.weight", "in.bias", "out.weight", "out.bias")}
    hidden = x @ w["in.weight"].T + w["in.bias"]
    if tower.shape.activation == "quick_gelu":
        hidden = hidden * torch.sigmoid(1.702 * hidden)
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    return hidden @ w["out.weight"].T + w["out.bias"]


def projected(tower: TextTower, x: Tensor) -> Tensor:
    y = tower.projection.weights["linear.weight"] @ x
    return y / y.norm()


def naive_causal(tower: TextTower, rows: Tensor) -> Tensor:
    """CLIP: padded to all positions, a causal mask, the end token's row of the last layer."""
    length, positions = len(rows), tower.shape.positions
    padding = tower.weights["token.weight"][tower.end].expand(positions - length, -1)
    x = torch.cat([rows, padding]) + tower.weights["position.weight"]
    mask = torch.full((positions, positions), float("-inf"), dtype=x.dtype).triu(1)
    for block in range(tower.shape.depth):
        x = x + attended(tower, block, normed(tower, f"blocks.{block}.norm1", x), mask)
        x = x + perceptron(tower, block, normed(tower, f"blocks.{block}.norm2", x))
    return projected(tower, normed(tower, "norm", x)[length - 1])


def naive_padded(tower: TextTower, rows: Tensor) -> Tensor:
    """SigLIP: padded to all positions, no mask at all, the row of the last position."""
    assert isinstance(tower, PaddedTower)
    padding = tower.weights["token.weight"][tower.pad].expand(tower.shape.positions - len(rows), -1)
    x = torch.cat([rows, padding]) + tower.weights["position.weight"]
    mask = torch.zeros(len(x), len(x), dtype=x.dtype)
    for block in range(tower.shape.depth):
        x = x + attended(tower, block, normed(tower, f"blocks.{block}.norm1", x), mask)
        x = x + perceptron(tower, block, normed(tower, f"blocks.{block}.norm2", x))
    return projected(tower, normed(tower, "norm", x)[-1])


def naive_first(tower: TextTower, rows: Tensor) -> Tensor:
    """BERT as BiomedCLIP reads it: the start token."""
    return naive_bert(tower, rows, lambda x: x[0])


def naive_bert(
    tower: TextTower, rows: Tensor, read: Callable[[Tensor], Tensor] = lambda x: x.sum(0) / len(x)
) -> Tensor:
    """BERT: padded to all positions, padding hidden from everybody, the mean over the sentence."""
    length, positions = len(rows), tower.shape.positions
    x = torch.cat([rows, rows.new_ones(positions - length, rows.shape[1])]) + tower.weights["position.weight"]
    x = normed(tower, "embedding_norm", x)
    mask = torch.zeros(positions, positions, dtype=x.dtype)
    mask[:, length:] = float("-inf")
    for block in range(tower.shape.depth):
        x = normed(tower, f"blocks.{block}.norm1", x + attended(tower, block, x, mask))
        x = normed(tower, f"blocks.{block}.norm2", x + perceptron(tower, block, x))
    return projected(tower, read(x[:length]))


def naive_encode(
    tower: TextTower,
    read: Callable[[TextTower, Tensor], Tensor],
    tokenise: Tokenise,
    contexts: Tensor,
    names: Sequence[str],
    position: str,
) -> Tensor:
    """Unit vectors (N, C, D): every class in every context, one after the other."""
    return torch.stack(
        [
            torch.stack(
                [
                    read(
                        tower,
                        sentence(tower, tokenise, context if context.ndim == 2 else context[number], name, position),
                    )
                    for number, name in enumerate(names)
                ]
            )
            for context in contexts
        ]
    )
