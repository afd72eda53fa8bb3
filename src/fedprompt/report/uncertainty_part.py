"""The section "What uncertainty is worth": a table with a line for every row and score, and two pictures.

What is measured, and how, is in `inference/uncertainty.py`; here are only its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedprompt.report import uncertainty_plots
from fedprompt.report.comparison_table import NOTHING, Cell, Spread, percent
from fedprompt.report.html_elements import slug
from fedprompt.report.sections import Part, Picture, Table

TITLE = "What uncertainty is worth"
COLUMNS = {
    "accuracy": "Accuracy",
    "ece": "ECE",
    "errors": "AUROC errors",
    "aurc": "AURC",
    "selective": "Accuracy at 80 %",
    "unknown": "AUROC unknown",
    "novel": "AUROC novel",
}
MEANING = (
    "Per cent, mean ± standard deviation over runs, test images of all clients together, answered again. AUROC errors: how "
    "often a wrong answer is less certain than a right one. AURC: mean share of wrong answers over all coverages, less is "
    "better. Accuracy at 80 %: of the most certain images."
)
MEANING_OF = {
    "unknown": "AUROC unknown: how often an image of a class that the client never saw is less certain than one of its own "
    "test images.",
    "novel": "AUROC novel: the same for images of classes that no client ever saw.",
}
CURVES = "Wrong answers among the most certain images, by the share of images that are answered. Lower is better."
BY_DRAWS = (
    "Accuracy if only the first draws of a prediction are averaged; the bars are one standard deviation over runs."
)


@dataclass(frozen=True, eq=False)
class Line:
    """One score of one row."""

    row: str
    score: str
    runs: int
    images: int
    strange: Mapping[str, int]
    """How many images of unknown and of novel classes were shown."""
    figures: Mapping[str, Spread]
    curves: Sequence[np.ndarray]
    """Risk by coverage of every run."""

    def to_json(self) -> dict[str, Any]:
        known = {key: {"mean": value.mean, "std": value.std} for key, value in self.figures.items()}
        images = {f"{kind}_images": count for kind, count in self.strange.items()}
        return {"row": self.row, "score": self.score, "runs": self.runs, "images": self.images, **images} | {
            "figures": known
        }


@dataclass(frozen=True, eq=False)
class Worths:
    """All lines of one task, and the accuracies by draws of the rows that have some."""

    lines: list[Line]
    by_draws: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def shown(self) -> list[str]:
        return [key for key in COLUMNS if any(key in line.figures for line in self.lines)]

    @property
    def head(self) -> list[str]:
        return ["Row", "Score", *(COLUMNS[key] for key in self.shown), "Runs", "Images"]

    def rows(self) -> list[list[str]]:
        return [
            [
                line.row,
                line.score,
                *(_text(line.figures.get(key)) for key in self.shown),
                str(line.runs),
                str(line.images),
            ]
            for line in self.lines
        ]

    @property
    def meaning(self) -> str:
        return " ".join([MEANING, *(text for key, text in MEANING_OF.items() if key in self.shown)])

    def pictures(self, label: str = "") -> list[Picture]:
        """Risk by coverage, and accuracy by draws where there are draws."""
        curves = {
            f"{line.row}, {line.score}": line.curves
            for line in self.lines
            if line.score != "confidence"  # it ranks nearly as the entropy does
        }
        made = [("risk-coverage", CURVES, uncertainty_plots.risk_coverage(curves))]
        if self.by_draws:
            made.append(("accuracy-by-draws", BY_DRAWS, uncertainty_plots.by_draws(self.by_draws)))
        return [
            Picture(f"{name}-{slug(label)}" if label else name, f"{label}: {text}" if label else text, figure)
            for name, text, figure in made
        ]


def uncertainty_part(found: Mapping[str, Worths]) -> Part:
    """The section, with the worths of every task by its label."""
    tables = [
        Table(f"{label}: {TITLE}" if label else TITLE, each.head, [[Cell(text) for text in row] for row in each.rows()])
        for label, each in found.items()
    ]
    pictures = [picture for label, each in found.items() for picture in each.pictures(label)]
    texts = list(dict.fromkeys(each.meaning for each in found.values()))
    return Part(TITLE, texts, pictures, tables=tables, unfolded=True)


def _text(value: Spread | None) -> str:
    return NOTHING if value is None else percent(value)
