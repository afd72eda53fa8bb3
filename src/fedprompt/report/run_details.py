"""The end of the page: common settings, differences, and everything needed to repeat each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fedprompt.metrics.accuracy import final_title, mean_title
from fedprompt.report import html_elements
from fedprompt.report.comparison_table import NOTHING, Cell, format_bytes
from fedprompt.report.evaluated_rounds import last_results
from fedprompt.report.events import client_name
from fedprompt.runs.families import families, flatten, rounds_done
from fedprompt.runs.families import written as written_value
from fedprompt.runs.final_figures import EVENT, RESULT
from fedprompt.runs.run import Run
from fedprompt.runs.store import PRIVACY, REFUSED, RoundRecord

HIDDEN = {"output", "engine", "name", "seed"}  # settings that do not change the experiment
MOST_EVENTS = 200  # that are listed for a run


def settings_section(runs: Sequence[Run]) -> str:
    """The settings that all runs share once, those that differ as a table, and the versions of the software."""
    groups = families(runs)
    plain = [group.runs[0].config.model_dump(mode="json", exclude=HIDDEN) for group in groups]
    common = shared(plain)
    flat, known = [flatten(each) for each in plain], set(flatten(common))
    varied = sorted({field for each in flat for field in each} - known)
    table = differing([group.title for group in groups], varied, flat) if varied else ""
    return html_elements.section(
        "Settings and versions",
        html_elements.folded("Settings of all runs", html_elements.preformatted(as_yaml(common))),
        html_elements.section("Settings that differ", table, level=3) if table else "",
        html_elements.section("Versions", versions(runs), level=3),
    )


def differing(titles: Sequence[str], fields: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> str:
    """One line per method with its settings, written as overrides: methods have few settings in common."""
    rows = [
        [Cell(title), Cell("  ".join(f"{field}={written_value(own[field])}" for field in fields if field in own))]
        for title, own in zip(titles, flat, strict=True)
    ]
    return html_elements.table("Settings that differ", ["Method", "Settings"], rows, kind="text")


def shared(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What nested settings have in common."""
    first, *rest = values
    common: dict[str, Any] = {}
    for key, value in first.items():
        if all(key in other and other[key] == value for other in rest):
            common[key] = value
        elif all(isinstance(each.get(key), dict) for each in values) and (
            inner := shared([each[key] for each in values])
        ):
            common[key] = inner
    return common


def as_yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def versions(runs: Sequence[Run]) -> str:
    """One line for every set of versions, and the runs that were made with it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        versions = run.reader.fact("versions") or {}
        found.setdefault(", ".join(f"{name} {version}" for name, version in versions.items()) or NOTHING, []).append(
            run.name
        )
    if len(found) == 1:
        return html_elements.paragraph(next(iter(found)))
    return html_elements.table(
        "Versions",
        ["Versions", "Runs"],
        [[Cell(text), Cell(", ".join(names))] for text, names in found.items()],
        kind="text",
    )


def runs_section(runs: Sequence[Run]) -> str:
    counted = {run.summary().get("evaluations", 1) for run in runs}
    over = counted.pop() if len(counted) == 1 else None
    figures = [
        mean_title("Average", over),
        mean_title("Worst Local", over),
        *map(final_title, ("Average", "Worst Local")),
    ]
    shown = figures[:2] if over == 1 else figures
    head = ["Run", "Method", "Seed", "Rounds", *shown, "Seconds", "Config digest"]
    return html_elements.section(
        "Runs",
        html_elements.table("Runs", head, [run_line(run, len(shown)) for run in runs]),
        html_elements.paragraph(
            "The whole config of every run, its rounds and its events are in the file, not on paper.", "paper"
        ),
        *(run_details(run) for run in runs),
    )


def run_line(run: Run, figures: int) -> list[Cell]:
    """With that many accuracies: means of the last rounds, and final ones where these are others."""
    summary, keys = run.summary(), ("average", "worst", "final_average", "final_worst")[:figures]
    cells = [
        run.name,
        run.config.label,
        str(run.config.seed),
        f"{rounds_done(run)}/{run.config.federation.rounds}" + ("" if run.finished else ", unfinished"),
        *(written(summary.get(key), "{:.2%}") for key in keys),
        written(sum(summary["seconds"].values()), "{:.1f}"),
        run.config.digest()[:12],
    ]
    return [Cell(cell) for cell in cells]


def run_details(run: Run) -> str:
    """Everything needed to repeat one run, and what it did round by round."""
    config = run.config
    # the path of a run changes no result, and is not published
    settings = config.model_dump(mode="json", exclude={"output"})
    versions = run.reader.fact("versions") or {}
    progress = f"{rounds_done(run)}/{config.federation.rounds} rounds"
    facts = [
        ("Method", config.label),
        ("Seed", str(config.seed)),
        ("Progress", progress if run.finished else f"{progress}, unfinished"),
        ("Clients", clients_of(run)),
        ("Accuracies of", images_of(run)),
        ("Config digest", config.digest()),
        ("Backbone digest", str(run.reader.fact("backbone"))),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    happened = events_table(run)
    parts = [
        html_elements.definitions(facts),
        html_elements.folded("Config", html_elements.preformatted(as_yaml(settings))),
        html_elements.folded("Rounds", rounds_table(run)),
        *([html_elements.folded("Events", happened)] if happened else []),
    ]
    return html_elements.folded(run.name, "\n".join(parts), "run screen")


def images_of(run: Run) -> str:
    """Which images rounds and tables show."""
    if run.config.federation.evaluate_on == "test":
        return "test images"
    if run.final_test is None:
        return "validation images"
    return f"test images, read once with the parameters of round {run.final_test.round}; of rounds: validation images"


def clients_of(run: Run) -> str:
    """The number of clients, and of those evaluated."""
    last = last_results(run)
    everyone, tested = len(run.clients), len(last.clients) if last else 0
    settings = run.config.federation
    drawn = settings.evaluate_clients == tested < everyone
    if settings.held_out and tested:
        who = f"{tested} of those held out of training" if drawn else f"the {tested} held out of training"
        return f"{everyone}; only {who} are evaluated"
    return f"{everyone}; {tested} of them, drawn once, are evaluated for all" if drawn else str(everyone)


def rounds_table(run: Run) -> str:
    records = run.rounds()
    phases = list(dict.fromkeys(phase for record in records for phase in record.seconds))
    head = ["Round", "Clients", "Loss", "Average", "Worst Local", "Up", "Down", *(f"{phase} (s)" for phase in phases)]
    if run.config.federation.evaluate_on == "validation":
        head[3:5] = [f"{title} (validation)" for title in head[3:5]]
    return html_elements.table(f"Rounds of {run.name}", head, [round_line(record, phases) for record in records])


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


def events_table(run: Run) -> str:
    """Other events; refused updates and privacy have their own sections."""
    found = [event for event in run.reader.events() if event[2] not in (REFUSED, PRIVACY, RESULT, EVENT)]
    rows = [
        [Cell(text) for text in (str(round), client_name(run, client), kind, detail)]
        for round, client, kind, detail in found[:MOST_EVENTS]
    ]
    left = len(found) - len(rows)
    rest = html_elements.paragraph(f"{left} more are in the run file.") if left else ""
    return (
        html_elements.table(f"Events of {run.name}", ["Round", "Client", "Kind", "Detail"], rows, kind="text") + rest
        if rows
        else ""
    )


def written(value: float | None, form: str) -> str:
    """A value that was not measured in a round is a dash, not a zero."""
    return NOTHING if value is None else form.format(value)
