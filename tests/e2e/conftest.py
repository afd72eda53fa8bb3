"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def config(tmp_path: Path, settings: Any) -> Callable[..., str]:
    """A tiny config file; returns its name relative to the folder of the test."""

    def write(**changes: Any) -> str:
        values = settings(**changes)
        values["output"] = {"threads": 1}
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
        return "tiny.yaml"

    return write
