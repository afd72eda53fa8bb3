"""FedPLOT: one context is the mean patch, the transport is FedOTP's, and contexts differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import seeded, shared_tensors, worst_difference
from text_methods import gradient, run_on_clip, runtime_of, working_parameters

from fedprompt.core import registry
from fedprompt.core.method import Batch, Seen
from fedprompt.errors import ConfigError
from fedprompt.methods.fedotp import FedOTP
from fedprompt.methods.fedplot import FedPLOT

pytestmark = pytest.mark.unit

BATCH = Batch(torch.zeros(3, dtype=torch.long))


def seen_with(contexts: int) -> Seen:
    generator = torch.Generator().manual_seed(0)
    patches = F.normalize(torch.randn(3, 7, 128, generator=generator), dim=-1)
    text = {str(n): F.normalize(torch.randn(5, 128, generator=generator), dim=-1) for n in range(contexts)}
    return Seen(image_patches=patches, text=text)


def test_one_context_is_the_mean_similarity_of_the_patches(settings: Any) -> None:
    _, world = runtime_of(settings, FedPLOT(contexts=1))
    seen = seen_with(1)
    found = FedPLOT(contexts=1).logits(world, {}, seen, BATCH, {})
    expected = world.text.scale * torch.einsum("bmd,cd->bc", seen.image_patches, seen.text["0"]) / 7
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_two_contexts_are_fedotps_balanced_transport(settings: Any) -> None:
    _, world = runtime_of(settings, FedPLOT(contexts=2))
    seen = seen_with(2)
    found = FedPLOT(contexts=2, epsilon=0.2).logits(world, {}, seen, BATCH, {})
    both = torch.stack([seen.text["0"], seen.text["1"]])
    expected = FedOTP(epsilon=0.2, balanced=True).transported(world.text.scale, seen.image_patches, both)
    assert torch.equal(found, expected)


def test_a_transport_is_no_worse_than_an_even_one_and_swaps_of_contexts_change_nothing(settings: Any) -> None:
    _, world = runtime_of(settings, FedPLOT(contexts=4))
    seen = seen_with(4)
    found = FedPLOT(contexts=4, epsilon=0.01, iterations=500).logits(world, {}, seen, BATCH, {})
    text = torch.stack([seen.text[str(n)] for n in range(4)])
    even = world.text.scale * torch.einsum("bmd,ncd->bcmn", seen.image_patches, text).mean((-2, -1))
    assert bool((found >= even - 1e-4).all())
    swapped = Seen(image_patches=seen.image_patches, text={str(n): seen.text[str(3 - n)] for n in range(4)})
    other = FedPLOT(contexts=4, epsilon=0.01, iterations=500).logits(world, {}, swapped, BATCH, {})
    torch.testing.assert_close(other, found, atol=1e-4, rtol=1e-4)


def test_contexts_that_begin_as_words_differ_and_all_learn(settings: Any) -> None:
    method = FedPLOT(contexts=3)
    runtime, world = runtime_of(settings, method)
    start = world.roles.shared["context"]
    assert start.shape[0] == 3
    assert 0 < float((start[0] - start[1]).abs().max()) < 0.02
    found = gradient(runtime, method, working_parameters(runtime), "context")
    assert all(float(each.abs().max()) > 0 for each in found)
    done = run_on_clip(settings, method, "plot")
    assert worst_difference(shared_tensors(done), world.roles.shared) > 1e-4
    assert not world.roles.local


def test_a_single_context_begins_as_the_words(settings: Any) -> None:
    _, world = runtime_of(settings, FedPLOT())
    assert torch.equal(FedPLOT(contexts=1).init(world, seeded()).shared["context"][0], world.text.words("a photo of a"))
    classes = FedPLOT(contexts=2, class_specific=True, context_tokens=2).init(world, seeded()).shared["context"]
    assert classes.shape == (2, world.classes, 2, world.text.width)


@pytest.mark.parametrize("given", [{"contexts": 0}, {"epsilon": 0.0}, {"iterations": 0}])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        registry.build({"name": "fedplot", **given})
