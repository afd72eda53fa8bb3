"""The results of a run as data frames of pandas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fedprompt.errors import ConfigError
from fedprompt.runs.attendance import ABSENT
from fedprompt.runs.store import REFUSED

if TYPE_CHECKING:
    import pandas

    from fedprompt.runs.run import Run
    from fedprompt.runs.store import RoundRecord

FIGURES = ("nll", "entropy", "mutual_information")  # of a client, sums over its images


class Frames(NamedTuple):
    """Three data frames of a run."""

    rounds: pandas.DataFrame
    """A row for each round: loss, bytes, size of the cohort, and the figures where it was evaluated."""
    clients: pandas.DataFrame
    """A row for each client and evaluated round: images, correct ones, accuracy, and accuracy by domain."""
    events: pandas.DataFrame
    """A row for each event: round, client, kind, detail."""


def require_pandas() -> Any:
    """The package, which only data frames need."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError("a data frame needs the package pandas: pip install pandas") from error
    return pandas


def frames(run: Run) -> Frames:
    """What `run.db` holds of rounds, clients and events."""
    pandas, names, records = require_pandas(), run.clients, run.rounds()
    rounds = [round_values(record) for record in records]
    clients = [
        {"round": record.round, "client": names[client], **client_values(result)}
        for record in records
        if record.summary is not None
        for client, result in sorted(run.evaluations(record.round).items())
    ]
    rules = (str(detail.get("rule")) for detail in run.reader.details(REFUSED))
    events = [
        {
            "round": round,
            "client": None if client is None else names[client],
            "kind": "absent" if kind == REFUSED and next(rules) in ABSENT else kind,
            "detail": detail,
        }
        for round, client, kind, detail in run.reader.events()
    ]
    return Frames(
        pandas.DataFrame(rounds or None, columns=None if rounds else ["round"]).set_index("round"),
        pandas.DataFrame(clients, columns=None if clients else ["round", "client", "accuracy"]),
        pandas.DataFrame(events, columns=["round", "client", "kind", "detail"]),
    )


def round_values(record: RoundRecord) -> dict[str, Any]:
    """The numbers of a round, by name."""
    return {
        "round": record.round,
        "cohort": len(record.cohort),
        "loss": record.loss,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "seconds": sum(record.seconds.values()),
        **_flat(record.summary or {}),
    }


def client_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one client in one evaluation, by name."""
    samples = result["samples"]
    means = {name: result[name] / samples for name in FIGURES if result.get(name) is not None}
    domains = {f"domains.{name}": correct / count for name, (count, correct) in result["domains"].items()}
    kept = {"samples": samples, "correct": result["correct"], "accuracy": result["correct"] / samples}
    return {**kept, **means, **domains, **_flat({"diagnostics": result["diagnostics"]})}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers by name, those of a group as `group.name`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{each}": number for each, number in value.items()}
        elif isinstance(value, int | float):
            found[name] = value
    return found
