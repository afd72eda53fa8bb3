"""FLORA on CLIP: the adapter, the orthogonal change, the loss, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, shared_tensors, worst_difference
from text_methods import noise_like, run_on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.flora_clip import FLORAClip, adapted, off_orthogonal, square
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit

BARE: Any = {"adapter": "none", "contrast_weight": 0.0, "orthogonal_weight": 0.0, "size_weight": 0.0}


def test_the_adapter_by_hand() -> None:
    """relu([1, -1]) = [1, 0]; logits [log 3, 0] are weights [3/4, 1/4]; times (4, 4) that is (3, 1)."""
    adapter = {
        "in.weight": torch.tensor([[0.25, 0.0], [0.0, -0.25]]),
        "in.bias": torch.zeros(2),
        "out.weight": torch.tensor([[1.0986123, 5.0], [0.0, 7.0]]),
        "out.bias": torch.zeros(2),
    }
    found = adapted(adapter, torch.tensor([[4.0, 4.0]]))
    torch.testing.assert_close(found, F.normalize(torch.tensor([[3.0, 1.0]]), dim=-1))


def test_an_adapter_that_begins_leaves_the_direction_of_an_image(settings: Any) -> None:
    runtime, _ = runtime_of(settings, FLORAClip(context_tokens=3))
    images, positions = runtime.bank.images(0, "train"), torch.arange(4)
    adapter = {
        n.removeprefix("adapter."): t for n, t in working_parameters(runtime).items() if n.startswith("adapter.")
    }
    found = adapted(adapter, images.features("image_raw", positions))
    torch.testing.assert_close(found, images.features("image", positions), atol=1e-6, rtol=1e-5)


def test_columns_begin_orthonormal_and_the_penalty_is_the_released_one_up_to_a_constant(settings: Any) -> None:
    _, world = runtime_of(settings, FLORAClip(context_tokens=5, rank=2))
    left = world.roles.local["low_rank.left"]
    assert float(off_orthogonal(left)) == pytest.approx(0.0, abs=1e-9)
    other = noise_like(left, 1, 1.0)
    gram = other @ other.T
    assert float(square(gram - torch.eye(5))) == pytest.approx(float(off_orthogonal(other)) + 5 - 2, rel=1e-5)


def test_the_loss_is_the_papers_term_by_term(settings: Any) -> None:
    method = FLORAClip(context_tokens=3, contrast_weight=2.0, temperature=0.3)
    runtime, world = runtime_of(settings, method)
    params = {n: t + noise_like(t, 1) if "low_rank" in n else t for n, t in working_parameters(runtime).items()}
    images, positions = runtime.bank.images(0, "train"), torch.arange(5)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    logits = method.logits(world, params, seen, batch, {})
    left, right = params["low_rank.left"], params["low_rank.right"]
    own, shared = world.text.encode(torch.stack([params["context"] + left @ right, params["context"]]), "end")
    plain = world.text.encode_words("a photo of a")
    torch.testing.assert_close(
        logits, world.text.scale * images.features("image", positions) @ own.T, atol=1e-4, rtol=1e-4
    )
    pairs = torch.stack([(plain * shared).sum(-1), (plain * own).sum(-1)], dim=-1) / 0.3
    expected = cross_entropy(logits, batch.labels).mean() - 2 * pairs.log_softmax(-1)[:, 0].mean()
    expected = expected + 0.1 * (left.T @ left - torch.eye(2)).square().sum() + 0.01 * right.square().sum()
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), expected, atol=1e-5, rtol=1e-5)


def test_with_nothing_of_its_own_it_is_promptfl(settings: Any) -> None:
    still = {"train": {"lr": 0.05, "lrs": {"low_rank.*": 0.0}}}
    found = run_on_clip(settings, FLORAClip(context_tokens=3, **BARE), "bare", **still)
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain", train={"lr": 0.05})
    assert worst_difference(shared_tensors(found), shared_tensors(plain)) < 1e-6
    assert found.client_accuracies() == plain.client_accuracies()


@pytest.mark.parametrize("where", ["shared", "local", "none"])
def test_the_adapter_is_where_it_was_asked_to_be(settings: Any, where: Any) -> None:
    done = run_on_clip(settings, FLORAClip(context_tokens=3, adapter=where), f"at-{where}")
    names = {"adapter.in.weight", "adapter.in.bias", "adapter.out.weight", "adapter.out.bias"}
    assert (names <= set(shared_tensors(done))) == (where == "shared")
    assert (names <= set(local_tensors(done, 0))) == (where == "local")
    assert float(local_tensors(done, 0)["low_rank.right"].abs().max()) > 0


def test_flora_still_means_the_stacked_one() -> None:
    assert type(registry.build({"name": "flora"})).__name__ == type(registry.build({"name": "flora_stacked"})).__name__
    assert isinstance(registry.build({"name": "flora_clip"}), FLORAClip)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rank": 99}, r"method.rank must be at most the \d+ words of the context, got 99"),
        ({"anchor_words": ""}, "method.anchor_words"),
        ({"adapter": "both"}, "adapter"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "flora_clip", **given}))
