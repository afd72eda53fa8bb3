"""PromptFL with FedProx: the proximal term has the gradient that the public code forgot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import shared_tensors, worst_difference
from text_methods import gradient, noise_like, run_on_clip, runtime_of, working_parameters

from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.promptfl_prox import PromptFLProx
from fedprompt.methods.variants.fedprox import FedProx

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("class_specific", [False, True])
def test_the_gradient_differs_from_that_of_promptfl_by_mu_times_the_distance(
    settings: Any, class_specific: bool
) -> None:
    shape: dict[str, Any] = {"context_tokens": 4, "class_specific": class_specific}
    method = PromptFLProx(mu=0.7, **shape)
    runtime, _ = runtime_of(settings, method)
    received = working_parameters(runtime)
    change = noise_like(received["context"], 1)
    params = {**received, "context": received["context"] + change}
    found = gradient(runtime, method, params, "context") - gradient(runtime, PromptFL(**shape), params, "context")
    torch.testing.assert_close(found, 0.7 * change, atol=1e-6, rtol=1e-4)


def test_at_the_received_context_the_term_pulls_nowhere(settings: Any) -> None:
    method = PromptFLProx(context_tokens=4, mu=100.0)
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime)
    plain = gradient(runtime, PromptFL(context_tokens=4), params, "context")
    assert torch.equal(gradient(runtime, method, params, "context"), plain)


def test_without_weight_it_is_promptfl(settings: Any) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    weightless = run_on_clip(settings, PromptFLProx(context_tokens=4, mu=0.0), "weightless")
    assert worst_difference(shared_tensors(plain), shared_tensors(weightless)) == 0.0


def test_it_is_promptfl_inside_the_variant_fedprox(settings: Any) -> None:
    ours = run_on_clip(settings, PromptFLProx(context_tokens=4, mu=0.5), "ours")
    variant = run_on_clip(settings, FedProx(inner=PromptFL(context_tokens=4), mu=0.5), "variant")
    assert worst_difference(shared_tensors(ours), shared_tensors(variant)) == 0.0


def test_the_heavier_the_term_the_nearer_the_context_stays(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFLProx(context_tokens=4))
    distances = []
    for mu in (0.0, 2.0, 10.0):
        done = run_on_clip(settings, PromptFLProx(context_tokens=4, mu=mu), f"mu{mu:g}", federation={"rounds": 1})
        distances.append(float((shared_tensors(done)["context"] - world.roles.shared["context"]).norm()))
    assert distances[0] > distances[1] > distances[2] > 0


def test_the_papers_mu_is_the_default_and_a_negative_one_is_refused() -> None:
    assert PromptFLProx().mu == 0.5
    with pytest.raises(ConfigError, match=r"method\.mu must .*, got -1"):
        registry.build({"name": "promptfl_prox", "mu": -1})
