"""What all methods with learnable contexts have in common: contexts that fit, and logits that are not rounded away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import experiment, run
from text_methods import on_clip, runtime_of

from fedprompt.client.step import forward, make_batch
from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.method import Method, Server
from fedprompt.core.recipe import learning_rate
from fedprompt.errors import ConfigError
from fedprompt.methods.bases.with_text import similarity
from fedprompt.methods.fedpha import FedPHA
from fedprompt.methods.pfeddc import PFedDC
from fedprompt.methods.pfedmoap import PFedMoAP
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.zero_shot import ZeroShot

pytestmark = pytest.mark.unit

ROOM = 77 - 2 - len("triangle.")  # of the tiny text tower, in which every letter is a token


def test_the_longest_context_that_fits_is_accepted_and_can_be_read(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFL())
    assert max(map(len, world.class_names)) == len("triangle")
    assert world.text.room == ROOM
    PromptFL(context_tokens=ROOM).check(world, TrainConfig())
    world.text.encode(torch.zeros(1, ROOM, world.text.width), "middle")
    with pytest.raises(ConfigError, match="leave room for the class name 'triangle'"):
        world.text.encode(torch.zeros(1, ROOM + 1, world.text.width), "middle")


def test_contexts_begin_as_plain_words_so_that_training_starts_at_zero_shot(settings: Any) -> None:
    runtime, world = runtime_of(settings, PromptFL())
    assert torch.equal(world.roles.shared["context"], world.text.words("a photo of a"))
    who, images, positions = runtime._client(0, 1), runtime.bank.images(0, "test"), torch.arange(3)
    found = []
    for method in (PromptFL(), ZeroShot()):
        params = method.begin(world, who, world.roles.shared, {})
        batch = make_batch(method, images, positions, training=False)
        seen = forward(method, world, params, images, positions, batch, {})
        found.append(method.logits(world, params, seen, batch, {}))
    torch.testing.assert_close(found[0], found[1])


def test_a_number_of_tokens_asks_for_a_random_start_and_words_come_before_it(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFL(context_tokens=5))
    assert world.roles.shared["context"].shape == (5, world.text.width)
    assert float(world.roles.shared["context"].std()) == pytest.approx(0.02, rel=0.2)
    _, world = runtime_of(settings, PromptFL(context_tokens=5, context_words="cat"))
    assert torch.equal(world.roles.shared["context"], world.text.words("cat"))


def context_rates(settings: Any, name: str) -> dict[str, float]:
    """The recommended rates of contexts, as shares of the size that their words have."""
    made = experiment(on_clip(settings, name, method={"name": name}, train={"lr": "auto", "momentum": "auto"}))
    train, world = made.config.train, made.factory.prepare().world
    assert (train.optimizer, train.schedule) == ("adam", "cosine")
    contexts = {each: start for each, start in world.roles.initial.items() if each.endswith(("context", "_text"))}
    contexts.pop("last_context", None)  # is not trained
    size = {each: float(start.double().square().mean().sqrt()) for each, start in contexts.items()}
    return {each: learning_rate(train, each, world.roles.initial) / size[each] for each in contexts}


@pytest.mark.parametrize("name", ["coop", "fedotp", "fedpgp", "pfeddc", "pfedmoap", "promptfl_amp", "promptfl_ft"])
def test_recommended_rates_of_contexts_follow_the_size_of_the_words(settings: Any, name: str) -> None:
    rates = context_rates(settings, name)
    assert rates
    assert rates == pytest.approx(dict.fromkeys(rates, 0.8))


@pytest.mark.parametrize("name", ["promptfl", "promptfl_prox", "pfedprompt"])
def test_a_context_that_everyone_shares_takes_longer_steps_since_averaging_shortens_them(
    settings: Any, name: str
) -> None:
    assert context_rates(settings, name) == pytest.approx({"context": 2.4})


def test_only_the_averaged_words_of_a_split_context_take_longer_steps(settings: Any) -> None:
    assert context_rates(settings, "promptfl_per") == pytest.approx({"shared.context": 2.4, "own.context": 0.8})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            PromptFL(context_tokens=ROOM + 1),
            rf"method\.context_tokens must make at most {ROOM} .* got '{ROOM + 1} tokens'",
        ),
        (PromptFL(context_words="x" * (ROOM + 1)), r"method\.context_words must make at most"),
        (FedPHA(local_tokens=(2, ROOM + 1)), r"method\.local_tokens must make at most"),
        (PFedDC(local_tokens=ROOM + 1), r"method\.local_tokens must make at most"),
        (PFedDC(context_tokens=ROOM - 1, local_tokens=2, fusion="concat"), r"method\.fusion must make at most"),
    ],
)
def test_contexts_that_leave_no_room_are_refused_before_anything_is_written(
    method: Method, message: str, settings: Any
) -> None:
    values = on_clip(settings, "long")
    with pytest.raises(ConfigError, match=message):
        run(values, method)
    assert not Path(values["output"]["directory"]).exists()


def test_concatenation_counts_only_where_both_prompts_are_used(settings: Any) -> None:
    _, world = runtime_of(settings, PromptFL())
    for method in (PFedDC(use_local=False), PFedDC(use_global=False), PFedDC(fusion="sum")):
        replace(method, context_tokens=ROOM).check(world, TrainConfig())


def test_a_novel_class_name_that_does_not_fit_is_refused_before_training(settings: Any) -> None:
    """The last two classes are novel. Behind 67 tokens of context every base class fits, and `triangle` does not."""
    _, world = runtime_of(settings, PromptFL())
    order = sorted(world.class_names, key=len)
    assert len(order[-1]) == len("triangle") > max(map(len, order[:3]))
    values = on_clip(settings, "novel", data={"classes": order, "novel": 0.4})
    with pytest.raises(ConfigError, match=rf"method\.context_tokens must make at most {ROOM}"):
        run(values, PromptFL(context_tokens=ROOM + 1))
    assert not Path(values["output"]["directory"]).exists()


def test_logits_of_half_precision_features_are_not_rounded(settings: Any) -> None:
    """At a scale of 100, bfloat16 logits near 30 would be 0.125 apart."""
    _, world = runtime_of(settings, PromptFL())
    scaled = replace(world, language=replace(world.text, scale=100.0))
    draws = torch.randn(2, 6, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    image, text = torch.nn.functional.normalize(draws + 0.6, dim=-1).to(torch.bfloat16)
    found = similarity(scaled, image, text)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), 100 * image.double() @ text.double().T, atol=1e-4, rtol=0)
    assert similarity(scaled, image.double(), text.double()).dtype == torch.float64


@pytest.mark.parametrize("name", ["promptfl", "fedotp", "pfedprompt", "pfedmoap"])
def test_methods_on_a_half_precision_backbone_keep_logits_in_single_precision(name: str, settings: Any) -> None:
    method = registry.methods()[name]()
    runtime, world = runtime_of(settings, method, backbone={"dtype": "bfloat16"})
    who = runtime._client(0, 1)
    received = method.download(world, Server(world.roles.shared, world.roles.server), 0)
    params = method.personalise(world, who, received, runtime._new(who))
    images, positions = runtime.bank.images(0, "test"), torch.arange(3)
    batch = make_batch(method, images, positions, training=False)
    seen = forward(method, world, params, images, positions, batch, {})
    assert method.logits(world, params, seen, batch, {}).dtype == torch.float32
    if isinstance(method, PFedMoAP):  # whose mixture is only used from the second participation on
        assert {each.dtype for each in method.experts_and_weights(params, seen)} == {torch.float32}
