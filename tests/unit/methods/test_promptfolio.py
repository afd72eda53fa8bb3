"""PromptFolio: the mixture, its two limits as whole runs, and who owns what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, shared_tensors, worst_difference
from text_methods import gradient, run_on_clip, runtime_of, working_parameters

from fedprompt.core import registry
from fedprompt.core.method import Batch, Seen
from fedprompt.errors import ConfigError
from fedprompt.methods.coop import CoOp
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.promptfolio import PromptFolio

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


def test_logits_are_those_of_both_contexts_mixed_and_not_normalised(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFolio(context_tokens=3))
    generator = torch.Generator().manual_seed(0)
    image, shared, own = (F.normalize(torch.randn(size, 128, generator=generator), dim=-1) for size in (4, 5, 5))
    seen = Seen(image=image, text={"context": shared, "local_context": own})
    batch = Batch(torch.zeros(4, dtype=torch.long))
    for share in (0.0, 0.25, 1.0):
        found = PromptFolio(local_share=share).logits(world, {}, seen, batch, {})
        expected = world.text.scale * ((1 - share) * image @ shared.T + share * image @ own.T)
        torch.testing.assert_close(found, expected)


def test_without_a_local_share_it_is_promptfl(settings: Any) -> None:
    folio = run_on_clip(settings, PromptFolio(context_tokens=3, local_share=0.0), "folio")
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain")
    assert worst_difference(shared_tensors(folio), shared_tensors(plain)) < 1e-6
    assert folio.client_accuracies() == plain.client_accuracies()


def test_with_nothing_but_the_local_share_it_is_coop(settings: Any) -> None:
    folio = run_on_clip(settings, PromptFolio(context_words="a photo of a", local_share=1.0), "folio")
    alone = run_on_clip(settings, CoOp(context_words="a photo of a"), "alone")
    for client in EVERYBODY:
        found, expected = local_tensors(folio, client)["local_context"], local_tensors(alone, client)["context"]
        assert float((found - expected).abs().max()) < 1e-6
    assert folio.client_accuracies() == alone.client_accuracies()


def test_both_contexts_are_trained_and_only_one_travels(settings: Any) -> None:
    method = PromptFolio(context_tokens=3)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    for name in ("context", "local_context"):
        assert float(gradient(runtime, method, params, name).abs().max()) > 1e-4
    assert float((params["context"] - params["local_context"]).abs().max()) > 0.01
    done = run_on_clip(settings, method, "folio")
    own = [local_tensors(done, client)["local_context"] for client in EVERYBODY]
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4
    assert worst_difference(shared_tensors(done), world.roles.shared) > 1e-4
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 3 * world.text.width


def test_a_client_that_never_took_part_predicts_as_promptfl_would(settings: Any) -> None:
    few = {"federation": {"rounds": 1, "fraction": 0.25}}
    done = run_on_clip(settings, PromptFolio(context_tokens=3, local_share=0.7), "folio", **few)
    method = PromptFolio(context_tokens=3, local_share=0.7)
    runtime, world = runtime_of(settings, method)
    shared = shared_tensors(done)
    trained = done.rounds()[-1].cohort[0]
    for client in EVERYBODY:
        local = local_tensors(done, client) if client == trained else runtime._new(runtime._client(client, 1))
        params = method.personalise(world, runtime._client(client, 1), shared, local)
        assert torch.equal(params["local_context"], params["context"]) == (client != trained)
        assert torch.equal(params["context"], shared["context"])


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_shares_outside_of_zero_and_one_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="local_share"):
        registry.build({"name": "promptfolio", "local_share": share})
