"""Blocks through torch.compile: the same numbers, one graph for all blocks, and a warning where it cannot be."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import experiment
from torch import Tensor
from torch._dynamo.utils import counters

from fedprompt.backbones.block import run_block
from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape, block_tensors
from fedprompt.backbones.torch_compile import CompiledBlock
from fedprompt.backbones.vit import ViT
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

DEPTH, WIDTH = 5, 32
PLAIN = random_vit(ViTShape(WIDTH, DEPTH, 2, 48, patch=4, image_size=16, layer_scale=True), seed=1)
BLOCK = {name: PLAIN.weights[f"blocks.0.{name}"] for name in block_tensors(PLAIN.shape)}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(backend: str) -> ViT:
    return dataclasses.replace(PLAIN, block=CompiledBlock(backend))


def step(vit: ViT, batch: int) -> tuple[Tensor, Tensor]:
    """Features and the gradient of deep prompts."""
    generator = torch.Generator().manual_seed(batch)
    tokens = vit.embed(torch.randn(batch, 3, 16, 16, generator=generator))
    prompts = (0.3 * torch.randn(DEPTH, 3, WIDTH, generator=generator)).requires_grad_()
    cls = vit.run(tokens, [TokenPrompt(prompts, tuple(range(DEPTH)))])["cls"]
    weighing = torch.linspace(-1, 1, cls.numel()).view_as(cls)
    return cls.detach(), torch.autograd.grad((cls * weighing).sum(), prompts)[0]


def assert_equal_steps(vit: ViT, batch: int) -> None:
    for ours, theirs in zip(step(vit, batch), step(PLAIN, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_all_blocks_and_all_sizes_of_a_batch_share_graphs() -> None:
    vit = compiled("eager")
    assert_equal_steps(vit, batch=4)
    assert graphs() == 3  # the first block, whose image rows want no gradient; those in between; the last, for one row
    for batch in (4, 7, 2):
        assert_equal_steps(vit, batch)
    assert graphs() == 3


@pytest.mark.slow
def test_more_sets_of_pieces_than_torch_allows_by_itself_stay_translated() -> None:
    block, rows = CompiledBlock("eager"), torch.randn(2, 3, WIDTH)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"engine\.compile")
        for slots in range(10):
            pieces = [rows] * slots
            found = block(BLOCK, PLAIN.shape, [rows], pieces)
            torch.testing.assert_close(found, run_block(BLOCK, PLAIN.shape, [rows], pieces))
    assert graphs() == 10


@pytest.mark.slow
def test_autocast_reaches_into_compiled_blocks() -> None:
    found, expected = (step(vit.autocasting(), batch=4) for vit in (compiled("eager"), PLAIN))
    for ours, theirs, exact in zip(found, expected, step(PLAIN, batch=4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not torch.equal(ours, exact)


@pytest.mark.slow
def test_a_machine_without_a_compiler_goes_on_and_says_so_once() -> None:
    from torch._inductor import config

    vit = compiled("inductor")
    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        with pytest.warns(UserWarning, match=r"engine\.compile has no effect, for torch\.compile fails here: .+"):
            found = step(vit, batch=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal_steps(vit, batch=2)
    for ours, theirs in zip(found, step(PLAIN, batch=2), strict=True):
        assert torch.equal(ours, theirs)


def test_pieces_that_do_not_fit_are_an_error_and_no_reason_to_give_up() -> None:
    block = CompiledBlock("eager")
    with pytest.raises(RuntimeError):
        block(BLOCK, PLAIN.shape, [torch.zeros(2, 3, WIDTH + 1)], [])
    good = [torch.randn(2, 3, WIDTH)]
    torch.testing.assert_close(block(BLOCK, PLAIN.shape, good, []), run_block(BLOCK, PLAIN.shape, good, []))
    assert graphs() == 1


@pytest.mark.slow
def test_a_compiled_backbone_is_the_same_backbone(settings: Callable[..., dict[str, Any]]) -> None:
    plain, translated = (experiment(settings(engine={"compile": on})).factory.prepare()[2] for on in (False, True))
    assert isinstance(translated.block, CompiledBlock)
    assert plain.block is run_block
    assert translated.digest() == plain.digest()


@pytest.mark.slow
def test_machine_code_gives_the_same_values_and_gradients() -> None:
    vit = compiled("inductor")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"engine\.compile")
        for batch in (4, 7):
            assert_equal_steps(vit, batch)
    assert graphs() == 3
