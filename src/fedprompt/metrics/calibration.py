"""Expected calibration error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS = 15  # equal-width confidence bins of the calibration error


def calibration_error(bins: Sequence[Sequence[float]]) -> float:
    """ECE: the gap between confidence and accuracy in each bin, weighted by its share of the samples."""
    table = np.asarray(bins, dtype=np.float64)
    return float(np.abs(table[:, 1] - table[:, 2]).sum() / table[:, 0].sum())
