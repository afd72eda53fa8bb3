"""Many clients as one batch: a step of a whole cohort, exact in values and gradients.

What a method does with its parameters is mapped over the clients (`torch.func.vmap`); the frozen backbone between those
parts sees one batch of everybody's images, each with the tokens of its client. Clients with fewer images are filled up
with copies that have weight 0 in `Batch.weights`.

A method that changes the weights of the backbone cannot share a pass with other clients: it goes client by client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedprompt.client.batch_schedule import BatchSchedule
from fedprompt.client.batch_sizing import Axes, StepNeeds
from fedprompt.client.step import changes_images, encode_text, first_block, inserted, rows_of, run_repeated
from fedprompt.core.method import Batch, Method, Prompts, Seen, World
from fedprompt.features.feature_tables import LoadedRows, tokens_name
from fedprompt.features.image_bank import ImageBank
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.tensors import Tensors, prefixed, stripped


@dataclass(frozen=True)
class StackedParams:
    """Parameters of several clients: stacked (N, ...), but for those that all have in common."""

    stacked: Tensors
    common: Tensors = field(default_factory=dict)

    @classmethod
    def of(cls, each: Sequence[Tensors], trained: Sequence[str] = ()) -> StackedParams:
        """`trained` are those that will differ, however they begin."""
        stacked, common = {}, {}
        for name, first in each[0].items():
            tensors = [params[name] for params in each]
            same = all(_is_same(first, other) for other in tensors)
            if same and name not in trained:
                common[name] = first
            else:
                stacked[name] = torch.stack(tensors)  # also where all are the same: a later step finds it laid out so
        return cls(stacked, common)

    def of_client(self, place: int) -> Tensors:
        return {**self.common, **{name: tensor[place] for name, tensor in self.stacked.items()}}

    def first(self, count: int) -> StackedParams:
        if all(tensor.shape[0] == count for tensor in self.stacked.values()):
            return self
        return StackedParams({name: tensor[:count] for name, tensor in self.stacked.items()}, self.common)

    def changed(self, changes: Tensors) -> StackedParams:
        """With other values of the first clients, as many as the changes have."""
        stacked = dict(self.stacked)
        for name, tensor in changes.items():
            before, count = stacked.get(name), tensor.shape[0]
            longer = before is not None and before.shape[0] > count
            stacked[name] = torch.cat([tensor, before[count:]]) if longer and before is not None else tensor
        return StackedParams(stacked, {name: tensor for name, tensor in self.common.items() if name not in changes})


def _is_same(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one piece of memory, looked at in the same way."""
    return first is other or (
        first.data_ptr() == other.data_ptr() and first.shape == other.shape and first.stride() == other.stride()
    )


@dataclass(frozen=True)
class StackedBatch:
    """A batch of N clients, B images each."""

    labels: Tensor  # (N, B)
    rows: LoadedRows  # (N * B, ...) features and tokens of the images, by the names of `ImageBank.prefetch`
    features: Tensors  # (N, B, ...) those of them that the method needs
    weights: Tensor | None  # (N, B), 0 for copies that fill up; None where there are none
    noise: Tensors  # (N, ...)
    training: bool = True

    @classmethod
    def of(
        cls,
        table: BatchSchedule,
        step: int,
        noise: Sequence[Tensors],
        step_needs: StepNeeds,
        method: Method,
        world: World,
        bank: ImageBank,
        training: bool,
        views: Sequence[Tensor] = (),
    ) -> StackedBatch:
        """One step of a schedule with the draws of its clients. Here its images are decoded, or read from the cache.

        Where images are augmented, `views` has those of every client.
        """
        sizes = table.now(step)
        count, width = len(sizes), max(sizes)
        indices = table.indices[:count, step, :width]
        weights = None
        if min(sizes) < width:
            weights = (torch.arange(width) < torch.tensor(sizes)[:, None]).to(world.device, world.dtype)
        seen = fill_up([{"views": each} for each in views], sizes, {"views": (0, 1)})["views"] if views else None
        rows = bank.load(indices.flatten(), step_needs.features, None if seen is None else seen.flatten(0, 1))
        features = {name: rows[name].unflatten(0, indices.shape) for name in method.needs}
        labels = table.labels[:count, step, :width]
        return cls(labels, rows, features, weights, fill_up(noise, sizes, step_needs.axes), training)

    @property
    def images(self) -> Tensors:
        """What is known of every image, to be mapped over the clients."""
        return {"labels": self.labels} if self.weights is None else {"labels": self.labels, "weights": self.weights}

    def batch(self, images: Tensors, features: Tensors) -> Batch:
        """One client's part, inside a mapped function."""
        return Batch(images["labels"], features, images.get("weights"), self.training)

    @property
    def parts(self) -> dict[str, Tensor]:
        """All its tensors, under names of their own."""
        own = {"labels": self.labels} if self.weights is None else {"labels": self.labels, "weights": self.weights}
        return {**own, **prefixed("row ", self.rows), **prefixed("noise ", self.noise)}

    def with_parts(self, parts: Tensors) -> StackedBatch:
        """The same with other tensors."""
        rows = LoadedRows.at_hand(stripped("row ", parts))
        features = {name: rows[name].unflatten(0, self.labels.shape) for name in self.features}
        weights, noise = parts.get("weights"), stripped("noise ", parts)
        return StackedBatch(parts["labels"], rows, features, weights, noise, self.training)

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


def forward_of_clients(
    step: Method, world: World, params: StackedParams, bank: ImageBank, folded: StackedBatch
) -> Seen:
    """The frozen backbone once for all clients. What is seen has the clients in front: (N, rows of a client, ...)."""
    clients, size = folded.labels.shape
    plan, slots, contexts, extra, rows = _prompts_of(step, world, params, folded)
    text = encode_text(world, plan.text, contexts)
    if not changes_images(plan, step.reads):
        found = {name: folded.rows[name].unflatten(0, (clients, size)) for name in step.reads}
        if plan.repeat > 1:
            found = {name: value.repeat(1, plan.repeat, *[1] * (value.dim() - 2)) for name, value in found.items()}
        return Seen(**found, text=text, extra=extra)
    start = first_block(plan)
    tokens = folded.rows[tokens_name(start)]

    def later(cls: Tensor) -> list[TokenPrompt]:
        joining, more, asked = _later_prompts(step, world, params, folded, cls)
        extra.update(more)
        return _folded(joining, asked)

    pause = None if plan.pause is None else (plan.pause, later)
    backbone = bank.backbone
    if rows:
        backbone = backbone.modulated({name: each.flatten(0, 1) for name, each in rows.items()})
    prompts = _folded(slots, inserted(plan.tokens))
    seen = run_repeated(backbone, tokens, prompts, step.reads, start, pause, plan.repeat, clients)
    return Seen(**{name: value.unflatten(0, (clients, -1)) for name, value in seen.items()}, text=text, extra=extra)


def losses_of_clients(
    step: Method, world: World, params: StackedParams, bank: ImageBank, folded: StackedBatch
) -> Tensor:
    """One loss for every client (N,)."""

    def loss(params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        logits = step.logits(world, params, seen, batch, noise)
        return step.loss(world, params, logits, seen, batch, noise)

    return _read_out(loss, params, forward_of_clients(step, world, params, bank, folded), folded)


def predictions_of_clients(
    method: Method, world: World, params: StackedParams, seen: Seen, folded: StackedBatch
) -> Tensor:
    """Probabilities (N, V, B, C) of V draws."""

    def predict(params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return method.predict(world, params, seen, batch, noise)

    return _read_out(predict, params, seen, folded)


def _read_out(
    read: Callable[[Tensors, Seen, Batch, Tensors], Tensor], params: StackedParams, seen: Seen, folded: StackedBatch
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
    names = ("cls", "patches", "prompts", "prompt_attention", "image", "image_raw", "image_patches")
    return {name: value for name in names if (value := getattr(seen, name)) is not None and value.dim() > 1}


def _prompts_of(
    step: Method, world: World, params: StackedParams, folded: StackedBatch
) -> tuple[Prompts, tuple[Tensor, ...], Tensors, Tensors, Tensors]:
    """What the method wants inserted: the plan of one client, and the tensors of all of them."""
    if type(step).prompts is Method.prompts:
        return Prompts(), (), {}, {}, {}
    plans: list[Prompts] = []

    def ask(
        own: Tensors, images: Tensors, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors, Tensors, Tensors]:
        batch = folded.batch(images, features)
        given = step.prompts(world, {**params.common, **own}, batch, noise)
        plans.append(given)
        contexts = {name: context.tokens for name, context in given.text.items()}
        return _tokens(inserted(given.tokens)), contexts, given.extra, rows_of(given)

    slots, contexts, extra, rows = over_clients(ask, params.stacked, folded.images, folded.features, folded.noise)
    return plans[0], slots, contexts, dict(extra), rows


def _later_prompts(
    step: Method, world: World, params: StackedParams, folded: StackedBatch, cls: Tensor
) -> tuple[tuple[Tensor, ...], Tensors, tuple[TokenPrompt, ...]]:
    plans: list[Prompts] = []

    def ask(
        own: Tensors, rows: Tensors, images: Tensors, features: Tensors, noise: Tensors
    ) -> tuple[tuple[Tensor, ...], Tensors]:
        batch = folded.batch(images, features)
        given = step.later(world, {**params.common, **own}, rows["cls"], batch, noise)
        plans.append(given)
        return _tokens(inserted(given.tokens)), given.extra

    rows = {"cls": cls.unflatten(0, (len(folded.labels), -1))}
    joining, extra = over_clients(ask, params.stacked, rows, folded.images, folded.features, folded.noise)
    return joining, extra, inserted(plans[0].tokens)


def _tokens(slots: Sequence[TokenPrompt]) -> tuple[Tensor, ...]:
    """The tokens of each slot: one set for all rows of a client (1, blocks, n, d), or one for each of them."""
    return tuple(slot.tokens if slot.tokens.dim() == 4 else slot.tokens.unsqueeze(0) for slot in slots)


def _folded(tokens: Sequence[Tensor], slots: Sequence[TokenPrompt]) -> list[TokenPrompt]:
    return [replace(slot, tokens=each.flatten(0, 1)) for each, slot in zip(tokens, slots, strict=True)]


def fill_up(noise: Sequence[Tensors], sizes: Sequence[int], axes: Axes) -> Tensors:
    """The draws of clients with batches of different sizes, stacked; `axes` says where the images are."""
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
