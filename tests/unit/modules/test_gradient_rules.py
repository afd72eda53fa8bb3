"""Rules on gradients: against the formulas, alone and mapped over clients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedprompt.modules.gradient_rules import aligned, clipped_and_noisy

pytestmark = pytest.mark.unit


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def gradient_of_aligned(own: Tensor, general: Tensor, strength: float) -> Tensor:
    leaf = torch.zeros_like(own).requires_grad_()
    first, second = aligned(leaf, strength)
    (found,) = torch.autograd.grad((first * own).sum() + (second * general).sum(), leaf)
    return found


def test_an_opposing_part_is_removed_by_hand() -> None:
    """g = (3, 1), b = (-2, 0): <g, b> = -6, ||b||^2 = 4, so g + 1.5 b = (0, 1); half of that leaves (1.5, 1)."""
    own, general = torch.tensor([3.0, 1.0]), torch.tensor([-2.0, 0.0])
    torch.testing.assert_close(gradient_of_aligned(own, general, 1.0), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(gradient_of_aligned(own, general, 0.5), torch.tensor([1.5, 1.0]))
    torch.testing.assert_close(gradient_of_aligned(own, general, 0.0), own)


def test_a_gradient_that_agrees_stays() -> None:
    own, general = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 5.0])
    assert torch.equal(gradient_of_aligned(own, general, 1.0), own)


def test_what_is_left_is_never_against_the_general_gradient() -> None:
    for seed in range(20):
        own, general = drawn(5, seed=seed), drawn(5, seed=seed + 100)
        assert float(gradient_of_aligned(own, general, 1.0) @ general) > -1e-5


def test_a_general_gradient_that_is_rounding_has_no_direction() -> None:
    own = torch.tensor([3.0, 1.0])
    for size in (0.0, 1e-5):
        assert torch.equal(gradient_of_aligned(own, -size * own, 1.0), own)


def test_a_long_gradient_is_cut_and_then_gets_its_noise() -> None:
    """(3, 4) has length 5, so with a bound of 1 it is (0.6, 0.8); a short one keeps its length."""
    noise = torch.tensor([0.1, -0.2])
    for gradient, expected in (([3.0, 4.0], [0.7, 0.6]), ([0.3, 0.4], [0.4, 0.2]), ([0.0, 0.0], [0.1, -0.2])):
        leaf = torch.zeros(2, requires_grad=True)
        (found,) = torch.autograd.grad((clipped_and_noisy(leaf, noise, 1.0) * torch.tensor(gradient)).sum(), leaf)
        torch.testing.assert_close(found, torch.tensor(expected))


def test_values_are_left_alone() -> None:
    tensor = drawn(3)
    first, second = aligned(tensor)
    assert torch.equal(first, tensor)
    assert torch.equal(second, tensor)
    assert torch.equal(clipped_and_noisy(tensor, drawn(3, seed=1), 0.1), tensor)


def test_mapped_over_clients_each_has_its_own_rule() -> None:
    own, general, noise = drawn(6, 4), drawn(6, 4, seed=1), drawn(6, 4, seed=2)
    leaf = torch.zeros(6, 4, requires_grad=True)

    def loss(each: Tensor, g: Tensor, b: Tensor, z: Tensor) -> Tensor:
        first, second = aligned(each, 1.0)
        return (first * g).sum() + (second * b).sum() + (clipped_and_noisy(each, z, 0.5) * g).sum()

    (together,) = torch.autograd.grad(torch.func.vmap(loss)(leaf, own, general, noise).sum(), leaf)
    for client in range(6):
        cut = own[client] * (0.5 / own[client].norm()).clamp_max(1)
        expected = gradient_of_aligned(own[client], general[client], 1.0) + cut + noise[client]
        torch.testing.assert_close(together[client], expected)
