"""Every method either exports exactly, or as an approximation that is measured, or is refused with a reason; all are explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documented_code import documented_logits, outcome_of
from every_method import CASES
from PIL import Image
from support import run

from fedprompt import registry
from fedprompt.backbones.dual import DualEncoder
from fedprompt.errors import ConfigError
from fedprompt.using.client import TrainedClient
from fedprompt.using.explain import explain
from fedprompt.using.export import export, measured
from fedprompt.using.opened import OpenedRun

pytestmark = pytest.mark.matrix

METHODS = [case for case in CASES if case in registry.methods() or case.startswith("fedvpt+")]


@pytest.fixture
def trained(settings: Any) -> Callable[[str], TrainedClient]:
    def make(case: str) -> TrainedClient:
        values = settings(
            data={"train_per_cell": 2, "test_per_cell": 1, "classes": ["disc", "square", "cross"]},
            train={"momentum": 0.0},
            federation={"rounds": 2},
        )
        return TrainedClient.open(OpenedRun.open(run(values, CASES[case]), method=CASES[case]), 1)

    return make


@pytest.mark.parametrize("case", METHODS)
def test_the_documented_code_gives_fedprompts_own_logits(
    case: str, trained: Callable[[str], TrainedClient], tmp_path: Path
) -> None:
    client, folder = trained(case), tmp_path / "exported"
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    expected = outcome_of(case.split("+")[0])
    if expected == "refused":
        with pytest.raises(ConfigError, match="cannot be exported: it reads image_patches"):
            export(client, folder, with_backbone=True, approximate=True)
        return
    said = export(client, folder, with_backbone=True, approximate=expected == "approximate")
    if expected == "exact":  # where a router or a gate has learned next to nothing, an approximate one may be exact too
        assert said["exact"]
    found = documented_logits(tmp_path, image, dual=isinstance(client.backbone, DualEncoder))
    torch.testing.assert_close(found, _own_logits(client, image, said["exact"]), atol=1e-4, rtol=1e-4)


def _own_logits(client: TrainedClient, image: Image.Image, exact: bool) -> torch.Tensor:
    images = client.images(client.pixels([image]))
    with torch.no_grad():
        if not exact:
            fixed, _ = measured(client)
            return fixed.feature(images, torch.arange(1))[0] @ fixed.weight.T + fixed.bias
        batch, noise = client.batch(images), client.noise(1)
        seen = client.look(images, batch, noise)
        return client.method.logits(client.world, client.params, seen, batch, noise)[0]


@pytest.mark.parametrize("case", list(CASES))
def test_every_method_is_explained_by_the_numbers_of_its_prediction(
    case: str, trained: Callable[[str], TrainedClient]
) -> None:
    client = trained(case)
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    found = explain(client, image)
    np.testing.assert_allclose(found.probabilities, client.probabilities([image])[0], atol=1e-5)
    assert sum(found.prompted.shares.values()) == pytest.approx(1)
    assert found.plain_probabilities.sum() == pytest.approx(1)
    for mixed in found.mixtures:
        assert len(mixed.parts) == len(mixed.weights) == len(mixed.used)
        if mixed.unit == "share":
            assert sum(mixed.weights) == pytest.approx(1, abs=1e-5)
