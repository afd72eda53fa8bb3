"""PromptFL with fine-tuning: the federation is PromptFL's, and what is tested is a tuned copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import fitting_stages, shared_tensors, trained_alone, worst_difference
from text_methods import results, run_on_clip, runtime_of, working_parameters

from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.promptfl_ft import PromptFLFineTuned

pytestmark = pytest.mark.unit


def test_the_shared_context_follows_promptfl_to_the_bit(settings: Any) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    tuned = run_on_clip(settings, PromptFLFineTuned(context_tokens=4), "tuned")
    assert worst_difference(shared_tensors(plain), shared_tensors(tuned)) == 0.0
    assert plain.rounds()[-1].bytes_up == tuned.rounds()[-1].bytes_up
    assert results(plain, 2) != results(tuned, 2)


def test_without_epochs_the_results_are_those_of_promptfl(settings: Any) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    tuned = run_on_clip(settings, PromptFLFineTuned(context_tokens=4, finetune_epochs=0), "tuned")
    assert results(plain, 2) == results(tuned, 2)


def test_the_copy_is_tuned_as_many_epochs_as_asked_and_local_training_has_otherwise(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFLFineTuned())
    for asked, epochs in ((None, 3), (0, 0), (7, 7)):
        (stage,) = PromptFLFineTuned(finetune_epochs=asked).adaptation(world, TrainConfig(epochs=3))
        assert (stage.epochs, stage.trainable) == (epochs, ("context",))


def test_tuning_lowers_the_loss_on_the_clients_own_images(settings: Any) -> None:
    runtime, _ = runtime_of(settings, PromptFLFineTuned(context_tokens=4, finetune_epochs=5))
    params = working_parameters(runtime)
    tuned, _ = trained_alone(runtime, fitting_stages(runtime, 0), params, 1, 0, "adaptation.", fitting=True)
    loss = runtime._client(0, 1).loss
    assert loss(tuned) < loss(params) - 0.05


def test_a_held_out_client_tunes_the_context_too(settings: Any) -> None:
    runtime, world = runtime_of(
        settings, PromptFLFineTuned(context_tokens=4), federation={"held_out": 0.5, "newcomer_epochs": 2}
    )
    client = min(world.newcomers)
    params = working_parameters(runtime, client)
    tuned, progress = trained_alone(
        runtime, fitting_stages(runtime, client), params, 1, client, "adaptation.", fitting=True
    )
    assert progress.steps == 2 * -(-runtime._client(client, 1).samples // 8)
    assert not torch.equal(tuned["context"], params["context"])


def test_a_negative_number_of_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.finetune_epochs must .*, got -1"):
        registry.build({"name": "promptfl_ft", "finetune_epochs": -1})
