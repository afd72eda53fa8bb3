"""Sinkhorn's iteration against naive loops, its marginals and limits, and its behaviour where a kernel underflows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedprompt.modules import optimal_transport as transport
from fedprompt.modules.optimal_transport import transport_plan

pytestmark = pytest.mark.unit


def similarities(*shape: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return low + (high - low) * drawn


def kernel_loop(s: Tensor, epsilon: float, mass: float, iterations: int, balanced: bool = False) -> Tensor:
    """One problem (M, N) the plain way, with the kernel and its scalings as they are."""
    patches, prompts = s.shape
    kernel = torch.exp((s - 1) / epsilon)
    v = torch.ones(prompts, dtype=s.dtype)
    for _ in range(iterations):
        u = (1 / patches) / (kernel @ v)
        if not balanced:
            u = u.clamp(max=1)
        v = ((1 if balanced else mass) / prompts) / (kernel.T @ u)
    return u[:, None] * kernel * v[None, :]


def logarithm_loop(s: Tensor, epsilon: float, mass: float, iterations: int, balanced: bool = False) -> Tensor:
    """The same with logarithms of sums taken from scratch each time."""
    patches, prompts = s.shape
    kernel, v = (s - 1) / epsilon, torch.zeros(prompts, dtype=s.dtype)
    for _ in range(iterations):
        u = -math.log(patches) - torch.logsumexp(kernel + v, 1)
        if not balanced:
            u = u.clamp(max=0)
        v = math.log((1 if balanced else mass) / prompts) - torch.logsumexp(kernel + u[:, None], 0)
    return (u[:, None] + kernel + v).exp()


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("iterations", [1, 2, 5, 6, 7, 11, 100])
def test_every_iterate_is_that_of_the_plain_loop(iterations: int, mass: float, balanced: bool) -> None:
    s = similarities(2, 3, 9, 2)
    plans = transport_plan(s, 0.1, mass, iterations, balanced)
    for image in range(2):
        for label in range(3):
            expected = kernel_loop(s[image, label], 0.1, mass, iterations, balanced)
            torch.testing.assert_close(plans[image, label], expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("patches", "prompts"), [(49, 2), (196, 2), (16, 3)])
def test_single_precision_agrees_with_the_plain_loop(patches: int, prompts: int, balanced: bool) -> None:
    s = similarities(patches, prompts, seed=3)
    found = transport_plan(s.float(), 0.1, 0.8, 100, balanced)
    torch.testing.assert_close(found.double(), kernel_loop(s, 0.1, 0.8, 100, balanced), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("epsilon", [0.01, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_products_between_logarithms_change_nothing_where_the_kernel_underflows(
    seed: int, epsilon: float, balanced: bool
) -> None:
    s = similarities(49, 2, seed=seed)
    found = transport_plan(s, epsilon, 0.8, 100, balanced)
    torch.testing.assert_close(found, logarithm_loop(s, epsilon, 0.8, 100, balanced), atol=1e-12, rtol=1e-6)
    single = transport_plan(s.float(), epsilon, 0.8, 100, balanced).double()
    assert float((single - found).abs().max()) < 1e-3 / 49


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("prompts", [1, 2, 4])
def test_marginals(prompts: int, mass: float) -> None:
    plan = transport_plan(similarities(4, 5, 49, prompts).float(), 0.1, mass, 500)
    assert (plan >= 0).all()
    assert float((plan.sum(-2) - mass / prompts).abs().max()) < 1e-5
    assert float((plan.sum(-1) - 1 / 49).max()) < 1e-3 / 49
    torch.testing.assert_close(plan.sum((-2, -1)), torch.full((4, 5), mass))


def test_the_plan_is_optimal_among_its_neighbours() -> None:
    """Moves that keep every column's mass and no row's excess cannot lower the entropic cost."""
    s, epsilon = similarities(6, 2, seed=1), 0.1
    plan = transport_plan(s, epsilon, 0.6, 3000)

    def cost(t: Tensor) -> float:
        return float((t * (1 - s)).sum() + epsilon * (t * (t.log() - 1)).sum())

    room, tried = 1 / 6 - plan.sum(1), 0
    for column in range(2):
        for giver in range(6):
            for taker in range(6):
                step = torch.zeros_like(plan)
                step[giver, column], step[taker, column] = -1e-5, 1e-5
                if giver == taker or room[taker] < 2e-5 or plan[giver, column] < 2e-5:
                    continue
                assert cost(plan + step) > cost(plan) - 1e-14
                tried += 1
    assert tried > 10


def test_all_of_the_mass_is_the_balanced_problem() -> None:
    s = similarities(5, 49, 2)
    bounded, balanced = transport_plan(s, 0.1, 1.0, 2000), transport_plan(s, 0.1, 1.0, 2000, balanced=True)
    torch.testing.assert_close(bounded, balanced, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(balanced.sum(-1), torch.full((5, 49), 1 / 49, dtype=torch.float64))


def test_balanced_ignores_the_mass() -> None:
    s = similarities(9, 2)
    assert torch.equal(transport_plan(s, 0.1, 0.3, 20, True), transport_plan(s, 0.1, 1.0, 20, True))


@pytest.mark.parametrize("mass", [0.5, 1.0])
def test_one_patch_gives_every_prompt_the_same(mass: float) -> None:
    plan = transport_plan(similarities(3, 1, 2), 0.1, mass)
    torch.testing.assert_close(plan, torch.full_like(plan, mass / 2))


def test_one_prompt_takes_all_patches_evenly() -> None:
    plan = transport_plan(similarities(3, 7, 1), 0.1, 1.0, 2000)
    torch.testing.assert_close(plan, torch.full_like(plan, 1 / 7), atol=1e-6, rtol=0)


def test_patches_that_fit_nothing_are_left_out() -> None:
    s = torch.tensor([[0.9, 0.0], [0.9, 0.0], [0.0, 0.9], [-0.9, -0.9]])
    plan = transport_plan(s, 0.05, 0.5, 500)
    assert float(plan[3].sum()) < 1e-6
    assert float(plan[:2, 0].sum()) == pytest.approx(0.25, abs=1e-4)
    assert float(plan[2, 1]) == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("mass", [0.01, 0.8, 1.0])
@pytest.mark.parametrize("epsilon", [0.01, 1e-3, 1e-4, 1e-6])
def test_nothing_is_lost_at_small_epsilon_in_single_precision(epsilon: float, mass: float, balanced: bool) -> None:
    plan = transport_plan(similarities(8, 8, 49, 2).float(), epsilon, mass, 100, balanced)
    assert plan.isfinite().all()
    assert (plan >= 0).all()
    assert float((plan.sum(-2) - (1.0 if balanced else mass) / 2).abs().max()) < 1e-5
    assert kernel_loop(similarities(49, 2).float(), epsilon, mass, 100, True).isnan().any()


@pytest.mark.parametrize("together", [1, 3, 20])
def test_how_often_logarithms_are_taken_does_not_matter(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = similarities(4, 49, 2)
    expected = transport_plan(s, 0.02, 0.8, 40)
    monkeypatch.setattr(transport, "TOGETHER", together)
    torch.testing.assert_close(transport_plan(s, 0.02, 0.8, 40), expected, atol=1e-12, rtol=1e-9)


def test_no_gradient_and_no_dependence_on_the_batch_or_the_order() -> None:
    s = similarities(6, 9, 2).requires_grad_()
    plan = transport_plan(s, 0.1, 0.8)
    assert not plan.requires_grad
    alone = torch.stack([transport_plan(each, 0.1, 0.8) for each in s])
    torch.testing.assert_close(plan, alone, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(torch.func.vmap(lambda each: transport_plan(each, 0.1, 0.8))(s.detach()), plan)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transport_plan(s[:, order], 0.1, 0.8), plan[:, order])
    torch.testing.assert_close(transport_plan(s.flip(-1), 0.1, 0.8), plan.flip(-1))


def test_half_precision_comes_back_as_such() -> None:
    plan = transport_plan(similarities(49, 2).bfloat16(), 0.01, 0.8)
    assert plan.dtype == torch.bfloat16
    assert float(plan.float().sum()) == pytest.approx(0.8, rel=0.01)
