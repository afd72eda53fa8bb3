"""Frozen text towers that read class names with a learnable context.

The sentence of class c is [start] context name . [end]. The context may also stand after the name (`front`) or around
it (`middle`), and it may be one for all classes or one per class. Three families:

* `CausalTower`, CLIP's: pre-norm, a token attends to those before it, the end token is read. Three shortcuts change
  only the time: nothing after the end token is computed; the common beginning of all sentences runs once, and the rest
  of each sentence attends to its keys and values; of the last block only the end token's row is computed.
* `BidirectionalTower`, BERT's: post-norm, all tokens attend to each other, the mean over the sentence is read.
  Sentences can share nothing. `FirstTokenTower` is the same, but its start token is read.
* `UnmaskedTower`, MobileCLIP's: CLIP's without its causal mask, so that a token attends to all positions, the padding
  among them, and the end token is read.
* `PaddedTower`, SigLIP's: pre-norm, all tokens attend to each other and to the padding that follows the end token, and
  the last row is read. There is no start token.

Sentences of one length run together, so nothing is padded. Many sentences run in chunks whose activations are
recomputed for the gradients, so memory does not grow with the number of classes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fedprompt.backbones import layers
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.shape import Activation
from fedprompt.errors import BackboneError, ConfigError, ContractError, broken
from fedprompt.modules.contexts import Position

CHUNK_TOKENS = 4096  # that go through the tower together


@dataclass(frozen=True)
class TextShape:
    """The numbers of a text transformer."""

    width: int
    depth: int
    heads: int
    mlp_width: int
    vocabulary: int
    positions: int
    """Longest sentence it was trained for, start and end included."""
    norm_eps: float
    activation: Activation = "gelu"


def text_tensor_shapes(shape: TextShape, outer_norm: str) -> dict[str, tuple[int, ...]]:
    """Every tensor such a tower has: embeddings, one norm outside the blocks (`norm` or `embedding_norm`), and the
    blocks.
    """
    width, hidden = shape.width, shape.mlp_width
    block: dict[str, tuple[int, ...]] = {
        **{f"norm{number}.{part}": (width,) for number in (1, 2) for part in ("weight", "bias")},
        "attention.in.weight": (3 * width, width),
        "attention.in.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "mlp.in.weight": (hidden, width),
        "mlp.in.bias": (hidden,),
        "mlp.out.weight": (width, hidden),
        "mlp.out.bias": (width,),
    }
    return {
        "token.weight": (shape.vocabulary, width),
        "position.weight": (shape.positions, width),
        f"{outer_norm}.weight": (width,),
        f"{outer_norm}.bias": (width,),
        **{f"blocks.{number}.{name}": size for number in range(shape.depth) for name, size in block.items()},
    }


@dataclass(frozen=True)
class Group:
    """Classes whose sentences have one length, and their tokens after the common beginning.

    An entry s >= 0 of `rests` is the context token s, and -1 - t is the token t of the vocabulary.
    """

    classes: Tensor  # (c,)
    rests: Tensor  # (c, L)
    speaks_context: bool
    """Some of these entries are tokens of the context."""


@dataclass(frozen=True, eq=False)
class Names:
    """Class names as token ids, and the layouts of their sentences used so far.

    The full stop is tokenised together with the name: after a bracket both may be one token. That token then counts as
    part of the name, and the full stop has none.
    """

    ids: tuple[tuple[int, ...], ...]
    stops: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    layouts: dict[tuple[int, int, int], tuple[Group, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TextTower(ABC):
    """A frozen text encoder with its tokenizer and its projection into the shared space."""

    shape: TextShape
    weights: dict[str, Tensor]
    tokenise: Callable[[str], Sequence[int]]
    """Without start and end."""
    start: int | None
    """The token that begins a sentence, if there is one."""
    end: int
    projection: Projection
    autocast: bool = False
    """Matrices are multiplied in bfloat16, except the projection's."""
    shares_beginning: ClassVar[bool]
    """The common beginning of all sentences runs once."""
    gap: ClassVar[str] = ""
    """What a name begins with, for tokenizers that tell the beginning of a text from that of a word inside it."""

    def __post_init__(self) -> None:
        if self.projection.width != self.shape.width:
            raise BackboneError(
                f"the text projection must take {self.shape.width} numbers, got one that takes {self.projection.width}"
            )
        self._check_known((*self._opening, self.end))

    @property
    def _opening(self) -> list[int]:
        return [] if self.start is None else [self.start]

    def words(self, text: str) -> Tensor:
        """The embeddings (n, d) of some words, to begin a context with or to be one."""
        return self._embedded(self._ids(text))

    def names(self, texts: Sequence[str]) -> Names:
        """Class names made ready for `encode`; an underscore counts as a space."""
        spoken = tuple(text.replace("_", " ") for text in texts)
        ids, stops = [], []
        for text in spoken:
            inside = self.gap + text
            alone, stopped = self._ids(inside), self._ids(inside + ".")
            if not alone:
                raise ConfigError(broken("class name", "have at least one token", text))
            if self.end in alone:
                raise ConfigError(broken("class name", "not hold the token that ends a sentence", text))
            ids.append(tuple(stopped[: len(alone)]))
            stops.append(tuple(stopped[len(alone) :]))
        return Names(tuple(ids), tuple(stops), spoken)

    def room(self, names: Names) -> int:
        """How many tokens of a context fit into a sentence with any of the names, its start and its end."""
        longest = max((len(name) + len(stop) for name, stop in zip(names.ids, names.stops, strict=True)), default=0)
        return self.shape.positions - len(self._opening) - 1 - longest

    def encode(self, contexts: Tensor, names: Names, position: Position = "end") -> Tensor:
        """Unit vectors (N, C, D) of every class with each of N contexts (N, m, d), or (N, C, m, d) with one per class."""
        classes, width = len(names.ids), self.shape.width
        tokens = contexts.shape[-2] if contexts.dim() > 1 else 0
        if contexts.shape[1:] not in ((tokens, width), (classes, tokens, width)):
            raise ContractError(
                f"contexts must be (N, m, {width}) or (N, {classes}, m, {width}), got {tuple(contexts.shape)}"
            )
        before = {"end": tokens, "middle": tokens // 2, "front": 0}[position]
        shared = before if contexts.dim() == 3 else 0  # context tokens that begin every sentence
        leading = self._embedded(self._opening).expand(len(contexts), -1, -1)
        if shared:
            leading = torch.cat([leading, contexts[:, :shared]], dim=1)
        groups = self._layout(names, tokens, before, shared)
        first = len(self._opening) + shared
        own = 0 if self.shares_beginning else first  # rows of the beginning that are separate for every sentence
        many = len(contexts) * sum(len(g.classes) * (own + g.rests.shape[1]) for g in groups) > CHUNK_TOKENS
        read: Callable[..., Tensor] = self._read_group
        if many and torch.is_grad_enabled():  # nothing is drawn at random inside
            read = partial(checkpoint, self._read_group, use_reentrant=False, preserve_rng_state=False)
        with self._precision():
            prepared = self._prepare(leading + self.weights["position.weight"][:first])
        encoded, order = [], []
        for group in groups:
            for part in _split(group, max(1, CHUNK_TOKENS // (len(contexts) * (own + group.rests.shape[1])))):
                encoded.append(read(contexts, part, first, *prepared))
                order.append(part.classes)
        return torch.cat(encoded, dim=1)[:, torch.cat(order).argsort()]

    def with_added(self, changes: Mapping[str, Tensor]) -> Self:
        """The same tower with something added to some of its weights, or with adapters beside its blocks."""
        return dataclasses.replace(self, weights=layers.with_changes(self.weights, changes))

    def digest(self) -> str:
        """The identity of what this tower computes, its projection included."""
        how = " autocast" if self.autocast else ""
        sha = hashlib.sha256(f"{type(self).__name__} {self.shape} {self.start} {self.end}{how}".encode())
        for part in (self.weights, self.projection.weights):
            layers.update_digest(sha, part)
        return sha.hexdigest()

    @abstractmethod
    def _prepare(self, leading: Tensor) -> list[Tensor]:
        """The data that the rests of all sentences need of their common beginning (N, P, d)."""

    @abstractmethod
    def _read(self, rest: Tensor, *prepared: Tensor) -> Tensor:
        """The output (N, c, d) of sentences with these rests (N, c, L, d)."""

    def _read_group(self, contexts: Tensor, group: Group, first: int, *prepared: Tensor) -> Tensor:
        rest = self._rest(contexts, group, first)
        with self._precision():
            read = self._read(rest, *prepared)
        return self.projection(read)

    def _precision(self) -> AbstractContextManager[object]:
        return layers.precision(self.autocast, self.weights["token.weight"].device)

    def _ids(self, text: str) -> list[int]:
        ids = list(self.tokenise(text))
        self._check_known(ids)
        return ids

    def _check_known(self, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.shape.vocabulary:
            raise BackboneError(
                f"the tokenizer must be that of the text tower, which knows {self.shape.vocabulary} tokens, "
                f"got token {max(ids)}"
            )

    def _embedded(self, ids: list[int]) -> Tensor:
        return self.weights["token.weight"][ids]

    def _layout(self, names: Names, tokens: int, before: int, shared: int) -> tuple[Group, ...]:
        """What follows the common beginning in every class's sentence, by length."""
        key = (tokens, before, shared)
        if key not in names.layouts:
            context, first = list(range(tokens)), len(self._opening) + shared
            rests: dict[int, list[tuple[int, list[int]]]] = {}
            for number, both in enumerate(zip(names.ids, names.stops, strict=True)):
                name, stop = ([-1 - token for token in ids] for ids in both)  # of the vocabulary, hence negative
                rest = [*context[shared:before], *name, *context[before:], *stop, -1 - self.end]
                if first + len(rest) > self.shape.positions:
                    rule = f"leave room for the class name {names.texts[number]!r} in {self.shape.positions} tokens"
                    raise ConfigError(broken("the number of context tokens", rule, tokens))
                rest += [-1 - token for token in self._padding(self.shape.positions - first - len(rest))]
                rests.setdefault(len(rest), []).append((number, rest))
            device = self.weights["token.weight"].device
            names.layouts[key] = tuple(
                Group(torch.tensor(classes, device=device), torch.tensor(entries, device=device), shared < tokens)
                for classes, entries in (zip(*rests[length], strict=True) for length in sorted(rests))
            )
        return names.layouts[key]

    def _padding(self, free: int) -> list[int]:
        """The tokens behind the end of a sentence that leaves so many positions free."""
        return []

    def _rest(self, contexts: Tensor, group: Group, first: int) -> Tensor:
        """The embedded rests (N, c, L, d) of some classes' sentences, which begin at position `first`."""
        rows = group.rests
        rest = self.weights["token.weight"][(-1 - rows).clamp_min(0)]  # (c, L, d)
        slots = rows.clamp_min(0)
        if group.speaks_context:
            own = contexts[:, slots] if contexts.dim() == 3 else contexts[:, group.classes[:, None], slots]
            rest = torch.where((rows >= 0)[:, :, None], own, rest)
        rest = rest + self.weights["position.weight"][first : first + rows.shape[1]]
        return rest.expand(len(contexts), *rest.shape[-3:])


def _split(group: Group, size: int) -> Iterator[Group]:
    parts = zip(group.classes.split(size), group.rests.split(size), strict=True)
    return (Group(classes, rests, group.speaks_context) for classes, rests in parts)


class PreNormTower(TextTower):
    """Blocks that normalise what goes in."""

    def _projected(self, block: int, x: Tensor) -> tuple[Tensor, ...]:
        prefix = f"blocks.{block}."
        x = layers.norm(self.weights, prefix + "norm1", x, self.shape.norm_eps)
        return layers.split_heads(layers.linear(self.weights, prefix + "attention.in", x), self.shape.heads, 3)

    def _finished(self, block: int, x: Tensor, mixed: Tensor) -> Tensor:
        prefix, weights = f"blocks.{block}.", self.weights
        given = x
        x = x + layers.linear(weights, prefix + "attention.out", mixed.transpose(1, 2).flatten(2))
        hidden = layers.linear(
            weights, prefix + "mlp.in", layers.norm(weights, prefix + "norm2", x, self.shape.norm_eps)
        )
        output = x + layers.linear(weights, prefix + "mlp.out", layers.activate(self.shape.activation, hidden))
        normed = partial(layers.norm, weights, prefix + "norm1", given, self.shape.norm_eps)
        return layers.with_adapter(weights, output, normed, prefix)


class CausalTower(PreNormTower):
    """CLIP's text encoder."""

    shares_beginning = True

    def _prepare(self, leading: Tensor) -> list[Tensor]:
        """Keys and values (2, N, h, P, d / h) of the common beginning in every block."""
        kept, x, last = [], leading, self.shape.depth - 1
        for block in range(self.shape.depth):
            query, key, value = self._projected(block, x)
            kept.append(torch.stack([key, value]))
            if block < last:
                mixed = layers.attention(query, key, value, is_causal=True)
                x = self._finished(block, x, mixed)
        return kept

    def _read(self, rest: Tensor, *prepared: Tensor) -> Tensor:
        contexts, classes, length, _ = rest.shape
        x, last = rest.flatten(0, 1), self.shape.depth - 1
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = F.pad(
            seen, (prepared[0].shape[3], 0), value=True
        )  # (L, P + L): all of the beginning, and what came before
        for block, common in enumerate(prepared):
            query, key, value = self._projected(block, x)
            ahead = common.unsqueeze(2).expand(-1, -1, classes, -1, -1, -1).flatten(1, 2)  # (2, N * c, h, P, d / h)
            key, value = torch.cat([ahead[0], key], dim=2), torch.cat([ahead[1], value], dim=2)
            if block == last:
                query, x, mask = query[:, :, -1:], x[:, -1:], mask[-1:]
            mixed = layers.attention(query, key, value, mask=mask)
            x = self._finished(block, x, mixed)
        x = layers.norm(self.weights, "norm", x[:, 0], self.shape.norm_eps)
        return x.unflatten(0, (contexts, classes))


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedTower(PreNormTower):
    """SigLIP's text encoder."""

    pad: int
    shares_beginning = False
    gap = " "

    def digest(self) -> str:
        return hashlib.sha256(f"{super().digest()} {self.pad}".encode()).hexdigest()

    def _padding(self, free: int) -> list[int]:
        return [self.pad] * free

    def _prepare(self, leading: Tensor) -> list[Tensor]:
        return [leading]

    def _read(self, rest: Tensor, *prepared: Tensor) -> Tensor:
        (leading,) = prepared
        contexts, classes = rest.shape[:2]
        x = torch.cat([leading.unsqueeze(1).expand(-1, classes, -1, -1), rest], dim=2).flatten(0, 1)
        for block in range(self.shape.depth):
            query, key, value = self._projected(block, x)
            if block == self.shape.depth - 1:
                query, x = query[:, :, -1:], x[:, -1:]
            x = self._finished(block, x, layers.attention(query, key, value))
        return layers.norm(self.weights, "norm", x[:, -1], self.shape.norm_eps).unflatten(0, (contexts, classes))


class UnmaskedTower(PreNormTower):
    """CLIP's text encoder without a mask: MobileCLIP's. Behind the end token stand tokens of number 0."""

    shares_beginning = False

    def _padding(self, free: int) -> list[int]:
        return [0] * free

    def _prepare(self, leading: Tensor) -> list[Tensor]:
        return [leading]

    def _read_group(self, contexts: Tensor, group: Group, first: int, *prepared: Tensor) -> Tensor:
        """The rows of the end tokens, which stand at different places."""
        ends = first + (group.rests == -1 - self.end).int().argmax(1)  # (c,)
        (leading,) = prepared
        rest = self._rest(contexts, group, first)
        many, classes = rest.shape[:2]
        with self._precision():
            x = torch.cat([leading.unsqueeze(1).expand(-1, classes, -1, -1), rest], dim=2).flatten(0, 1)
            for block in range(self.shape.depth):
                query, key, value = self._projected(block, x)
                if block == self.shape.depth - 1:
                    rows, places = torch.arange(len(x), device=x.device), ends.repeat(many)
                    query, x = query[rows, :, places].unsqueeze(2), x[rows, places].unsqueeze(1)
                x = self._finished(block, x, layers.attention(query, key, value))
            read = layers.norm(self.weights, "norm", x[:, 0], self.shape.norm_eps).unflatten(0, (many, classes))
        return self.projection(read)

    def _read(self, rest: Tensor, *prepared: Tensor) -> Tensor:
        raise NotImplementedError("the end tokens are needed to read")


class BidirectionalTower(TextTower):
    """BERT's encoder with mean pooling, as sentence encoders use it."""

    shares_beginning = False

    def _prepare(self, leading: Tensor) -> list[Tensor]:
        return [leading]

    def _read(self, rest: Tensor, *prepared: Tensor) -> Tensor:
        (leading,) = prepared
        contexts, classes = rest.shape[:2]
        common = leading.unsqueeze(1).expand(-1, classes, -1, -1)
        x = self._norm("embedding_norm", torch.cat([common, rest], dim=2).flatten(0, 1))
        for block in range(self.shape.depth):
            prefix, weights = f"blocks.{block}.", self.weights
            projected = layers.linear(weights, prefix + "attention.in", x)
            query, key, value = layers.split_heads(projected, self.shape.heads, 3)
            mixed = layers.attention(query, key, value).transpose(1, 2).flatten(2)
            given = partial(torch.clone, x)  # the block before normalised what came out of it
            x = self._norm(prefix + "norm1", x + layers.linear(weights, prefix + "attention.out", mixed))
            hidden = layers.activate(self.shape.activation, layers.linear(weights, prefix + "mlp.in", x))
            output = x + layers.linear(weights, prefix + "mlp.out", hidden)
            x = self._norm(prefix + "norm2", layers.with_adapter(weights, output, given, prefix))
        return self._pooled(x).unflatten(0, (contexts, classes))

    def _pooled(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layers.norm(self.weights, name, x, self.shape.norm_eps)


class FirstTokenTower(BidirectionalTower):
    """BERT's encoder, of whose last layer the start token is read."""

    def _pooled(self, x: Tensor) -> Tensor:
        return x[:, 0]
