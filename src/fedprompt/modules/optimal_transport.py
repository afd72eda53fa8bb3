"""Optimal transport between the M patches of an image and N prompts, by Sinkhorn's iteration.

With similarities S (M, N), costs 1 - S and a mass gamma to be moved, the plan T >= 0 minimises <T, 1 - S> - epsilon *
entropy(T) under

    row m:     sum_n T[m, n] <= 1 / M          (= 1 / M when balanced): patches that fit no prompt may be left out
    column n:  sum_m T[m, n]  = gamma / N

Its solution is T = diag(u) K diag(v), K = exp((S - 1) / epsilon), and the iteration starts from v = 1:

    u <- min((1 / M) / (K v), 1)               (without the bound when balanced)
    v <- (gamma / N) / (K^T u)

K underflows at small epsilon, so log K, log u and log v are stored. The first iteration uses log-sum-exp. After it the
plan itself is formed, and a few iterations at a time scale its rows and columns by plain products, before the factors
are moved into log u and log v and the plan is formed again. That is safe. One iteration multiplies an entry by at most
M N / gamma: a column that held gamma / N still holds 1 / M of that after the rows were cut, and a row that was cut to 1
/ M still holds gamma / N of that after the columns were scaled. So an entry below e^FLOOR cannot matter before the plan
is formed again. An empty row was not cut, and its u stays 1.

The number of iterations is fixed. A stop once the changes are small on average would let the result for one image
depend on the others in its batch. Columns are exact; rows are exact after convergence, which takes longer for smaller
epsilon.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOGETHER = 5  # iterations by plain products before logarithms are taken again
FLOOR = -60.0  # entries of the plan below e^FLOOR are raised to it, since denormal numbers are slow


@torch.no_grad()
def transport_plan(
    similarities: Tensor, epsilon: float, mass: float = 1.0, iterations: int = 100, balanced: bool = False
) -> Tensor:
    """Plans (..., M, N), without gradient, for similarities (..., M, N); `balanced` moves a mass of 1 and leaves
    nothing out.
    """
    patches, prompts = similarities.shape[-2:]
    row, column = 1 / patches, (1.0 if balanced else mass) / prompts
    bound = math.inf if balanced else 0.0  # of log u
    precise = similarities.detach().to(torch.promote_types(similarities.dtype, torch.float32))
    kernel = (precise.movedim(-1, 0).contiguous() - 1) / epsilon  # log K, (N, ..., M)
    rows = (math.log(row) - kernel.logsumexp(0)).clamp_max(bound)  # log u, (..., M)
    columns = math.log(column) - (kernel + rows).logsumexp(-1, keepdim=True)  # log v, (N, ..., 1)
    for done in range(1, iterations, TOGETHER):
        plan = (kernel + rows + columns).clamp_min(FLOOR).exp()
        limit = (bound - rows).exp()
        v = torch.ones_like(columns)
        for _ in range(min(TOGETHER, iterations - done)):
            u = torch.minimum(row / (plan * v).sum(0), limit)
            v = column / (plan * u).sum(-1, keepdim=True)
        rows, columns = rows + u.log(), columns + v.log()
    plan = (kernel + rows + columns).exp()
    exact = plan * (column / plan.sum(-1, keepdim=True))  # logarithms of small epsilons are large and leave few digits
    return exact.movedim(0, -1).to(similarities.dtype)


@torch.no_grad()
def unbalanced_plan(costs: Tensor, relaxation: float, iterations: int = 1000) -> Tensor:
    """The plan T (M, N) that minimises <T, costs> + relaxation * (KL(T 1 | 1/M) + KL(T' 1 | 1/N)), without entropy.

    Majorisation and minimisation (Chapel et al., NeurIPS 2021): T <- T * sqrt(a b / (row sum * column sum)) * exp(-costs /
    (2 relaxation)) from T = a b. An entry that vanishes stays 0; where one is left, costs + relaxation * log(row sum / a *
    column sum / b) = 0.
    """
    rows, columns = costs.shape
    kernel = (-costs / (2 * relaxation)).exp() / math.sqrt(rows * columns)
    plan = torch.full_like(costs, 1 / (rows * columns))
    least = torch.finfo(costs.dtype).tiny
    for _ in range(iterations):
        by_row, by_column = plan.sum(-1, keepdim=True).clamp_min(least), plan.sum(0, keepdim=True).clamp_min(least)
        plan = plan * kernel / (by_row.sqrt() * by_column.sqrt())
    return plan
