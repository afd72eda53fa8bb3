"""From class probabilities to the counts of a `ClientResult`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedprompt.metrics.accuracy import ClientResult, pack_hits
from fedprompt.metrics.calibration import BINS
from fedprompt.metrics.one_against_rest import Figures, Scores


def entropy(probabilities: Tensor) -> Tensor:
    """Of the last axis, in nats; 0 log 0 counts as 0."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def score(
    draws: Tensor,
    labels: Tensor,
    domains: np.ndarray,
    domain_names: Sequence[str],
    diagnostics: Mapping[str, float] | None = None,
    by_class: bool = False,
) -> ClientResult:
    """Average V draws (V, B, C) in probability space and count. Mutual information = H(mean) - mean H.

    With `by_class` also count by label and prediction, and rank the images of every class against the rest.
    """
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
    figures = Figures.of(labels.numpy(), probabilities.numpy()) if by_class else None
    places = np.unique(domains, return_inverse=True)[1] if by_class else domains  # in the order of `domains` below
    cells = Counter(zip(domains.tolist(), labels.tolist(), predicted.tolist(), strict=True)) if by_class else None
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
        confusion=None
        if cells is None
        else [[domain_names[domain], label, guess, count] for (domain, label, guess), count in sorted(cells.items())],
        auroc=None if figures is None or math.isnan(figures.auroc) else figures.auroc,
        sensitivity=None if figures is None or math.isnan(figures.sensitivity) else figures.sensitivity,
        scores=Scores(labels.numpy(), places, probabilities.numpy()) if by_class else None,
    )
