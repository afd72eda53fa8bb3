"""The test after the last round of a run that is evaluated on validation images, as stored in its run file. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
