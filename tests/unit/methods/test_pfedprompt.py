"""pFedPrompt: the memory against a naive sum, what is kept in it, and that it never travels."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support import shared_tensors, worst_difference
from text_methods import gradient, results, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Method
from fedprompt.errors import ConfigError
from fedprompt.methods.pfedprompt import (
    KEYS,
    KNOWN,
    SHARPNESS,
    SHARPNESSES,
    WEIGHT,
    WEIGHTS,
    PFedPrompt,
    calibrate,
    recall,
    remember,
)
from fedprompt.methods.promptfl import PromptFL
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit


def test_what_the_memory_says_is_a_sum_over_the_remembered_images() -> None:
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(7, 4, generator=generator), dim=-1)
    labels = torch.tensor([2, 0, 2, 0, 2, 2, 2])
    images = F.normalize(torch.randn(3, 4, generator=generator), dim=-1)
    found = recall(*remember(features, labels, classes=4, most=16), images, sharpness=5.5)
    for row, image in enumerate(images):
        for label in range(4):
            expected = sum(
                math.exp(-5.5 * (1 - float(image @ key)))
                for key, its in zip(features, labels.tolist(), strict=True)
                if its == label
            )
            assert float(found[row, label]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (found[:, [1, 3]] == 0).all(), "nothing is said of classes that were never seen"


@hypothesis.given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=5), most=st.integers(1, 6))
def test_each_class_keeps_as_many_images_as_it_has_up_to_the_bound(counts: list[int], most: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    labels = labels[order]
    features = torch.arange(len(labels), dtype=torch.float32).add(1).unsqueeze(1)
    keys, known = remember(features, labels, len(counts), most)
    assert keys.shape == (len(counts), most, 1)
    for label, count in enumerate(counts):
        kept = keys[label, known[label] > 0, 0].tolist()
        assert len(kept) == len(set(kept)) == min(count, most)
        assert set(kept) <= set(features[labels == label, 0].tolist())
        assert (keys[label, known[label] == 0] == 0).all()


def test_a_full_memory_is_spread_over_the_clients_order() -> None:
    """A client's images come domain by domain: the first ones alone would be those of one domain."""
    features = torch.arange(12.0).unsqueeze(1)
    keys, _ = remember(features, torch.zeros(12, dtype=torch.long), classes=1, most=4)
    assert keys.flatten().tolist() == [0.0, 3.0, 6.0, 9.0]


def test_the_memory_of_a_client_is_made_of_its_own_training_images(settings: Any) -> None:
    runtime, world = runtime_of(settings, PFedPrompt(context_tokens=2))
    memories = []
    for client in range(world.clients):
        params, images = working_parameters(runtime, client), runtime.bank.images(client, "train")
        features = images.features("image", torch.arange(len(images)))
        assert params[KNOWN].sum(-1).tolist() == runtime._client(client, 1).class_counts.tolist()
        for label in range(world.classes):
            kept = params[KEYS][label, params[KNOWN][label] > 0]
            assert torch.equal(kept, features[images.labels == label])
        memories.append(params[KEYS])
    assert not torch.equal(memories[0], memories[1])


def test_features_of_training_images_come_with_their_labels(settings: Any) -> None:
    """The hook of the contract, in batches that do not divide the number of images."""
    runtime, _ = runtime_of(settings, PFedPrompt(), federation={"evaluation_batch": 7})
    images = runtime.bank.images(1, "train")
    for name in ("image", "cls"):
        found, labels = runtime._client(1, 1).features(name)
        assert torch.equal(found, images.features(name, torch.arange(len(images))))
        assert torch.equal(labels, images.labels)


def test_the_context_follows_promptfl_to_the_bit_and_only_it_travels(settings: Any) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    personal = run_on_clip(settings, PFedPrompt(context_tokens=4), "personal")
    assert worst_difference(shared_tensors(plain), shared_tensors(personal)) == 0.0
    for record, other in zip(plain.rounds(), personal.rounds(), strict=True):
        assert (record.bytes_up, record.bytes_down) == (other.bytes_up, other.bytes_down)
    assert results(plain, 2) != results(personal, 2)


def test_a_memory_without_weight_is_promptfl(settings: Any) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    personal = run_on_clip(settings, PFedPrompt(context_tokens=4, memory_weight=0.0), "personal")
    for client, found in results(personal, 2).items():
        assert {**found, "diagnostics": {}} == {**results(plain, 2)[client], "diagnostics": {}}


def logits_of(runtime: ClientRuntime, method: Method, params: Tensors, training: bool) -> torch.Tensor:
    images, positions = runtime.bank.images(0, "train"), torch.arange(6)
    batch = make_batch(method, images, positions, training)
    seen = forward(method, runtime.world, params, images, positions, batch, {})
    return method.logits(runtime.world, params, seen, batch, {})


def test_the_memory_joins_in_at_tests_and_in_training_when_asked(settings: Any) -> None:
    method = PFedPrompt(context_tokens=4, memory_weight=2.0, sharpness=5.5)
    runtime, _ = runtime_of(settings, method)
    params, plain = working_parameters(runtime), PromptFL(context_tokens=4)
    said = logits_of(runtime, plain, params, training=False)
    assert torch.equal(logits_of(runtime, method, params, training=True), said)
    features = runtime.bank.images(0, "train").features("image", torch.arange(6))
    expected = said + 2.0 * recall(params[KEYS], params[KNOWN], features, 5.5)
    torch.testing.assert_close(logits_of(runtime, method, params, training=False), expected)
    always = PFedPrompt(context_tokens=4, memory_weight=2.0, sharpness=5.5, train_with_memory=True)
    torch.testing.assert_close(logits_of(runtime, always, params, training=True), expected)
    gradients = [gradient(runtime, each, params, "context") for each in (plain, method, always)]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2], rtol=1e-3)


def naive_choice(features: Tensor, labels: list[int], text: Tensor, scale: float, classes: int) -> tuple[float, float]:
    """Alpha and beta image by image: each is classified by the text and by all other images."""
    scored = []
    for beta in SHARPNESSES:
        for alpha in WEIGHTS:
            right, fit = [], []
            for number, (image, label) in enumerate(zip(features, labels, strict=True)):
                if labels.count(label) < 2:
                    continue
                logits = scale * image @ text.T
                for other, key in enumerate(features):
                    if other != number:
                        logits[labels[other]] += alpha * math.exp(-beta * (1 - float(image @ key)))
                right.append(float(logits.argmax() == label))
                fit.append(float(logits.log_softmax(0)[label]))
            scored.append((sum(right) / len(right), sum(fit) / len(fit), alpha, beta, len(right)))
    best, count = max(each[0] for each in scored), scored[0][-1]
    error = math.sqrt(max(best * (1 - best), 1 / count) / count)
    _, _, alpha, beta, _ = max((each for each in scored if each[0] >= best - error), key=lambda each: each[1])
    return alpha, beta


@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_alpha_and_beta_are_those_that_classify_each_remembered_image_best_by_the_others(spread: float) -> None:
    """Six dimensions, texts that say nothing: near images need another beta than scattered ones."""
    drawn = torch.Generator().manual_seed(1)
    centres = F.normalize(torch.randn(4, 6, generator=drawn, dtype=torch.float64), dim=-1)
    labels = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3]
    noise = torch.randn(len(labels), 6, generator=drawn, dtype=torch.float64)
    features = F.normalize(centres[labels] + spread * noise / 6**0.5, dim=-1)
    text = F.normalize(torch.randn(4, 6, generator=drawn, dtype=torch.float64), dim=-1)
    keys, known = remember(features, torch.tensor(labels), classes=4, most=5)
    found = calibrate(keys, known, 10.0 * keys @ text.T, WEIGHTS, SHARPNESSES)
    assert found == naive_choice(features, labels, text, 10.0, 4)
    assert found != (1.0, 5.5)


def test_a_client_calibrates_the_memory_on_its_own_training_images(settings: Any) -> None:
    method = PFedPrompt(context_tokens=2)
    runtime, world = runtime_of(settings, method)
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    features = images.features("image", torch.arange(len(images))).double()
    text = world.text.encode(params["context"][None], "end")[0].double()
    expected = naive_choice(features, images.labels.tolist(), text, world.text.scale, world.classes)
    assert (float(params[WEIGHT]), float(params[SHARPNESS])) == expected
    half = PFedPrompt(context_tokens=2, sharpness=3.0)
    assert float(working_parameters(runtime_of(settings, half)[0])[SHARPNESS]) == 3


def test_one_image_per_class_leaves_the_numbers_of_tip_adapter() -> None:
    keys, known = remember(torch.eye(3), torch.tensor([0, 1, 2]), classes=3, most=2)
    assert calibrate(keys, known, keys @ torch.eye(3), WEIGHTS, SHARPNESSES) == (1.0, 5.5)
    assert calibrate(keys, known, keys @ torch.eye(3), (7.0,), SHARPNESSES) == (7.0, 5.5)


def test_a_strong_memory_knows_the_training_images(settings: Any) -> None:
    method = PFedPrompt(context_tokens=4, memory_weight=1e4, sharpness=200.0)
    runtime, _ = runtime_of(settings, method)
    found = logits_of(runtime, method, working_parameters(runtime), training=False).argmax(-1)
    assert torch.equal(found, runtime.bank.images(0, "train").labels[:6])


def test_held_out_clients_have_a_memory_too(settings: Any) -> None:
    changes: dict[str, Any] = {"federation": {"rounds": 1, "held_out": 0.5}}
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain", **changes)
    personal = run_on_clip(settings, PFedPrompt(context_tokens=4, memory_weight=20.0), "personal", **changes)
    assert len(personal.client_accuracies()) == 2
    assert results(plain, 1) != results(personal, 1)


@pytest.mark.parametrize(("setting", "value"), [("memory_per_class", 0), ("memory_weight", -1), ("sharpness", -1)])
def test_settings_that_cannot_work_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{setting} must .*, got {value}"):
        registry.build({"name": "pfedprompt", setting: value})
