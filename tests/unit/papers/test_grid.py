"""How far a grid is, and how long the rest may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedprompt.papers.collect import Request
from fedprompt.papers.grid import Progress
from fedprompt.papers.paper_configs import find

pytestmark = pytest.mark.unit


def progress(seconds: dict[str, float]) -> Progress:
    """Two seeds of a slow method, two of a fast one, and one of a third."""
    names = ["slow-0", "slow-1", "fast-0", "fast-1", "third-0"]
    configs: list[Any] = [SimpleNamespace(run_name=name, label=name.partition("-")[0]) for name in names]
    return Progress(configs, seconds)


def test_the_time_left_is_that_of_the_same_method_and_else_of_all() -> None:
    found = progress({"slow-0": 100.0, "fast-0": 10.0})
    assert found.seconds_left() == 100 + 10 + 55
    assert found.seconds_left(jobs=2) == 82.5
    assert found.seconds_left(jobs=9) == 55  # three runs are left
    assert found.sentence() == "2 of 5 runs finished, about 0:02:45 left"
    assert found.by_method() == {"slow": (1, 2, 100.0), "fast": (1, 2, 10.0), "third": (0, 1, None)}


def test_nothing_is_known_before_the_first_run_and_nothing_is_left_after_the_last() -> None:
    assert progress({}).sentence() == "0 of 5 runs finished, time left unknown"
    done = progress(dict.fromkeys(("slow-0", "slow-1", "fast-0", "fast-1", "third-0"), 3700.0))
    assert done.sentence() == "5 of 5 runs finished, about 0:00:00 left"
    assert done.left == []


def test_a_request_is_the_same_in_another_process() -> None:
    asked = Request(find("pfedbayespt/table1"), "small", ("data.test_per_cell=2",), (0, 3))
    assert Request.of_json(asked.to_json()) == asked  # type: ignore[arg-type]
