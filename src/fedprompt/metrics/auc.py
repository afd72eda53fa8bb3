"""The area under the ROC curve of a score that should separate members from others.

    A = P(s(member) > s(other)) + P(s(member) = s(other)) / 2
    error^2 = (A (1 - A) + (m - 1) (A / (2 - A) - A^2) + (n - 1) (2 A^2 / (1 + A) - A^2)) / (m n)

over m members and n others: the statistic of Mann and Whitney, with the standard error of Hanley and McNeil (1982).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve, or the mean of some."""

    auc: float
    error: float
    """Standard error."""
    members: int
    others: int

    def to_json(self) -> dict[str, float]:
        return {"auc": self.auc, "error": self.error, "members": self.members, "others": self.others}


def area(members: Tensor, others: Tensor) -> Area:
    """How often a member scores higher than another image, ties counted half."""
    first, second = len(members), len(others)
    ranked = others.double().sort().values
    below, not_above = (torch.searchsorted(ranked, members.double(), right=right) for right in (False, True))
    auc = float((below + not_above).double().mean()) / (2 * second)
    by_members, by_others = auc / (2 - auc) - auc**2, 2 * auc**2 / (1 + auc) - auc**2
    variance = (auc * (1 - auc) + (first - 1) * by_members + (second - 1) * by_others) / (first * second)
    return Area(auc, math.sqrt(max(variance, 0.0)), first, second)


def mean_area(areas: Sequence[Area]) -> Area | None:
    """The unweighted mean; None for an empty list."""
    if not areas:
        return None
    return Area(
        sum(each.auc for each in areas) / len(areas),
        math.sqrt(sum(each.error**2 for each in areas)) / len(areas),
        sum(each.members for each in areas),
        sum(each.others for each in areas),
    )
