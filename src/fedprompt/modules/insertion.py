"""Prompt tokens in a transformer, of images or of sentences, in every style of the literature.

A `TokenPrompt` is a *slot* of tokens after the CLS token, beside patches or words. Slots are independent of each other,
so one method may use several.

| style | slot |
|---|---|
| shallow (VPT-Shallow)        | `blocks=(0,)` |
| deep (VPT-Deep)              | `blocks=range(L)`: at each listed block the slot's rows are dropped and replaced |
| partial depth q, carried     | `blocks=range(q)`: after the last listed block the rows are kept |
| partial depth q, dropped     | the same with `after="drop"`: they leave before block q |
| cumulative append (SGPT)     | `mode="append"`: at each listed block new rows are added and the old ones stay |
| one prompt deep inside (PEP) | `blocks=(l,)` |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprompt.errors import ContractError
from fedprompt.random_streams import Stream

WITHOUT_BLOCKS = (
    "backbone.name must be a vision transformer for a method that puts prompts into the image tower, reads its blocks or changes "
    "its weights, got one without blocks (CLIP's ResNet, MobileCLIP's MCi)"
)


@dataclass(frozen=True)
class TokenPrompt:
    """Tokens for the listed blocks (counted from 0): the same for a whole batch, one set per sample, or one set for
    each run of samples, as many runs as there are clients in a batch.
    """

    tokens: Tensor  # (len(blocks), n, d), or (G, len(blocks), n, d) for G equally long runs, G = B being one per sample
    blocks: tuple[int, ...]
    mode: Literal["replace", "append"] = "replace"
    after: Literal["carry", "drop"] = "carry"


def check_prompt(prompt: TokenPrompt, batch: int, width: int, first: int, depth: int) -> None:
    """Raise unless the slot fits a batch of sequences that runs through blocks `first` to `depth - 1`."""
    blocks, tokens = list(prompt.blocks), prompt.tokens
    if not blocks or blocks != sorted(set(blocks)) or blocks[0] < first or blocks[-1] >= depth:
        raise ContractError(f"prompt.blocks must be increasing and in {first}..{depth - 1}, got {blocks}")
    runs = len(tokens) if tokens.ndim == 4 else 1
    fits = tokens.ndim in (3, 4) and tokens.shape[-3] == len(blocks) and tokens.shape[-1] == width
    if not fits or runs < 1 or batch % runs:
        raise ContractError(
            f"prompt.tokens must be ({len(blocks)}, n, {width}) or ({batch}, {len(blocks)}, n, {width}), "
            f"got {tuple(tokens.shape)}"
        )
    if prompt.mode not in ("replace", "append") or prompt.after not in ("carry", "drop"):
        raise ContractError(f"prompt.mode and prompt.after must be known, got {prompt.mode!r} and {prompt.after!r}")


def enter(prompt: TokenPrompt, rows: Tensor, block: int) -> Tensor:
    """The rows of a slot at the input of `block`, given those that came out of the block before.

    Tokens for the whole batch, or for a run of samples, are not repeated until a block has mixed them with a sample:
    what depends only on them is computed once.
    """
    if block not in prompt.blocks:
        return rows
    tokens = prompt.tokens[..., list(prompt.blocks).index(block), :, :]  # (n, d) or (G, n, d)
    fresh = tokens if tokens.ndim == 3 else tokens.unsqueeze(0)
    if prompt.mode == "replace" or rows.shape[1] == 0:
        return fresh
    return torch.cat(together([rows, fresh]), dim=1)


def spread(rows: Tensor, batch: int) -> Tensor:
    """Rows (G, ...) of G equally long runs of samples as rows (B, ...) of the samples."""
    if len(rows) in (1, batch):
        return rows.expand(batch, *rows.shape[1:])
    return rows.repeat_interleave(batch // len(rows), dim=0)


def together(pieces: Sequence[Tensor]) -> list[Tensor]:
    """Pieces (G, ...) of one sequence, spread over as many samples as the one with most."""
    most = max(len(rows) for rows in pieces)
    return [spread(rows, most) for rows in pieces]


def leaves(prompt: TokenPrompt, block: int) -> bool:
    """Whether the slot's rows are dropped after `block`: their outputs are then never used."""
    replaced = prompt.mode == "replace" and block + 1 in prompt.blocks
    dropped = prompt.after == "drop" and block >= prompt.blocks[-1]
    return replaced or dropped


def vpt_bound(patch: int, width: int) -> float:
    """VPT's Xavier-like bound: prompts start uniform in ±sqrt(6 / (3 p² + d))."""
    return math.sqrt(6.0 / (3 * patch * patch + width))


def vpt_init(blocks: int, tokens: int, width: int, patch: int, generator: Stream) -> Tensor:
    """Prompt tokens of shape (blocks, tokens, width) at VPT's initial scale."""
    return (generator.uniform(blocks, tokens, width) * 2 - 1) * vpt_bound(patch, width)


PromptStart = Literal["blank", "random", "zero"]
BLANK_NOISE = 0.3  # of VPT's scale: tokens differ from each other, and the features of images stay what they were


def initial_prompt(kind: PromptStart, blank: Tensor, tokens: int, patch: int, generator: Stream) -> Tensor:
    """Initial prompts (blocks, tokens, d), given the tokens (blocks, d) of a blank image at these blocks.

    `blank`: these tokens with a little noise. Random tokens are far from all that the frozen blocks have seen: ten of them at
    every block leave little of an image's features, blank ones leave nearly all.
    """
    drawn = vpt_init(len(blank), tokens, blank.shape[-1], patch, generator)
    if kind == "blank":
        return blank.unsqueeze(1) + BLANK_NOISE * drawn
    return drawn if kind == "random" else torch.zeros_like(drawn)
