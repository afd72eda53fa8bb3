"""One frozen vision transformer for every family: a forward pass over plain tensors, with prompts.

The weights are a flat dictionary (see `shape.py`), so there is one copy, no module state, no dropout and nothing to put
into "training mode".

Two shortcuts make the prompted pass cheaper without changing its result:

* a prompt row that is dropped before the next block needs a key and a value, but no query, no output projection and no
  MLP;
* of the last block, only the rows that are read are computed; all others are only keys and values, and for few query
  rows not even these are computed.

So at each block a row is either *live* (its output is used) or *passive* (it is only a key and a value). See
`block.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedprompt.backbones import layers
from fedprompt.backbones.block import Block, cls_attention, run_block
from fedprompt.backbones.layers import Weights
from fedprompt.backbones.pooling import pooled, pooled_alone
from fedprompt.backbones.recomputed_block import RecomputedBlock
from fedprompt.backbones.rotary import Turns
from fedprompt.backbones.shape import CHANNELS, OPERATIONS, ViTShape, block_tensors
from fedprompt.backbones.torch_compile import CompiledBlock
from fedprompt.errors import BackboneError, ContractError, broken
from fedprompt.modules.insertion import TokenPrompt, check_prompt, enter, leaves, spread, together
from fedprompt.tensors import to_device

__all__ = ["READS", "ViT", "ViTShape"]

READS = ("cls", "patches", "prompts")  # what can be read after the last block and the final norm
ATTENTION = "prompt_attention"  # can be read beside them


@dataclass(frozen=True, eq=False)
class ViT:
    """A frozen backbone at one resolution, with the preprocessing it was trained with."""

    name: str
    shape: ViTShape
    mean: tuple[float, float, float]
    """Images are normalised with (x - mean) / std, x in [0, 1]."""
    std: tuple[float, float, float]
    weights: dict[str, Tensor]
    native_image_size: int
    """The resolution its positions were trained at."""
    stem: int = 0
    """First blocks that belong to the embedding: they have no prompts, and blocks are counted after them."""
    autocast: bool = False
    """Matrices are multiplied in bfloat16; everything else is `dtype`."""
    block: Block = run_block
    """How a block is computed."""

    @property
    def depth(self) -> int:
        """Blocks that can have prompts."""
        return self.shape.depth - self.stem

    @property
    def reads(self) -> dict[str, int]:
        """What can be read of a pass without prompts, and its numbers per image."""
        return {"cls": self.shape.width, "patches": self.shape.patches * self.shape.width}

    @property
    def frame(self) -> int:
        """Side of the images in pixels where something can be added to them (`modulated`): their patches are what enters
        block 0, without a stem or a norm before it.
        """
        return self.shape.image_size if self.depth and not self.stem and not self.shape.ln_pre else 0

    @property
    def operations(self) -> dict[str, int]:
        """Operations whose output can be scaled and shifted image by image (`modulated`), and their width."""
        sizes = block_tensors(self.shape)
        blocks = range(self.depth)
        found = {f"blocks.{block}.{name}": sizes[name + ".bias"][0] for block in blocks for name in OPERATIONS}
        before = {"patch": self.shape.width} if self.frame else {}
        return before | found | ({"norm": self.shape.width} if self.depth and "norm.weight" in self.weights else {})

    @property
    def device(self) -> torch.device:
        return self.weights["lead"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["lead"].dtype

    def embed(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, S, S) to the input of block 0, (B, T, d): CLS, extra tokens and patches after the
        stem.
        """
        size = self.shape.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (CHANNELS, size, size):
            raise ContractError(f"images must be (B, {CHANNELS}, {size}, {size}), got {tuple(images.shape)}")
        weights = self.weights
        images = to_device(images, self.device, self.dtype)
        with layers.precision(self.autocast, self.device):
            patches = self._patched(images)
        patches = patches.flatten(2).transpose(1, 2) + weights["position"]  # (B, M, d)
        tokens = torch.cat([weights["lead"].expand(len(images), -1, -1), patches], dim=1)
        tokens = self._norm("ln_pre", tokens) if self.shape.ln_pre else tokens
        for block in range(-self.stem, 0):
            (tokens,) = self._block(block, [tokens], [], self._turns())
        return tokens

    def _patched(self, images: Tensor) -> Tensor:
        """The patches (B, d, grid, grid) of images on the device, before their positions."""
        return F.conv2d(images, self.weights["patch.weight"], self.weights["patch.bias"], stride=self.shape.patch)

    def summary(self, tokens: Tensor) -> Tensor:
        """One row (B, d) for an image in the middle of a pass: CLS, or without CLS the mean of the patches."""
        return tokens[:, 0] if self.shape.has_cls else tokens.mean(1)

    def with_added(self, changes: Mapping[str, Tensor]) -> ViT:
        """The same transformer with something added to some of its weights; `blocks.0` is the first block after the
        stem.
        """
        renamed = {name: self._behind_stem(name) for name in changes}
        return dataclasses.replace(self, weights=layers.with_changes(self.weights, changes, renamed))

    def modulated(self, rows: Mapping[str, Tensor]) -> ViT:
        """The same transformer for one batch, whose images it treats differently: outputs of `operations` are scaled and
        shifted by tensors (B, 2, width), and `pixels` (G, 3, S, S) are added to the normalised images of G equally long runs.
        """
        weights, known = dict(self.weights), self.operations
        for name, value in rows.items():
            if name == "pixels":
                if not self.frame or tuple(value.shape[1:]) != (CHANNELS, self.frame, self.frame):
                    raise ContractError(
                        f"pixels must be (G, {CHANNELS}, {self.frame}, {self.frame}), got {tuple(value.shape)}"
                    )
                moved = F.conv2d(value.to(self.dtype), weights["patch.weight"], stride=self.shape.patch)
                weights[name] = moved.flatten(2).transpose(1, 2)  # (G, M, d)
            elif name not in known or value.ndim != 3 or tuple(value.shape[1:]) != (2, known[name]):
                raise ContractError(f"factors must fit an operation, got {name!r} of shape {tuple(value.shape)}")
            else:
                place = self._behind_stem(name)
                weights[place + layers.FACTOR], weights[place + layers.SHIFT] = value.unbind(1)
        return dataclasses.replace(self, weights=weights)

    def _entering(self, tokens: Tensor) -> Tensor:
        """The input of block 0 (B, T, d) after what was added to the pixels, and scaled and shifted behind the embedding."""
        if "pixels" not in self.weights and "patch" + layers.FACTOR not in self.weights:
            return tokens
        lead, patches = tokens.split([self.shape.lead, self.shape.patches], dim=1)
        patches = patches - self.weights["position"]
        if "pixels" in self.weights:
            patches = patches + spread(self.weights["pixels"], len(patches))
        patches = layers.scaled(self.weights, "patch", patches) + self.weights["position"]
        return torch.cat([lead, patches], dim=1)

    def _behind_stem(self, name: str) -> str:
        kind, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        return f"blocks.{int(number) + self.stem}.{part}" if kind == "blocks" and number.isdecimal() else name

    def autocasting(self) -> Self:
        """The same transformer with matrix products in bfloat16, and everything else unchanged."""
        if self.dtype == torch.float64:
            raise BackboneError(broken("backbone.autocast", "be false where backbone.dtype is float64", True))
        return dataclasses.replace(self, autocast=True)

    def compiled(self) -> Self:
        """The same transformer with blocks that torch.compile compiles on first use."""
        return dataclasses.replace(self, block=CompiledBlock())

    def recomputing(self) -> Self:
        """The same transformer with activations that are computed again for the gradients."""
        return dataclasses.replace(self, block=RecomputedBlock(self.block))

    def run(
        self,
        tokens: Tensor,
        prompts: Sequence[TokenPrompt] = (),
        reads: Iterable[str] = ("cls",),
        start: int = 0,
        pause: tuple[int, Callable[[Tensor], Sequence[TokenPrompt]]] | None = None,
        repeat: int = 1,
    ) -> dict[str, Tensor]:
        """Run the blocks from `start` on with prompts inserted, and read rows after the final norm.

        `tokens` are the inputs of block `start` without prompts, so the blocks before the first prompted one may be
        computed once and cached. Reads: `cls` (B, d), `patches` (B, M, d), `prompts` (B, P, d) with the rows that are
        still there after the last block, slot by slot and oldest first within an appending slot. `prompt_attention`
        (B, slots) is the share of the attention of CLS that a slot gets, mean over the heads and over the blocks where
        it has rows. The order of rows inside the sequence does not matter, because prompts have no position. A norm
        before block 0 (CLIP) also applies to prompts of block 0. With attention pooling, `cls` is the pooled vector of
        patches and remaining prompts, and `patches` are pooled one by one.

        `pause` is a block and a function: the pass pauses before that block, and the function returns extra prompts
        computed from the CLS rows (B, d) of its input (`summary`).

        With `repeat` every image is a run of so many samples, and B counts samples. Until a prompt tells the samples of a
        run apart, they are computed as one; so are queries, keys and values in the block where it enters.
        """
        reads = frozenset(reads)
        self._check(tokens, prompts, reads, start, pause, repeat)
        tokens = self._entering(tokens) if start == 0 else tokens
        batch, last = len(tokens) * repeat, self.depth - 1
        empty = tokens.new_empty(1, 0, self.shape.width)
        main, prompts, slots = tokens, list(prompts), [empty for _ in prompts]
        looks: list[Tensor] = []
        for block in range(start, self.depth):
            if pause is not None and block == pause[0]:
                joining = list(pause[1](self.summary(main)))
                for prompt in joining:
                    check_prompt(prompt, batch=batch, width=self.shape.width, first=block, depth=self.depth)
                prompts, slots = prompts + joining, slots + [empty for _ in joining]
            if block == last:
                break
            slots = [self._enter(prompt, rows, block) for prompt, rows in zip(prompts, slots, strict=True)]
            looks += [self._look(block, [main, *slots])] if ATTENTION in reads else []
            stay = [not leaves(prompt, block) for prompt in prompts]
            live = [main, *(rows for rows, s in zip(slots, stay, strict=True) if s)]
            passive = [rows for rows, s in zip(slots, stay, strict=True) if not s]
            main, *kept = self._block(block, live, passive, self._turns())
            slots = [kept.pop(0) if s else rows[:, :0] for rows, s in zip(slots, stay, strict=True)]
        slots = [self._enter(prompt, rows, last) for prompt, rows in zip(prompts, slots, strict=True)]
        last_reads = reads - {ATTENTION}
        if self.shape.has_cls or "cls" not in reads:
            seen = self._last_block(main, prompts, slots, last_reads)
        else:
            seen = self._last_block(main, prompts, slots, frozenset(READS[1:]))
            seen["cls"] = self._pooled(seen["patches"], seen["prompts"])
        if "patches" in reads and not self.shape.has_cls:
            seen["patches"] = self._pooled_alone(seen["patches"])
        if ATTENTION in reads:
            looks.append(self._look(last, [main, *slots]))
            shares = pad_sequence([look.T for look in looks], padding_value=0.0)[1:]  # slots may join at a pause
            seen[ATTENTION] = (shares.sum(1) / (shares > 0).sum(1).clamp(min=1)).T
        return {name: spread(seen[name], batch) for name in reads}

    def block_inputs(self, tokens: Tensor, blocks: Sequence[int] | None = None) -> list[Tensor]:
        """The inputs (B, T, d) of the listed blocks (all when None) in a pass without prompts."""
        wanted = range(self.depth) if blocks is None else blocks
        if any(not 0 <= block < self.depth for block in wanted):
            raise ContractError(f"blocks must be in 0..{self.depth - 1}, got {list(wanted)}")
        found = {0: tokens}
        for block in range(max(wanted, default=0)):
            (tokens,) = self._block(block, [tokens], [], self._turns())
            if block + 1 in wanted:
                found[block + 1] = tokens
        return [found[block] for block in wanted]

    @torch.no_grad()
    def blank_tokens(self) -> Tensor:
        """The mean patch token (L, d) that enters each block for an image of the mean colour, in float32 on the CPU."""
        size, lead = self.shape.image_size, self.shape.lead
        inputs = self.block_inputs(self.embed(torch.zeros(1, CHANNELS, size, size)))
        return torch.stack([tokens[0, lead:].mean(0) for tokens in inputs]).float().cpu()

    def read_early(self, tokens: Tensor, blocks: int) -> Tensor:
        """The feature (B, d) of an image that ends after the first `blocks` blocks of a pass without prompts."""
        if blocks == self.depth:
            return self.run(tokens)["cls"]
        rows = self.block_inputs(tokens, [blocks])[0]
        if self.shape.has_cls:
            return self._norm("norm", rows[:, 0])
        return self._pooled(self._norm("norm", rows), rows[:, :0])

    def digest(self) -> str:
        """The identity of what this backbone computes: architecture, resolution, preprocessing and every byte of every
        weight.
        """
        described = {**self.shape.described(), "mean": self.mean, "std": self.std, "stem": self.stem}
        if self.autocast:
            described["autocast"] = True
        sha = hashlib.sha256(repr(sorted(described.items())).encode())
        layers.update_digest(sha, self.weights)
        return sha.hexdigest()

    def assert_frozen(self, expected_digest: str) -> None:
        """Raise unless the weights are those of `expected_digest` and none of them requires a gradient."""
        trainable = [name for name, tensor in self.weights.items() if tensor.requires_grad]
        if trainable:
            raise BackboneError(f"backbone {self.name!r} must stay frozen, but {trainable[0]!r} requires a gradient")
        found = self.digest()
        if found != expected_digest:
            raise BackboneError(
                f"backbone {self.name!r} must stay frozen, but its digest went from {expected_digest} to {found}"
            )

    def _pooled(self, rows: Tensor, prompts: Tensor) -> Tensor:
        """What is read as CLS where there is no CLS row: one vector (B, d) of normed rows."""
        return pooled(self.weights, self.shape, torch.cat([rows, prompts], dim=1))

    def _pooled_alone(self, rows: Tensor) -> Tensor:
        """The same of every row by itself, (B, R, d)."""
        return pooled_alone(self.weights, self.shape, rows)

    def _enter(self, prompt: TokenPrompt, rows: Tensor, block: int) -> Tensor:
        """The rows of a slot at the input of a block. CLIP's `ln_pre` also applies to prompts of block 0."""
        entered = enter(prompt, rows, block)
        return self._norm("ln_pre", entered) if self.shape.ln_pre and self.stem + block == 0 else entered

    def _last_block(
        self, main: Tensor, prompts: Sequence[TokenPrompt], slots: list[Tensor], reads: frozenset[str]
    ) -> dict[str, Tensor]:
        """Only the rows that are read are live."""
        block, sizes = self.depth - 1, [int(self.shape.has_cls), self.shape.extra_tokens, self.shape.patches]
        cls, extra, patches = zip(main.split(sizes, dim=1), self._turns(sizes) or [None] * 3, strict=True)
        rows, passive = {"cls": cls, "patches": patches}, [extra]  # each with its turn
        if "prompts" in reads:
            gone = [leaves(prompt, block) for prompt in prompts]
            stay = together([main[:, :0], *(slot for slot, g in zip(slots, gone, strict=True) if not g)])
            rows["prompts"] = (torch.cat(stay, dim=1), None)
            slots = [slot for slot, g in zip(slots, gone, strict=True) if g]
        passive += [(slot, None) for slot in slots]
        passive += [piece for name, piece in rows.items() if name not in reads]
        live = {name: piece for name, piece in rows.items() if name in reads}
        pieces, turns = zip(*live.values(), *passive, strict=True)
        outputs = self._block(block, list(pieces[: len(live)]), list(pieces[len(live) :]), turns)
        seen = {name: self._norm("norm", output) for name, output in zip(live, outputs, strict=True)}
        return seen | {"cls": seen["cls"].squeeze(1)} if "cls" in seen else seen

    def _turns(self, sizes: Sequence[int] = ()) -> Turns:
        """The rotation of an image's own rows, whole or in parts; nothing without rotary positions."""
        if self.shape.rope_base is None:
            return ()
        return self.weights["rotation"].split(sizes or self.shape.tokens, dim=1)

    def _block(self, block: int, live: list[Tensor], passive: list[Tensor], turns: Turns = ()) -> list[Tensor]:
        """The live pieces after a block. Passive ones may be shared by runs of samples."""
        with layers.precision(self.autocast, self.device):
            turns = [*turns, *[None] * (len(live) + len(passive) - len(turns))]
            return self.block(self._weights_of(block), self.shape, live, passive, turns)

    def _look(self, block: int, pieces: Sequence[Tensor]) -> Tensor:
        """The shares of the attention of CLS on each piece."""
        turns = [*self._turns(), *[None] * len(pieces)][: len(pieces)]
        with layers.precision(self.autocast, self.device):
            return cls_attention(self._weights_of(block), self.shape, pieces, turns)

    def _weights_of(self, block: int) -> Weights:
        prefix = f"blocks.{self.stem + block}."
        more = (
            *layers.ADAPTER_TENSORS,
            *(name + part for name in OPERATIONS for part in (layers.FACTOR, layers.SHIFT)),
        )
        names = [*block_tensors(self.shape), *(name for name in more if prefix + name in self.weights)]
        return {name: self.weights[prefix + name] for name in names}

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layers.norm(self.weights, name, x, self.shape.norm_eps)

    def _check(
        self,
        tokens: Tensor,
        prompts: Sequence[TokenPrompt],
        reads: frozenset[str],
        start: int,
        pause: tuple[int, object] | None,
        repeat: int,
    ) -> None:
        shape = self.shape
        if tokens.ndim != 3 or tuple(tokens.shape[1:]) != (shape.tokens, shape.width):
            raise ContractError(f"tokens must be (B, {shape.tokens}, {shape.width}), got {tuple(tokens.shape)}")
        if not reads - {ATTENTION} or not reads <= {*READS, ATTENTION}:
            raise ContractError(f"reads must be some of {', '.join(READS)}, got {sorted(reads)}")
        if not 0 <= start < self.depth:
            raise ContractError(f"start must be in 0..{self.depth - 1}, got {start}")
        if pause is not None and not start <= pause[0] < self.depth:
            raise ContractError(f"pause must be in {start}..{self.depth - 1}, got {pause[0]}")
        for prompt in prompts:
            check_prompt(prompt, batch=len(tokens) * repeat, width=shape.width, first=start, depth=self.depth)
