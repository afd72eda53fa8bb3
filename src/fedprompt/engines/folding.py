"""Many clients as one batch: a step of a whole cohort, exact in values and gradients.

What a method does with its parameters is mapped over the clients (`torch.func.vmap`); the frozen backbone between those
parts sees one batch of everybody's images, each with the tokens of its client. Clients with fewer images are filled up
with copies that have weight 0 in `Batch.weights`.

A method that changes the weights of the backbone cannot share a pass with other clients: it goes client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedprompt.engines.images import ImageBank, Images
from fedprompt.engines.step import changes_images, first_block, inserted, make_batch, speak
from fedprompt.method import Batch, Method, Prompts, Seen, World
from fedprompt.prompts.insertion import VisionPrompt
from fedprompt.roles import Tensors

ENOUGH_ROWS = 2048  #: tokens in one pass of the frozen backbone
MOST_CLIENTS = 64  #: that work at the same time, however small they are
NAME_TOKENS = 6  #: of a class name with what frames it, about


class NotFoldable(Exception):
    """The method changes the weights of the backbone."""


@dataclass(frozen=True)
class Together:
    """Parameters of several clients: stacked (N, ...), but for those that all have in common."""

    stacked: Tensors
    common: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, each: Sequence[Tensors], trained: Sequence[str] = ()) -> Together:
        """`trained` are those that will differ, however they begin."""
        stacked, common = {}, {}
        for name, first in each[0].items():
            tensors = [params[name] for params in each]
            same = all(_is_same(first, other) for other in tensors)
            if same and name not in trained:
                common[name] = first
            else:
                stacked[name] = first.expand(len(each), *first.shape) if same else torch.stack(tensors)
        return cls(stacked, common)

    def of_client(self, place: int) -> Tensors:
        return {**self.common, **{name: tensor[place] for name, tensor in self.stacked.items()}}

    def first(self, count: int) -> Together:
        return Together({name: tensor[:count] for name, tensor in self.stacked.items()}, self.common)

    def changed(self, changes: Tensors) -> Together:
        """With other values of the first clients, as many as the changes have."""
        stacked = dict(self.stacked)
        for name, tensor in changes.items():
            rest = stacked[name][len(tensor) :] if name in stacked else tensor[:0]
            stacked[name] = torch.cat([tensor, rest]) if len(rest) else tensor
        return Together(stacked, {name: tensor for name, tensor in self.common.items() if name not in changes})


def _is_same(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one piece of memory, looked at in the same way."""
    return first is other or (
        first.data_ptr() == other.data_ptr() and first.shape == other.shape and first.stride() == other.stride()
    )


def alike(params: Tensors) -> tuple[Any, ...]:
    """Clients can be stacked if they agree on this."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(params.items()))


@dataclass(frozen=True)
class Folded:
    """A batch of N clients, B images each."""

    indices: Tensor  # (N, B) of the images in the source
    labels: Tensor  # (N, B)
    features: Tensors  # (N, B, ...)
    weights: Tensor | None  # (N, B), 0 for copies that fill up; None where there are none
    noise: Tensors  # (N, ...)
    training: bool = True

    @classmethod
    def of(
        cls,
        world: World,
        bank: ImageBank,
        method: Method,
        indices: Tensor,
        labels: Tensor,
        sizes: Sequence[int],
        noise: Tensors,
        training: bool,
    ) -> Folded:
        """A batch with the features the method needs, of which `sizes` images of each client count."""
        width = indices.shape[1]
        found = {name: bank.features(name, indices.flatten()).unflatten(0, indices.shape) for name in method.needs}
        weights = None
        if min(sizes) < width:
            weights = (torch.arange(width) < torch.tensor(sizes)[:, None]).to(world.device, world.dtype)
        return cls(indices, labels, found, weights, noise, training)

    @property
    def images(self) -> Tensors:
        """What is said of every image, to be mapped over the clients."""
        return {"labels": self.labels} if self.weights is None else {"labels": self.labels, "weights": self.weights}

    def batch(self, images: Tensors, features: Tensors) -> Batch:
        """One client's part, inside a mapped function."""
        return Batch(images["labels"], features, images.get("weights"), self.training)

    def of_client(self, place: int) -> Batch:
        """One client's part, with what fills it up."""
        return self.batch(
            {name: tensor[place] for name, tensor in self.images.items()},
            {name: tensor[place] for name, tensor in self.features.items()},
        )


def over_clients(function: Callable[..., Any], *groups: Tensors) -> Any:
    """`torch.func.vmap` of a function of dictionaries. They are handed over flat, because walking through nested ones costs
    more than the arithmetic of a small step.
    """
    names = [tuple(group) for group in groups]

    def flat(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return function(*({name: next(left) for name in each} for each in names))

    return torch.func.vmap(flat)(*(tensor for group in groups for tensor in group.values()))


def look_together(step: Method, world: World, params: Together, bank: ImageBank, folded: Folded) -> Seen:
    """The frozen backbone once for all clients. What is seen has the clients in front: (N, rows of a client, ...)."""
    clients, size = folded.labels.shape
    plan, slots, contexts, extra = _asked(step, world, params, folded)
    text = speak(world, plan.text, contexts)
    if not changes_images(plan, step.reads):
        found = {
            name: bank.features(name, folded.indices.flatten()).unflatten(0, (clients, size)) for name in step.reads
        }
        if plan.repeat > 1:
            found = {name: value.repeat(1, plan.repeat, *[1] * (value.dim() - 2)) for name, value in found.items()}
        return Seen(**found, text=text, extra=extra)
    start = first_block(plan)
    tokens = bank.tokens(folded.indices.flatten(), start)
    if plan.repeat > 1:
        tokens = tokens.unflatten(0, (clients, size)).repeat(1, plan.repeat, 1, 1).flatten(0, 1)

    def later(cls: Tensor) -> list[VisionPrompt]:
        joining, more, asked = _asked_later(step, world, params, folded, cls)
        extra.update(more)
        return _folded(joining, asked)

    pause = None if plan.pause is None else (plan.pause, later)
    seen = bank.backbone.run(tokens, _folded(slots, inserted(plan.vision)), step.reads, start, pause)
    return Seen(**{name: value.unflatten(0, (clients, -1)) for name, value in seen.items()}, text=text, extra=extra)


def losses_together(step: Method, world: World, params: Together, bank: ImageBank, folded: Folded) -> Tensor:
    """One loss for every client (N,)."""

    def loss(params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        logits = step.logits(world, params, seen, batch, noise)
        return step.loss(world, params, logits, seen, batch, noise)

    return _read_out(loss, params, look_together(step, world, params, bank, folded), folded)


def predictions_together(method: Method, world: World, params: Together, seen: Seen, folded: Folded) -> Tensor:
    """Probabilities (N, V, B, C) of V draws."""

    def predict(params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return method.predict(world, params, seen, batch, noise)

    return _read_out(predict, params, seen, folded)


def _read_out(
    read: Callable[[Tensors, Seen, Batch, Tensors], Tensor], params: Together, seen: Seen, folded: Folded
) -> Tensor:
    rows = _rows_of(seen)

    def answer(
        own: Tensors, rows: Tensors, text: Tensors, extra: Tensors, images: Tensors, features: Tensors, noise: Tensors
    ) -> Tensor:
        batch = folded.batch(images, features)
        return read({**params.common, **own}, Seen(**rows, text=text, extra=extra), batch, noise)

    groups = (params.stacked, rows, seen.text, seen.extra, folded.images, folded.features, folded.noise)
    found: Tensor = over_clients(answer, *groups)
    return found


def seen_by(seen: Seen, place: int) -> Seen:
    """What one client has seen."""
    rows, text, extra = (
        {name: tensor[place] for name, tensor in group.items()} for group in (_rows_of(seen), seen.text, seen.extra)
    )
    return Seen(**rows, text=text, extra=extra)


def _rows_of(seen: Seen) -> Tensors:
    names = ("cls", "patches", "prompts", "image", "image_patches")
    return {name: value for name in names if (value := getattr(seen, name)) is not None and value.numel()}


def _asked(
    step: Method, world: World, params: Together, folded: Folded
) -> tuple[Prompts, tuple[Tensor, ...], Tensors, Tensors]:
    """What the method wants inserted: the plan of one client, and the tensors of all of them."""
    if type(step).prompts is Method.prompts:
        return Prompts(), (), {}, {}
    plans: list[Prompts] = []

    def ask(
        own: Tensors, images: Tensors, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors, Tensors]:
        batch = folded.batch(images, features)
        given = step.prompts(world, {**params.common, **own}, batch, noise)
        plans.append(given)
        contexts = {name: context.tokens for name, context in given.text.items()}
        if given.weights:
            raise NotFoldable
        return _tokens(inserted(given.vision)), contexts, given.extra

    slots, contexts, extra = over_clients(ask, params.stacked, folded.images, folded.features, folded.noise)
    return plans[0], slots, contexts, dict(extra)


def _asked_later(
    step: Method, world: World, params: Together, folded: Folded, cls: Tensor
) -> tuple[tuple[Tensor, ...], Tensors, tuple[VisionPrompt, ...]]:
    plans: list[Prompts] = []

    def ask(
        own: Tensors, rows: Tensors, images: Tensors, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        batch = folded.batch(images, features)
        given = step.later(world, {**params.common, **own}, rows["cls"], batch, noise)
        plans.append(given)
        return _tokens(inserted(given.vision)), given.extra

    rows = {"cls": cls.unflatten(0, (len(folded.labels), -1))}
    joining, extra = over_clients(ask, params.stacked, rows, folded.images, folded.features, folded.noise)
    return joining, extra, inserted(plans[0].vision)


def _tokens(slots: Sequence[VisionPrompt]) -> tuple[Tensor, ...]:
    """The tokens of each slot: one set for all rows of a client (1, blocks, n, d), or one for each of them."""
    return tuple(slot.tokens if slot.tokens.dim() == 4 else slot.tokens.unsqueeze(0) for slot in slots)


def _folded(tokens: Sequence[Tensor], slots: Sequence[VisionPrompt]) -> list[VisionPrompt]:
    return [replace(slot, tokens=each.flatten(0, 1)) for each, slot in zip(tokens, slots, strict=True)]


@dataclass(frozen=True)
class Demand:
    """What a step asks of the backbone."""

    per_image: int  #: tokens that go through it for every image
    per_client: int  #: and for every client on top of that
    features: tuple[str, ...]  #: what it reads of the images, by the names of `ImageBank.prefetch`


class FoldSize:
    """How many clients make one good batch of the frozen backbone. Only sizes decide, so the bits of a run do not depend on the machine.

    Folding pays as long as a batch is too small to keep the matrix products busy; beyond `ENOUGH_ROWS` tokens it only costs memory.
    """

    def __init__(self, world: World, asked: int | Literal["auto"]) -> None:
        self._world, self._asked = world, asked
        self._known: list[tuple[Method, Demand]] = []

    @property
    def most(self) -> int:
        """Clients whose parameters are held at the same time."""
        return MOST_CLIENTS if self._asked == "auto" else self._asked

    def of(self, demand: Demand, batch: int) -> int:
        """For batches of so many images."""
        if self._asked != "auto":
            return self._asked
        return max(1, min(MOST_CLIENTS, ENOUGH_ROWS // max(1, demand.per_image * batch + demand.per_client)))

    def demand(self, step: Method, params: Tensors, images: Images, training: bool) -> Demand:
        """Found out once for each step, with one client's parameters and an image of it."""
        for known, demand in self._known:
            if known == step:
                return demand
        world = self._world
        image = make_batch(step, images, torch.zeros(1, dtype=torch.long), training)
        noise = world.placed(step.noise(world, 1, training, torch.Generator().manual_seed(0)))
        with torch.no_grad():
            given = step.prompts(world, params, image, noise)
        tokens = world.tokens + sum(slot.tokens.shape[-2] for slot in inserted(given.vision))
        passes = changes_images(given, step.reads)
        found = Demand(
            per_image=given.repeat * tokens if passes else 0,
            per_client=sum(world.classes * (context.tokens.shape[-2] + NAME_TOKENS) for context in given.text.values()),
            features=(*step.needs, *((f"tokens:{first_block(given)}",) if passes else step.reads)),
        )
        self._known.append((step, found))
        return found


def fill_up(noise: Sequence[Tensors], sizes: Sequence[int], axes: Mapping[str, tuple[int, int]]) -> Tensors:
    """The draws of clients with batches of different sizes, stacked; `axes` says where the images are (`image_axes`)."""
    width = max(sizes)

    def filled(name: str, tensor: Tensor, size: int) -> Tensor:
        if size == width or name not in axes:
            return tensor
        axis, times = axes[name]
        runs = tensor.unflatten(axis, (times, size))
        copies = runs.narrow(axis + 1, 0, 1).expand(*runs.shape[: axis + 1], width - size, *runs.shape[axis + 2 :])
        return torch.cat([runs, copies], dim=axis + 1).flatten(axis, axis + 1)

    return {
        name: torch.stack([filled(name, each[name], size) for each, size in zip(noise, sizes, strict=True)])
        for name in noise[0]
    }


def image_axes(step: Method, world: World, training: bool) -> dict[str, tuple[int, int]]:
    """Which axis of each random draw goes over the images of a batch, and how many rows every image has there."""
    sizes = (5, 7)  # any two: the axis is the one that grows
    few, more = (step.noise(world, size, training, torch.Generator().manual_seed(0)) for size in sizes)
    found = {}
    for name, tensor in few.items():
        for axis, (short, long) in enumerate(zip(tensor.shape, more[name].shape, strict=True)):
            if short != long:
                found[name] = (axis, short // sizes[0])
    return found
