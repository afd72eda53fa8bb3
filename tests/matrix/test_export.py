"""Every method either exports exactly, or as an approximation that is measured, or is refused with a reason; all are explained."""

from __future__ import annotations

import warnings
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

from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.inference.explain import explain
from fedprompt.inference.export import export, measured
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient

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
        return TrainedClient.open(LoadedRun.open(run(values, CASES[case]), method=CASES[case]), 1)

    return make


@pytest.mark.sampled
@pytest.mark.parametrize("case", METHODS)
def test_the_documented_code_gives_fedprompts_own_logits(
    case: str, trained: Callable[[str], TrainedClient], tmp_path: Path
) -> None:
    client, folder = trained(case), tmp_path / "exported"
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    name = case.split("+")[0]
    expected = outcome_of(name) or _found_outcome(client, tmp_path / "asked", name)
    if expected == "refused":
        with pytest.raises(ConfigError, match=r"cannot be exported: it .* use `fedprompt predict`"):
            export(client, folder, with_backbone=True, approximate=True)
        return
    said = export(client, folder, with_backbone=True, approximate=expected == "approximate")
    if expected == "exact":  # where a router or a gate has learned next to nothing, an approximate one may be exact too
        assert said["exact"]
    found = documented_logits(tmp_path, image)
    torch.testing.assert_close(found, _own_logits(client, image, said["exact"]), atol=1e-4, rtol=1e-4)


def _found_outcome(client: TrainedClient, folder: Path, name: str) -> str:
    """Of a method without a row in docs/export.md: what `fedprompt export` answers. The row is asked for in a warning."""
    try:
        export(client, folder)
        found = "exact"
    except ConfigError as error:
        found = "approximate" if "has no exact export" in str(error) else "refused"
    message = f"docs/export.md says nothing about `{name}`; its export is {found}: add it to such a row of the table"
    warnings.warn(message, stacklevel=1)
    return found


def _own_logits(client: TrainedClient, image: Image.Image, exact: bool) -> torch.Tensor:
    images = client.images(client.pixels([image]))
    with torch.no_grad():
        if not exact:
            fixed, _ = measured(client)
            return fixed.feature(images, torch.arange(1))[0] @ fixed.weight.T + fixed.bias
        batch, noise = client.batch(images), client.noise(1)
        seen = client.forward(images, batch, noise)
        return client.method.logits(client.world, client.params, seen, batch, noise)[0]


@pytest.mark.sampled
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
