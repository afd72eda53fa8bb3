"""One HTML file that holds a whole comparison: table, pictures and the settings of every run.

It loads nothing and runs no script, so it can be mailed, archived and opened anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from fedprompt.assets import write_atomically
from fedprompt.errors import RunError, broken
from fedprompt.federation.store import RoundRecord
from fedprompt.report import page, tables
from fedprompt.report.families import rounds_done
from fedprompt.report.tables import Cell, format_bytes
from fedprompt.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(runs: Sequence[Run], directory: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.png` (the overview for a README) into the directory; returns their paths."""
    from fedprompt.report import plots

    if not runs:
        raise RunError(broken("report", "be given at least one run", []))
    html, overview = directory / "report.html", directory / "report.png"
    write_atomically(html, render(runs).encode())
    plots.save_overview(runs, overview)
    return html, overview


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    methods = ", ".join(dict.fromkeys(run.config.label for run in runs))
    body = [
        page.paragraph(f"{len(runs)} runs of {methods}"),
        comparison_section(runs),
        pictures_section(runs),
        page.section("Runs", *(run_section(run, number) for number, run in enumerate(runs))),
    ]
    return page.document("Comparison of runs", "\n".join(body))


def comparison_section(runs: Sequence[Run]) -> str:
    rows = tables.comparison(runs)
    return page.section(
        "Comparison",
        *(page.paragraph(note, "warn") for note in tables.notes(rows)),
        page.table("Comparison", tables.header(tables.columns(rows)), tables.cells(rows, tables.columns(rows))),
        *(page.paragraph(text) for text in tables.explanations(rows)),
    )


def pictures_section(runs: Sequence[Run]) -> str:
    from fedprompt.report import plots

    pictures = [
        (plots.learning_curves(runs), "Accuracy by round: mean over seeds, band of one standard deviation."),
        (plots.client_spread(runs), "Accuracies of the clients, sorted: the flatter the line, the fairer the method."),
        (plots.domain_bars(runs), "Accuracy on the images of each domain, over the last evaluated rounds."),
        (plots.bytes_against_accuracy(runs), "Average against the bytes sent by all clients and the server."),
        (
            plots.calibration(runs),
            "Accuracy against confidence in the last evaluated round; dotted: perfectly calibrated.",
        ),
    ]
    figures = [drawn(figure, caption, f"picture{number}") for number, (figure, caption) in enumerate(pictures)]
    return page.section("Pictures", f'<div class="pictures">\n{"".join(figures)}\n</div>')


def drawn(figure: Figure, caption: str, prefix: str) -> str:
    from fedprompt.report.style import svg

    return page.picture(svg(figure, prefix), caption)


def run_section(run: Run, number: int) -> str:
    """Everything needed to repeat one run, and what it did round by round."""
    from fedprompt.report import plots

    config = run.config
    # where a run was written changes no result, and is nobody else's business
    settings = yaml.safe_dump(config.model_dump(mode="json", exclude={"output"}), sort_keys=False, allow_unicode=True)
    versions = run.reader.fact("versions") or {}
    progress = f"{rounds_done(run)}/{config.federation.rounds} rounds"
    facts = [
        ("Method", config.label),
        ("Seed", str(config.seed)),
        ("Progress", progress if run.finished else f"{progress}, unfinished"),
        ("Clients", clients_of(run)),
        ("Config digest", config.digest()),
        ("Backbone digest", str(run.reader.fact("backbone"))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    heatmap = drawn(
        plots.client_heatmap(run), f"Accuracy of every client in every evaluated round of {run.name}.", f"run{number}"
    )
    return page.section(
        run.name,
        page.definitions(facts),
        page.folded("Config", page.preformatted(settings)),
        page.folded("Rounds", rounds_table(run)),
        page.folded("Clients by round", heatmap),
        level=3,
    )


def clients_of(run: Run) -> str:
    """How many there are, and how many of them the accuracies are about."""
    everyone, tested = len(run.clients), len(run.client_accuracies())
    settings = run.config.federation
    drawn = settings.evaluate_clients == tested < everyone
    if settings.held_out and tested:
        who = f"{tested} of those held out of training" if drawn else f"the {tested} held out of training"
        return f"{everyone}; only {who} are evaluated"
    return f"{everyone}; {tested} of them, drawn once, stand for all in evaluations" if drawn else str(everyone)


def rounds_table(run: Run) -> str:
    records = run.rounds()
    phases = list(dict.fromkeys(phase for record in records for phase in record.seconds))
    head = ["Round", "Clients", "Loss", "Average", "Worst Local", "Up", "Down", *(f"{phase} (s)" for phase in phases)]
    return page.table(f"Rounds of {run.name}", head, [round_line(record, phases) for record in records])


def round_line(record: RoundRecord, phases: Sequence[str]) -> list[Cell]:
    summary = record.summary or {}
    numbers = [
        str(record.round),
        str(len(record.cohort)),
        written(record.loss, "{:.4f}"),
        *(written(summary.get(key), "{:.2%}") for key in ("average", "worst")),
        format_bytes(record.bytes_up),
        format_bytes(record.bytes_down),
        *(written(record.seconds.get(phase), "{:.2f}") for phase in phases),
    ]
    return [Cell(number) for number in numbers]


def written(value: float | None, form: str) -> str:
    """What was not measured in a round is a dash, not a zero."""
    return "–" if value is None else form.format(value)
