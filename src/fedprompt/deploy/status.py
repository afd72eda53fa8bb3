"""`fedprompt federate status`: connected nodes, Flower's status of the runs, and the progress of each run file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprompt.deploy import expiry
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.submit import status
from fedprompt.errors import FedpromptError
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from rich.table import Table

NODES = ("name", "status", "since")
STARTED = ("run_id", "status", "running_at", "finished_at", "details")
CERTIFICATES = ("certificate", "until", "days", "advice")
FILES = ("run", "rounds", "of", "average", "worst", "refused")


def standing(folder: ServerFolder) -> dict[str, list[dict[str, Any]]]:
    """Certificates, nodes, Flower's list of runs, and run files, as plain values."""
    terms = expiry.of_server(folder)
    expiry.check(terms)
    found = status(folder)
    return {
        "certificates": [_term(term) for term in terms],
        "nodes": [_only(asdict(node), NODES) for node in found.nodes],
        "started": [_only(asdict(run), STARTED) for run in found.runs],
        "runs": [_progress(path.parent) for path in sorted(folder.runs.glob("*/run.db"))],
    }


def tables(found: dict[str, list[dict[str, Any]]]) -> list[Table]:
    """The same as text."""
    from rich.table import Table
    from rich.text import Text

    made = []
    for title, key, columns in (
        ("Certificates", "certificates", CERTIFICATES),
        ("Sites", "nodes", NODES),
        ("Started", "started", STARTED),
        ("Run files", "runs", FILES),
    ):
        table = Table(*columns, title=title, title_justify="left")
        for row in found[key]:
            table.add_row(*(Text(safe_line(_shown(row[column]))) for column in columns))
        made.append(table)
    return made


def _progress(directory: Path) -> dict[str, Any]:
    """The progress of a run; for an unreadable file the reason, so that the others are still listed."""
    from fedprompt.runs.run import Run

    try:
        run = Run(directory)
        try:
            summary = run.summary()
        finally:
            run.close()
    except FedpromptError as error:
        return {**dict.fromkeys(FILES), "run": directory.name, "refused": str(error)}
    return {column: summary.get(column) for column in FILES}


def _term(term: expiry.Term) -> dict[str, Any]:
    """With advice if it expires soon."""
    advice = "" if term.warning() is None else term.advice
    return {"certificate": term.certificate, "until": f"{term.until:%Y-%m-%d}", "days": term.days, "advice": advice}


def _only(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values[name] for name in names}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{100 * value:.2f} %"
    if isinstance(value, dict):
        return ", ".join(f"{count} {rule}" for rule, count in value.items()) or "none"
    return "" if value is None else str(value)
