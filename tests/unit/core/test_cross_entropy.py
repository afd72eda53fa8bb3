"""Cross-entropy of a method: that of torch, with few classes and with many, for one client and mapped over several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedprompt.core.method import FEW_CLASSES, cross_entropy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("classes", [1, 2, 10, FEW_CLASSES - 1, FEW_CLASSES, 100])
def test_values_and_gradients_are_those_of_torch(classes: int) -> None:
    draws = torch.Generator().manual_seed(classes)
    logits = 5 * torch.randn(3, 7, classes, generator=draws)
    labels = torch.randint(classes, (3, 7), generator=draws)
    ways = {
        "plain": lambda x: torch.stack(
            [F.cross_entropy(own, now, reduction="none") for own, now in zip(x, labels, strict=True)]
        ),
        "alone": lambda x: torch.stack([cross_entropy(own, now) for own, now in zip(x, labels, strict=True)]),
        "mapped": lambda x: torch.func.vmap(cross_entropy)(x, labels),
    }
    found = {}
    for name, way in ways.items():
        leaf = logits.clone().requires_grad_()
        values = way(leaf)
        (gradient,) = torch.autograd.grad((values * torch.arange(1.0, 8.0)).sum(), leaf)
        found[name] = values.detach(), gradient
    for name in ("alone", "mapped"):
        for tensor, expected in zip(found[name], found["plain"], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


def test_a_class_that_is_impossible_does_no_harm() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([2]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
