"""Run files written by hand, for tests of the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedprompt.config import parse
from fedprompt.dashboard.views import Views
from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.runs.store import Event, RoundRecord, RunStore


def begin(
    directory: Path, clients: int = 3, events: tuple[Event, ...] = (), rounds: int = 2, **settings: Any
) -> RunStore:
    """A run that is being written: it has round 0 and is open."""
    config = parse({"federation": {"rounds": rounds}, **settings})
    facts = {
        "config": config.model_dump(mode="json"),
        "clients": {"numbered": clients},
        "backbone": "weights",
        "versions": {"fedprompt": "0"},
        "classes": ["a", "b"],
    }
    store = RunStore.create(directory, facts, events)
    store.commit(RoundRecord(0, [], None, 100, 50, None), b"", b"", {}, {})
    return store


def commit(store: RunStore, round: int, correct: list[int] | None = None, *events: Event, loss: float = 0.5) -> None:
    """A round of two clients; with correct answers of ten by client where it was evaluated."""
    found = [ClientResult(10, right, 1, 1, 0, [[10, 5, right]], {"ink": [10, right]}) for right in correct or []]
    summary = summarise(found) if found else None
    record = RoundRecord(round, [0, 1], loss, 80, 40, summary, {"train": 1.5, "evaluate": 0.5})
    evaluations = {client: each.to_json() for client, each in enumerate(found)}
    store.commit(record, b"", b"", {}, evaluations, events)


def write(directory: Path, correct: list[list[int]], rounds: int | None = None, **settings: Any) -> Path:
    """A run that ended: `write(path, [[9, 5], [8, 6]])` has two rounds, with correct answers of ten by client."""
    clients = max(map(len, correct), default=1)
    store = begin(directory, clients, rounds=len(correct) if rounds is None else rounds, **settings)
    for round, answers in enumerate(correct, start=1):
        commit(store, round, answers)
    store.close()
    return store.directory


def listed(views: Views) -> dict[str, dict[str, Any]]:
    """The lines of the list by name."""
    return {entry["name"]: entry for entry in views.runs({})["changed"]}
