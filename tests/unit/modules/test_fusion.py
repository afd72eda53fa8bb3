"""Fusion of two prompts: against torch's attention, against hand-made numbers, and in its limits."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from support import seeded
from torch import Tensor, nn

from fedprompt.modules.fusion import (
    Answer,
    Direction,
    Fused,
    cross_attend,
    describe_attention,
    fuse_by_attention,
    fuse_plainly,
    needs_equal_lengths,
    new_attention,
    part,
)
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

WIDTH = 24
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained_attention(seed: int = 5) -> Tensors:
    """An attention in which every tensor counts."""
    generator = seeded(seed)
    return {
        name: generator.normal(*tensor.shape, dtype=torch.float64) * WIDTH**-0.5
        for name, tensor in new_attention(WIDTH, generator).items()
    }


def normalised(rows: Tensor) -> Tensor:
    return (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def torch_attention(weights: Tensors, queries: Tensor, asked: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The library's layer on normalised tokens (m, d) and (n, d)."""
    layer = nn.MultiheadAttention(WIDTH, heads, dtype=torch.float64)
    names = ("query", "key", "value")
    state = {
        "in_proj_weight": torch.cat([weights[f"{name}.weight"] for name in names]),
        "in_proj_bias": torch.cat([weights[f"{name}.bias"] for name in names]),
        "out_proj.weight": weights["output.weight"],
        "out_proj.bias": weights["output.bias"],
    }
    asking, answering = normalised(queries), normalised(asked)
    inputs = (asking, answering, answering)
    return torch.func.functional_call(layer, state, inputs, {"average_attn_weights": False})


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_the_attention_is_torchs_on_normalised_tokens(heads: int) -> None:
    weights, queries, asked = trained_attention(), tokens(4), tokens(7, seed=1)
    answer = cross_attend(weights, queries, asked, heads)
    expected, listened = torch_attention(weights, queries, asked, heads)
    torch.testing.assert_close(answer.tokens, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(answer.weights, listened, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(answer.weights.sum(-1), torch.ones(heads, 4, dtype=torch.float64))


def test_leading_axes_are_fused_each_by_itself() -> None:
    weights, queries, asked = trained_attention(), tokens(3, 4), tokens(3, 5, seed=1)
    together = cross_attend(weights, queries, asked, heads=4)
    for number in range(3):
        alone = cross_attend(weights, queries[number], asked[number], heads=4)
        torch.testing.assert_close(together.tokens[number], alone.tokens)
        torch.testing.assert_close(together.weights[number], alone.weights)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_direction_is_its_formula(direction: Direction) -> None:
    weights, shared, own = trained_attention(), tokens(4), tokens(4, seed=1)

    def said(queries: Tensor, asked: Tensor) -> Tensor:
        return torch_attention(weights, queries, asked, heads=2)[0]

    expected = {
        "local_queries": own + said(own, shared),
        "global_queries": shared + said(shared, own),
        "bidirectional": own + said(own, shared) + shared + said(shared, own),
        "concat_keys": own + said(own, torch.cat([shared, own])),
    }
    found = fuse_by_attention(direction, weights, shared, own, heads=2).tokens
    torch.testing.assert_close(found, expected[direction], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_new_attention_leaves_the_residual_alone(direction: Direction) -> None:
    shared, own = tokens(4).float(), tokens(4, seed=1).float()
    starts = {"global_queries": shared, "bidirectional": own + shared}
    found = fuse_by_attention(direction, new_attention(WIDTH, seeded()), shared, own, heads=8)
    assert torch.equal(found.tokens, starts.get(direction, own))


@pytest.mark.parametrize("direction", ["local_queries", "global_queries", "concat_keys"])
def test_the_fused_prompt_is_as_long_as_the_one_that_asks(direction: Direction) -> None:
    weights, shared, own = trained_attention(), tokens(7), tokens(3, seed=1)
    found = fuse_by_attention(direction, weights, shared, own, heads=2).tokens
    assert len(found) == (7 if direction == "global_queries" else 3)


def test_the_order_of_the_asked_tokens_cannot_be_seen_and_that_of_the_asking_ones_is_kept() -> None:
    weights, shared, own = trained_attention(), tokens(6), tokens(3, seed=1)
    plain = fuse_by_attention("local_queries", weights, shared, own, heads=2).tokens
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    torch.testing.assert_close(fuse_by_attention("local_queries", weights, shared[order], own, heads=2).tokens, plain)
    turned = fuse_by_attention("local_queries", weights, shared, own.flip(0), heads=2).tokens
    torch.testing.assert_close(turned, plain.flip(0))
    twice = fuse_by_attention("local_queries", weights, torch.cat([shared, shared]), own, heads=2).tokens
    torch.testing.assert_close(twice, plain)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_stacked_clients_are_fused_as_one_after_the_other(direction: Direction) -> None:
    clients = [(trained_attention(seed), tokens(2, 4, seed=seed), tokens(2, 4, seed=seed + 9)) for seed in range(3)]

    def loss(weights: Tensors, shared: Tensor, own: Tensor) -> Tensor:
        return fuse_by_attention(direction, weights, shared, own, heads=4).tokens.square().sum()

    alone = [torch.func.grad_and_value(loss, argnums=(0, 1, 2))(*client) for client in clients]
    weights = {name: torch.stack([client[0][name] for client in clients]) for name in clients[0][0]}
    prompts = [torch.stack(each) for each in zip(*[client[1:] for client in clients], strict=True)]
    gradients, values = torch.func.vmap(torch.func.grad_and_value(loss, argnums=(0, 1, 2)))(weights, *prompts)
    for number, ((by_weight, by_global, by_local), value) in enumerate(alone):
        torch.testing.assert_close(values[number], value)
        torch.testing.assert_close(gradients[1][number], by_global)
        torch.testing.assert_close(gradients[2][number], by_local)
        for name, gradient in by_weight.items():
            torch.testing.assert_close(gradients[0][name][number], gradient)


def test_kinds_without_parameters() -> None:
    shared, own = torch.tensor([[2.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    assert torch.equal(fuse_plainly("mean", shared, own), torch.tensor([[1.0, 3.0]]))
    assert torch.equal(fuse_plainly("sum", shared, own), torch.tensor([[2.0, 6.0]]))
    longer = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    assert torch.equal(fuse_plainly("concat", shared, longer), torch.tensor([[2.0, 4.0], [0.0, 2.0], [1.0, 1.0]]))


def test_lengths_must_agree_where_tokens_are_added() -> None:
    assert needs_equal_lengths("mean", "local_queries")
    assert needs_equal_lengths("sum", "local_queries")
    assert not needs_equal_lengths("concat", "bidirectional")
    assert [direction for direction in DIRECTIONS if needs_equal_lengths("attention", direction)] == ["bidirectional"]


@pytest.mark.parametrize(("width", "count"), [(512, 1_050_624), (768, 2_362_368), (32, 4_224)])
def test_an_attention_has_four_square_maps_with_biases(width: int, count: int) -> None:
    weights = new_attention(width, seeded())
    assert sum(tensor.numel() for tensor in weights.values()) == 4 * (width**2 + width) == count
    for name in ("query", "key", "value"):
        bound = math.sqrt(6 / (2 * width))
        weight = weights[f"{name}.weight"]
        assert 0.95 * bound < float(weight.abs().max()) <= bound
    zeros = ("output.weight", "output.bias", "query.bias", "key.bias", "value.bias")
    assert not any(bool(weights[name].any()) for name in zeros)


def test_even_attention_and_its_collapse_are_told_apart() -> None:
    weights = trained_attention()
    weights |= {name: torch.zeros_like(weights[name]) for name in ("query.weight", "query.bias")}
    shared, own = tokens(5), tokens(3, seed=1)
    even = describe_attention("local_queries", fuse_by_attention("local_queries", weights, shared, own, 2), shared, own)
    assert float(even["attention_entropy"]) == pytest.approx(1)
    assert float(even["attention_peak"]) == pytest.approx(1 / 5)
    same = torch.eye(5, dtype=torch.float64)[[2, 2, 2]].expand(2, 3, 5)  # all queries hear token 2
    each = torch.eye(5, dtype=torch.float64)[[0, 1, 2]].expand(2, 3, 5)  # each query hears another one
    for listened, peak in ((same, 1.0), (each, 1 / 3)):
        found = describe_attention("local_queries", Fused(own, (Answer(own, listened),)), shared, own)
        assert float(found["attention_entropy"]) == pytest.approx(0, abs=1e-12)
        assert float(found["attention_peak"]) == pytest.approx(peak)


def test_the_entropy_of_a_known_attention() -> None:
    """Golden: (1/2, 1/4, 1/4) has entropy 1.5 log 2, of at most log 3."""
    listened = torch.tensor([[[0.5, 0.25, 0.25]]], dtype=torch.float64)
    own = tokens(1)
    found = describe_attention("local_queries", Fused(own, (Answer(own, listened),)), tokens(3, seed=1), own)
    assert float(found["attention_entropy"]) == pytest.approx(1.5 * math.log(2) / math.log(3))
    assert float(found["attention_peak"]) == pytest.approx(0.5)


def test_a_single_token_is_heard_evenly() -> None:
    shared, own = tokens(1), tokens(2, seed=1)
    fused = fuse_by_attention("local_queries", trained_attention(), shared, own, heads=2)
    found = describe_attention("local_queries", fused, shared, own)
    assert float(found["attention_entropy"]) == float(found["attention_peak"]) == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shares_say_where_the_prompt_comes_from(direction: Direction) -> None:
    weights, shared, own = trained_attention(), 2 * tokens(4), tokens(4, seed=1)
    fused = fuse_by_attention(direction, weights, shared, own, heads=2)
    found = describe_attention(direction, fused, shared, own)
    one, two = torch_attention(weights, own, shared, 2)[0], torch_attention(weights, shared, own, 2)[0]
    if direction == "local_queries":
        share, attention = one.norm() / (one.norm() + own.norm()), one.norm() / (one.norm() + own.norm())
    elif direction == "global_queries":
        share, attention = shared.norm() / (two.norm() + shared.norm()), two.norm() / (two.norm() + shared.norm())
    elif direction == "bidirectional":
        share = (shared + one).norm() / ((shared + one).norm() + (own + two).norm())
        attention = (one + two).norm() / ((one + two).norm() + (own + shared).norm())
    else:
        said, listened = torch_attention(weights, own, torch.cat([shared, own]), 2)
        attention = said.norm() / (said.norm() + own.norm())
        mass = listened[:, :, :4].sum(-1).mean()
        torch.testing.assert_close(found["global_mass"], mass)
        share = attention * mass
    torch.testing.assert_close(found["global_share"], share)
    torch.testing.assert_close(found["attention_share"], attention)
    assert ("global_mass" in found) == (direction == "concat_keys")
    assert all(0 <= float(number) <= 1 for number in found.values())


def test_the_mass_on_global_tokens_is_their_number_when_nobody_prefers_any() -> None:
    weights = trained_attention() | {"query.weight": torch.zeros(WIDTH, WIDTH, dtype=torch.float64)}
    weights["query.bias"] = torch.zeros(WIDTH, dtype=torch.float64)
    shared, own = tokens(6), tokens(2, seed=1)
    found = describe_attention("concat_keys", fuse_by_attention("concat_keys", weights, shared, own, 2), shared, own)
    assert float(found["global_mass"]) == pytest.approx(6 / 8)


def test_an_untrained_fusion_is_all_local_or_all_global() -> None:
    shared, own = tokens(4).float(), tokens(4, seed=1).float()
    weights = new_attention(WIDTH, seeded())
    shares: dict[Direction, float] = {"local_queries": 0.0, "global_queries": 1.0, "concat_keys": 0.0}
    for direction, share in shares.items():
        found = describe_attention(direction, fuse_by_attention(direction, weights, shared, own, 2), shared, own)
        assert float(found["global_share"]) == share
        assert float(found["attention_share"]) == 0


def test_parts_of_known_lengths() -> None:
    three, four = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])
    assert float(part(three, four)) == pytest.approx(3 / 7)
    assert float(part(0 * three, 0 * four)) == 0
