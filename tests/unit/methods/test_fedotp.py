"""FedOTP: logits and gradients against plans from a plain loop, limits, and who owns what. The plans are in tests/unit/prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, shared_tensors
from text_methods import gradient, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.core import registry
from fedprompt.core.method import Batch, Seen
from fedprompt.errors import ConfigError
from fedprompt.methods.bases.with_text import similarity
from fedprompt.methods.fedotp import FedOTP

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


def unit_vectors(*shape: int, seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=-1)


def naive_plan(s: Tensor, epsilon: float, mass: float, iterations: int = 100) -> Tensor:
    kernel, v = torch.exp(-(1 - s) / epsilon), torch.ones(s.shape[1], dtype=s.dtype)
    for _ in range(iterations):
        u = (1 / len(s) / (kernel @ v)).clamp(max=1)
        v = mass / s.shape[1] / (kernel.T @ u)
    return u[:, None] * kernel * v


def test_logits_and_their_gradient_are_those_of_a_fixed_plan() -> None:
    patches, contexts = unit_vectors(2, 9, 6, seed=0), unit_vectors(2, 3, 6, seed=1).requires_grad_()
    logits = FedOTP(epsilon=0.1, mass=0.7).transported(10.0, patches, contexts)
    weights = unit_vectors(2, 3, seed=2)
    (found,) = torch.autograd.grad((logits * weights).sum(), contexts)
    expected = torch.zeros_like(contexts)
    for image in range(2):
        for label in range(3):
            s = (patches[image] @ contexts[:, label].T).detach()
            plan = naive_plan(s, 0.1, 0.7)
            assert float(logits[image, label].detach()) == pytest.approx(float(10 * (plan * s).sum()), abs=1e-9)
            expected[:, label] += weights[image, label] * 10 * plan.T @ patches[image]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("balanced", [False, True])
def test_one_patch_and_equal_contexts_give_the_plain_logits(settings: Any, balanced: bool) -> None:
    method = FedOTP(context_tokens=2, mass=1.0, balanced=balanced)
    _, world = runtime_of(settings, method)
    image, text = unit_vectors(4, 128, seed=0).float(), unit_vectors(5, 128, seed=1).float()
    seen = Seen(image_patches=image.unsqueeze(1), text={"context": text, "local_context": text})
    found = method.logits(world, {}, seen, Batch(torch.zeros(4, dtype=torch.long)), {})
    torch.testing.assert_close(found, similarity(world, image, text), atol=1e-4, rtol=1e-5)


def test_one_context_gives_the_mean_over_all_patches() -> None:
    patches, contexts = unit_vectors(2, 9, 6, seed=0), unit_vectors(1, 3, 6, seed=1)
    found = FedOTP(mass=1.0, balanced=True).transported(10.0, patches, contexts)
    torch.testing.assert_close(found, 10 * patches.mean(1) @ contexts[0].T)


def test_a_step_of_the_engine_is_the_naive_one(settings: Any) -> None:
    method = FedOTP(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    patches, labels = images.features("image_patches", torch.arange(6)).double(), images.labels[:6]
    assert patches.shape == (6, 16, 128)
    for name in ("context", "local_context"):
        leaf = params[name].detach().requires_grad_()
        contexts = torch.stack([{**params, name: leaf}[each] for each in ("context", "local_context")])
        text = world.text.encode(contexts, "end").double()
        rows = []
        for image in range(6):
            s = [patches[image] @ text[:, label].T for label in range(world.classes)]
            rows.append(torch.stack([(naive_plan(each.detach(), 0.1, 0.8) * each).sum() for each in s]))
        loss = F.cross_entropy(world.text.scale * torch.stack(rows), labels)
        (expected,) = torch.autograd.grad(loss, leaf)
        found = gradient(runtime, method, params, name)
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


def test_the_global_context_travels_and_the_local_one_stays(settings: Any) -> None:
    done = run_on_clip(settings, FedOTP(context_tokens=3), "otp")
    own = [local_tensors(done, client) for client in EVERYBODY]
    assert set(own[0]) == {"local_context", "trained"}
    assert set(shared_tensors(done)) == {"context"}
    assert len({tuple(each["local_context"].flatten().tolist()) for each in own}) == 4
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 3 * own[0]["local_context"].shape[-1]


def test_a_client_that_never_took_part_predicts_with_the_global_context(settings: Any) -> None:
    method = FedOTP(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    who = runtime._client(2, 1)
    shared = {"context": world.roles.shared["context"] + 1}
    fresh = method.personalise(world, who, shared, runtime._new(who))
    assert torch.equal(fresh["local_context"], shared["context"])
    kept = {**runtime._new(who), "trained": torch.ones(())}
    assert torch.equal(method.personalise(world, who, shared, kept)["local_context"], kept["local_context"])
    begun = method.begin(world, who, shared, runtime._new(who))
    assert torch.equal(begun["local_context"], world.roles.local["local_context"])


@pytest.mark.parametrize("epsilon", [0.01, 1e-3])
def test_a_run_with_a_small_epsilon_stays_finite(settings: Any, epsilon: float) -> None:
    done = run_on_clip(settings, FedOTP(context_tokens=2, epsilon=epsilon), "sharp")
    assert all(tensor.isfinite().all() for tensor in shared_tensors(done).values())
    assert len(done.client_accuracies()) == 4


@pytest.mark.parametrize(
    ("field", "value"), [("epsilon", 0.0), ("mass", 0.0), ("mass", 1.5), ("iterations", 0), ("balanced", "yes")]
)
def test_impossible_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        registry.build({"name": "fedotp", field: value})


def test_contexts_that_start_as_the_same_words_do_not_start_equal(settings: Any) -> None:
    """Equal ones would have equal gradients for ever, and what is sent would be the local context."""
    roles = runtime_of(settings, FedOTP())[1].roles
    apart = (roles.shared["context"] - roles.local["local_context"]).std()
    assert 0.001 < float(apart) < 0.003
