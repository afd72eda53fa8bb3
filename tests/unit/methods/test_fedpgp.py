"""FedPGP: the low-rank change, the contrast, what is computed when, its limit as a whole run, and who owns what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experiment, local_tensors, run, shared_tensors, worst_difference
from text_methods import gradient, noise_like, on_clip, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.core import registry
from fedprompt.core.method import Batch, World
from fedprompt.errors import ConfigError
from fedprompt.methods.bases.with_low_rank import ANCHOR
from fedprompt.methods.fedpgp import FedPGP
from fedprompt.methods.promptfl import PromptFL
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

LEFT, RIGHT = "low_rank.left", "low_rank.right"
EVERYBODY = range(4)


def unit_vectors(*shape: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def own_context(method: FedPGP, world: World, params: Tensors) -> Tensor:
    return method.prompts(world, params, Batch(torch.zeros(1)), {}).text["own"].tokens


@pytest.mark.parametrize("class_specific", [False, True])
def test_the_change_has_the_rank_that_was_asked_for(settings: Any, class_specific: bool) -> None:
    method = FedPGP(context_tokens=6, rank=2, class_specific=class_specific)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    params = {**params, **{name: params[name] + noise_like(params[name], 1, 1.0) for name in (LEFT, RIGHT)}}
    change = own_context(method, world, params) - params["context"]
    assert change.shape == params["context"].shape
    assert (torch.linalg.matrix_rank(change, rtol=1e-4) == 2).all()
    torch.testing.assert_close(change, params[LEFT] @ params[RIGHT], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [LEFT, RIGHT])
def test_without_a_factor_the_context_is_the_global_one(settings: Any, name: str) -> None:
    method = FedPGP(context_tokens=3, rank=2)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    assert not torch.equal(own_context(method, world, params), params["context"])
    params[name] = torch.zeros_like(params[name])
    assert torch.equal(own_context(method, world, params), params["context"])


def test_tensors_start_as_small_noise(settings: Any) -> None:
    _, world = runtime_of(settings, FedPGP(context_tokens=64, rank=64))
    for tensor in (world.roles.shared["context"], world.roles.local[LEFT], world.roles.local[RIGHT]):
        assert float(tensor.std()) == pytest.approx(0.02, rel=0.1)


def test_the_contrast_is_minus_the_logarithm_of_a_softmax() -> None:
    anchor, shared, own = (unit_vectors(5, 16, seed=seed) for seed in range(3))
    found = FedPGP(temperature=0.2).contrast(anchor, shared, own)
    losses = []
    for label in range(5):
        positive = math.exp(float(anchor[label] @ shared[label]) / 0.2)
        negative = math.exp(float(shared[label] @ own[label]) / 0.2)
        losses.append(-math.log(positive / (positive + negative)))
    assert float(found) == pytest.approx(sum(losses) / 5, rel=1e-5)


def test_an_own_context_that_says_what_the_anchor_says_costs_log_two() -> None:
    anchor, shared = unit_vectors(5, 16, seed=0), unit_vectors(5, 16, seed=1)
    assert float(FedPGP().contrast(anchor, shared, anchor)) == pytest.approx(math.log(2))
    assert float(FedPGP().contrast(shared, shared, anchor)) < math.log(2)


def test_the_loss_is_cross_entropy_and_the_weighted_contrast(settings: Any) -> None:
    """Against text features that are computed here, with "a photo of a" for an anchor; gradients of all that is trained."""
    method = FedPGP(context_tokens=3, rank=2, contrast_weight=0.7)
    runtime, world = runtime_of(settings, method)
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    image, labels = images.features("image", torch.arange(6)), images.labels[:6]
    words = world.text.words("a photo of a")
    for name in ("context", LEFT, RIGHT):
        leaf = params[name].detach().requires_grad_()
        given = {**params, name: leaf}
        shared = world.text.encode(given["context"][None], "end")[0]
        own = world.text.encode((given["context"] + given[LEFT] @ given[RIGHT])[None], "end")[0]
        plain = world.text.encode(words[None], "end")[0].detach()
        pairs = torch.stack([(plain * shared).sum(-1), (shared * own).sum(-1)], dim=-1) / 0.5
        contrast = F.cross_entropy(pairs, torch.zeros(world.classes, dtype=torch.long))
        loss = F.cross_entropy(world.text.scale * image @ own.T, labels) + 0.7 * contrast
        (expected,) = torch.autograd.grad(loss, leaf)
        assert float(expected.abs().max()) > 1e-4
        torch.testing.assert_close(gradient(runtime, method, params, name), expected, atol=1e-5, rtol=1e-4)


def test_the_contrast_costs_nothing_where_it_is_not_needed(settings: Any) -> None:
    training, testing = Batch(torch.zeros(1)), Batch(torch.zeros(1), training=False)
    method = FedPGP(context_tokens=3, rank=2)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    assert set(method.prompts(world, params, training, {}).text) == {"own", "global"}
    assert set(method.prompts(world, params, testing, {}).text) == {"own"}
    without = FedPGP(context_tokens=3, rank=2, contrast_weight=0.0)
    runtime, world = runtime_of(settings, without)
    params = working_parameters(runtime)
    assert ANCHOR not in params
    assert set(without.prompts(world, params, training, {}).text) == {"own"}


@dataclass(frozen=True)
class Unchanged(FedPGP):
    """No change to begin with."""

    def own(self, world: World, context: Tensor, generator: Stream) -> Tensors:
        return {name: torch.zeros_like(tensor) for name, tensor in super().own(world, context, generator).items()}


def test_without_change_and_contrast_it_is_promptfl(settings: Any) -> None:
    method = Unchanged(context_tokens=3, contrast_weight=0.0)
    changed = run_on_clip(settings, method, "pgp")
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain")
    assert worst_difference(shared_tensors(changed), shared_tensors(plain)) < 1e-6
    assert changed.client_accuracies() == plain.client_accuracies()


def test_only_the_global_context_travels(settings: Any) -> None:
    done = run_on_clip(settings, FedPGP(context_tokens=3, rank=2), "pgp")
    assert set(shared_tensors(done)) == {"context"}
    own = [local_tensors(done, client) for client in EVERYBODY]
    assert set(own[0]) == {LEFT, RIGHT, "trained"}
    assert own[0][LEFT].shape == (3, 2)
    assert len({tuple(each[RIGHT].flatten().tolist()) for each in own}) == 4
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 3 * own[0][RIGHT].shape[-1]


def test_a_client_that_never_took_part_predicts_with_the_global_context(settings: Any) -> None:
    method = FedPGP(context_tokens=3, rank=2)
    runtime, world = runtime_of(settings, method)
    who = runtime._client(1, 1)
    fresh = method.personalise(world, who, world.roles.shared, runtime._new(who))
    assert torch.equal(own_context(method, world, fresh), world.roles.shared["context"])
    kept = {**runtime._new(who), "trained": torch.ones(())}
    trained = method.personalise(world, who, world.roles.shared, kept)
    assert not torch.equal(own_context(method, world, trained), world.roles.shared["context"])


def test_a_held_out_client_trains_its_change_alone(settings: Any) -> None:
    federation = {"rounds": 1, "held_out": 0.25, "newcomer_epochs": 2}
    done = run(on_clip(settings, "held", method={"name": "fedpgp", "context_tokens": 3}, federation=federation))
    assert len(done.client_accuracies()) == 1
    method = FedPGP(context_tokens=3)
    made = experiment(on_clip(settings, "held"), method)
    world = made.factory.prepare()[-1]
    (stage,) = method.newcomer(world, made.config.train, 2)
    assert stage.trainable == (LEFT, RIGHT)


def test_anchor_words_need_a_token(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"anchor_words must have at least one token, got ''"):
        run(on_clip(settings, "silent", method={"name": "fedpgp", "anchor_words": ""}))


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("contrast_weight", -1.0), ("temperature", 0.0)])
def test_impossible_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        registry.build({"name": "fedpgp", field: value})
