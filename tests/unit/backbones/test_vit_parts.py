"""Parts of the pass: a stem that belongs to the embedding, a pause, an early reading, and changes of the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from naive import as_tensor, naive_vit
from torch import Tensor
from unit.backbones.naive_vit import naive_block, naive_run

from fedprompt.backbones import load_backbone
from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import READS, ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ContractError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

DEPTH, WIDTH, BATCH = 4, 16, 3
SHAPE = ViTShape(WIDTH, DEPTH, 2, 24, patch=4, image_size=8, extra_tokens=2, layer_scale=True)
VIT = random_vit(SHAPE, seed=1, dtype=torch.float64)
IMAGES = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(2))
TOKENS = VIT.embed(IMAGES)
STEMS = range(DEPTH)


def with_stem(stem: int) -> ViT:
    return dataclasses.replace(VIT, stem=stem)


def random(*size: int, seed: int = 3) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# the stem


@pytest.mark.parametrize("stem", STEMS)
def test_embedding_runs_the_blocks_of_the_stem(stem: int) -> None:
    expected = TOKENS
    for block in range(stem):
        expected = naive_block(VIT, block, expected)
    close(with_stem(stem).embed(IMAGES), expected)
    assert with_stem(stem).depth == DEPTH - stem


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])
def test_blocks_are_counted_behind_the_stem(stem: int, deep: bool) -> None:
    """Prompting block i behind a stem of s is prompting block s + i of the whole transformer."""
    vit = with_stem(stem)
    blocks = tuple(range(vit.depth if deep else 1))
    prompt = TokenPrompt(random(len(blocks), 2, WIDTH), blocks)
    shifted = dataclasses.replace(prompt, blocks=tuple(stem + block for block in blocks))
    seen, expected = vit.run(vit.embed(IMAGES), [prompt], READS), naive_run(VIT, TOKENS, [shifted])[0]
    for name in READS:
        close(seen[name], expected[name])


def test_features_behind_a_stem_are_those_of_the_whole_transformer() -> None:
    vit = with_stem(2)
    tokens = vit.embed(IMAGES)
    for found, expected in zip(vit.block_inputs(tokens), VIT.block_inputs(TOKENS)[2:], strict=True):
        close(found, expected)
    close(vit.read_early(tokens, 1), VIT.read_early(TOKENS, 3))


def test_a_prompt_beyond_the_blocks_behind_the_stem_is_refused() -> None:
    vit = with_stem(3)
    with pytest.raises(ContractError, match=r"prompt\.blocks must be increasing and in 0\.\.0"):
        vit.run(vit.embed(IMAGES), [TokenPrompt(random(1, 1, WIDTH), (1,))])


def test_a_stem_changes_the_digest() -> None:
    assert len({with_stem(stem).digest() for stem in STEMS}) == len(STEMS)


def test_a_stem_that_leaves_no_block_is_refused(tmp_path) -> None:
    assert load_backbone(BackboneConfig(name="tiny", stem=2), tmp_path).depth == 1
    with pytest.raises(BackboneError, match=r"backbone\.stem must be below the 3 blocks of the backbone, got 3"):
        load_backbone(BackboneConfig(name="tiny", stem=3), tmp_path)


# the pause


@pytest.mark.parametrize("stem", [0, 1])
@pytest.mark.parametrize("block", range(DEPTH - 1))
def test_prompts_that_join_at_a_pause_are_as_if_given_beforehand(block: int, stem: int) -> None:
    vit = with_stem(stem)
    tokens = vit.embed(IMAGES)
    given = TokenPrompt(random(1, 2, WIDTH), (0,))
    joining = [
        TokenPrompt(random(BATCH, vit.depth - block, 2, WIDTH, seed=4), tuple(range(block, vit.depth))),
        TokenPrompt(random(1, 1, WIDTH, seed=5), (block,), mode="append"),
    ]
    paused = vit.run(tokens, [given], READS, pause=(block, lambda cls: joining))
    beforehand = vit.run(tokens, [given, *joining], READS)
    plain = vit.run(tokens, [given])
    assert (paused["cls"] - plain["cls"]).abs().max() > 0.01
    for name in READS:
        close(paused[name], beforehand[name])


@pytest.mark.parametrize("block", range(DEPTH))
def test_a_pause_shows_the_cls_row_that_enters_the_block(block: int) -> None:
    prompt = TokenPrompt(random(1, 2, WIDTH), (0,))
    shown = []

    def forward(cls: Tensor) -> list[TokenPrompt]:
        shown.append(cls)
        return []

    seen = VIT.run(TOKENS, [prompt], pause=(block, forward))
    rows = torch.cat([TOKENS[:, :1], prompt.tokens.expand(BATCH, -1, -1), TOKENS[:, 1:]], dim=1)
    for number in range(block):
        rows = naive_block(VIT, number, rows)
    (cls,) = shown
    close(cls, rows[:, 0])
    assert torch.equal(seen["cls"], VIT.run(TOKENS, [prompt])["cls"]), "a pause in which nothing joins changes nothing"


def test_gradients_pass_through_a_pause() -> None:
    tokens = random(1, 1, WIDTH).requires_grad_()
    seen = VIT.run(
        TOKENS,
        [TokenPrompt(tokens, (0,), after="drop")],
        pause=(2, lambda cls: [TokenPrompt(cls[:, None, None], (2,))]),
    )
    (found,) = torch.autograd.grad(seen["cls"][:, 0].sum(), tokens)

    rows = torch.cat([TOKENS[:, :1], tokens.expand(BATCH, -1, -1), TOKENS[:, 1:]], dim=1)
    rows = naive_block(VIT, 0, rows)
    rows = naive_block(VIT, 1, torch.cat([rows[:, :1], rows[:, 2:]], dim=1))
    rows = naive_block(VIT, 3, naive_block(VIT, 2, torch.cat([rows[:, :1], rows], dim=1)))
    final = torch.nn.functional.layer_norm(
        rows[:, 0], (WIDTH,), VIT.weights["norm.weight"], VIT.weights["norm.bias"], SHAPE.norm_eps
    )
    (expected,) = torch.autograd.grad(final[:, 0].sum(), tokens)
    assert expected.abs().max() > 1e-4
    close(found, expected)


@pytest.mark.parametrize(("block", "start"), [(-1, 0), (DEPTH, 0), (1, 2)])
def test_a_pause_outside_the_pass_is_refused(block: int, start: int) -> None:
    with pytest.raises(ContractError, match=rf"pause must be in {start}\.\.3, got {block}"):
        VIT.run(TOKENS, start=start, pause=(block, lambda cls: []))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (TokenPrompt(random(1, 1, WIDTH), (1,)), r"prompt\.blocks must be increasing and in 2\.\.3"),
        (TokenPrompt(random(1, 1, WIDTH + 1), (2,)), r"prompt\.tokens must be"),
        (TokenPrompt(random(BATCH + 1, 1, 1, WIDTH), (2,)), r"prompt\.tokens must be"),
    ],
)
def test_a_prompt_that_joins_where_it_cannot_is_refused(prompt: TokenPrompt, complaint: str) -> None:
    with pytest.raises(ContractError, match=complaint):
        VIT.run(TOKENS, pause=(2, lambda cls: [prompt]))


# the early reading


@pytest.mark.parametrize("blocks", range(1, DEPTH + 1))
def test_an_early_reading_is_the_final_norm_of_the_cls_row_after_so_many_blocks(blocks: int) -> None:
    rows = TOKENS
    for number in range(blocks):
        rows = naive_block(VIT, number, rows)
    weight, bias = VIT.weights["norm.weight"], VIT.weights["norm.bias"]
    expected = torch.nn.functional.layer_norm(rows[:, 0], (WIDTH,), weight, bias, SHAPE.norm_eps)
    close(VIT.read_early(TOKENS, blocks), expected)


def test_reading_after_the_last_block_is_the_whole_pass_bit_for_bit() -> None:
    assert torch.equal(VIT.read_early(TOKENS, DEPTH), VIT.run(TOKENS)["cls"])


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_early_readings_are_the_hidden_states_of_transformers(tmp_path, blocks: int) -> None:
    theirs = naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0)
    theirs.save_pretrained(tmp_path / "vit")
    config = BackboneConfig(name=str(tmp_path / "vit"), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    ours = load_backbone(config, tmp_path)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = theirs.embeddings(images)
        for layer in list(theirs.layers)[:blocks]:
            hidden = as_tensor(layer(hidden))
        expected = theirs.layernorm(hidden)[:, 0]
    torch.testing.assert_close(ours.read_early(ours.embed(images), blocks), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("blocks", [-1, DEPTH + 1])
def test_a_reading_outside_the_transformer_is_refused(blocks: int) -> None:
    with pytest.raises(ContractError, match=r"blocks must be in 0\.\.3"):
        VIT.read_early(TOKENS, blocks)


# added weights


def fitting(name: str, seed: int = 7) -> Tensor:
    return 0.1 * random(*VIT.weights[name].shape, seed=seed)


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attention.in.weight",
        "blocks.3.attention.in.weight",
        "blocks.1.attention.in.bias",
        "blocks.2.attention.out.weight",
        "blocks.1.mlp.in.weight",
        "blocks.2.norm1.bias",
        "blocks.0.scale1",
        "norm.weight",
    ],
)
def test_what_is_added_counts_in_values_and_gradients(name: str) -> None:
    change = fitting(name).requires_grad_()
    prompt = TokenPrompt(random(DEPTH, 2, WIDTH), tuple(range(DEPTH)))
    summed = dataclasses.replace(VIT, weights=VIT.weights | {name: VIT.weights[name] + change})
    found = VIT.with_added({name: change}).run(TOKENS, [prompt])["cls"]
    expected = naive_run(summed, TOKENS, [prompt])[0]["cls"]
    close(found, expected)
    assert (found - VIT.run(TOKENS, [prompt])["cls"]).abs().max() > 1e-4
    (ours,), (theirs,) = (torch.autograd.grad(cls[:, 0].sum(), change) for cls in (found, expected))
    assert theirs.abs().max() > 1e-6
    close(ours, theirs)


@pytest.mark.parametrize("stem", [1, 2])
def test_added_weights_are_counted_behind_the_stem(stem: int) -> None:
    vit, change = with_stem(stem), fitting("blocks.0.attention.in.weight")
    found = vit.with_added({"blocks.1.attention.in.weight": change})
    expected = VIT.with_added({f"blocks.{stem + 1}.attention.in.weight": change})
    assert torch.equal(found.embed(IMAGES), vit.embed(IMAGES)), "the stem is as it was"
    close(found.run(found.embed(IMAGES))["cls"], expected.run(TOKENS)["cls"])
    assert (expected.run(TOKENS)["cls"] - VIT.run(TOKENS)["cls"]).abs().max() > 1e-3


def test_adding_leaves_the_backbone_itself_as_it_was() -> None:
    before = VIT.digest()
    changed = VIT.with_added({"blocks.0.mlp.out.bias": fitting("blocks.0.mlp.out.bias").requires_grad_()})
    VIT.assert_frozen(before)
    assert changed.digest() != before
    untouched = "blocks.1.mlp.out.bias"
    assert changed.weights[untouched] is VIT.weights[untouched]


def test_adding_nothing_or_zeros_changes_nothing() -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in VIT.weights.items()}
    assert VIT.with_added({}).digest() == VIT.digest()
    assert VIT.with_added(zeros).digest() == VIT.digest()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("blocks.0.attention.query.weight", (WIDTH, WIDTH)),
        ("blocks.0.attention.in.weight", (WIDTH, WIDTH)),
        ("blocks.3.attention.in.weight", (3 * WIDTH, WIDTH)),
        ("blocks.-1.attention.in.weight", (3 * WIDTH, WIDTH)),
        ("blocks.first.attention.in.weight", (3 * WIDTH, WIDTH)),
        ("blocks", (1,)),
        ("attention.in.weight", (3 * WIDTH, WIDTH)),
        ("norm.weight", (1,)),
    ],
)
def test_weights_that_do_not_fit_are_refused(name: str, size: tuple[int, ...]) -> None:
    """Behind a stem of one there are blocks 0 to 2, and the stem is out of reach."""
    with pytest.raises(ContractError, match="added weights must fit the backbone, got") as error:
        with_stem(1).with_added({name: torch.zeros(size)})
    assert repr(name) in str(error.value)
    assert str(size) in str(error.value)
