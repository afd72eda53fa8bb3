"""PromptFL with a split context: who owns which half, both limits, and the alternating variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import fitting_stages, local_tensors, run, shared_tensors, trained_alone, worst_difference
from text_methods import noise_like, on_clip, run_on_clip, runtime_of, working_parameters

from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.method import Batch, Method, Server
from fedprompt.errors import ConfigError
from fedprompt.methods.coop import CoOp
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.promptfl_per import OWN, SHARED, PromptFLPer

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


@pytest.mark.parametrize("class_specific", [False, True])
@pytest.mark.parametrize(("tokens", "asked", "shared"), [(4, None, 2), (5, None, 2), (1, None, 0), (6, 5, 5)])
def test_the_context_is_that_of_promptfl_cut_in_two(
    settings: Any, tokens: int, asked: int | None, shared: int, class_specific: bool
) -> None:
    _, world = runtime_of(
        settings, PromptFLPer(context_tokens=tokens, shared_tokens=asked, class_specific=class_specific)
    )
    _, plain = runtime_of(settings, PromptFL(context_tokens=tokens, class_specific=class_specific))
    first, second = world.roles.shared[SHARED], world.roles.local[OWN]
    assert (first.shape[-2], second.shape[-2]) == (shared, tokens - shared)
    assert torch.equal(torch.cat([first, second], dim=-2), plain.roles.shared["context"])


def test_only_the_first_half_changes_on_download(settings: Any) -> None:
    method = PromptFLPer(context_tokens=6)
    runtime, world = runtime_of(settings, method)
    before = working_parameters(runtime)
    moved = {SHARED: world.roles.shared[SHARED] + noise_like(world.roles.shared[SHARED], 1)}
    after = working_parameters(runtime, server=Server(moved, {}))
    first, second = (
        method.prompts(world, params, Batch(torch.zeros(1)), {}).text["context"].tokens for params in (before, after)
    )
    assert torch.equal(first[3:], second[3:])
    assert (first[:3] != second[:3]).any(-1).all()


def test_own_halves_differ_between_clients_and_only_the_shared_one_travels(settings: Any) -> None:
    done = run_on_clip(settings, PromptFLPer(context_tokens=6), "per")
    own = [local_tensors(done, client)[OWN] for client in EVERYBODY]
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4
    last, width = done.rounds()[-1], own[0].shape[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 3 * width


@pytest.mark.parametrize("alternate", [False, True])
def test_with_every_word_shared_it_is_promptfl(settings: Any, alternate: bool) -> None:
    plain = run_on_clip(settings, PromptFL(context_tokens=4), "plain")
    per = run_on_clip(settings, PromptFLPer(context_tokens=4, shared_tokens=4, alternate=alternate), "per")
    assert torch.equal(shared_tensors(plain)["context"], shared_tensors(per)[SHARED])


def test_with_no_word_shared_it_is_coop(settings: Any) -> None:
    alone = run_on_clip(settings, CoOp(context_tokens=4), "alone")
    per = run_on_clip(settings, PromptFLPer(context_tokens=4, shared_tokens=0), "per")
    for client in EVERYBODY:
        assert torch.equal(local_tensors(alone, client)["context"], local_tensors(per, client)[OWN])
    assert per.rounds()[-1].bytes_up == 0


def test_alternating_trains_the_own_half_first_and_the_shared_one_with_it_fixed(settings: Any) -> None:
    method = PromptFLPer(context_tokens=4, alternate=True, own_epochs=3)
    runtime, world = runtime_of(settings, method)
    own, shared = method.stages(world, TrainConfig(epochs=2))
    assert (own.trainable, own.epochs, shared.trainable, shared.epochs) == ((OWN,), 3, (SHARED,), 2)
    start = working_parameters(runtime)
    middle, _ = trained_alone(runtime, (own,), start, 1, 0, "")
    end, _ = trained_alone(runtime, (own, shared), start, 1, 0, "")
    assert torch.equal(middle[SHARED], start[SHARED])
    assert torch.equal(middle[OWN], end[OWN])
    assert not torch.equal(end[SHARED], start[SHARED])
    assert not torch.equal(end[OWN], start[OWN])


def test_alternating_without_own_epochs_leaves_the_own_half_alone(settings: Any) -> None:
    done = run_on_clip(settings, PromptFLPer(context_tokens=4, alternate=True, own_epochs=0), "per")
    _, world = runtime_of(settings, PromptFLPer(context_tokens=4))
    for client in EVERYBODY:
        assert worst_difference(local_tensors(done, client), world.roles.local) == 0.0


@pytest.mark.parametrize("alternate", [False, True])
def test_a_held_out_client_trains_its_own_half_alone(settings: Any, alternate: bool) -> None:
    method = PromptFLPer(context_tokens=4, alternate=alternate)
    runtime, world = runtime_of(settings, method, federation={"held_out": 0.5, "newcomer_epochs": 1})
    client = min(world.newcomers)
    before = working_parameters(runtime, client)
    after, _ = trained_alone(runtime, fitting_stages(runtime, client), before, 1, client, "adaptation.", fitting=True)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {OWN}


def test_words_can_be_split_too(settings: Any) -> None:
    method = PromptFLPer(context_words="ab cd")
    _, world = runtime_of(settings, method)
    words = world.text.words("ab cd")
    assert torch.equal(torch.cat([world.roles.shared[SHARED], world.roles.local[OWN]]), words)
    assert len(world.roles.shared[SHARED]) == len(words) // 2


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (PromptFLPer(context_tokens=4, shared_tokens=5), r"method\.shared_tokens must be at most the 4 tokens"),
        (PromptFLPer(own_epochs=1), r"method\.own_epochs must be null unless method\.alternate is true, got 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, method: Method, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(on_clip(settings, "refused"), method)


def test_a_negative_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.shared_tokens must .*, got -1"):
        registry.build({"name": "promptfl_per", "shared_tokens": -1})
