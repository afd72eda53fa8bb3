"""Are the labels those of the images? Zero-shot accuracy with the right class names, and with names in other places.

    right     share of images x of class y with argmax_c <I(x), T("a photo of a" c)> = y
    permuted  the same after class c got the name of class s(c), s(c) != c for all c; mean over a few such s
    blind     sum_c (share of images of class c) * (share of images called c): the same answers in random order
    chance    1 / C

A loader that mixes up labels, or a text tower that says the same of every class, brings `right` down to the others. The
check warns where

    right < max(chance, blind, permuted) + 3 * sqrt(m (1 - m) / n),   m = max(chance, blind), n images

and never stops a run: a random backbone is allowed to know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprompt.core.method import World
from fedprompt.features.image_bank import ImageBank
from fedprompt.random_streams import SERVER, Stream, stream

IMAGES = 512  # test images that are used, at most
PERMUTATIONS = 5
STANDARD_ERRORS = 3.0
WORDS = "a photo of a"

LabelCheck = dict[str, Any]  # plain figures, as the run file keeps them


def check_labels(world: World, bank: ImageBank, seed: int, part: str = "test") -> LabelCheck | None:
    """The figures for a federation; None where there is only one class to name. `part` says which images are looked at."""
    if world.classes < 2:
        return None
    sizes = bank.sizes(part)
    indices, labels = [], []
    for client, count in enumerate(evenly(sizes, IMAGES)):
        if count:
            images, positions = bank.images(client, part), spaced(int(sizes[client]), count)
            indices.append(torch.from_numpy(images.indices)[positions])
            labels.append(images.labels[positions.to(images.labels.device)])
    features = bank.tables.features("image", torch.cat(indices), alone=True)
    found = figures(features, torch.cat(labels), world.text.encode_words(WORDS), seed)
    if all(name.isdecimal() for name in world.class_names):
        found["numbered"] = True
    return found if part == "test" else {**found, "part": part}


def figures(images: Tensor, labels: Tensor, text: Tensor, seed: int) -> LabelCheck:
    """Of unit vectors of images (n, D) with labels (n,), and of classes (C, D)."""
    classes, count = len(text), len(labels)
    images, text = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (images, text))
    called = (images @ text.T).argmax(-1)
    right = _share(called == labels)
    generator = stream(seed, 0, SERVER, "label_check")
    elsewhere = [(images @ text[derangement(classes, generator)].T).argmax(-1) for _ in range(PERMUTATIONS)]
    permuted = sum(_share(wrong == labels) for wrong in elsewhere) / PERMUTATIONS
    true, answered = (torch.bincount(values, minlength=classes).double() / count for values in (labels, called))
    blind, chance = float((true * answered).sum()), 1 / classes
    level = max(chance, blind)
    threshold = max(level, permuted) + STANDARD_ERRORS * (level * (1 - level) / count) ** 0.5
    return {
        "images": count,
        "classes": classes,
        "right": right,
        "permuted": permuted,
        "chance": chance,
        "blind": blind,
        "threshold": threshold,
        "clear": right >= threshold,
    }


def sentence(check: Mapping[str, Any]) -> str:
    """The check in one line."""
    share = {name: f"{100 * check[name]:.1f} %" for name in ("right", "permuted", "chance")}
    return (
        f"label check: zero-shot {share['right']}, with permuted names {share['permuted']}, chance {share['chance']} "
        f"({check['images']} {check.get('part', 'test')} images, {check['classes']} classes)"
    )


def warning(check: Mapping[str, Any]) -> str | None:
    """What a person should know when the labels do not show in the images."""
    if check["clear"]:
        return None
    if check.get("numbered"):
        return (
            f"zero-shot accuracy is {100 * check['right']:.1f} %, and the classes have numbers for names: this method reads "
            "names, so give the source some, such as a JSON file with `classes` beside a parquet file"
        )
    return (
        f"zero-shot accuracy {100 * check['right']:.1f} % is not clearly above guessing and permuted class names (it "
        f"should reach {100 * check['threshold']:.1f} %): labels or class names may be mixed up, or this backbone does "
        "not know these classes"
    )


def derangement(count: int, generator: Stream) -> Tensor:
    """A permutation that moves everyone: a random circle in which each takes the place of the next."""
    circle = generator.permutation(count)
    moved = torch.empty_like(circle)
    moved[circle] = circle.roll(-1)
    return moved


def evenly(sizes: Sequence[int] | np.ndarray, limit: int) -> list[int]:
    """How many images of each client: as equal as their sizes allow, `limit` in total at most."""
    held = np.asarray(sizes)
    each = max(each for each in range(limit + 1) if np.minimum(held, each).sum() <= limit)
    counts = np.minimum(held, each)
    more = np.flatnonzero(held > each)
    rest = min(limit - int(counts.sum()), len(more))
    counts[more[spaced(len(more), rest).numpy()]] += 1
    return [int(count) for count in counts]


def spaced(size: int, count: int) -> Tensor:
    """`count` different positions, spread over 0..size-1."""
    return torch.arange(count) * size // max(count, 1)


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())
