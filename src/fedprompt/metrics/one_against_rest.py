"""Figures beside accuracy, from labels and class probabilities; by the definitions of scikit-learn.

    recall_c = M_cc / sum_k M_ck            over the confusion matrix M: rows are labels, columns predictions
    balanced accuracy = mean of recall_c    over classes that have images
    F1_c = 2 M_cc / (sum_k M_ck + sum_k M_kc),   macro-F1 = its mean over classes that are labels or predictions
    AUROC = mean over classes c of P(p_c(image of c) > p_c(another)), ties counted half
    sensitivity at specificity s = mean over classes of the largest true positive rate whose false positive rate is at most 1 - s

A class without images, or the only one with images, has neither AUROC nor sensitivity and is left out of their means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SPECIFICITY = 0.9  # at which run files have the sensitivity
RANKED = ("auroc", "sensitivity")  # figures that need an order of images, not counts


@dataclass(frozen=True, eq=False)
class Figures:
    """What is known of some labelled images and their predictions."""

    confusion: Array
    """(C, C) counts."""
    auroc: float
    """NaN where no class can be told from another."""
    sensitivity: float
    """At the given specificity; NaN likewise."""

    @classmethod
    def of(cls, labels: Array, probabilities: Array, specificity: float = SPECIFICITY) -> Figures:
        """Of labels (N,) and probabilities (N, C)."""
        classes = probabilities.shape[1]
        confusion = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(confusion, (labels, probabilities.argmax(1)), 1)
        pairs = [(labels == number, probabilities[:, number]) for number in range(classes)]
        pairs = [(positive, scores) for positive, scores in pairs if 0 < positive.sum() < len(positive)]
        areas = [auroc(positive, scores) for positive, scores in pairs]
        found = [sensitivity(positive, scores, specificity) for positive, scores in pairs]
        return cls(confusion, _mean(areas), _mean(found))

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.confusion) / self.images)

    @property
    def balanced_accuracy(self) -> float:
        labelled = self.confusion.sum(1)
        here = labelled > 0
        return float((np.diag(self.confusion)[here] / labelled[here]).mean())

    @property
    def macro_f1(self) -> float:
        total = self.confusion.sum(0) + self.confusion.sum(1)
        here = total > 0
        return float((2 * np.diag(self.confusion)[here] / total[here]).mean())

    def to_dict(self) -> dict[str, float]:
        """The numbers, by name."""
        names = ("images", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "sensitivity")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Scores:
    """The predictions of some images, kept until those of all clients can be ranked together; never stored and never sent."""

    labels: Array
    """(N,)"""
    domains: Array
    """(N,) places in a list of names."""
    probabilities: Array
    """(N, C)"""


def ranked_together(each: Sequence[tuple[Scores, Sequence[str]]]) -> dict[str, dict[str, float]]:
    """AUROC and sensitivity of all images, and of every domain where there are several: what cannot be summed over clients."""
    labels = np.concatenate([scores.labels for scores, _ in each])
    probabilities = np.concatenate([scores.probabilities for scores, _ in each])
    names = np.concatenate([np.array(own, dtype=object)[scores.domains] for scores, own in each])
    domains = {name: _ranks(labels[names == name], probabilities[names == name]) for name in sorted(set(names))}
    if len(domains) == 1:
        domains = {}
    by_figure = {key: {name: found[key] for name, found in domains.items() if key in found} for key in RANKED}
    return {
        "ranked": _ranks(labels, probabilities),
        **{f"{key}_by_domain": values for key, values in by_figure.items()},
    }


def _ranks(labels: Array, probabilities: Array) -> dict[str, float]:
    found = Figures.of(labels, probabilities)
    return {name: value for name in RANKED if not math.isnan(value := getattr(found, name))}


def rates(positive: Array, scores: Array) -> tuple[Array, Array]:
    """False and true positive rate at every threshold, from the highest: images of one score change sides together."""
    values, place = np.unique(-scores, return_inverse=True)
    counts = [np.bincount(place[chosen], minlength=len(values)) for chosen in (~positive, positive)]
    false, true = (np.concatenate([[0], np.cumsum(count)]) / count.sum() for count in counts)
    return false, true


def auroc(positive: Array, scores: Array) -> float:
    """The area under the curve of the two rates."""
    false, true = rates(positive, scores)
    return float(np.trapezoid(true, false))


def sensitivity(positive: Array, scores: Array, specificity: float) -> float:
    """The largest true positive rate where the specificity is at least the given one."""
    false, true = rates(positive, scores)
    return float(true[false <= 1 - specificity + 1e-12].max())  # 1 - 0.9 is less than 0.1


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan
