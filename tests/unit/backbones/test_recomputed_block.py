"""Activations that are computed again: the same numbers, and a fraction of what is stored for the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import content, run
from torch import Tensor

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.errors import FedpromptError
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

DEPTH, WIDTH = 6, 32
PLAIN = random_vit(ViTShape(WIDTH, DEPTH, 2, 128, patch=4, image_size=16, layer_scale=True), seed=1)


def step(vit: ViT) -> tuple[Tensor, Tensor, int]:
    """Features, the gradient of deep prompts, and the bytes that were stored for it."""
    generator, stored = torch.Generator().manual_seed(0), {}
    known = {tensor.untyped_storage().data_ptr() for tensor in vit.weights.values()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = vit.embed(torch.randn(4, 3, 16, 16, generator=generator))
    prompts = (0.3 * torch.randn(DEPTH, 3, WIDTH, generator=generator)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cls = vit.run(tokens, [TokenPrompt(prompts, tuple(range(DEPTH)))])["cls"]
    weighing = torch.linspace(-1, 1, cls.numel()).view_as(cls)
    (slope,) = torch.autograd.grad((cls * weighing).sum(), prompts)
    return cls.detach(), slope, sum(stored.values())


def test_the_numbers_are_the_same_and_a_fraction_is_stored() -> None:
    cls, slope, stored = step(PLAIN)
    again_cls, again_slope, again_stored = step(PLAIN.recomputing())
    assert torch.equal(cls, again_cls)
    assert torch.equal(slope, again_slope)
    assert again_stored < stored / 3


@pytest.mark.parametrize("method", ["fedvpt_deep", "pfedbayespt", "fedlora"])
def test_a_run_has_the_same_bits(method: str, settings: Any) -> None:
    plain, again = (
        content(run(settings(name=f"recompute-{on}", method={"name": method}, engine={"recompute": on})))
        for on in (False, True)
    )
    assert plain == again


def test_an_encoder_of_sentences_is_refused(settings: Any) -> None:
    with pytest.raises(FedpromptError, match=r"engine\.recompute must be false"):
        run(settings(backbone={"name": "tiny-bert"}, engine={"recompute": True}))
