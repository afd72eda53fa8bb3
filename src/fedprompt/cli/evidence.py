"""Commands that show what runs came to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedprompt.cli.launching import print_comparison
from fedprompt.cli.options import AsJson, Runs, emit, open_runs


def compare(
    runs: Runs,
    format: Annotated[
        Literal["table", "markdown", "latex", "csv", "json"], typer.Option(help="How to print it.")
    ] = "table",
    as_json: AsJson = False,
) -> None:
    """One row per method and setting: mean and standard deviation over seeds."""
    print_comparison(open_runs(runs), "json" if as_json else format)


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.html and report.png.")] = Path(
        "runs"
    ),
    figures: Annotated[
        bool, typer.Option("--figures", help="For papers: every picture as PNG and SVG in figures/, and table.tex.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page and a picture; see docs/report.md."""
    from fedprompt.report.html import write_report

    made = write_report(open_runs(runs), output, figures)
    lines = [f"report: {made.html}", f"picture: {made.png}"]
    if made.latex is not None:
        lines += [f"table: {made.latex}", f"figures: {len(made.figures)} files in {output / 'figures'}"]
    data = {"html": str(made.html), "png": str(made.png)}
    more = {"figures": [str(path) for path in made.figures], "latex": str(made.latex)} if figures else {}
    emit({**data, **more}, as_json, "\n".join(lines))


def audit(
    runs: Runs,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Audit so many clients, drawn at random; else all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What uploads give away of training images, as AUC of attacks on them; see docs/audit.md."""
    opened = open_runs(runs)
    from fedprompt.evaluation.leaks import audit_run
    from fedprompt.report.leaks import leak_table

    findings = [audit_run(each, clients) for each in opened]
    emit(findings, as_json, leak_table(findings))


def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders that hold some; else the folder runs.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Else 8050, or a free one where that is taken.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. There is no login.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a live page that lists runs, follows them while they train and compares them; see docs/dashboard.md."""
    from fedprompt.dashboard.launching import serve

    serve(runs, host, port, open_browser)
