"""Attention of a vision transformer, captured block by block.

A backbone has a function that computes a block (`ViT.block`). `Watch` is such a function: it computes the block as
usual, and additionally the attention weights by their formula. So a watched pass gives the same bits as an unwatched
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.block import run_block
from fedprompt.backbones.dual_encoder import JOINT_READS, DualEncoder
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.rotary import Turns, joined, turned
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import READS, ViT
from fedprompt.client.step import encode_text, inserted, rows_of
from fedprompt.core.method import Batch, Method, Prompts, Seen, World
from fedprompt.errors import ConfigError, broken
from fedprompt.modules.insertion import TokenPrompt, together
from fedprompt.tensors import Tensors

Pause = tuple[int, Callable[[Tensor], Sequence[TokenPrompt]]]


@dataclass(frozen=True)
class Looked:
    """Attention at one block over columns [CLS, extra tokens, patches, prompts]; every row sums to one."""

    heads: Tensor
    """(B, h, T + P), of CLS in every head."""
    rows: Tensor
    """(B, R, T + P), means over the heads of the image's own rows; of the last block only CLS."""

    @property
    def cls(self) -> Tensor:
        """(B, T + P): of CLS, the mean over the heads."""
        return self.rows[:, 0]


@dataclass
class Watch:
    """Computes blocks and records their attention, in the order in which blocks are run."""

    tokens: int
    """T, rows of an image without prompts."""
    looked: list[Looked] = field(default_factory=list)

    def __call__(
        self, weights: Weights, shape: ViTShape, live: Sequence[Tensor], passive: Sequence[Tensor], turns: Turns = ()
    ) -> list[Tensor]:
        pieces = together([*live, *passive])
        turn = joined(turns or [None] * len(pieces), pieces)
        looks = attention_weights(weights, shape, torch.cat(pieces, dim=1), turn)
        self.looked.append(self._ordered(looks, [piece.shape[1] for piece in pieces], len(live)))
        return run_block(weights, shape, live, passive, turns)

    def _ordered(self, looks: Tensor, sizes: Sequence[int], live: int) -> Looked:
        """All blocks except the last come as [image, prompts ...], the last as [CLS, patches, prompts ... | extra
        tokens, prompts ...].
        """
        if sizes[0] == self.tokens:
            return Looked(looks[:, :, 0], looks[:, :, : self.tokens].mean(1))
        parts = list(looks[:, :, :1].split(list(sizes), dim=-1))
        cls, patches, extra = parts[0], parts[1], parts[live]
        ordered = torch.cat([cls, extra, patches, *parts[2:live], *parts[live + 1 :]], dim=-1)
        return Looked(ordered[:, :, 0], ordered.mean(1))


def attention_weights(weights: Weights, shape: ViTShape, rows: Tensor, turn: Tensor | None = None) -> Tensor:
    """softmax(q k / sqrt(d / h)) of all rows (B, R, d) at a block, (B, h, R, R)."""
    normed = layers.norm(weights, "norm1", rows, shape.norm_eps)
    projected = F.linear(normed, weights["attention.in.weight"], weights["attention.in.bias"])
    query, key, _ = layers.split_heads(projected, shape.heads, 3)
    scores = turned(query, turn) @ turned(key, turn).mT * query.shape[-1] ** -0.5
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


@dataclass(frozen=True)
class Attention:
    """Attention of B images at every block, those of the stem first."""

    blocks: tuple[Looked, ...]
    shape: ViTShape

    def at(self, block: int) -> Tensor:
        """(B, T + P), attention of CLS at a block; negative numbers count from the last."""
        return self.blocks[block].cls

    def rollout(self) -> Tensor:
        """(B, T + 1), what reaches CLS from where through all blocks (Abnar and Zuidema, 2020); prompts are the last
        column.

        Attention is averaged with the identity: R <- (R + A R) / 2, from R = 1. What comes through a prompt row counts
        for the prompts.
        """
        tokens = self.shape.tokens
        first = self.blocks[0].rows
        reached = torch.eye(tokens, tokens + 1, dtype=first.dtype, device=first.device).expand(len(first), -1, -1)
        by_prompts = torch.zeros_like(reached[:, :1])
        by_prompts[..., -1] = 1
        for looked in self.blocks:
            own, prompts = looked.rows[..., :tokens], looked.rows[..., tokens:].sum(-1, keepdim=True)
            reached = (reached[:, : looked.rows.shape[1]] + own @ reached + prompts * by_prompts) / 2
        return reached[:, 0]

    def shares(self, where: Tensor) -> dict[str, Tensor]:
        """The shares of attention (B, T + P) by kind of row, (B,) each."""
        lead = self.shape.lead
        edges = {"cls": (0, 1), "extra": (1, lead), "patches": (lead, self.shape.tokens)}
        edges["prompts"] = (self.shape.tokens, where.shape[-1])
        return {name: where[:, start:end].sum(-1) for name, (start, end) in edges.items()}

    def grid(self, where: Tensor) -> Tensor:
        """(B, side, side), attention (B, T + P) on the patches, as a share of all attention on patches."""
        lead, side = self.shape.lead, self.shape.grid
        patches = where[:, lead : self.shape.tokens]
        return (patches / patches.sum(-1, keepdim=True)).unflatten(-1, (side, side))


@dataclass(frozen=True)
class Watched:
    """A prompted pass over some images with its attention."""

    seen: Seen
    """As `client.step.forward` gives it."""
    given: Prompts
    """The prompts of the method, including those of `later`."""
    attention: Attention

    @property
    def in_images(self) -> bool:
        """Whether the image tower has prompts."""
        changed = self.given.weights or self.given.factors or self.given.pixels is not None
        return bool(inserted(self.given.tokens) or changed)


def run_watched(
    backbone: ViT,
    images: Tensor,
    prompts: Sequence[TokenPrompt] = (),
    reads: Iterable[str] = (),
    pause: Pause | None = None,
) -> tuple[Tensors, Attention]:
    """The output for normalised images (B, 3, S, S), and the attention, including the stem's."""
    if not backbone.shape.has_cls:
        raise ConfigError(broken("backbone.name", "have a CLS token, whose attention is shown", backbone.name))
    eye = Watch(backbone.shape.tokens)
    watched = dataclasses.replace(backbone, block=eye)
    # all rows are read, so that those of the last block can be separated
    seen = watched.run(watched.embed(images), prompts, {*READS, *reads}, pause=pause)
    return seen, Attention(tuple(eye.looked), backbone.shape)


def watch_plain(backbone: ViT, images: Tensor) -> tuple[Tensors, Attention]:
    """The pass without prompts; for a dual encoder also the features of the shared space."""
    return run_watched(backbone, images, reads=JOINT_READS if isinstance(backbone, DualEncoder) else ())


def watch(
    method: Method, world: World, params: Tensors, backbone: ViT, images: Tensor, batch: Batch, noise: Tensors
) -> Watched:
    """The prompted pass over a batch of normalised images, in the steps of `client.step.forward`."""
    given = method.prompts(world, params, batch, noise)
    slots, extra = list(given.tokens), dict(given.extra)

    def later(cls: Tensor) -> tuple[TokenPrompt, ...]:
        more = method.later(world, params, cls, batch, noise)
        slots.extend(more.tokens)
        extra.update(more.extra)
        return inserted(more.tokens)

    contexts = {name: context.tokens.unsqueeze(0) for name, context in given.text.items()}
    text = {
        name: features[0] for name, features in encode_text(world, given.text, contexts, given.text_weights).items()
    }
    changed = backbone.with_added(given.weights) if given.weights else backbone
    modulation = rows_of(given)
    changed = changed.modulated(modulation) if modulation else changed
    pause = None if given.pause is None else (given.pause, later)
    repeated = images.repeat(given.repeat, 1, 1, 1)
    rows, attention = run_watched(changed, repeated, inserted(given.tokens), method.reads, pause)
    seen = Seen(**{name: rows[name] for name in method.reads}, text=text, extra=extra)
    return Watched(seen, dataclasses.replace(given, tokens=tuple(slots), extra=extra), attention)
