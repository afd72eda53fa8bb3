"""A set for tests: five shapes in four styles, 16 x 16 pixels, generated in milliseconds."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from PIL import Image

from fedprompt.data.seeded_streams import stream
from fedprompt.data.sources.base import Source

SIZE = 16
TRAIN, TEST = 12, 6  # images per (domain, class)
CLASSES = ("disc", "square", "triangle", "cross", "bars")
DOMAINS = ("red_on_black", "blue_on_white", "outline", "noisy_green")


class TinySource(Source):
    """All pixels are in memory: 360 images of 768 bytes."""

    def __init__(self) -> None:
        per_cell = TRAIN + TEST
        cells = np.arange(len(DOMAINS) * len(CLASSES)).repeat(per_cell)
        self.name = "tiny"
        self.class_names, self.domain_names = CLASSES, DOMAINS
        self.domains, self.labels = np.divmod(cells, len(CLASSES))
        within = np.tile(np.arange(per_cell), len(DOMAINS) * len(CLASSES))
        self.splits = np.where(within < TRAIN, "train", "test")
        self.ranks = np.where(within < TRAIN, within, within - TRAIN)
        self._pixels = _drawn()
        self.fingerprint = hashlib.sha256(self._pixels.tobytes()).hexdigest()

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])


@cache
def _drawn() -> np.ndarray:
    """All images, drawn once: a run takes little longer than drawing them. By domain, then by class."""
    generator = stream(0, "tiny")
    images = [
        paint(shape(label, generator), domain, generator)
        for domain in range(len(DOMAINS))
        for label in range(len(CLASSES))
        for _ in range(TRAIN + TEST)
    ]
    pixels = np.stack(images)
    pixels.setflags(write=False)
    return pixels


def shape(label: int, generator: np.random.Generator) -> np.ndarray:
    """The mask of one shape, a little moved and resized."""
    centre = SIZE / 2 - 0.5 + generator.uniform(-1.5, 1.5, size=2)
    radius = generator.uniform(4.5, 6.0)
    y, x = (np.mgrid[:SIZE, :SIZE] - centre[:, None, None]) / radius  # inside is |x|, |y| <= 1
    inside = np.maximum(abs(x), abs(y)) <= 1
    masks = (
        np.hypot(x, y) <= 1,
        inside,
        inside & (abs(x) <= (y + 1) / 2),
        inside & (np.minimum(abs(x), abs(y)) <= 0.35),
        inside & (np.sin(y * 2 * np.pi) >= 0),
    )
    return masks[label]


def paint(mask: np.ndarray, domain: int, generator: np.random.Generator) -> np.ndarray:
    """The mask in the style of a domain, (size, size, 3) uint8."""
    if domain == 2:
        inner = mask & np.roll(mask, 1, 0) & np.roll(mask, -1, 0) & np.roll(mask, 1, 1) & np.roll(mask, -1, 1)
        mask = mask & ~inner
    ink, paper = (
        ((220, 40, 40), (0, 0, 0)),
        ((40, 60, 220), (255, 255, 255)),
        ((30, 30, 30), (235, 225, 200)),
        ((60, 210, 60), (90, 90, 90)),
    )[domain]
    noise = generator.normal(0, 30 if domain == 3 else 6, size=(SIZE, SIZE, 3))
    return (np.where(mask[..., None], ink, paper) + noise).clip(0, 255).astype(np.uint8)
