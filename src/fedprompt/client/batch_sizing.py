"""What a step asks of the frozen backbone, and how many clients therefore make one good batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedprompt.client.step import changes_images, first_block, inserted, make_batch
from fedprompt.core.method import Method, World
from fedprompt.errors import ContractError
from fedprompt.features.augmentation import whole_views
from fedprompt.features.feature_tables import tokens_name
from fedprompt.features.image_bank import Images
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.tensors import Tensors

ENOUGH_ROWS = 2048  # tokens in one pass of the frozen backbone
MOST_CLIENTS = 16  # that work at the same time, however small they are
NAME_TOKENS = 6  # of a class name with what frames it, about

Noise = Callable[[Method, int, bool, Stream], Tensors]  # the random draws of a step, on the right device
Axes = Mapping[str, tuple[int, int]]  # by draw, the axis that goes over the images and how many rows each has there


@dataclass(frozen=True)
class StepNeeds:
    """What a step asks of the backbone."""

    per_image: int
    """Tokens that go through it for every image."""
    per_client: int
    """And for every client on top of that."""
    features: tuple[str, ...]
    """What it reads of the images, by the names of `ImageBank.prefetch`."""
    axes: Axes
    draws: bool
    """Whether it draws random numbers."""
    foldable: bool
    """Whether several clients can share a pass."""


class BatchSizer:
    """Finds out what steps ask for. Only sizes decide, so the bits of a run depend neither on the machine nor on its history,
    until memory runs out.

    Folding clients pays as long as a batch is too small to keep the matrix products busy; beyond `ENOUGH_ROWS` tokens it only
    costs memory.
    """

    def __init__(self, world: World, cohort: int | Literal["auto"], noise: Noise, augmented: bool = False) -> None:
        """`augmented` says whether features of training images are computed in every step."""
        self._world, self._cohort, self._noise, self._augmented = world, cohort, noise, augmented
        self._known: list[tuple[Method, bool, object, StepNeeds]] = []
        self._fitting: int | None = None
        self._notes: list[str] = []

    def halved(self, clients: int) -> int:
        """Half as many clients, for which memory has run out: no later batch has more."""
        self._fitting = max(1, clients // 2)
        self._notes.append(f"out of memory with {clients} clients in one batch: from here on at most {self._fitting}")
        return self._fitting

    def take_notes(self) -> list[str]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        return notes

    @property
    def most(self) -> int:
        """Clients whose parameters are held at the same time."""
        return MOST_CLIENTS if self._cohort == "auto" else self._cohort

    def clients(self, step_needs: StepNeeds, batch: int) -> int:
        """How many clients share a pass, with batches of that many images."""
        if not step_needs.foldable:
            return 1
        rows = max(1, step_needs.per_image * batch + step_needs.per_client)
        wanted = max(1, min(MOST_CLIENTS, ENOUGH_ROWS // rows)) if self._cohort == "auto" else self._cohort
        return wanted if self._fitting is None else min(wanted, self._fitting)

    def of(self, step: Method, params: Tensors, images: Images, training: bool) -> StepNeeds:
        """The demand of a step on clients whose parameters look like these; asked of one image."""
        kind = shapes_of(params)
        for known, trained, looks, step_needs in self._known:
            if trained == training and looks == kind and known == step:
                return step_needs
        found = self._measure(step, params, images, training)
        self._known.append((step, training, kind, found))
        return found

    def _measure(self, step: Method, params: Tensors, images: Images, training: bool) -> StepNeeds:
        world, first, anew = self._world, torch.zeros(1, dtype=torch.long), training and self._augmented
        one = images.load(first, step.needs, whole_views(1)) if anew else images
        image = make_batch(step, one, first, training)
        noise = self._drawn(step, 1, training)
        with torch.no_grad():
            given = step.prompts(world, params, image, noise)
        tokens = world.tokens + sum(slot.tokens.shape[-2] for slot in inserted(given.tokens))
        passes = changes_images(given, step.reads)
        features_first = anew and (bool(step.needs) or not passes)
        said = [
            (each.per_image, (len(each.names) or world.classes) * (each.tokens.shape[-2] + NAME_TOKENS))
            for each in given.text.values()
        ]
        return StepNeeds(
            per_image=(given.repeat * tokens if passes else 0)
            + (world.tokens if features_first else 0)
            + sum(tokens for per_image, tokens in said if per_image),
            per_client=sum(tokens for per_image, tokens in said if not per_image),
            features=(*step.needs, *((tokens_name(first_block(given)),) if passes else step.reads)),
            axes=self._axes(step, training),
            draws=bool(noise),
            foldable=not (given.weights or given.text_weights),
        )

    def _axes(self, step: Method, training: bool) -> Axes:
        """Which axis goes over the images is the one that grows with their number."""
        sizes = (5, 7)
        few, more = (self._drawn(step, size, training) for size in sizes)
        found = {}
        for name, tensor in few.items():
            grown = [
                (axis, short, long)
                for axis, (short, long) in enumerate(zip(tensor.shape, more[name].shape, strict=True))
                if short != long
            ]
            if not grown:
                continue
            axis, short, long = grown[0]
            if len(grown) > 1 or short % sizes[0] or long != short // sizes[0] * sizes[1]:
                rule = "have one axis over the images, as long as a multiple of their number, draw after draw"
                raise ContractError(f"noise {name!r} of {type(step).__name__} must {rule}")
            found[name] = (axis, short // sizes[0])
        return found

    def _drawn(self, step: Method, size: int, training: bool) -> Tensors:
        return self._noise(step, size, training, stream(0, 0, SERVER, "sizes"))


def shapes_of(params: Tensors) -> tuple[Any, ...]:
    """Clients can be stacked if they agree on this."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(params.items()))
