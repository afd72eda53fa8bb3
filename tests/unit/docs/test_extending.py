"""The worked examples of docs/extending.md: each is a whole file, and is run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import documents
import numpy as np
import pytest
import yaml
from warm_processes import command_line

from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

PAGE = (documents.ROOT / "docs/extending.md").read_text()
EXAMPLES = {
    re.match(r'"""(\w+\.py): ', code)[1]: code  # type: ignore[index]
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
USES: dict[str, dict[str, Any]] = {
    "damped_mean.py": {
        "method": {"name": "fedvpt", "head": "shared"},
        "aggregation": {"rule": "damped_mean", "options": {"step": 0.25}},
    },
    "npz_source.py": {
        "data": {
            "source": "shapes.npz",
            "format": "npz",
            "options": {"names": ["round", "square"]},
            "train_per_cell": None,
            "test_per_cell": None,
        },
        "partition": {"scheme": "iid", "clients": 2},
    },
    "by_size.py": {"partition": {"scheme": "by_size", "clients": 3, "options": {"ratio": 3.0}}},
    "shallow.py": {"backbone": {"name": "shallow:tiny", "options": {"blocks": 2}}},
    "timed.py": {"engine": {"kind": "timed", "options": {"slow": 0.0}}},
    "csv_tracker.py": {"output": {"trackers": ["csv"]}},
}


def test_every_example_is_run() -> None:
    assert list(EXAMPLES) == list(USES)


def example(name: str, folder: Path, settings: Any) -> tuple[Run, str]:
    """The run of a config that uses an example, and what was said on standard error."""
    (folder / name).write_text(EXAMPLES[name])
    generator = np.random.default_rng(0)
    np.savez(
        folder / "shapes.npz",
        images=generator.integers(0, 256, (40, 12, 10, 3), dtype=np.uint8),
        labels=np.arange(40) % 2,
    )
    made = settings(**USES[name], federation={"rounds": 1})
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    done = command_line(folder)("run", "config.yaml", "--plugin", name, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    (found,) = (folder / "runs").glob("*/run.db")
    return Run(found.parent), done.stderr


def test_the_tracker(tmp_path: Path, settings: Any) -> None:
    run, _ = example("csv_tracker.py", tmp_path, settings)
    (line,) = (run.directory / "trackers/csv/average.csv").read_text().splitlines()
    assert line == f"1,{run.history()[-1]['average']}"


def test_the_rule(tmp_path: Path, settings: Any) -> None:
    run, _ = example("damped_mean.py", tmp_path, settings)
    assert run.config.aggregation.options == {"step": 0.25}
    assert run.finished


def test_the_command_that_is_shown(tmp_path: Path) -> None:
    ((command, config, *rest),) = documents.commands(documents.ROOT / "docs/extending.md")
    assert command == "run"
    (tmp_path / "damped_mean.py").write_text(EXAMPLES["damped_mean.py"])
    done = command_line(tmp_path)("validate", config, *rest)
    assert done.returncode == 0, done.stderr


def test_the_source(tmp_path: Path, settings: Any) -> None:
    run, _ = example("npz_source.py", tmp_path, settings)
    manifest = run.manifest()
    assert (manifest.class_names, manifest.source_name) == (("round", "square"), "shapes")
    assert sum(len(client.train) + len(client.test) for client in manifest.clients) == 40


def test_the_partition(tmp_path: Path, settings: Any) -> None:
    run, _ = example("by_size.py", tmp_path, settings)
    sizes = [len(client.train) for client in run.manifest().clients]
    assert sizes[1] / sizes[0] == pytest.approx(3, rel=0.1)
    assert sizes[2] / sizes[1] == pytest.approx(3, rel=0.1)


def test_the_backbone(tmp_path: Path, settings: Any) -> None:
    run, _ = example("shallow.py", tmp_path, settings)
    assert run.finished
    fails = command_line(tmp_path)(
        "run", "config.yaml", "backbone.options.blocks=4", "name=deep", "--plugin", "shallow.py"
    )
    assert fails.returncode == 4
    assert "backbone.options.blocks must be in 1..3, got 4" in fails.stderr


def test_the_engine(tmp_path: Path, settings: Any) -> None:
    _, said = example("timed.py", tmp_path, settings)
    assert re.findall(r"round 1: (client_\d) trained for \d+\.\d{3} s", said) == [f"client_{k}" for k in range(4)]


def test_every_message_of_the_page_is_one_that_the_code_has() -> None:
    code = "".join(path.read_text() for path in (documents.ROOT / "src/fedprompt").rglob("*.py"))
    for part in (
        "be a Python file (.py) that exists",
        "be a file that can be imported",
        "register something",
        "must be registered once",
        "is not a setting of",
        "cannot be loaded",
    ):
        assert part in PAGE
        assert part in code
