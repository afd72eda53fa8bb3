"""The test after the last round of a run that is evaluated on validation images, as stored in its run file. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedprompt.config import FederationConfig
from fedprompt.metrics.accuracy import conclude
from fedprompt.runs.store import RunReader

EVENT = "final_test"  # the kind of event with the round that was tested and its figures
RESULT = "tested"  # the kind of event with the result of one client


@dataclass(frozen=True)
class FinalTest:
    """Test images were read once: with the parameters of this round."""

    round: int
    summary: dict[str, Any]


def stored_test(reader: RunReader) -> FinalTest | None:
    """The final test of a run; None if there was none so far."""
    for found in reader.details(EVENT):
        round, summary = found.get("round"), found.get("summary")
        if type(round) is int and isinstance(summary, dict):
            return FinalTest(round, summary)
    return None


def stored_results(reader: RunReader) -> Mapping[int, dict[str, Any]]:
    """The results of its clients, by client number."""
    clients = [client for _, client, kind, _ in reader.events() if kind == RESULT]
    return {client: found for client, found in zip(clients, reader.details(RESULT), strict=True) if client is not None}


def final_figures(
    settings: FederationConfig, history: Sequence[Mapping[str, Any]], tested: FinalTest | None
) -> dict[str, Any]:
    """The figures of a run from its evaluated rounds, or from its final test where rounds are evaluated on validation images."""
    found = conclude(history, settings.last_rounds)
    if settings.evaluate_on == "test":
        return found
    if tested is None:
        return {**found, "images": "validation"}
    validated = {entry["round"]: entry["average"] for entry in history}.get(tested.round)
    once = conclude([{"round": tested.round, **tested.summary}], 1)
    return {**once, "images": "test", "validation_average": validated}
