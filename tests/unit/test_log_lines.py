"""One line a fact, in both forms, whoever says it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from fedprompt.io import log_lines
from fedprompt.io.log_lines import configure, fact, line_of, relayed, take_over

pytestmark = pytest.mark.unit

WHEN = datetime(2026, 11, 19, 14, 50, 3, 120000, UTC)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    configure()


def test_a_line_for_people_has_time_level_run_site_and_round() -> None:
    line = line_of("must answer", "warning", run="first", site="a", round=3, time=WHEN)
    assert line == "2026-11-19T14:50:03.120Z WARNING run=first site=a round=3 must answer"
    assert line_of("hello", time=WHEN) == "2026-11-19T14:50:03.120Z INFO hello"


def test_a_line_for_programs_has_the_same() -> None:
    configure("json")
    assert json.loads(line_of("must answer", "error", run="first", site="a", round=3, time=WHEN)) == {
        "time": "2026-11-19T14:50:03.120Z",
        "level": "error",
        "run": "first",
        "site": "a",
        "round": 3,
        "text": "must answer",
    }


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", ["two\nlines", "\x1b[31mred\x1b[0m\u202e", "x" * 10**6, 'quote " and \\'])
def test_whatever_is_said_it_is_one_line_that_a_terminal_can_show(form: Any, text: str) -> None:
    configure(form)
    line = line_of(text, run="a\nb=c", site='s" t')
    assert line.isprintable()
    assert len(line) < 2 * log_lines.LONGEST
    if form == "json":
        assert json.loads(line)["run"] == "a\nb=c"
    else:
        assert 'run="a b=c" site="s\\" t"' in line


def test_the_site_of_a_node_is_in_all_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "hospital-a")
    fact("hello")
    assert json.loads(capsys.readouterr().err)["site"] == "hospital-a"


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    logger = logging.getLogger("a library of a test")
    logging.captureWarnings(False)  # a test before may have left them to logging
    yield logger
    logger.handlers[:] = []
    logging.captureWarnings(False)


def test_lines_of_libraries_have_the_same_form(library: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    take_over(("routine",), (library.name, "py.warnings"))
    library.setLevel(logging.DEBUG)
    library.info("started %s", 7)
    library.info("routine: nobody needs this")
    library.debug("nor this")
    library.error("failed", exc_info=ValueError("no"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["level"], each["text"].partition(" | ")[0]) for each in said[:2]] == [
        ("info", "started 7"),
        ("error", "failed: ValueError: no"),
    ]
    assert said[2]["level"] == "warning"
    assert "old" in said[2]["text"]


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("\x1b[92mINFO \x1b[0m:      Starting Flower SuperExec\n", "info", "Starting Flower SuperExec"),
        ("WARNING:  it is late", "warning", "it is late"),
        ("CRITICAL: over", "error", "over"),
        ("  round 1/2  cohort of 2", "info", "round 1/2  cohort of 2"),
    ],
)
def test_lines_of_children_have_the_same_form(line: str, level: str, text: str) -> None:
    configure("json")
    found = json.loads(relayed(line) or "")
    assert (found["level"], found["text"]) == (level, text)


def test_what_has_the_form_already_keeps_it_and_an_empty_line_is_no_fact() -> None:
    for form in ("text", "json"):
        configure(form)  # type: ignore[arg-type]
        line = line_of("hello", time=WHEN)
        assert relayed(f"{line}\n") == line
    configure("json")
    forged = relayed('{"time": "x", "level": "info", "run": null, "site": null, "round": null, "text": "\x9b31m"}\n')
    assert forged is not None
    assert forged.isprintable(), "a child cannot put a control character into the log"
    assert json.loads(relayed('{"time": "half') or "")["text"] == '{"time": "half'
    configure("text")
    assert relayed("\x1b[92mINFO \x1b[0m: \n") is None
    assert relayed(" \n") is None


def test_all_that_a_process_and_its_children_print_comes_out_as_facts() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from fedprompt.io.log_lines import configure, fact, relaying\n"
        "configure('json')\n"
        "with relaying():\n"
        "    print('from print'); fact('a fact', round=2)\n"
        "    subprocess.run([sys.executable, '-c', 'import sys; print(\"WARNING: child\", file=sys.stderr)'])\n"
        "print('afterwards', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *lines, last = done.stderr.splitlines()
    assert last == "afterwards"
    assert done.stdout == ""
    said = {each["text"]: each for each in map(json.loads, lines)}
    assert said.keys() == {"from print", "a fact", "child"}
    assert said["child"]["level"] == "warning"
    assert said["a fact"]["round"] == 2


def test_a_line_nested_without_end_does_not_end_the_log() -> None:
    """Then nobody would read what the server's parts print, and they would wait for that."""
    configure("json")
    line = relayed('{"time": ' + "[" * 200_000)
    assert line is not None
    assert json.loads(line)["level"] == "info"
