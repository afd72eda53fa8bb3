"""From class probabilities to the counts of a `ClientResult`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedprompt.metrics.accuracy import ClientResult, pack_hits
from fedprompt.metrics.calibration import BINS


def entropy(probabilities: Tensor) -> Tensor:
    """Of the last axis, in nats; 0 log 0 counts as 0."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def score(
    draws: Tensor,
    labels: Tensor,
    domains: np.ndarray,
    domain_names: Sequence[str],
    diagnostics: Mapping[str, float] | None = None,
) -> ClientResult:
    """Average V draws (V, B, C) in probability space and count. Mutual information = H(mean) - mean H."""
    draws = draws.detach().to("cpu", torch.float64)
    labels = labels.cpu()
    probabilities = draws.mean(0)
    confidence, predicted = probabilities.max(-1)
    right = predicted == labels
    spread = entropy(probabilities)
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    index = (confidence * BINS).long().clamp(max=BINS - 1)
    bins.index_add_(0, index, torch.stack([torch.ones_like(confidence), confidence, right.double()], -1))
    chosen = probabilities.gather(-1, labels[:, None]).clamp_min(torch.finfo(torch.float64).tiny)
    hits = right.numpy()
    return ClientResult(
        samples=len(labels),
        correct=int(right.sum()),
        nll=float(-chosen.log().sum()),
        entropy=float(spread.sum()),
        mutual_information=float((spread - entropy(draws).mean(0)).clamp_min(0).sum()),
        bins=bins.tolist(),
        domains={
            domain_names[domain]: [int((domains == domain).sum()), int(hits[domains == domain].sum())]
            for domain in np.unique(domains).tolist()
        },
        diagnostics=dict(diagnostics or {}),
        hits=pack_hits(hits),
    )
