"""Gates against torch's own attention and naive loops, and what they must do at their limits."""

from __future__ import annotations

import pytest
import torch
from support import seeded
from torch import Tensor, nn

from fedprompt.modules import gates
from fedprompt.modules.init import linear_layer
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

IMAGES, CLASSES, EXPERTS, WIDTH, HEADS, SCALING = 5, 3, 4, 16, 4, 10.0
ALL = torch.ones(EXPERTS, dtype=torch.float64)


def unit(*size: int, seed: int) -> Tensor:
    drawn = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn / drawn.norm(dim=-1, keepdim=True)


@pytest.fixture
def image() -> Tensor:
    return unit(IMAGES, WIDTH, seed=1)


@pytest.fixture
def text() -> Tensor:
    return unit(EXPERTS, CLASSES, WIDTH, seed=2)


@pytest.fixture
def gate() -> Tensors:
    drawn = gates.attention_start(WIDTH, seeded(3))
    return {name: tensor.double() for name, tensor in drawn.items()}


def scores(gate: Tensors, image: Tensor, text: Tensor, known: Tensor = ALL, scaling: float = SCALING) -> Tensor:
    weights = gates.attention_weights(gate, image, text, known, HEADS, scaling)
    return gates.attention_scores(gate, weights, image, text)


def naive(gate: Tensors, image: Tensor, text: Tensor, scaling: float = SCALING) -> tuple[Tensor, Tensor]:
    """torch's attention, class after class: the mixture M (B, C, w) and the weights (B, C, h, E)."""
    width = image.shape[-1]
    attention = nn.MultiheadAttention(width, HEADS, batch_first=True, dtype=image.dtype)
    undo = scaling * (width / HEADS) ** 0.5  # torch divides by the root of a head's width
    tensors = {
        "in_proj_weight": torch.cat([undo * gate["query.weight"], gate["key.weight"], gate["value.weight"]]),
        "in_proj_bias": torch.cat([undo * gate["query.bias"], gate["key.bias"], gate["value.bias"]]),
        "out_proj.weight": gate["output.weight"],
        "out_proj.bias": gate["output.bias"],
    }
    mixtures, weights = [], []
    for number in range(text.shape[1]):
        inputs = (image.unsqueeze(0), text[:, number].unsqueeze(0), text[:, number].unsqueeze(0))
        asked = {"need_weights": True, "average_attn_weights": False}
        mixture, weight = torch.func.functional_call(attention, tensors, inputs, asked)
        mixtures.append(mixture[0])
        weights.append(weight[0].transpose(0, 1))
    return torch.stack(mixtures, dim=1), torch.stack(weights, dim=1)


def test_the_attention_is_torchs_with_another_factor(gate: Tensors, image: Tensor, text: Tensor) -> None:
    mixture, weights = naive(gate, image, text)
    found = gates.attention_weights(gate, image, text, ALL, HEADS, SCALING)
    assert found.shape == (IMAGES, CLASSES, HEADS, EXPERTS)
    torch.testing.assert_close(found, weights)
    torch.testing.assert_close(found.sum(-1), torch.ones(IMAGES, CLASSES, HEADS, dtype=torch.float64))
    assert float(found.std()) > 0.01
    torch.testing.assert_close(scores(gate, image, text), (mixture * image[:, None]).sum(-1))


def test_gradients_are_those_of_torchs_attention(gate: Tensors, image: Tensor, text: Tensor) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in gate.items()}
    words = text.requires_grad_()
    target = unit(IMAGES, CLASSES, seed=9)
    wanted = [*leaves.values(), words]
    found = torch.autograd.grad((scores(leaves, image, words) * target).sum(), wanted)
    mixture, _ = naive(leaves, image, words)
    expected = torch.autograd.grad(((mixture * image[:, None]).sum(-1) * target).sum(), wanted)
    for name, one, other in zip((*leaves, "text"), found, expected, strict=True):
        assert float(one.abs().max()) > 1e-6 or name == "key.bias", name  # it moves all experts alike
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_the_order_of_experts_does_not_matter_nor_does_having_all_of_them_twice(
    gate: Tensors, image: Tensor, text: Tensor
) -> None:
    expected = scores(gate, image, text)
    torch.testing.assert_close(scores(gate, image, text[[2, 0, 3, 1]]), expected)
    torch.testing.assert_close(scores(gate, image, text.repeat(2, 1, 1), ALL.repeat(2)), expected)


def test_an_expert_that_is_not_known_might_as_well_not_be_there(gate: Tensors, image: Tensor, text: Tensor) -> None:
    known = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    weights = gates.attention_weights(gate, image, text, known, HEADS, SCALING)
    assert (weights[..., [1, 3]] == 0).all()
    torch.testing.assert_close(scores(gate, image, text, known), scores(gate, image, text[[0, 2]], ALL[:2]))


@pytest.mark.parametrize("how", ["scaling", "query"])
def test_without_a_query_all_experts_count_the_same(gate: Tensors, image: Tensor, text: Tensor, how: str) -> None:
    if how == "query":
        gate = {name: 0 * tensor if name.startswith("query") else tensor for name, tensor in gate.items()}
    found = scores(gate, image, text, scaling=0.0 if how == "scaling" else SCALING)
    values = text @ gate["value.weight"].T + gate["value.bias"]
    mixture = values.mean(0) @ gate["output.weight"].T + gate["output.bias"]
    torch.testing.assert_close(found, image @ mixture.T)


def test_a_large_factor_picks_one_expert_per_image_class_and_head(gate: Tensors, image: Tensor, text: Tensor) -> None:
    query, key = (
        (x @ gate[f"{part}.weight"].T + gate[f"{part}.bias"]).unflatten(-1, (HEADS, -1))
        for part, x in (("query", image), ("key", text))
    )
    best = (query[:, None, None] * key[None]).sum(-1).argmax(1)  # (B, E, C, h) -> (B, C, h)
    weights = gates.attention_weights(gate, image, text, ALL, HEADS, 1e6)
    torch.testing.assert_close(weights.max(-1).values, torch.ones(IMAGES, CLASSES, HEADS, dtype=torch.float64))
    assert torch.equal(weights.argmax(-1), best)
    assert len(best.unique()) > 1


def test_equal_experts_under_an_identity_are_plain_similarity(gate: Tensors, image: Tensor, text: Tensor) -> None:
    gate = {name: torch.zeros_like(tensor) if "bias" in name else tensor for name, tensor in gate.items()}
    gate |= {f"{part}.weight": torch.eye(WIDTH, dtype=torch.float64) for part in ("value", "output")}
    torch.testing.assert_close(scores(gate, image, text[:1].expand_as(text)), image @ text[0].T)


def test_one_expert_alone_passes_value_and_output(gate: Tensors, image: Tensor, text: Tensor) -> None:
    value = text[0] @ gate["value.weight"].T + gate["value.bias"]
    mixture = value @ gate["output.weight"].T + gate["output.bias"]
    torch.testing.assert_close(scores(gate, image, text[:1], ALL[:1]), image @ mixture.T)


@pytest.mark.parametrize(
    ("width", "numbers"),
    [(32, 4_224), (64, 16_640), (128, 66_048), (256, 263_168), (512, 1_050_624), (1024, 4_198_400)],
)
def test_the_numbers_of_an_attention(width: int, numbers: int) -> None:
    gate = gates.attention_start(width, seeded())
    assert sum(tensor.numel() for tensor in gate.values()) == numbers == 4 * (width**2 + width)


def test_layers_start_as_torchs_do() -> None:
    """Uniform in ±1/sqrt(fan-in), which has standard deviation 1/sqrt(3 fan-in)."""
    layer = linear_layer("linear", 200, 50, seeded())
    theirs = nn.Linear(50, 200)
    for name, parameter in theirs.named_parameters():
        found = layer[f"linear.{name}"]
        assert found.shape == parameter.shape
        assert float(found.abs().max()) <= 50**-0.5
        assert float(found.std()) == pytest.approx((3 * 50) ** -0.5, rel=0.1)


def test_pooling_takes_every_nth_number_or_means_of_n() -> None:
    features = torch.arange(12.0).view(2, 6)
    assert gates.pooled(features, 3, "stride").tolist() == [[0, 2, 4], [6, 8, 10]]
    assert gates.pooled(features, 3, "mean").tolist() == [[0.5, 2.5, 4.5], [6.5, 8.5, 10.5]]
    wide = torch.randn(4, 3, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gates.pooled(wide, 128, "stride"), wide[..., ::4])
    assert torch.equal(gates.pooled(wide, 512, "stride"), wide)
    assert torch.equal(gates.pooled(wide, 512, "mean"), wide)


def test_the_linear_gate_mixes_full_features_with_weights_of_the_image() -> None:
    wide, image = unit(EXPERTS, CLASSES, 2 * WIDTH, seed=4), unit(IMAGES, 2 * WIDTH, seed=5)
    drawn = linear_layer("linear", EXPERTS, WIDTH, seeded(6))
    gate = {name: 5 * tensor.double() for name, tensor in drawn.items()}
    known = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    weights = gates.linear_weights(gate, image[:, ::2], known)
    found = gates.linear_scores(weights, image, wide)
    for b in range(IMAGES):
        exponentials = [
            float(known[e]) * float((gate["linear.weight"][e] @ image[b, ::2] + gate["linear.bias"][e]).exp())
            for e in range(EXPERTS)
        ]
        for c in range(CLASSES):
            mixture = sum(value / sum(exponentials) * wide[e, c] for e, value in enumerate(exponentials))
            assert float(found[b, c]) == pytest.approx(float(image[b] @ mixture), abs=1e-12)
    assert float(weights.std(0).max()) > 1e-3, "weights must depend on the image"


def test_entropy_is_one_for_uniform_weights_and_zero_for_a_choice() -> None:
    known = torch.tensor([1.0, 1.0, 0.0, 1.0])
    assert gates.entropy(known.expand(2, 5, 4) / 3, known).tolist() == pytest.approx([1.0, 1.0])
    assert gates.entropy(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), known).tolist() == [0.0]
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert gates.entropy(half, known).mean().item() == pytest.approx(0.6309297, abs=1e-6)  # log 2 / log 3
    assert gates.entropy(torch.ones(3, 1), torch.ones(1)).tolist() == [0.0] * 3
