"""What a client's prompts change for one image: attention of CLS with and without them, predictions, and mixtures.

*Without prompts* means the same frozen backbone with the client's own head; for methods that read class names, the class
names after a fixed template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprompt.client.step import inserted
from fedprompt.core.method import Batch, Mixture, Seen, probabilities
from fedprompt.data.cache.pixel_store import normalise
from fedprompt.errors import ConfigError, DivergenceError, argument, broken
from fedprompt.inference.attention_maps import Attention, Watched, watch, watch_plain
from fedprompt.inference.in_memory_images import require_images
from fedprompt.inference.trained_client import Picture, TrainedClient
from fedprompt.methods.bases.with_text import similarity
from fedprompt.tensors import Tensors

PLAIN_WORDS = "a photo of a"  # before class names, in place of learned words
LAST, ROLLOUT = "last", "rollout"
MOST_NAMED = 20  # classes in an error
MOST_DRAWN = 1024  # pixels of the longer side of a picture that is drawn


@dataclass(frozen=True)
class AttentionView:
    """Attention of CLS in one image."""

    patches: np.ndarray
    """(side, side), shares of all attention on patches."""
    shares: dict[str, float]
    """Of all attention, by kind of row: cls, extra, patches, prompts."""


@dataclass(frozen=True)
class Mixed:
    """The mixture for one image; see `Mixture`."""

    what: str
    unit: str
    parts: tuple[str, ...]
    weights: tuple[float, ...]
    used: tuple[bool, ...]

    @classmethod
    def of(cls, mixture: Mixture) -> Mixed:
        """Of the first image of a batch."""
        weights = mixture.weights[0]
        used = weights > 0 if mixture.used is None else mixture.used[0]
        return cls(mixture.what, mixture.unit, mixture.parts, tuple(weights.tolist()), tuple(used.tolist()))

    @property
    def order(self) -> list[int]:
        """Its parts, those used first and the heaviest first."""
        return sorted(range(len(self.parts)), key=lambda part: (not self.used[part], -self.weights[part]))


@dataclass(frozen=True)
class Explanation:
    """All numbers of the picture."""

    run: str
    client: str
    method: str
    image: str
    pixels: np.ndarray
    """(H, W, 3) uint8, the part of the image that the backbone sees, at its own resolution."""
    size: int
    """Side of the square that the backbone sees, in pixels."""
    class_names: tuple[str, ...]
    label: int | None
    """The number of the right class, where it is known."""
    where: str
    """Which attention: "block 11 of 0..11", "rollout ..."."""
    changes: str
    """The method's prompts and their places, in words."""
    in_images: bool
    """Whether the image tower is changed at all."""
    differs: bool
    """Whether the method changes anything: prompts in either tower, or weights."""
    tokens: int
    """Prompt tokens at the block shown."""
    prompted: AttentionView
    plain: AttentionView
    draws: np.ndarray
    """(V, C), class probabilities of every draw."""
    plain_probabilities: np.ndarray
    """(C,), without prompts."""
    plain_means: str
    """What "without prompts" means here."""
    mixtures: tuple[Mixed, ...]
    numbers: dict[str, float]
    """The method's own diagnostics."""

    @property
    def probabilities(self) -> np.ndarray:
        """(C,), the mean over the draws."""
        mean: np.ndarray = self.draws.mean(0)
        return mean

    @property
    def answer(self) -> str:
        """`Predicted: mug, 87.3 %. Right.`"""
        first = int(self.probabilities.argmax())
        text = f"Predicted: {self.class_names[first]}, {100 * self.probabilities[first]:.1f} %."
        if self.label is None:
            return text
        return f"{text} Right." if first == self.label else f"{text} Wrong: it is {self.class_names[self.label]}."

    def top(self, count: int) -> list[int]:
        """The likeliest classes with prompts, and the likeliest without."""
        order = np.argsort(-self.probabilities, kind="stable")[:count].tolist()
        first = int(self.plain_probabilities.argmax())
        return order if first in order else [*order[: count - 1], first]

    def to_json(self) -> dict[str, Any]:
        """The numbers without the pixels."""

        def values(view: AttentionView) -> dict[str, Any]:
            return {"shares": view.shares, "patches": view.patches.tolist()}

        spread = self.draws.std(0)
        return {
            "run": self.run,
            "client": self.client,
            "method": self.method,
            "image": self.image,
            "predicted": self.class_names[int(self.probabilities.argmax())],
            "label": None if self.label is None else self.class_names[self.label],
            "right": None if self.label is None else int(self.probabilities.argmax()) == self.label,
            "attention": {
                "where": self.where,
                "prompt_tokens": self.tokens,
                "with_prompts": values(self.prompted),
                "without_prompts": values(self.plain),
            },
            "changes": self.changes,
            "without_prompts_means": self.plain_means,
            "classes": [
                {
                    "class": name,
                    "with_prompts": float(self.probabilities[number]),
                    "without_prompts": float(self.plain_probabilities[number]),
                    "std_over_draws": float(spread[number]) if len(self.draws) > 1 else None,
                }
                for number, name in enumerate(self.class_names)
            ],
            "mixtures": [
                {
                    "what": mixed.what,
                    "unit": mixed.unit,
                    "parts": [
                        {"name": mixed.parts[part], "weight": mixed.weights[part], "used": mixed.used[part]}
                        for part in mixed.order
                    ],
                }
                for mixed in self.mixtures
            ],
            "diagnostics": self.numbers,
        }


def explain(client: TrainedClient, picture: Picture, block: str | int = LAST, label: str | None = None) -> Explanation:
    """What the client's prompts change for a picture. `block`: a number (from 0, after the stem), "last" or "rollout".

    `label` is the right class; when not given, the folder of an image file counts if it has the name of a class.
    """
    require_images(client.backbone, "an explanation")
    number, right = _block(block, client.backbone.depth), _label(label, picture, client.world.class_names)
    pixels = client.pixels([picture])
    backbone, world = client.backbone, client.world
    images = client.images(pixels)
    with torch.no_grad():
        inputs = normalise(pixels, backbone.mean, backbone.std, backbone.dtype, backbone.device)
        batch, noise = client.batch(images), client.noise(1)
        rows, plain = watch_plain(backbone, inputs)
        watched = watch(client.method, world, client.params, backbone, inputs, batch, noise)
        draws = client.method.predict(world, client.params, watched.seen, batch, noise)[:, 0]
        without, means = _without(client, watched, rows, batch, noise)
        numbers = client.method.diagnostics(world, client.params, watched.seen, batch)
        mixtures = client.method.mixtures(world, client.params, watched.seen, batch)
    if not draws.isfinite().all():
        raise DivergenceError(f"predictions of client {client.name!r} must be finite, got NaN or infinity")
    where = (
        f"rollout over all {backbone.shape.depth} blocks"
        if number is None
        else f"block {number} of 0..{backbone.depth - 1}, mean of {backbone.shape.heads} heads"
    )
    return Explanation(
        run=client.opened.run.name,
        client=client.name,
        method=client.config.label,
        image=str(picture) if not isinstance(picture, np.ndarray) else "array",
        pixels=client.own_pixels(picture, MOST_DRAWN),
        size=pixels.shape[1],
        class_names=world.class_names,
        label=right,
        where=where,
        changes=describe(watched, client),
        in_images=watched.in_images,
        differs=watched.in_images or client.method.uses_text,
        tokens=_tokens(watched.attention, number, backbone.stem),
        prompted=_look(watched.attention, number, backbone.stem),
        plain=_look(plain, number, backbone.stem),
        draws=draws.double().cpu().numpy(),
        plain_probabilities=without.double().cpu().numpy(),
        plain_means=means,
        mixtures=tuple(Mixed.of(mixture) for mixture in mixtures),
        numbers={name: float(value.mean()) for name, value in numbers.items()},
    )


def describe(watched: Watched, client: TrainedClient) -> str:
    """How the method changes the frozen towers, as text."""
    given, changes = watched.given, []
    slots = inserted(given.tokens)
    if slots:
        deepest = sorted({block for slot in slots for block in slot.blocks})
        each = " + ".join(str(slot.tokens.shape[-2]) for slot in slots)
        own = [slot.tokens.ndim == 4 for slot in slots]
        made = f", {'all' if all(own) else 'some'} made for this image," if any(own) else ""
        changes.append(f"{each} prompt tokens at a time{made} enter the image tower at {_listed(deepest)}")
    if given.weights:
        blocks = sorted({int(name.split(".")[1]) for name in given.weights})
        changes.append(f"weights of the image tower are changed in {_listed(blocks)}; there are no prompt tokens")
    if given.factors:
        changes.append("outputs inside the image tower are scaled and shifted, as made for this image")
    if given.pixels is not None:
        changes.append("learned pixels are added to the image")
    if not changes:
        changes.append("the image tower is unchanged, so there is one map")
    if given.text:
        words = {context.tokens.shape[-2] for context in given.text.values()}
        changes.append(
            f"learned words ({', '.join(map(str, sorted(words)))}) are added to the class names in the text tower"
        )
    elif client.method.uses_text:
        changes.append("the text tower reads plain words")
    if not given.text and not client.method.uses_text and not watched.in_images:
        changes.append("only the head is trained")
    return "; ".join(changes)


def _without(
    client: TrainedClient, watched: Watched, rows: Mapping[str, Tensor], batch: Batch, noise: Tensors
) -> tuple[Tensor, str]:
    """Class probabilities (C,) of the backbone without prompts, and their description."""
    method, world = client.method, client.world
    if method.uses_text:
        logits = similarity(world, rows["image"], world.text.encode_words(PLAIN_WORDS))
        return probabilities(logits)[0], f"class names after '{PLAIN_WORDS}', image tower unchanged"
    repeat = watched.given.repeat
    if watched.seen.prompts is not None:  # CLS replaces the rows of absent prompts
        rows = {**rows, "prompts": rows["cls"].unsqueeze(1).expand(-1, watched.seen.prompts.shape[1], -1)}
    kept = {name: rows[name].repeat(repeat, *[1] * (rows[name].dim() - 1)) for name in method.reads if name in rows}
    seen = Seen(**kept, text=watched.seen.text, extra=watched.seen.extra)
    return method.predict(world, client.params, seen, batch, noise)[:, 0].mean(
        0
    ), "the same head, image tower unchanged"


def _block(block: str | int, depth: int) -> int | None:
    """The number of a block; None for all of them."""
    text = str(block)
    if text == ROLLOUT:
        return None
    if text == LAST:
        return depth - 1
    if not (text.isascii() and text.isdecimal() and int(text) < depth):
        raise ConfigError(
            broken(argument("block", "--block"), f"be {LAST}, {ROLLOUT} or a number in 0..{depth - 1}", block)
        )
    return int(text)


def _label(label: str | None, picture: Picture, class_names: Sequence[str]) -> int | None:
    """The number of the right class, if it is known."""
    known = [name.casefold() for name in class_names]
    if label is None:
        folder = Path(picture).resolve().parent.name.casefold() if isinstance(picture, str | Path) else None
        return known.index(folder) if folder in known else None
    if label.casefold() not in known:
        shown = ", ".join(class_names[:MOST_NAMED]) + (", ..." if len(class_names) > MOST_NAMED else "")
        raise ConfigError(broken("--label", f"be a class of the run ({shown})", label))
    return known.index(label.casefold())


def _look(attention: Attention, block: int | None, stem: int) -> AttentionView:
    """For one image, the mean over its draws."""
    where = attention.rollout() if block is None else attention.at(stem + block)
    shares = {name: float(share.mean()) for name, share in attention.shares(where).items()}
    return AttentionView(attention.grid(where).mean(0).float().cpu().numpy(), shares)


def _tokens(attention: Attention, block: int | None, stem: int) -> int:
    shown = attention.blocks[-1 if block is None else stem + block]
    return int(shown.cls.shape[-1]) - attention.shape.tokens


def _listed(blocks: Sequence[int]) -> str:
    """Numbers of blocks, with ranges: "blocks 0-3, 5"."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'block' if len(blocks) == 1 else 'blocks'} {listed}"
