"""FedPHA: the projector, the loss term by term, lengths, and its limit as a whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, run, shared_tensors, worst_difference
from text_methods import gradient, on_clip, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.core import registry
from fedprompt.core.method import Batch
from fedprompt.errors import ConfigError
from fedprompt.methods.coop import CoOp
from fedprompt.methods.fedpha import FedPHA, distance, projector
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


def context(tokens: int, width: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tokens", "dropped"), [(1, 0), (4, 0), (5, 1), (8, 1), (10, 2), (16, 3), (40, 6)])
def test_the_projector_is_symmetric_and_idempotent_and_has_the_rank_of_the_kept_directions(
    tokens: int, dropped: int
) -> None:
    made = projector(context(tokens), 0.8)
    torch.testing.assert_close(made, made.T)
    torch.testing.assert_close(made @ made, made, atol=1e-12, rtol=1e-12)
    assert int(torch.linalg.matrix_rank(made)) == min(tokens, 32) - dropped


@pytest.mark.parametrize(("tokens", "width"), [(16, 32), (4, 32), (10, 10), (8, 6)])
def test_the_gradient_goes_through_the_singular_vectors_of_the_global_context(tokens: int, width: int) -> None:
    """The authors' rule with torch's own derivative of the decomposition, where all singular values differ."""
    leaf, local = context(tokens, width).requires_grad_(), context(3, width, seed=1)
    weight = context(3, width, seed=2)
    right = torch.linalg.svd(leaf, full_matrices=False)[2].T
    weak = right[:, int(right.shape[1] * 0.2 + 1e-9) :]
    (expected,) = torch.autograd.grad((local @ weak @ weak.T * weight).sum(), leaf)
    (found,) = torch.autograd.grad((local @ projector(leaf, 0.8) * weight).sum(), leaf)
    if tokens < width or tokens > 5:
        assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-6)


def test_nearly_equal_words_do_not_blur_the_projector_in_float32() -> None:
    rows = context(4)
    rows[3] = rows[0] + 1e-3 * context(1, seed=1)[0]
    exact = projector(rows.float().double(), 0.8)
    torch.testing.assert_close(projector(rows.float(), 0.8), exact.float(), atol=1e-6, rtol=1e-6)


def test_features_that_differ_by_rounding_do_not_push_each_other_anywhere() -> None:
    shared = F.normalize(context(3), dim=-1).float()
    for step, pushed in ((1e-7, False), (0.1, True)):
        own = (shared + step * context(3, seed=1).float()).requires_grad_()
        (found,) = torch.autograd.grad(distance(own, shared).sum(), own)
        assert bool(found.any()) == pushed
        torch.testing.assert_close(distance(own, shared), torch.linalg.vector_norm(own - shared, dim=-1))


def test_words_that_occur_twice_leave_the_gradient_finite() -> None:
    first, second = context(2)
    leaf = torch.stack([first, second, first, first]).requires_grad_()
    (found,) = torch.autograd.grad((context(3, seed=1) @ projector(leaf, 0.75)).square().sum(), leaf)
    assert found.isfinite().all()
    assert float(found.abs().max()) > 1e-3


def test_strong_directions_go_first_and_everything_outside_goes_too() -> None:
    strong, weak, outside = torch.eye(32, dtype=torch.float64)[:3]
    made = torch.stack([5 * strong, 5 * strong + weak, 5 * strong - weak, 0.5 * weak])
    kept = projector(made, 0.75)  # 1 of 4 directions is dropped; the context spans two of them
    torch.testing.assert_close(kept @ weak, weak, atol=1e-2, rtol=0)
    assert float((kept @ strong).norm()) < 0.1
    assert float((kept @ outside).norm()) < 1e-12


def test_all_of_the_directions_leave_what_the_context_spans_as_it_is() -> None:
    made = context(6)
    torch.testing.assert_close(made @ projector(made, 1.0), made, atol=1e-12, rtol=1e-12)


def test_words_that_occur_twice_bring_no_direction_of_their_own() -> None:
    first, second = context(2)
    kept = projector(torch.stack([first, second, first, second]).float(), 1.0).double()
    assert int(torch.linalg.matrix_rank(kept, rtol=1e-4)) == 2
    again = torch.stack([first, second]) @ kept
    torch.testing.assert_close(again, torch.stack([first, second]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("class_specific", [False, True])
def test_the_loss_is_the_sum_of_its_terms(settings: Any, class_specific: bool) -> None:
    """With a projector made of all singular vectors here; gradients of both contexts, also through the projector."""
    method = FedPHA(
        context_tokens=5,
        local_tokens=2,
        margin=1.5,
        pull_weight=30.0,
        push_weight=0.7,
        class_specific=class_specific,
    )
    runtime, world = runtime_of(settings, method)
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    image, labels = images.features("image", torch.arange(6)), images.labels[:6]
    for name in ("context", "local_context"):
        leaf = params[name].detach().requires_grad_()
        given = {**params, name: leaf}
        shared = world.text.encode(given["context"][None], "end")[0]
        own = world.text.encode(given["local_context"][None], "end")[0]
        weak = torch.linalg.svd(given["context"], full_matrices=False)[2][..., 1:5, :]
        projected = world.text.encode((given["local_context"] @ weak.mT @ weak)[None], "end")[0]
        loss = sum(F.cross_entropy(world.text.scale * image @ text.T, labels) for text in (own, shared))
        loss = loss + 30.0 * (own - projected).square().mean()
        loss = loss + 0.7 * (1.5 - (own - shared).square().sum(-1).sqrt()).clamp_min(0).mean()
        (expected,) = torch.autograd.grad(loss, leaf)
        assert float(expected.abs().max()) > 1e-3
        found = gradient(runtime, method, params, name)
        torch.testing.assert_close(found, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)


def test_the_pull_reaches_both_contexts(settings: Any) -> None:
    strong, none = FedPHA(pull_weight=1000.0, push_weight=0.0), FedPHA(pull_weight=0.0, push_weight=0.0)
    runtime, _ = runtime_of(settings, strong)
    params = working_parameters(runtime)
    for name in ("context", "local_context"):
        with_it, without = (gradient(runtime, method, params, name) for method in (strong, none))
        assert float((with_it - without).abs().max()) > 1e-3


def test_local_contexts_begin_like_the_global_one_unless_they_have_a_length_of_their_own(settings: Any) -> None:
    _, world = runtime_of(settings, FedPHA())
    assert torch.equal(world.roles.local["local_context"], world.roles.shared["context"])
    _, world = runtime_of(settings, FedPHA(local_tokens=3))
    assert world.roles.local["local_context"].shape == (3, world.text.width)


def test_equal_contexts_have_a_finite_gradient(settings: Any) -> None:
    method = FedPHA(context_words="a photo of a")
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime)
    assert torch.equal(params["context"], params["local_context"])
    for name in ("context", "local_context"):
        assert gradient(runtime, method, params, name).isfinite().all()


def test_without_pull_and_push_it_is_promptfl_and_coop_side_by_side(settings: Any) -> None:
    words = {"context_words": "a photo of a"}
    pair = run_on_clip(settings, FedPHA(**words, pull_weight=0.0, push_weight=0.0), "pair")
    plain = run_on_clip(settings, PromptFL(**words), "plain")
    alone = run_on_clip(settings, CoOp(**words), "alone")
    assert worst_difference(shared_tensors(pair), shared_tensors(plain)) < 1e-6
    for client in EVERYBODY:
        found, expected = local_tensors(pair, client)["local_context"], local_tensors(alone, client)["context"]
        assert float((found - expected).abs().max()) < 1e-6
    assert pair.client_accuracies() == alone.client_accuracies()


def test_an_evaluation_says_the_local_context_alone(settings: Any) -> None:
    method = FedPHA(local_tokens=2)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    testing = method.prompts(world, params, Batch(torch.zeros(1), training=False), {})
    assert set(testing.text) == {"local_context"}
    assert testing.text["local_context"].tokens.shape == (2, 32)


def test_lengths_go_round_the_clients_and_only_the_global_context_travels(settings: Any) -> None:
    method = registry.build({"name": "fedpha", "context_tokens": 3, "local_tokens": [2, 5, 1]})
    done = run_on_clip(settings, method, "lengths")
    own = [local_tensors(done, client)["local_context"] for client in EVERYBODY]
    assert [len(each) for each in own] == [2, 5, 1, 2]
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 3 * 32
    again = run_on_clip(settings, method, "part", federation={"rounds": 3, "fraction": 0.5})
    assert len(again.client_accuracies()) == 4


def test_a_client_that_never_took_part_predicts_with_the_global_context(settings: Any) -> None:
    method = FedPHA(context_tokens=3, local_tokens=5)
    runtime, world = runtime_of(settings, method)
    who = runtime._client(1, 1)
    fresh = method.personalise(world, who, world.roles.shared, runtime._new(who))
    assert torch.equal(fresh["local_context"], world.roles.shared["context"])
    kept = {**runtime._new(who), "trained": torch.ones(())}
    assert len(method.personalise(world, who, world.roles.shared, kept)["local_context"]) == 5


def test_a_held_out_client_trains_a_local_context(settings: Any) -> None:
    federation = {"rounds": 1, "held_out": 0.25, "newcomer_epochs": 2}
    asked = {"name": "fedpha", "local_tokens": 2}
    assert len(run(on_clip(settings, "held", method=asked, federation=federation)).client_accuracies()) == 1


def test_words_say_the_length_of_both(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"local_tokens must be null with context_words"):
        run(on_clip(settings, "words", method={"name": "fedpha", "context_words": "a photo", "local_tokens": 2}))


@pytest.mark.parametrize(
    ("field", "value"), [("local_tokens", 0), ("local_tokens", []), ("kept_ratio", 0.0), ("margin", -1.0)]
)
def test_impossible_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        registry.build({"name": "fedpha", field: value})
