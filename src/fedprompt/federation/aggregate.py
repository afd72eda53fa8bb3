"""Pure functions that turn the tensors of a cohort into one set.

The weighted mean trusts every client. The robust rules count each client once and read its tensors as one vector x_i of D numbers, in
double precision; n is the number of clients that take part and f = floor(malicious * n) the number of them that may be malicious. A client
whose weight is 0 takes no part, nor does one with a value that is not finite. Where none is left, every rule is the weighted mean.
Robust rules put the vectors in lexicographic order first: the order of clients changes no bit of a result, and the first vector wins a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fedprompt.config.plugin_options import arguments
from fedprompt.config.registries import AGGREGATORS
from fedprompt.errors import ContractError, broken
from fedprompt.tensors import Tensors

if TYPE_CHECKING:
    from fedprompt.config import AggregationConfig
    from fedprompt.core.method import Combine

STEPS = 1000  # of the search for a geometric median, at most
PRECISION = 1e-12  # of that search, relative to the usual distance between clients


Rule = TypeVar("Rule", bound=Callable[..., Tensors])


def register_aggregator(name: str) -> Callable[[Rule], Rule]:
    """Make a rule of aggregation known under a name: `aggregation: {rule: ...}` in a config.

    It is called as `Combine` says. Keyword-only parameters are its settings: `malicious` and `radius` come from the
    section, all others from its `options`.
    """
    return AGGREGATORS.registrar(name)


def rule(settings: AggregationConfig) -> Combine:
    """The function a config asks for."""
    found: Combine = AGGREGATORS.get(settings.rule)
    combine = partial(found, **arguments(settings, "aggregation", settings.rule, found))
    return combine if settings.rule in AGGREGATORS.fixed else _checked(combine, settings.rule)


def _checked(combine: Combine, name: str) -> Combine:
    """A rule of a plugin; its result must have the names and shapes of its input."""

    def checked(tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None) -> Tensors:
        result = combine(tensors, weights, around)
        wanted, found = _kinds(tensors[0]), _kinds(result) if isinstance(result, dict) else result
        if found != wanted:
            raise ContractError(
                broken(f"aggregation.rule {name!r}", f"give tensors like those of a client {wanted}", found)
            )
        return result

    return checked


def _kinds(tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@register_aggregator("mean")
def weighted_mean(tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None) -> Tensors:
    """The weighted mean of each named tensor. Summed in double precision; the caller fixes the order of clients."""
    if not tensors:
        raise ContractError("aggregation must have at least one upload, got none")
    names = list(tensors[0])
    if not names:
        return {}
    totals = [torch.zeros(first.shape, dtype=torch.float64) for first in tensors[0].values()]
    for part, weight in zip(tensors, weights, strict=True):
        torch._foreach_add_(totals, [part[name].cpu() for name in names], alpha=weight)
    return {
        name: total.to(tensors[0][name].dtype).to(tensors[0][name].device)
        for name, total in zip(names, totals, strict=True)
    }


@register_aggregator("median")
def median(tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None) -> Tensors:
    """The median of every number by itself; of an even cohort, the mean of the two in the middle."""
    return _robust(tensors, weights, _middle)


@register_aggregator("trimmed_mean")
def trimmed_mean(
    tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None, *, malicious: float
) -> Tensors:
    """The mean of every number by itself without its f smallest and its f largest values."""

    def estimate(rows: Tensor) -> Tensor:
        cut = _most_malicious(malicious, len(rows))
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)

    return _robust(tensors, weights, estimate)


@register_aggregator("krum")
def krum(
    tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None, *, malicious: float
) -> Tensors:
    """The vector of the one client with the lowest score, see `krum_order`. Its promise needs n > 2f + 2."""
    return _robust(tensors, weights, lambda rows: rows[krum_order(rows, _most_malicious(malicious, len(rows)))[0]])


@register_aggregator("multi_krum")
def multi_krum(
    tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None, *, malicious: float
) -> Tensors:
    """The mean of the n - f clients with the lowest scores, see `krum_order`."""

    def estimate(rows: Tensor) -> Tensor:
        f = _most_malicious(malicious, len(rows))
        best = krum_order(rows, f)[: len(rows) - f]
        return rows[best.sort().values].mean(0)

    return _robust(tensors, weights, estimate)


def krum_order(rows: Tensor, f: int) -> Tensor:
    """Rows (n, D) by rising score: sum_j |x_i - x_j|^2 over the n - f - 2 others nearest to x_i (Blanchard et al. 2017), at least one."""
    squares = torch.stack([(rows - row).square().sum(1) for row in rows])
    others = squares.fill_diagonal_(math.inf).sort(1).values[:, : max(1, len(rows) - f - 2)]
    return others.sum(1).argsort(stable=True)


@register_aggregator("geometric_median")
def geometric_median(tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None) -> Tensors:
    """The vector with the smallest sum of distances to those of the clients, see `geometric_centre`."""
    return _robust(tensors, weights, geometric_centre)


def geometric_centre(rows: Tensor) -> Tensor:
    """argmin_z sum_i |x_i - z| over rows (n, D), by Weiszfeld's iteration with the step of Vardi and Zhang (2000).

    Let m be the number of rows equal to z, and R = sum_i (x_i - z) / |x_i - z| the pull of the others. z is a minimum where |R| <= m, so
    that a row more than half of the clients share is found exactly; from anywhere else it moves to

        z + (1 - m / |R|) R / sum_i 1 / |x_i - z|.

    The search begins at the best row, or the mean of all equally good ones (the middle, where the minimum is a whole line segment). Every
    step lowers the sum, so the search cannot stop at another row. z is kept as shares of the rows, and distances are measured in the n
    dimensions the rows span.
    """
    points, counts = torch.unique(rows, dim=0, return_counts=True)
    counts = counts.to(rows)
    spanned = torch.linalg.qr(points.T).R.T  # (n, at most n), rotated
    distances = torch.cdist(spanned, spanned, compute_mode="donot_use_mm_for_euclid_dist")
    totals = distances @ counts
    best = totals <= totals.min() * (1 + PRECISION)
    parts = best / best.sum(dtype=rows.dtype)
    close = PRECISION * distances[best][0].sort().values[len(points) // 2]
    for _ in range(STEPS):
        away = spanned - parts @ spanned
        lengths = torch.linalg.vector_norm(away, dim=1)
        here = lengths <= close
        pulls = torch.where(here, 0.0, counts / lengths)
        pull, held = torch.linalg.vector_norm(pulls @ away), counts[here].sum()
        if not (pull - held) / pulls.sum() > close:  # the length of the step; not positive at a minimum
            break
        moving = 1 - held / pull
        parts = moving * pulls / pulls.sum() + (1 - moving) * parts
    centre: Tensor = parts @ points
    return centre


@register_aggregator("clipped_mean")
def clipped_mean(
    tensors: Sequence[Tensors], weights: Sequence[float], around: Tensors | None = None, *, radius: float
) -> Tensors:
    """c + mean_i min(1, radius / |x_i - c|) (x_i - c), where c is `around`; the median of tensors that it lacks or has in another shape."""

    def estimate(rows: Tensor) -> Tensor:
        centre = _split(_middle(rows), tensors[0])
        for name, tensor in (around or {}).items():
            if name in centre and centre[name].shape == tensor.shape:
                centre[name] = tensor
        origin = _flat(centre)
        changes = rows - origin
        lengths = torch.linalg.vector_norm(changes, dim=1, keepdim=True)
        mean: Tensor = origin + (changes * (radius / lengths).clamp_max(1)).mean(0)
        return mean

    return _robust(tensors, weights, estimate)


def _robust(tensors: Sequence[Tensors], weights: Sequence[float], estimate: Callable[[Tensor], Tensor]) -> Tensors:
    """`estimate` of the rows (n, D) of the participating clients, as tensors like those of the first client."""
    shapes = [{name: tensor.shape for name, tensor in part.items()} for part in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise ContractError(broken("aggregation", "have the same names and shapes from every client", shapes))
    members = [_flat(part) for part, weight in zip(tensors, weights, strict=True) if weight > 0]
    members = [row for row in members if row.numel() and bool(row.isfinite().all())]
    if not members:
        return weighted_mean(tensors, weights)
    rows = torch.stack(members)
    places = torch.unique(rows, dim=0, return_inverse=True)[1]
    found = _split(estimate(rows[places.argsort()]), tensors[0])
    return {name: found[name].to(first.dtype).to(first.device) for name, first in tensors[0].items()}


def _middle(rows: Tensor) -> Tensor:
    """The median of each column; torch's own would be the lower of the two in the middle."""
    ordered = rows.sort(0).values
    return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


def _most_malicious(share: float, clients: int) -> int:
    """floor(share * clients) without errors of binary fractions (0.29 of 100 are 29), and fewer than half."""
    return min(math.floor(share * clients + 1e-9), (clients - 1) // 2)


def _flat(tensors: Tensors) -> Tensor:
    """All numbers of a client as one vector (D), tensors by name."""
    parts = [tensors[name].to("cpu", torch.float64).flatten() for name in sorted(tensors)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def _split(vector: Tensor, like: Tensors) -> Tensors:
    """The inverse of `_flat`, still in double precision."""
    names = sorted(like)
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}
