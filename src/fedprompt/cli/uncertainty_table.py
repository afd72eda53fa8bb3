"""The command that asks what a run's uncertainty is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprompt.cli.models import Device
from fedprompt.cli.options import AsJson, Data, Plugins, Runs, TrustConfig, Weights, open_runs
from fedprompt.errors import ConfigError
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from fedprompt.inference.uncertainty import Answers

COLUMNS = {
    "accuracy": "Accuracy",
    "ece": "ECE",
    "errors": "AUROC errors",
    "aurc": "AURC",
    "selective": "Accuracy at 80 %",
    "unknown": "AUROC unknown",
}


def uncertainty(
    runs: Runs,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws of a prediction, of methods that have draws; else as in the run.")
    ] = None,
    ensemble: Annotated[
        bool, typer.Option("--ensemble", help="Runs that differ only in their seed are one ensemble, not repetitions.")
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
    from fedprompt.inference import uncertainty as measure
    from fedprompt.runs.families import families

    options = {"weights": weights, "data": data, "device": device, "trust_config": trust_config}
    rows: dict[str, list[Answers]] = {}
    for family in families(open_runs(runs), *(["partition"] if ensemble else [])):
        found = [measure.answers(run, draws, **options) for run in family.runs]
        if ensemble and len(found) < 2:
            raise ConfigError(
                f"an ensemble must have at least two runs that differ in their seed, got one of {family.label}"
            )
        title = f"ensemble of {len(found)}: {family.title}" if ensemble else family.title
        rows.setdefault(title, []).extend([measure.ensemble(found)] if ensemble else found)
    table = _table(rows)
    by_draws = {title: [measure.accuracy_by_draws(each) for each in found] for title, found in rows.items()}
    by_draws = {title: found for title, found in by_draws.items() if min(map(len, found)) > 1 and not ensemble}
    if as_json:
        typer.echo(json.dumps({"rows": table, "accuracy_by_draws": by_draws}, indent=2))
    else:
        _show(table, by_draws)
    if output is not None:
        _draw(output, rows, by_draws)


def _table(rows: dict[str, list[Answers]]) -> list[dict[str, Any]]:
    """One line for every row and score: mean and standard deviation over its runs."""
    from fedprompt.inference.uncertainty import worth
    from fedprompt.report.comparison_table import spread

    lines = []
    for title, found in rows.items():
        scores = [{each.score: each.figures for each in worth(answers)} for answers in found]
        for score in scores[0]:
            figures = {key: spread(each[score].get(key) for each in scores) for key in scores[0][score]}
            known = {key: {"mean": value.mean, "std": value.std} for key, value in figures.items() if value}
            images = sum(len(each.labels) for each in found)
            unknown = sum(each.unknown.shape[1] for each in found)
            lines.append(
                {"row": title, "score": score, "runs": len(found), "images": images, "unknown_images": unknown}
                | {"figures": known}
            )
    return lines


def _show(table: list[dict[str, Any]], by_draws: dict[str, list[list[float]]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    shown = [key for key in COLUMNS if any(key in line["figures"] for line in table)]
    drawn = Table(title="What uncertainty is worth", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("Row", "Score", *(COLUMNS[key] for key in shown), "Runs", "Images"):
        drawn.add_column(title, justify="left" if title in ("Row", "Score") else "right", overflow="fold")
    for line in table:
        figures = [_text(line["figures"].get(key)) for key in shown]
        drawn.add_row(safe_line(line["row"]), line["score"], *figures, str(line["runs"]), str(line["images"]))
    console.print(drawn)
    for title, runs in by_draws.items():
        means = [sum(each[place] for each in runs) / len(runs) for place in range(len(runs[0]))]
        words = "  ".join(f"V={place}: {100 * mean:.2f}" for place, mean in enumerate(means, start=1))
        console.print(safe_line(f"Accuracy by draws, {title}: {words}"), highlight=False, markup=False)
    console.print(
        "per cent, mean ± std over runs, all images together. AUROC errors: how often a wrong answer is less certain than a "
        "right one. AURC: mean share of wrong answers over all coverages, less is better. Accuracy at 80 %: of the most "
        "certain images. AUROC unknown: how often an image of a class that the client never saw is less certain than one "
        "of its own test images.",
        highlight=False,
        markup=False,
    )


def _text(figure: dict[str, float | None] | None) -> str:
    if figure is None or figure["mean"] is None:
        return "–"
    mean = f"{100 * figure['mean']:.1f}"
    return mean if figure["std"] is None else f"{mean} ± {100 * figure['std']:.1f}"


def _draw(folder: Path, rows: dict[str, list[Answers]], by_draws: dict[str, list[list[float]]]) -> None:
    from fedprompt.inference.uncertainty import worth
    from fedprompt.io.files import write_atomically
    from fedprompt.report import uncertainty_plots
    from fedprompt.report.plot_style import png, svg_file

    curves: dict[str, list[Any]] = {}
    for title, found in rows.items():
        for answers in found:
            for each in worth(answers):
                if each.score != "confidence":  # it ranks nearly as the entropy does
                    curves.setdefault(f"{title}, {each.score}", []).append(each.curve)
    figures = {"risk-coverage": uncertainty_plots.risk_coverage(curves)}
    if by_draws:
        figures["accuracy-by-draws"] = uncertainty_plots.by_draws(by_draws)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        write_atomically(folder / f"{name}.png", png(figure, 300))
        write_atomically(folder / f"{name}.svg", svg_file(figure))
        typer.echo(safe_line(f"picture: {folder / name}.png"), err=True)
