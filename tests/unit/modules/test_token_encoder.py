"""The encoder against the naive way: mask the features, nn.LayerNorm, transpose, nn.Linear, transpose."""

from __future__ import annotations

import pytest
import torch
from support import seeded
from torch import Tensor, nn

from fedprompt.errors import ContractError
from fedprompt.modules.token_encoder import (
    NORM_EPSILON,
    constant_network,
    draw_masks,
    encode,
    initial_network,
    initial_norm,
    linear_from,
    unit_length,
    within,
)
from fedprompt.tensors import Tensors

BLOCKS, TOKENS, WIDTH, OUT = 3, 7, 16, 2


def made(hidden: int, seed: int = 0) -> tuple[Tensors, list[Tensors]]:
    generator = seeded(seed)
    norm = {name: value + 0.3 * generator.normal(*value.shape) for name, value in initial_norm(BLOCKS, WIDTH).items()}
    return norm, [initial_network(BLOCKS, TOKENS, hidden, OUT, generator) for _ in range(2)]


def features(size: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(size, BLOCKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def some_masks(draws: int = 3, size: int = 4, keep: float = 0.6) -> Tensor:
    return draw_masks((draws, size, BLOCKS, TOKENS), keep, seeded(2))


def naive(norm: Tensors, network: Tensors, features: Tensor, masks: Tensor) -> Tensor:
    draws = []
    for mask in masks:
        blocks = []
        for block in range(BLOCKS):
            layer_norm = nn.LayerNorm(WIDTH, eps=NORM_EPSILON)
            layer_norm.weight, layer_norm.bias = (
                nn.Parameter(norm["norm.weight"][block]),
                nn.Parameter(norm["norm.bias"][block]),
            )
            rows = torch.nn.functional.layer_norm(
                features[:, block] * mask[:, block, :, None],
                (WIDTH,),
                norm["norm.weight"][block],
                norm["norm.bias"][block],
                NORM_EPSILON,
            ).transpose(1, 2)
            if "in.weight" in network:
                rows = nn.functional.gelu(
                    nn.functional.linear(rows, network["in.weight"][block], network["in.bias"][block])
                )
            blocks.append(
                nn.functional.linear(rows, network["out.weight"][block], network["out.bias"][block]).transpose(1, 2)
            )
        draws.append(torch.stack(blocks, dim=1))
    return torch.stack(draws)


@pytest.mark.parametrize("hidden", [0, 5])
def test_masked_weights_equal_masked_features_in_values_and_gradients(hidden: int) -> None:
    norm, networks = made(hidden)
    leaves = [tensor.requires_grad_() for tensors in (norm, *networks) for tensor in tensors.values()]
    ours = encode(norm, networks, features(), some_masks())
    theirs = [naive(norm, network, features(), some_masks()) for network in networks]
    for fast, slow in zip(ours, theirs, strict=True):
        assert fast.shape == (3, 4, BLOCKS, OUT, WIDTH)
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    fast_grads = torch.autograd.grad(sum(each.square().sum() for each in ours), leaves)
    slow_grads = torch.autograd.grad(sum(each.square().sum() for each in theirs), leaves)
    for fast, slow in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-4, rtol=1e-5)


def test_masks_always_keep_cls_and_the_asked_share_of_the_rest() -> None:
    generator = seeded()
    assert draw_masks((2, 3, 4), 0.0, generator).sum() == 2 * 3
    assert draw_masks((2, 3, 4), 1.0, generator).min() == 1
    masks = draw_masks((100, 100, 11), 0.9, generator)
    assert masks[..., 0].min() == 1
    assert masks[..., 1:].mean() == pytest.approx(0.9, abs=0.005)


def test_with_nothing_kept_only_the_cls_row_counts() -> None:
    norm, networks = made(4)
    masks = draw_masks((1, 4, BLOCKS, TOKENS), 0.0, seeded())
    other = features()
    other[:, :, 1:] = features(seed=9)[:, :, 1:]
    assert torch.equal(encode(norm, networks, features(), masks)[0], encode(norm, networks, other, masks)[0])
    other[:, :, 0] = 1 + other[:, :, 0].flip(-1)
    assert not torch.allclose(encode(norm, networks, features(), masks)[0], encode(norm, networks, other, masks)[0])


def test_changing_one_image_changes_only_its_own_row() -> None:
    norm, networks = made(4)
    changed = features()
    changed[2] += torch.randn(changed[2].shape, generator=torch.Generator().manual_seed(5))
    before, after = (encode(norm, networks, each, some_masks())[0] for each in (features(), changed))
    assert torch.equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])
    assert not torch.allclose(before[:, 2], after[:, 2])


def test_channels_are_alike_and_tokens_are_not() -> None:
    _, networks = made(4)
    norm = initial_norm(BLOCKS, WIDTH)
    generator = torch.Generator().manual_seed(3)
    channels, tokens = torch.randperm(WIDTH, generator=generator), torch.randperm(TOKENS, generator=generator)
    (plain, _), (moved, _) = (
        encode(norm, networks, each, some_masks(keep=1.0)) for each in (features(), features()[..., channels])
    )
    torch.testing.assert_close(plain[..., channels], moved, atol=1e-5, rtol=1e-5)
    shuffled = encode(norm, networks, features()[:, :, tokens], some_masks(keep=1.0))[0]
    assert not torch.allclose(plain, shuffled, atol=1e-3)
    permuted = [{**network, "in.weight": network["in.weight"][..., tokens]} for network in networks]
    torch.testing.assert_close(
        encode(norm, permuted, features()[:, :, tokens], some_masks(keep=1.0))[0], plain, atol=1e-5, rtol=1e-5
    )


def test_a_linear_mean_may_start_as_the_cls_row_or_as_the_mean_of_all_rows() -> None:
    norm, (network, _) = initial_norm(BLOCKS, WIDTH), made(0)[1]
    rows = torch.nn.functional.layer_norm(features(), (WIDTH,), eps=NORM_EPSILON)
    masks = some_masks(keep=1.0)
    (first,) = encode(norm, [linear_from("cls", network, 0.5)], features(), masks)
    torch.testing.assert_close(first[0, :, :, 0], 0.5 * rows[:, :, 0])
    (middle,) = encode(norm, [linear_from("mean", network, 1.0)], features(), masks)
    tokens = middle.shape[-2]
    assert tokens > 1
    for token in range(tokens):  # each from rows of its own: equal tokens would stay equal
        torch.testing.assert_close(middle[0, :, :, token], rows[:, :, token::tokens].mean(2))
    assert linear_from("default", network, 1.0) is network


def test_values_outside_a_range_are_cut_and_their_gradients_are_not() -> None:
    values = torch.tensor([-5.0, 0.5, 7.0], requires_grad=True)
    cut = within(values, -1.0, 1.0)
    assert cut.tolist() == [-1.0, 0.5, 1.0]
    (slope,) = torch.autograd.grad(cut.sum(), [values])
    assert slope.tolist() == [1.0, 1.0, 1.0]


def test_a_token_of_unit_length_has_root_mean_square_one_and_zeros_stay_finite() -> None:
    tokens = torch.stack([torch.linspace(-3, 5, WIDTH), torch.zeros(WIDTH)]).requires_grad_()
    scaled = unit_length(tokens)
    assert scaled[0].square().mean().item() == pytest.approx(1.0, abs=1e-5)
    (slope,) = torch.autograd.grad(scaled.sum(), [tokens])
    assert torch.isfinite(slope).all()


def test_a_constant_network_says_the_same_for_every_image() -> None:
    norm, (network, _) = made(4)
    (said,) = encode(norm, [constant_network(network, -3.0)], features(), some_masks())
    assert torch.equal(said, torch.full_like(said, -3.0))


def test_another_number_of_tokens_is_refused() -> None:
    norm, networks = made(4)
    with pytest.raises(ContractError, match="mixes 7 tokens, but the image has 6"):
        encode(norm, networks, features()[:, :, :6], some_masks()[..., :6])
