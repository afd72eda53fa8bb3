"""The prompted pass equals the slow and obvious one, in values and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from unit.backbones.naive_vit import naive_run

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import READS, ViT
from fedprompt.errors import ContractError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

DEPTH, WIDTH, BATCH = 4, 16, 3
SHAPES = {
    "plain": ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8),
    "registers": ViTShape(WIDTH, DEPTH, 4, 24, patch=4, image_size=8, extra_tokens=2, layer_scale=True),
    "swiglu": ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8, layer_scale=True, mlp="swiglu"),
    "clip": ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8, activation="quick_gelu", ln_pre=True),
    "rotary": ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8, extra_tokens=2, layer_scale=True, rope_base=100.0),
    "pooled": ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8, pooling="attention"),
}
STYLES = {
    "shallow": [((0,), "replace", "carry")],
    "deep": [(range(DEPTH), "replace", "carry")],
    "deep dropped": [(range(DEPTH), "replace", "drop")],
    "partial carried": [(range(2), "replace", "carry")],
    "partial dropped": [(range(2), "replace", "drop")],
    "with gaps": [((0, 2), "replace", "carry")],
    "one deep inside": [((2,), "replace", "drop")],
    "appended": [((0, 1, 3), "append", "carry")],
    "appended then dropped": [((0, 1), "append", "drop")],
    "several slots": [(range(DEPTH), "replace", "carry"), ((0, 1), "append", "carry"), ((1,), "replace", "drop")],
}


def double_vit(kind: str = "plain") -> ViT:
    return random_vit(SHAPES[kind], seed=1, dtype=torch.float64)


def random_tokens(vit: ViT, batch: int = BATCH) -> Tensor:
    size = vit.shape.image_size
    return vit.embed(torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2)))


def random_prompts(style: str, per_sample: bool, rows: int = 2) -> list[TokenPrompt]:
    generator = torch.Generator().manual_seed(3)
    lead = (BATCH,) if per_sample else ()
    return [
        TokenPrompt(
            torch.randn(*lead, len(blocks), rows, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),
            tuple(blocks),
            mode,
            after,
        )
        for blocks, mode, after in STYLES[style]
    ]


def gradients(seen: dict[str, Tensor], prompts: list[TokenPrompt]) -> list[Tensor | None]:
    loss = sum(
        (value * torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)).sum()
        for value in seen.values()
    )
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, [prompt.tokens for prompt in prompts], allow_unused=True))


@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per sample"])
@pytest.mark.parametrize("reads", [("cls",), ("patches",), READS], ids=["cls", "patches", "all"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", SHAPES)
def test_prompted_pass_equals_the_naive_one_in_values_and_gradients(kind, style, reads, per_sample):
    vit, prompts = double_vit(kind), random_prompts(style, per_sample)
    tokens = random_tokens(vit)
    seen = vit.run(tokens, prompts, reads)
    expected = {name: value for name, value in naive_run(vit, tokens, prompts)[0].items() if name in reads}
    assert seen.keys() == expected.keys()
    for name in reads:
        torch.testing.assert_close(seen[name], expected[name], rtol=0, atol=1e-10)
    for ours, theirs in zip(gradients(seen, prompts), gradients(expected, prompts), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_the_shortcuts_hold_in_single_precision_to_1e_5():
    vit = random_vit(SHAPES["registers"], seed=1)
    prompt = TokenPrompt(
        0.3 * torch.randn(DEPTH, 3, WIDTH, generator=torch.Generator().manual_seed(0)), tuple(range(DEPTH))
    )
    tokens = random_tokens(vit)
    expected = naive_run(vit, tokens, [prompt])[0]["cls"]
    torch.testing.assert_close(vit.run(tokens, [prompt])["cls"], expected, rtol=1e-5, atol=1e-5)


def test_deep_prompts_receive_a_gradient_at_every_block():
    vit, (prompt,) = double_vit(), random_prompts("deep", per_sample=False)
    vit.run(random_tokens(vit), [prompt])["cls"].square().sum().backward()
    assert (prompt.tokens.grad.flatten(1).norm(dim=1) > 0).all()


def test_zero_prompt_tokens_equal_the_plain_pass():
    vit = double_vit()
    tokens = random_tokens(vit)
    nothing = TokenPrompt(torch.zeros(DEPTH, 0, WIDTH, dtype=torch.float64), tuple(range(DEPTH)))
    torch.testing.assert_close(vit.run(tokens, [nothing])["cls"], vit.run(tokens)["cls"], rtol=0, atol=0)


def test_prompts_change_the_cls_row():
    vit = double_vit()
    tokens = random_tokens(vit)
    change = vit.run(tokens, random_prompts("shallow", False))["cls"] - vit.run(tokens)["cls"]
    assert change.abs().max() > 0.01


def test_shallow_equals_deep_with_depth_one():
    vit, (shallow,) = double_vit(), random_prompts("shallow", per_sample=False)
    tokens = random_tokens(vit)
    deep = TokenPrompt(shallow.tokens, tuple(range(1)))
    torch.testing.assert_close(vit.run(tokens, [deep])["cls"], vit.run(tokens, [shallow])["cls"], rtol=0, atol=0)


def test_the_order_of_prompt_tokens_does_not_matter():
    vit, (prompt,) = double_vit(), random_prompts("deep", per_sample=False, rows=5)
    tokens = random_tokens(vit)
    shuffled = TokenPrompt(prompt.tokens[:, [3, 1, 4, 0, 2]], prompt.blocks)
    torch.testing.assert_close(vit.run(tokens, [shuffled])["cls"], vit.run(tokens, [prompt])["cls"], rtol=0, atol=1e-12)


def test_two_slots_equal_one_slot_with_both_their_rows():
    vit, (prompt,) = double_vit(), random_prompts("deep", per_sample=False, rows=4)
    tokens = random_tokens(vit)
    halves = [TokenPrompt(part, prompt.blocks) for part in prompt.tokens.split([1, 3], dim=1)]
    torch.testing.assert_close(vit.run(tokens, halves)["cls"], vit.run(tokens, [prompt])["cls"], rtol=0, atol=1e-12)


def test_a_batch_that_mixes_clients_equals_each_client_alone():
    vit = double_vit()
    tokens = random_tokens(vit, batch=6)
    clients = torch.randn(3, DEPTH, 2, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    blocks = tuple(range(DEPTH))
    folded = vit.run(tokens, [TokenPrompt(clients.repeat_interleave(2, dim=0), blocks)])["cls"]
    runs = vit.run(tokens, [TokenPrompt(clients, blocks)])["cls"]
    torch.testing.assert_close(runs, folded, rtol=0, atol=1e-12)
    alone = [vit.run(tokens[2 * i : 2 * i + 2], [TokenPrompt(clients[i], blocks)])["cls"] for i in range(3)]
    torch.testing.assert_close(folded, torch.cat(alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("style", "alive"),
    [
        ("shallow", 2),
        ("deep", 2),
        ("partial carried", 2),
        ("partial dropped", 0),
        ("appended", 6),
        ("several slots", 6),
    ],
)
def test_rows_alive_after_the_last_block(style, alive):
    vit = double_vit()
    seen = vit.run(random_tokens(vit), random_prompts(style, per_sample=False), ("prompts",))
    assert seen["prompts"].shape == (BATCH, alive, WIDTH)


def test_an_appending_slot_reads_its_oldest_rows_first():
    vit, (prompt,) = double_vit(), random_prompts("appended", per_sample=False)
    tokens = random_tokens(vit)
    split = [TokenPrompt(prompt.tokens[i : i + 1], (block,)) for i, block in enumerate(prompt.blocks)]
    together = vit.run(tokens, [prompt], ("prompts",))["prompts"]
    torch.testing.assert_close(together, vit.run(tokens, split, ("prompts",))["prompts"], rtol=0, atol=1e-12)


def test_reading_only_cls_equals_reading_everything():
    vit, prompts = double_vit("registers"), random_prompts("several slots", per_sample=True)
    tokens = random_tokens(vit)
    torch.testing.assert_close(
        vit.run(tokens, prompts)["cls"], vit.run(tokens, prompts, READS)["cls"], rtol=0, atol=1e-12
    )


def test_starting_at_a_block_with_its_kept_input_equals_the_whole_pass():
    vit = double_vit()
    tokens = random_tokens(vit)
    prompt = TokenPrompt(random_prompts("shallow", False)[0].tokens.repeat(2, 1, 1), (2, 3))
    (kept,) = vit.block_inputs(tokens, [2])
    torch.testing.assert_close(
        vit.run(kept, [prompt], start=2)["cls"], vit.run(tokens, [prompt])["cls"], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("blocks", [(), (1, 0), (0, 0), (-1,), (DEPTH,)])
def test_blocks_must_increase_and_exist(blocks):
    vit = double_vit()
    prompt = TokenPrompt(torch.zeros(len(blocks), 1, WIDTH, dtype=torch.float64), blocks)
    with pytest.raises(ContractError, match=r"prompt\.blocks must be increasing"):
        vit.run(random_tokens(vit), [prompt])


@pytest.mark.parametrize(
    "size", [(1, WIDTH), (2, 1, WIDTH), (1, 1, WIDTH + 1), (BATCH + 1, 1, 1, WIDTH), (BATCH - 1, 1, 1, WIDTH)]
)
def test_tokens_must_fit_blocks_width_and_batch(size):
    vit = double_vit()
    with pytest.raises(ContractError, match=r"prompt\.tokens must be"):
        vit.run(random_tokens(vit), [TokenPrompt(torch.zeros(size, dtype=torch.float64), (0,))])


def test_a_prompt_below_the_starting_block_is_refused():
    vit, prompts = double_vit(), random_prompts("shallow", per_sample=False)
    with pytest.raises(ContractError, match=r"in 2\.\.3"):
        vit.run(random_tokens(vit), prompts, start=2)


def test_an_unknown_read_is_refused():
    vit = double_vit()
    with pytest.raises(ContractError, match="reads must be some of cls, patches, prompts"):
        vit.run(random_tokens(vit), reads=("mean",))


def test_blank_tokens_are_the_mean_patch_tokens_of_a_blank_image_at_every_block():
    vit = double_vit()
    size = vit.shape.image_size
    inputs = vit.block_inputs(vit.embed(torch.zeros(1, 3, size, size)))
    found, lead = vit.blank_tokens(), 1 + vit.shape.extra_tokens
    assert found.shape == (vit.depth, vit.shape.width)
    for block, tokens in enumerate(inputs):
        torch.testing.assert_close(found[block], tokens[0, lead:].mean(0).float())
