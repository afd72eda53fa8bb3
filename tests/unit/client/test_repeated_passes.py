"""Several passes over each image: what they share is computed once, and equals passes that share nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from unit.backbones.test_vit_prompts import SHAPES, STYLES

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.vit import ViT
from fedprompt.client.step import run_repeated
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

CLIENTS, IMAGES, DRAWS, WIDTH = 2, 3, 4, 16
READS = ("cls", "patches", "prompts")


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def slots(style: str, sets: int) -> list[TokenPrompt]:
    """As many sets of tokens as asked; the first slot has one for each client."""
    everyones = TokenPrompt(drawn(CLIENTS, 2, 1, WIDTH, seed=1), (0, 2))
    own = [
        TokenPrompt(drawn(sets, len(blocks), 2, WIDTH, seed=2), tuple(blocks), mode, after)
        for blocks, mode, after in STYLES[style]
    ]
    return [everyones, *own]


def naive(vit: ViT, tokens: Tensor, prompts: Sequence[TokenPrompt], reads: Sequence[str]) -> Tensors:
    """Every image as often as it is gone through, client by client and draw by draw."""
    every = tokens.unflatten(0, (CLIENTS, IMAGES)).repeat(1, DRAWS, 1, 1).flatten(0, 1)
    return vit.run(every, prompts, reads)


def values_and_gradients(seen: Tensors, prompts: Sequence[TokenPrompt]) -> list[Tensor]:
    total = sum((value * torch.arange(value.numel()).view_as(value).cos()).sum() for _, value in sorted(seen.items()))
    found = torch.autograd.grad(total, [slot.tokens for slot in prompts], materialize_grads=True, allow_unused=True)
    return [*(value for _, value in sorted(seen.items())), *found]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", SHAPES)
def test_draws_that_share_what_they_can_equal_draws_that_share_nothing(kind: str, style: str) -> None:
    vit = random_vit(SHAPES[kind], seed=1, dtype=torch.float64)
    size = SHAPES[kind].image_size
    tokens = vit.embed(drawn(CLIENTS * IMAGES, 3, size, size, seed=5).detach())
    for sets in (CLIENTS * DRAWS * IMAGES, CLIENTS * DRAWS):  # for every sample, or for every draw of a client
        for reads in (("cls",), READS):
            prompts = slots(style, sets)
            seen = run_repeated(vit, tokens, prompts, reads, 0, None, DRAWS, CLIENTS)
            plain = naive(vit, tokens, prompts, reads)
            pairs = zip(values_and_gradients(seen, prompts), values_and_gradients(plain, prompts), strict=True)
            for ours, expected in pairs:
                torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_prompts_that_join_at_a_pause_see_and_are_seen_draw_by_draw() -> None:
    vit = random_vit(SHAPES["plain"], seed=1, dtype=torch.float64)
    tokens = vit.embed(drawn(CLIENTS * IMAGES, 3, 8, 8, seed=5).detach())
    first = [TokenPrompt(drawn(CLIENTS * DRAWS, 1, 1, WIDTH, seed=3), (0,))]
    factor = torch.arange(1.0, CLIENTS * DRAWS * IMAGES + 1, dtype=torch.float64)[:, None]

    def joining(cls: Tensor) -> list[TokenPrompt]:
        return [TokenPrompt((cls * factor)[:, None, None], (2,))]

    for prompts in (first, []):  # told apart before the pause, or only there
        seen = run_repeated(vit, tokens, prompts, ("cls",), 0, (2, joining), DRAWS, CLIENTS)
        every = tokens.unflatten(0, (CLIENTS, IMAGES)).repeat(1, DRAWS, 1, 1).flatten(0, 1)
        plain = vit.run(every, prompts, ("cls",), 0, (2, joining))
        torch.testing.assert_close(seen["cls"], plain["cls"], rtol=1e-8, atol=1e-8)


def test_blocks_before_the_first_prompt_of_a_draw_run_once_for_all_draws() -> None:
    vit = random_vit(SHAPES["plain"], seed=1, dtype=torch.float64)
    tokens = vit.embed(drawn(IMAGES, 3, 8, 8, seed=5).detach())

    def products(block: int, draws: int) -> int:
        own = TokenPrompt(drawn(draws * IMAGES, 1, 1, WIDTH), (block,))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run_repeated(vit, tokens, [own], ("cls",), 0, None, draws)
        return int(counter.get_total_flops())

    more = {block: products(block, 5) - products(block, 1) for block in (0, 2)}
    shared = (
        2 * IMAGES * vit.shape.tokens * WIDTH * (3 * WIDTH + WIDTH + 2 * 24)
    )  # projections of one block, four more times
    assert more[0] - more[2] >= 4 * 2 * shared


def test_no_draw_is_told_apart_where_no_prompt_does_it() -> None:
    vit = random_vit(SHAPES["plain"], seed=1, dtype=torch.float64)
    tokens = vit.embed(drawn(CLIENTS * IMAGES, 3, 8, 8, seed=5).detach())
    prompts = [TokenPrompt(drawn(CLIENTS, 1, 2, WIDTH, seed=1), (0,))]
    seen = run_repeated(vit, tokens, prompts, ("cls", "patches"), 0, None, DRAWS, CLIENTS)
    for name, rows in naive(vit, tokens, prompts, ("cls", "patches")).items():
        torch.testing.assert_close(seen[name], rows, rtol=1e-8, atol=1e-8)
