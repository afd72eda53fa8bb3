"""The command that asks what a run's uncertainty is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedprompt.cli.models import Device
from fedprompt.cli.options import AsJson, Data, Plugins, Runs, TrustConfig, Weights, open_runs
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from fedprompt.report.uncertainty_part import Worths


def uncertainty(
    runs: Runs,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws of a prediction, of methods that have draws; else as in the run.")
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Runs that differ only in their seed are one ensemble, not repetitions.")
    ] = False,
    novel: Annotated[
        bool,
        typer.Option(
            "--novel",
            help="Also show every client test images of the classes that data.classes or data.novel keeps out.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the pictures, as PNG and SVG; else none is drawn.")
    ] = None,
    as_json: AsJson = False,
    weights: Weights = None,
    data: Data = None,
    device: Device = None,
    trust_config: TrustConfig = False,
    plugin: Plugins = None,
) -> None:
    """What uncertainty is worth: does it find wrong answers and unknown classes? Also accuracy by the number of draws."""
    from fedprompt.inference.uncertainty_rows import of_runs

    options = {"weights": weights, "data": data, "device": device, "trust_config": trust_config}
    found = of_runs(open_runs(runs), draws, ensemble, novel, **options)
    if as_json:
        rows = [line.to_json() for line in found.lines]
        typer.echo(json.dumps({"rows": rows, "accuracy_by_draws": found.by_draws}, indent=2))
    else:
        _show(found)
    if output is not None:
        _draw(output, found)


def _show(found: Worths) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from fedprompt.report.uncertainty_part import TITLE

    console = Console()
    drawn = Table(title=TITLE, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in found.head:
        drawn.add_column(title, justify="left" if title in ("Row", "Score") else "right", overflow="fold")
    for row in found.rows():
        drawn.add_row(*map(safe_line, row))
    console.print(drawn)
    for title, runs in found.by_draws.items():
        means = [sum(each[place] for each in runs) / len(runs) for place in range(len(runs[0]))]
        words = "  ".join(f"V={place}: {100 * mean:.2f}" for place, mean in enumerate(means, start=1))
        console.print(safe_line(f"Accuracy by draws, {title}: {words}"), highlight=False, markup=False)
    console.print(found.meaning, highlight=False, markup=False)


def _draw(folder: Path, found: Worths) -> None:
    from fedprompt.report.html_report import save_picture

    folder.mkdir(parents=True, exist_ok=True)
    for picture in found.pictures():
        path, _ = save_picture(picture, folder / picture.name)
        typer.echo(safe_line(f"picture: {path}"), err=True)
