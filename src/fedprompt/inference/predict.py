"""Predictions of a client for many pictures: one row for each, batch by batch, and counts at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from fedprompt.errors import ConfigError, DataError, broken
from fedprompt.inference.exported_client import ExportedClient
from fedprompt.inference.input_images import Item
from fedprompt.inference.trained_client import TrainedClient


@dataclass(frozen=True)
class Row:
    """The prediction for one item, or its error."""

    name: str
    label: str | None = None
    """The given label."""
    top: tuple[tuple[str, float], ...] = ()
    """Classes and their probabilities, the most likely first."""
    entropy: float | None = None
    """In nats."""
    mutual_information: float | None = None
    """In nats; None for methods that draw once."""
    error: str | None = None
    item: str = "image"
    """What it is: "image" or "text"."""

    def to_json(self) -> dict[str, Any]:
        return {
            self.item: self.name,
            "label": self.label,
            "top": [{"class": name, "probability": share} for name, share in self.top],
            "entropy": self.entropy,
            "mutual_information": self.mutual_information,
            "error": self.error,
        }


@dataclass
class Tally:
    """Counts of the rows so far."""

    classes: frozenset[str]
    item: str = "image"
    """What is counted: "image" or "text"."""
    items: int = 0
    labelled: int = 0
    """With a label that is a class of the run."""
    correct: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Names of the first few."""
    failed: int = 0

    def add(self, row: Row) -> None:
        self.items += 1
        if row.error is not None:
            self.failed += 1
            self.unreadable += [row.name] if len(self.unreadable) < 3 else []
        elif row.label in self.classes:
            self.labelled += 1
            self.correct += row.top[0][0] == row.label

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.labelled if self.labelled else None

    def to_json(self) -> dict[str, Any]:
        return {
            f"{self.item}s": self.items,
            "unreadable": self.failed,
            "labelled": self.labelled,
            "correct": self.correct,
            "accuracy": self.accuracy,
        }

    def sentence(self) -> str:
        parts = [f"{self.items} {self.item}{'s' * (self.items != 1)}"]
        if self.failed:
            parts.append(f"{self.failed} unreadable")
        if self.accuracy is not None:
            parts.append(f"accuracy {100 * self.accuracy:.1f} % ({self.correct} of {self.labelled} with a label)")
        return ", ".join(parts)

    def complaint(self) -> DataError | None:
        """The error that ends the command after all other items are predicted."""
        if not self.failed:
            return None
        rest = ", ..." if self.failed > len(self.unreadable) else ""
        names = ", ".join(self.unreadable) + rest
        return DataError(
            f"{self.item}s must be readable: {self.failed} of {self.items} were not ({names}); the others are done"
        )


def predictions(client: TrainedClient | ExportedClient, items: Iterable[Item], top: int = 5) -> Iterator[Row]:
    """One row for each item, in their order. Only one batch of them is in memory."""
    if top < 1:
        raise ConfigError(broken("top", "be at least 1", top))
    generator = client.stream()
    for group in _groups(items, client.batch_size):
        pixels, errors = _decoded(client, group)
        prediction = client.predict(np.stack(pixels), generator) if pixels else None
        place = 0
        for item, error in zip(group, errors, strict=True):
            if error is not None or prediction is None:
                yield Row(item.name, item.label, error=error, item=client.item)
                continue
            shares, order = prediction.probabilities[place].sort(descending=True, stable=True)
            spread = prediction.mutual_information
            yield Row(
                item.name,
                item.label,
                tuple(
                    (client.class_names[c], float(p)) for p, c in zip(shares[:top], order[:top].tolist(), strict=True)
                ),
                float(prediction.entropy[place]),
                None if spread is None else float(spread[place]),
                item=client.item,
            )
            place += 1


def _groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    left = iter(items)
    while group := list(islice(left, size)):
        yield group


def _decoded(
    client: TrainedClient | ExportedClient, group: Iterable[Item]
) -> tuple[list[np.ndarray], list[str | None]]:
    """Pixels of the readable pictures, and for each picture its error."""
    pixels: list[np.ndarray] = []
    errors: list[str | None] = []
    for item in group:
        try:
            pixels.append(client.pixels([item.load()])[0])
            errors.append(None)
        except DataError as error:
            errors.append(str(error))
    return pixels, errors
