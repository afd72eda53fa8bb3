"""How prompts start."""

from __future__ import annotations

import pytest
import torch
from support import seeded

from fedprompt.core.method import World
from fedprompt.modules.insertion import BLANK_NOISE, initial_prompt, vpt_bound

pytestmark = pytest.mark.unit

BLANK = torch.arange(6.0).reshape(3, 2)  # three blocks of width two


def test_a_blank_start_is_the_blank_tokens_of_each_block_with_a_little_noise() -> None:
    found = initial_prompt("blank", BLANK, 5, 14, seeded())
    noise = found - BLANK.unsqueeze(1)
    assert found.shape == (3, 5, 2)
    assert 0 < noise.abs().max() <= BLANK_NOISE * vpt_bound(14, 2)
    assert len(noise.reshape(-1, 2).unique(dim=0)) == 15, "tokens that are equal would stay equal"


def test_the_other_starts_do_not_depend_on_blank_tokens() -> None:
    for kind in ("random", "zero"):
        first, second = (initial_prompt(kind, blank, 5, 14, seeded()) for blank in (BLANK, BLANK + 1))
        assert torch.equal(first, second)
    assert not initial_prompt("zero", BLANK, 5, 14, seeded()).any()


def test_the_world_gives_the_tokens_of_the_listed_blocks() -> None:
    world = World(2, 3, 5, 14, ("a", "b"), ("one",), blank=lambda: BLANK)
    found = world.initial_prompt("blank", [2, 0, 2], 4, seeded())
    torch.testing.assert_close(found.mean(1), BLANK[[2, 0, 2]], atol=BLANK_NOISE * vpt_bound(14, 2), rtol=0)


@pytest.mark.assets
def test_ten_blank_tokens_at_every_block_leave_the_features_of_an_image_and_random_ones_do_not() -> None:
    """Cosine of features with and without prompts, over images whose mean is taken out."""
    from fedprompt.backbones.load import load_backbone
    from fedprompt.config import BackboneConfig
    from fedprompt.io.files import cache_directory
    from fedprompt.modules.insertion import TokenPrompt

    backbone = load_backbone(BackboneConfig(name="dinov2-small", image_size=98), cache_directory(None))
    images = seeded().normal(12, 3, 7, 7).repeat_interleave(14, -1).repeat_interleave(14, -2)
    tokens = backbone.embed(images)
    plain = backbone.run(tokens)["cls"]
    kept = {}
    for kind in ("blank", "random"):
        prompt = initial_prompt(kind, backbone.blank_tokens(), 10, backbone.shape.patch, seeded())
        prompted = backbone.run(tokens, [TokenPrompt(prompt, tuple(range(backbone.depth)))])["cls"]
        centre = plain.mean(0)
        kept[kind] = float(torch.cosine_similarity(prompted - centre, plain - centre).mean())
    assert kept["blank"] > 0.8
    assert kept["random"] < 0.5
