"""What tests with real processes of Flower share. Where one fails, it shows how the logs of its processes end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from real_processes import Federation, Processes

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.e2e_flower)
            if find_spec("flwr") is None:
                item.add_marker(pytest.mark.skip(reason="Flower is not installed: pip install 'fedprompt[flower]'"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            for process in value.started if isinstance(value, Processes) else []:
                report.sections.append((process.log.name, process.tail))
    return report


Found = Callable[..., Federation]


@pytest.fixture(scope="module")
def found_federation() -> Iterator[Found]:
    """Makes federations whose processes end with the tests of a file."""
    made: list[Processes] = []

    def found(
        folder: Path, sites: Sequence[str], secure: bool = True, environment: Mapping[str, str] | None = None
    ) -> Federation:
        federation = Federation(folder, sites, secure, environment)
        made.append(federation)
        return federation

    yield found
    for each in made:
        each.end()
