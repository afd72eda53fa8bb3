"""One HTML page of all studies of a config file: what each method was given, what was found, and what mattered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedprompt.io.files import write_atomically
from fedprompt.report import html_elements
from fedprompt.report.comparison_table import NOTHING, Cell
from fedprompt.report.plot_style import png, svg
from fedprompt.tuning.halving import planned_rounds
from fedprompt.tuning.outcome import Outcome, TrialRow
from fedprompt.tuning.study_plots import importance, importance_plot, parallel_plot

PAGE = "tuning.html"
HEAD = ("Study", "Trials", "Ended early", "Diverged", "Rounds", "Image passes", "Seconds", "Config", "Best")
EXPLANATION = (
    "Accuracies are the Average on validation images, which are training images that no trial trained on. No test image was "
    "read. Config is the first trial, with the values of the config file; it may have ended early. Every study has the "
    "same number of trials, and of rounds but for trials that diverged. A dash as a value: that of the config, outside of "
    "what was searched."
)


def write_page(outcomes: Sequence[Outcome], directory: Path) -> Path:
    """Write the page, and its pictures as PNG beside it."""
    sections = [
        html_elements.section("What each method was given", _given(outcomes), html_elements.paragraph(EXPLANATION))
    ]
    for number, outcome in enumerate(outcomes):
        sections.append(_study(outcome, number, directory))
    names = ["What each method was given", *(outcome.plan.title for outcome in outcomes)]
    lead = html_elements.paragraph(f"{len(outcomes)} studies on validation images, by fedprompt tune.")
    contents = [(html_elements.slug(name), name) for name in names]
    page = html_elements.document("Tuning", lead, "\n".join(sections), contents)
    write_atomically(directory / PAGE, page.encode())
    return directory / PAGE


def given_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The lines of the table, as text."""
    return [
        [
            each.plan.title,
            str(each.tuned.trials),
            str(each.tuned.pruned),
            str(each.tuned.diverged),
            str(each.tuned.rounds),
            str(each.tuned.image_passes),
            f"{each.tuned.seconds:.1f}",
            _percent(each.start.objective),
            _percent(each.best.objective),
        ]
        for each in outcomes
    ]


def unequal(outcomes: Sequence[Outcome]) -> list[str]:
    """Studies that were given less than the others, and why."""
    lines = []
    for each in outcomes:
        planned = planned_rounds(each.tuned.trials, each.plan.config.federation.rounds)
        if each.tuned.rounds != planned:
            lines.append(
                f"{each.plan.title}: {each.tuned.rounds} of {planned} rounds, since trials diverged or ended by themselves"
            )
    return lines


def _given(outcomes: Sequence[Outcome]) -> str:
    rows = [[Cell(text) for text in row] for row in given_rows(outcomes)]
    return html_elements.table("What each method was given", list(HEAD), rows) + html_elements.notes(unequal(outcomes))


def _study(outcome: Outcome, number: int, directory: Path) -> str:
    plan, prefix = outcome.plan, f"s{number}"
    measure, shares = importance(outcome)
    chosen = [(setting, _value(value)) for setting, value in outcome.best.values.items()]
    drawn = []
    pictures = {
        "parallel": (
            parallel_plot(outcome),
            "Every trial: the values it tried, and its Average at the first comparison. The thick line is the chosen one.",
        )
    }
    if len(shares) > 1:
        pictures["importance"] = (
            importance_plot(shares, measure),
            f"Share of each setting in the differences between trials, by {measure}.",
        )
    for name, (figure, caption) in pictures.items():
        write_atomically(directory / f"{plan.study}-{name}.png", png(figure))
        drawn.append(html_elements.picture(svg(figure, f"{prefix}-{name}"), caption))
    missing = (
        []
        if shares or len(plan.space) < 2
        else [html_elements.paragraph("Importance needs four trials with different figures.")]
    )
    rows = [[Cell(text, row is outcome.best) for text in _line(row, list(plan.space))] for row in outcome.rows]
    head = ["Trial", *plan.space, "First", "Objective", "Rounds"]
    return html_elements.section(
        plan.title,
        html_elements.paragraph(f"Chosen, and written to {outcome.path.name}:"),
        html_elements.definitions(chosen),
        html_elements.pictures(drawn),
        *missing,
        html_elements.folded("All trials", html_elements.table(f"Trials of {plan.title}", head, rows)),
    )


def _line(row: TrialRow, settings: Sequence[str]) -> list[str]:
    figure = "diverged" if row.diverged else _percent(row.objective)
    return [
        str(row.number),
        *(_value(row.values[name]) if name in row.values else NOTHING for name in settings),
        _percent(row.first),
        figure,
        str(row.rounds),
    ]


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
