"""A site that requires noise: whatever the method, its figures and its refusals do not depend on its training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from remote_run import exported, tiny_settings
from support import seeded

from fedprompt.backbones.weight_cache import identity
from fedprompt.core import registry
from fedprompt.core.method import Server
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order, Setting
from fedprompt.errors import ConfigError
from fedprompt.experiment import Experiment

pytestmark = pytest.mark.matrix

NAMES = tuple(f"client_{place}" for place in range(4))
PRIVACY = {"noise": 1.0, "clip": 1e-3, "clips": {"*": 5.0}}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": {"name": name}} for name in registry.methods()},
    **{
        f"fedvpt+{name}": {"method": {"name": "fedvpt", "head": "shared"}, "variant": {"name": name}}
        for name in registry.variants()
    },
    "pep_fedpt": {"method": {"name": "pep_fedpt", "minimum_count": 5}},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same test images twice; once with all training images, once with a few, of which some classes have none."""
    folder = tmp_path_factory.mktemp("files")
    whole = exported({**tiny_settings(folder / "runs", "whole"), "data": {"source": "tiny"}}, folder)["client_1"]
    table = pq.read_table(whole)
    labels, splits = (np.array(table.column(name).to_pylist()) for name in ("label", "split"))
    few = np.flatnonzero((splits == "train") & (labels < labels.max()))[:7]
    kept = np.sort(np.concatenate([few, np.flatnonzero(splits == "test")]))
    pq.write_table(table.take(pa.array(kept)), folder / "few.parquet")
    return [whole, folder / "few.parquet"]


@pytest.mark.sampled
@pytest.mark.parametrize("evaluate_at", ["personalised", "global"])
@pytest.mark.parametrize("case", CASES)
def test_figures_of_a_site_that_requires_noise_say_nothing_of_its_training_images(
    case: str, evaluate_at: str, files: list[Path], tmp_path: Path
) -> None:
    text = registry.methods()[CASES[case]["method"]["name"]]().uses_text
    sections = {
        **CASES[case],
        "data": {"source": "tiny"},
        "backbone": {"name": "tiny-clip" if text else "tiny"},
        "federation": {"rounds": 2, "evaluate_at": evaluate_at},
        "privacy": PRIVACY,
    }
    made = Experiment(tiny_settings(tmp_path / "runs", case, **sections))
    try:
        source, _, backbone, world = made.factory.prepare()
    except ConfigError as error:
        if "privacy" not in str(error):
            raise
        return  # such a run cannot begin anywhere
    stream = seeded()
    shared = {
        name: tensor + 0.5 * stream.normal(*tensor.shape) if tensor.is_floating_point() else tensor
        for name, tensor in world.roles.shared.items()
    }
    received = made.method.download(world, Server(shared, world.roles.server), 1)
    config = made.config.model_dump(mode="json", exclude={"engine", "output"})
    setting = Setting("a" * 32, config, identity(backbone), source.class_names, NAMES)
    order = Order("work", setting, 1, evaluate=1, received=received).to_bytes()
    answers = [Site("client_1", str(file), tmp_path / file.stem, least_noise=1.0).answer(order) for file in files]
    assert answers[0] == answers[1]
    found = Answer.from_bytes(answers[0])
    assert found.result is not None or (found.failure is not None and found.failure[0] == "privacy"), found.failure
