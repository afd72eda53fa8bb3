"""What an uncertainty is worth: does it tell wrong answers from right ones?

    risk(k)  = wrong answers among the k images with the least uncertainty, as a share;   coverage = k / n
    AURC     = mean over k = 1..n of risk(k)                                   (Geifman and El-Yaniv, 2017)
    AUROC    = P(uncertainty of a wrong answer > that of a right one), ties counted half

Images of equal uncertainty have no order among themselves: each of them adds the mean error of all of them, which is the
expectation over all orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedprompt.metrics.one_against_rest import auroc

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Selective:
    """Answers to n images, from the one with the least uncertainty to the one with the most."""

    risks: Array
    """(n,): risk(1), ..., risk(n)."""
    auroc: float
    """NaN if all answers are right, or all are wrong."""

    @classmethod
    def of(cls, uncertainty: Array, wrong: Array) -> Selective:
        """Of any score that grows with uncertainty (n,), and which answers are wrong (n,)."""
        values, place, counts = np.unique(uncertainty, return_inverse=True, return_counts=True)
        shares = np.bincount(place, weights=wrong.astype(np.float64), minlength=len(values)) / counts
        errors = np.repeat(shares, counts)
        area = auroc(wrong, uncertainty) if 0 < wrong.sum() < len(wrong) else math.nan
        return cls(errors.cumsum() / np.arange(1, len(errors) + 1), area)

    @property
    def aurc(self) -> float:
        return float(self.risks.mean())

    def accuracy_at(self, coverage: float) -> float:
        """Accuracy on this share of the images, those with the least uncertainty; at least on one image."""
        return 1 - float(self.risks[max(1, round(coverage * len(self.risks))) - 1])

    def curve(self, points: int = 100) -> Array:
        """The risk at coverages 1/points, ..., 1, so that runs with other numbers of images can be averaged."""
        coverages = np.arange(1, points + 1) / points
        here: Array = np.interp(coverages, np.arange(1, len(self.risks) + 1) / len(self.risks), self.risks)
        return here
