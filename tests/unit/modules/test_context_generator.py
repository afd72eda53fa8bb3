"""The prompt generator against torch's own layers, and what it must not depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import seeded
from torch import Tensor, nn

from fedprompt.modules.context_generator import generate, initial_generator
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

TOKENS, WIDTH, FEATURES, HEADS, CLASSES = 3, 8, 12, 4, 6


def made(seed: int = 0) -> Tensors:
    """A generator in which no norm and no bias is at its start."""
    generator = seeded(seed)
    tensors = initial_generator(generator.normal(TOKENS, WIDTH), FEATURES, generator)
    return {name: (each + 0.3 * generator.normal(*each.shape)).double() for name, each in tensors.items()}


def features(seed: int = 1) -> Tensor:
    drawn = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=-1)


def naive(tensors: Tensors, names: Tensor, residual: bool = False) -> Tensor:
    """Of names that are all known, with modules of torch as the authors use them: no residual around the attention."""

    def norm(name: str, x: Tensor) -> Tensor:
        layer = nn.LayerNorm(x.shape[-1], dtype=x.dtype)
        weights = {part: tensors[f"{name}.{part}"] for part in ("weight", "bias")}
        return torch.func.functional_call(layer, weights, (x,))

    attention = nn.MultiheadAttention(
        WIDTH, HEADS, kdim=FEATURES, vdim=FEATURES, batch_first=True, bias=True, dtype=torch.float64
    )
    weights = {
        "q_proj_weight": tensors["attention.query.weight"],
        "k_proj_weight": tensors["attention.key.weight"],
        "v_proj_weight": tensors["attention.value.weight"],
        "in_proj_bias": torch.cat([tensors[f"attention.{name}.bias"] for name in ("query", "key", "value")]),
        "out_proj.weight": tensors["attention.output.weight"],
        "out_proj.bias": tensors["attention.output.bias"],
    }
    said = norm("names_norm", names)[None]
    asked = norm("queries_norm", tensors["queries"])[None]
    answer, _ = torch.func.functional_call(attention, weights, (asked, said, said))
    mixed = answer[0] + tensors["queries"] if residual else answer[0]
    wide = norm("feed_forward.norm", mixed) @ tensors["feed_forward.in.weight"].T + tensors["feed_forward.in.bias"]
    hidden = wide[:, : 4 * WIDTH] * nn.GELU()(wide[:, 4 * WIDTH :])
    return mixed + hidden @ tensors["feed_forward.out.weight"].T + tensors["feed_forward.out.bias"]


@pytest.mark.parametrize("residual", [False, True])
def test_it_is_a_cross_attention_with_biases_and_a_gated_layer(residual: bool) -> None:
    found = generate(made(), features(), torch.ones(CLASSES), HEADS, residual)
    torch.testing.assert_close(found, naive(made(), features(), residual), atol=1e-12, rtol=1e-12)


def test_it_starts_as_torchs_attention_does() -> None:
    """With keys as wide as queries torch draws one matrix (3 d, d), uniform in ±sqrt(6 / 4 d), and biases of zero."""
    tensors, torchs = initial_generator(torch.zeros(4, 64), 64, seeded()), nn.MultiheadAttention(64, 4)
    for name in ("query", "key", "value"):
        found, expected = tensors[f"attention.{name}.weight"], torchs.in_proj_weight.detach()
        assert float(found.std()) == pytest.approx(float(expected.std()), rel=0.05)
        assert float(found.abs().max()) == pytest.approx(float(expected.abs().max()), rel=0.01)
    for name in ("query", "key", "value", "output"):
        assert not tensors[f"attention.{name}.bias"].any()


def test_names_that_are_not_known_are_not_there() -> None:
    known = torch.tensor([1.0, 0, 1, 0, 0, 1])
    found = generate(made(), features(), known, HEADS)
    torch.testing.assert_close(found, naive(made(), features()[known > 0]), atol=1e-12, rtol=1e-12)
    other = features()
    other[1] = -other[1]
    assert torch.equal(generate(made(), other, known, HEADS), found)
    assert float((generate(made(), features(), torch.ones(CLASSES), HEADS) - found).abs().max()) > 1e-3


def test_the_order_of_the_names_does_not_matter() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    known = torch.tensor([1.0, 1, 0, 1, 0, 1])
    found = generate(made(), features()[order], known[order], HEADS)
    torch.testing.assert_close(found, generate(made(), features(), known, HEADS), atol=1e-12, rtol=1e-12)


def test_what_is_trained_has_a_gradient() -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in made().items()}
    loss = generate(tensors, features(), torch.tensor([1.0, 1, 0, 1, 0, 1]), HEADS).square().sum()
    for name, gradient in zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True):
        assert gradient.isfinite().all(), name
        if name != "attention.key.bias":  # adds the same to all scores of a query
            assert float(gradient.abs().max()) > 1e-9, name


def test_size_at_the_width_of_clip() -> None:
    """The paper's: about 4.2 million numbers, of which attention has 4 d^2 and the gated layer 12 d^2."""
    tensors = initial_generator(torch.zeros(4, 512), 512, seeded())
    weights = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2 and name != "queries")
    assert weights == 16 * 512**2
    assert sum(tensor.numel() for tensor in tensors.values()) == 4_206_080
