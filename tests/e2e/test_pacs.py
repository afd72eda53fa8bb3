"""Real images and real weights, when they lie beside the project; skipped otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import SHARED
from support import run

from fedprompt import config
from fedprompt.config import config_files

IMAGES = SHARED / "data" / "pacs.parquet"
WEIGHTS = SHARED / "weights" / "vit_tiny_patch16_224.safetensors"
CHANCE = 1 / 7

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.shared,
    pytest.mark.skipif(
        not (IMAGES.exists() and WEIGHTS.exists()), reason="no ../shared with PACS and a ViT-Ti beside the project"
    ),
]


@pytest.fixture
def pacs(settings: Any) -> Any:
    """`configs/pacs.yaml` with the real files and fewer images."""

    def make(overrides: list[str]) -> list[config.Config]:
        given = [f"data.source={IMAGES}", f"backbone.name={WEIGHTS}", "data.test_per_cell=10", *overrides]
        output = settings()["output"]
        return config_files.load(
            "configs/pacs.yaml", [*given, *(f"output.{key}={value}" for key, value in output.items())]
        )

    return make


@pytest.mark.parametrize("domains", [1, 4])
def test_head_tune_is_far_above_chance(pacs: Any, domains: int) -> None:
    (one,) = pacs(["method=head_tune", "data.train_per_cell=6", f"partition.domains_per_client={domains}"])
    assert run(one).summary()["average"] > 2.5 * CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("domains", [1, 4])
def test_all_four_methods_learn(pacs: Any, domains: int) -> None:
    for one in pacs([f"partition.domains_per_client={domains}"]):
        assert run(one).summary()["average"] > 2 * CHANCE, one.run_name
