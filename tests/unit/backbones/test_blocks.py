"""One block: its shortcuts equal the obvious way, in values and gradients, and the cheaper one is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from unit.backbones.naive_vit import naive_block

from fedprompt.backbones import block, layers
from fedprompt.backbones.random_weights import random_tensors, random_vit
from fedprompt.backbones.shape import ViTShape, block_tensors, tensor_shapes

pytestmark = pytest.mark.unit

SHAPE = ViTShape(width=24, depth=1, heads=3, mlp_width=20, patch=4, image_size=8, layer_scale=True)


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in random_tensors(block_tensors(SHAPE), seed=1).items()}


def rows(*sizes: tuple[int, int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, SHAPE.width, generator=generator, dtype=torch.float64) for size in sizes]


def slow_heads(projected: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    return projected.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


@pytest.mark.parametrize("parts", [2, 3])
def test_heads_equal_the_plain_permutation_in_values_and_gradients(parts: int) -> None:
    projected = torch.randn(2, 5, parts * 12, dtype=torch.float64, requires_grad=True)
    weighing = torch.randn(parts, 2, 3, 5, 4, dtype=torch.float64)
    found, expected = (split(projected, 3, parts) for split in (layers.split_heads, slow_heads))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = (
        torch.autograd.grad((torch.stack(each) * weighing).sum(), projected)[0] for each in (found, expected)
    )
    assert torch.equal(ours, theirs)


def test_heads_of_which_one_is_not_used_have_gradients() -> None:
    projected = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    ours, theirs = (split(projected, 3, 2)[1].square().sum() for split in (layers.split_heads, slow_heads))
    assert torch.equal(*(torch.autograd.grad(loss, projected)[0] for loss in (ours, theirs)))


def test_heads_can_be_differentiated_twice() -> None:
    projected = torch.randn(1, 2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: [part.sin() for part in layers.split_heads(x, 2, 3)], (projected,))


def test_heads_can_be_mapped_over_clients() -> None:
    projected = torch.randn(4, 2, 5, 24)
    mapped = torch.func.vmap(lambda one: layers.split_heads(one, 3, 2))(projected)
    for client in range(4):
        alone = slow_heads(projected[client], 3, 2)
        assert all(torch.equal(both[client], part) for both, part in zip(mapped, alone, strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["per sample", "shared"])
@pytest.mark.parametrize("live", [1, 3])
def test_both_ways_to_look_agree_in_values_and_gradients(live: int, shared: bool) -> None:
    x, passive = rows((2, live), (1 if shared else 2, 7))
    own = weights()
    leaves = [x, passive, own["attention.in.weight"], own["attention.in.bias"], own["norm1.weight"]]
    for leaf in leaves:
        leaf.requires_grad_()
    few, many = (forward(own, SHAPE, x, [passive]) for forward in (block._few_look, block._many_look))
    torch.testing.assert_close(few, many, rtol=0, atol=1e-12)
    weighing = torch.linspace(-1, 1, few.numel(), dtype=few.dtype).view_as(few)
    for ours, theirs in zip(*(torch.autograd.grad((way * weighing).sum(), leaves) for way in (few, many)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_a_block_equals_the_naive_one_for_a_few_live_rows() -> None:
    vit = random_vit(SHAPE, dtype=torch.float64)
    cls, rest = rows((2, 1), (2, 6))
    own = {name: vit.weights[f"blocks.0.{name}"] for name in block_tensors(SHAPE)}
    (found,) = block.run_block(own, SHAPE, [cls], [rest])
    expected = naive_block(vit, 0, torch.cat([cls, rest], dim=1))[:, :1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def flops(make: object) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # where scores are matrix products
        make()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("passive", [0, 1, 9, 40])
@pytest.mark.parametrize("live", [1, 2, 5, 12])
def test_a_block_takes_the_way_with_fewer_products(live: int, passive: int) -> None:
    x, others = rows((2, live), (2, passive))
    own, pieces = weights(), [others] if passive else []
    ways = [
        flops(lambda forward=forward: forward(own, SHAPE, x, pieces)) for forward in (block._few_look, block._many_look)
    ]
    behind = 2 * x.shape[0] * live * (SHAPE.width**2 + 2 * SHAPE.width * SHAPE.mlp_width)
    assert flops(lambda: block.run_block(own, SHAPE, [x], pieces)) - behind == min(ways)


def test_the_tensors_of_a_block_are_those_of_the_whole() -> None:
    shape = dataclasses.replace(SHAPE, depth=2)
    whole = tensor_shapes(shape)
    for name, size in block_tensors(shape).items():
        assert whole[f"blocks.0.{name}"] == whole[f"blocks.1.{name}"] == size
    assert len([name for name in whole if name.startswith("blocks.")]) == 2 * len(block_tensors(shape))


SEEN = torch.ones(9, 9, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "asked",
    [{}, {"mask": SEEN}, {"is_causal": True}, {"scale": 0.3}, {"mask": SEEN[None, None, -1:].expand(5, 1, 1, 9)}],
    ids=["plain", "mask", "causal", "scale", "mask by image"],
)
def test_attention_in_bfloat16_is_as_close_to_the_exact_one_as_torch_s(asked: dict[str, Any]) -> None:
    """Written out it may round elsewhere, but not more, in the output and in all three gradients."""
    exact = [
        torch.randn(5, 3, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(each))
        for each in range(4)
    ]
    theirs = {"attn_mask" if name == "mask" else name: value for name, value in asked.items()}

    def results(attend: Callable[..., Tensor], dtype: torch.dtype, given: dict[str, Any]) -> list[Tensor]:
        query, key, value = (each.to(dtype).requires_grad_() for each in exact[:3])
        mixed = attend(query, key, value, **given)
        gradients = torch.autograd.grad(mixed, (query, key, value), exact[3].to(dtype))
        return [each.double() for each in (mixed.detach(), *gradients)]

    true = results(F.scaled_dot_product_attention, torch.float64, theirs)
    ours = results(layers.attention, torch.bfloat16, asked)
    torchs = results(F.scaled_dot_product_attention, torch.bfloat16, theirs)
    for expected, mine, other in zip(true, ours, torchs, strict=True):
        assert (mine - expected).norm() < 1.2 * (other - expected).norm() + 1e-3 * expected.norm()
    same = results(layers.attention, torch.float32, asked)
    for found, expected in zip(same, results(F.scaled_dot_product_attention, torch.float32, theirs), strict=True):
        assert torch.equal(found, expected)


def test_attention_of_many_rows_in_bfloat16_does_not_store_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2, 3, 8, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(layers, "LARGEST_LOOK", 63)
    assert torch.equal(layers.attention(rows, rows, rows), F.scaled_dot_product_attention(rows, rows, rows))
