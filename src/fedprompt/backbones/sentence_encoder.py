"""BERT-like encoders of sentences as backbones: words where a vision transformer has patches.

A `SentenceEncoder` is used like a `ViT`. Its items are sentences as token numbers (B, T), -1 behind the end, and methods see
T rows of width d for each of them, as they see patches. Rows behind the end of a sentence are rows of zeros
(`post_norm_block.py`). What is read as `cls` is the row of the start token or the mean over the words of the sentence, as the
model was trained; prompts are not part of the mean.

Behind the blocks of such an encoder there is no norm, and a mean over words is short: all-MiniLM-L6-v2 has a root mean square
of 0.16, where the CLS row of DINOv2-S has 2.3. A step of Adam moves a logit by rate * sum_i |f_i|, so a head that learns at
the rate for images learns nothing here. All that is read is therefore scaled to the root mean square `READ_SIZE`; it was
trained to be compared by its direction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.backbones.assemble import check_tensors, compute_device
from fedprompt.backbones.minilm import END, START, bert_weights
from fedprompt.backbones.minilm import SHAPE as MINILM_SHAPE
from fedprompt.backbones.model_folder import activation, check_heads, folder_config, number, whole
from fedprompt.backbones.post_norm_block import run_post_norm_block, sentence_attention, words
from fedprompt.backbones.rotary import Turns
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.text_tower import TextShape, text_tensor_shapes
from fedprompt.backbones.tokenizer import Words
from fedprompt.backbones.vit import ATTENTION, ViT
from fedprompt.backbones.weight_files import read_folder
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken
from fedprompt.io.bounded_read import read_json
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.modules.token_encoder import unit_length

NO_TOKEN = -1
MOST_TOKENS = 64  # of a sentence, where the config gives no number
READ_SIZE = 2.0  # as a final norm leaves the rows of an image, for which the rates of heads were chosen
BLANK_SENTENCES = 16  # whose mean row is where prompts start
PATCH = 8  # random prompts are as large as those of a vision transformer with patches of 8 pixels
OF_IMAGES = ("image_size", "mean", "std")  # settings that a sentence encoder has no use for


@dataclass(frozen=True)
class SentenceShape(ViTShape):
    """A post-norm transformer for sentences of at most `max_tokens` tokens, start and end included."""

    max_tokens: int = MOST_TOKENS
    pooling: Literal["cls", "attention", "mean"] = "mean"

    @property
    def patches(self) -> int:
        return self.max_tokens - self.lead


@dataclass(frozen=True, eq=False, kw_only=True)
class SentenceEncoder(ViT):
    """A frozen encoder of sentences with its tokenizer."""

    shape: SentenceShape
    tokenise: Words
    start: int
    end: int

    @property
    def device(self) -> torch.device:
        return self.weights["token.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["token.weight"].dtype

    def ids(self, sentence: str) -> np.ndarray:
        """The token numbers (T,) int32 of a sentence between start and end, cut to the longest one."""
        inside = self.tokenise(sentence)[: self.shape.max_tokens - 2]
        row = np.full(self.shape.max_tokens, NO_TOKEN, dtype=np.int32)
        row[: len(inside) + 2] = [self.start, *inside, self.end]
        return row

    def embed(self, images: Tensor) -> Tensor:
        """Sentences as token numbers (B, T) to the input of block 0, (B, T, d)."""
        ids = images.to(self.device, torch.long)
        x = self.weights["token.weight"][ids.clamp_min(0)] + self.weights["position.weight"][: ids.shape[1]]
        x = layers.norm(self.weights, "embedding_norm", x, self.shape.norm_eps)
        x = x * (ids >= 0).unsqueeze(-1)
        for block in range(-self.stem, 0):
            (x,) = self._block(block, [x], [], self._turns())
        return x

    def run(
        self,
        tokens: Tensor,
        prompts: Sequence[TokenPrompt] = (),
        reads: Iterable[str] = ("cls",),
        start: int = 0,
        pause: tuple[int, Callable[[Tensor], Sequence[TokenPrompt]]] | None = None,
        repeat: int = 1,
    ) -> dict[str, Tensor]:
        """As of an image; all rows that are read have the root mean square `READ_SIZE`."""
        seen = super().run(tokens, prompts, reads, start, pause, repeat)
        return {name: found if name == ATTENTION else _sized(found) for name, found in seen.items()}

    def read_early(self, tokens: Tensor, blocks: int) -> Tensor:
        return _sized(super().read_early(tokens, blocks))

    def summary(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] if self.shape.has_cls else _mean(tokens)

    def compiled(self) -> Self:
        raise BackboneError(broken("engine.compile", "be false for an encoder of sentences", True))

    def recomputing(self) -> Self:
        raise BackboneError(broken("engine.recompute", "be false for an encoder of sentences", True))

    @torch.no_grad()
    def blank_tokens(self) -> Tensor:
        """The mean row (L, d) that enters each block for sentences of words from all over the vocabulary.

        A sentence without words would be no blank: its start and end rows draw attention away from the words.
        """
        sentences, inside = BLANK_SENTENCES, self.shape.max_tokens - 2
        known = torch.linspace(0, len(self.weights["token.weight"]) - 1, sentences * inside).long()
        ids = F.pad(known.reshape(inside, sentences).T, (1, 1))
        ids[:, 0], ids[:, -1] = self.start, self.end
        return torch.stack([rows.mean((0, 1)) for rows in self.block_inputs(self.embed(ids))]).float().cpu()

    def digest(self) -> str:
        sha = hashlib.sha256(f"{super().digest()} {self.start} {self.end} {READ_SIZE}".encode())
        sha.update(self.tokenise.to_json().encode())
        return sha.hexdigest()

    def _pooled(self, rows: Tensor, prompts: Tensor) -> Tensor:
        return _mean(rows)

    def _pooled_alone(self, rows: Tensor) -> Tensor:
        return rows

    def _turns(self, sizes: Sequence[int] = ()) -> Turns:
        """Marks the rows of the sentence, in so many pieces, where the block of an image gets their rotation."""
        return [self.weights["token.weight"][0]] * max(1, len(sizes))

    def _block(self, block: int, live: list[Tensor], passive: list[Tensor], turns: Turns = ()) -> list[Tensor]:
        own = _own(turns, len(live) + len(passive))
        with layers.precision(self.autocast, self.device):
            return run_post_norm_block(self._weights_of(block), self.shape, live, passive, own)

    def _look(self, block: int, pieces: Sequence[Tensor]) -> Tensor:
        with layers.precision(self.autocast, self.device):
            return sentence_attention(self._weights_of(block), self.shape, pieces, _own(self._turns(), len(pieces)))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x  # post-norm blocks leave normed rows


def _own(turns: Turns, pieces: int) -> list[bool]:
    return [turn is not None for turn in [*turns, *[None] * (pieces - len(turns))]]


def _mean(rows: Tensor) -> Tensor:
    """The mean (B, d) over the words of sentences (B, T, d)."""
    real = words(rows).unsqueeze(-1).to(rows)
    return (rows * real).sum(1) / real.sum(1).clamp_min(1)


def _sized(rows: Tensor) -> Tensor:
    return READ_SIZE * unit_length(rows)


def minilm_encoder(tensors: Mapping[str, Tensor], tokenizer: Path, config: BackboneConfig) -> SentenceEncoder:
    """all-MiniLM-L6-v2, of its checkpoint and `tokenizer.json`."""
    return assembled(
        bert_weights(tensors, "all-MiniLM-L6-v2"), MINILM_SHAPE, "mean", Words.from_file(tokenizer), config
    )


def from_folder(folder: Path, settings: BackboneConfig) -> SentenceEncoder:
    """A BERT, with the pooling that a folder of sentence-transformers states; the mean where none is stated."""
    config = folder_config(folder)
    width, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    check_heads(width, heads)
    shape = TextShape(
        width=width,
        depth=whole(config, "num_hidden_layers", most=1000),
        heads=heads,
        mlp_width=whole(config, "intermediate_size"),
        vocabulary=whole(config, "vocab_size"),
        positions=whole(config, "max_position_embeddings"),
        norm_eps=number(config, "layer_norm_eps"),
        activation=activation(config),
    )
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise BackboneError(f"the backbone folder {str(folder)!r} must hold a tokenizer.json")
    named = bert_weights(read_folder(folder, settings.sha256), str(folder))
    return assembled(named, shape, _pooling(folder), Words.from_file(tokenizer), settings)


def _pooling(folder: Path) -> Literal["cls", "mean"]:
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "mean"
    stated: Any = read_json(path)
    modes = {mode for mode, used in stated.items() if mode.startswith("pooling_mode_") and used is True}
    if modes == {"pooling_mode_cls_token"}:
        return "cls"
    if modes == {"pooling_mode_mean_tokens"}:
        return "mean"
    raise BackboneError(broken(f"pooling in {str(path)!r}", "be that of the start token or the mean", sorted(modes)))


def assembled(
    named: Mapping[str, Tensor],
    own: TextShape,
    pooling: Literal["cls", "mean"],
    tokenizer: Words,
    config: BackboneConfig,
) -> SentenceEncoder:
    """Check every tensor, cut the positions, move to device and precision, freeze."""
    check_tensors(named, text_tensor_shapes(own, outer_norm="embedding_norm"))
    for name in OF_IMAGES:
        if getattr(config, name) is not None:
            raise BackboneError(
                broken(f"backbone.{name}", "be absent for an encoder of sentences", getattr(config, name))
            )
    longest = min(MOST_TOKENS, own.positions) if config.max_tokens is None else config.max_tokens
    if not 3 <= longest <= own.positions:
        rule = f"be in 3..{own.positions}, the positions of the encoder"
        raise BackboneError(broken("backbone.max_tokens", rule, longest))
    if config.stem >= own.depth:
        raise BackboneError(broken("backbone.stem", f"be below the {own.depth} blocks of the backbone", config.stem))
    start, end = tokenizer.number(START), tokenizer.number(END)
    if start is None or end is None:
        raise BackboneError(f"the tokenizer of {config.name!r} must know the tokens {START} and {END}")
    shape = SentenceShape(
        width=own.width,
        depth=own.depth,
        heads=own.heads,
        mlp_width=own.mlp_width,
        patch=PATCH,
        image_size=0,
        norm_eps=own.norm_eps,
        activation=own.activation,
        pooling=pooling,
        max_tokens=longest,
    )
    device, dtype = compute_device(config.device), getattr(torch, config.dtype)
    weights = {name: tensor.detach().to(device, dtype).contiguous() for name, tensor in named.items()}
    return SentenceEncoder(
        name=config.name,
        shape=shape,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        weights=weights,
        native_image_size=0,
        stem=config.stem,
        tokenise=tokenizer,
        start=start,
        end=end,
    )
