"""The tests after the last round, with the parameters of the round that counts.

A run that is evaluated on validation images reads its test images here, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import Prepared
from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.messages import Download
from fedprompt.evaluation.base_to_novel import novel_test
from fedprompt.federation.best_round import kept_round
from fedprompt.federation.loop import AfterLastRound
from fedprompt.federation.observer import Observer
from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.runs.final_figures import EVENT, RESULT, stored_test
from fedprompt.runs.store import Event, RunStore


def tests_at_the_end(
    runtime: ClientRuntime, prepared: Prepared, cache: Path, store: RunStore, observer: Observer
) -> AfterLastRound | None:
    """The final test and the base-to-novel test where a run has them and they are not done yet."""
    tests = [final_test(runtime, store, observer), novel_test(runtime, prepared, cache, store, observer)]
    missing = [test for test in tests if test is not None]

    def afterwards(round: int, clients: Sequence[int], download: Download) -> None:
        last = store.server_state()
        kept = kept_round(store, round) if last is not None and last[0] != round else None
        if kept is not None:
            runtime.states = ClientStates(kept.client_state)
        try:
            for test in missing:
                test(round, clients, download)
        finally:
            if kept is not None:
                kept.close()

    return afterwards if missing else None


def final_test(runtime: ClientRuntime, store: RunStore, observer: Observer) -> AfterLastRound | None:
    """Test every client on its test images, if the rounds were evaluated on other images."""
    if runtime.config.federation.evaluate_on == "test" or stored_test(store) is not None:
        return None

    def afterwards(round: int, clients: Sequence[int], download: Download) -> None:
        ordered, size = sorted(clients), runtime.cohort_size()
        results: dict[int, ClientResult] = {}
        for start in range(0, len(ordered), size):
            received = {client: download(client) for client in ordered[start : start + size]}
            results |= runtime.test_together(round, runtime.fitted_together(round, received), "test")
            observer.evaluated(round, len(results), len(ordered))
        summary = summarise(results[client] for client in ordered)
        events = [Event(client, RESULT, json.dumps(results[client].to_json())) for client in ordered]
        store.notes(round, [*events, Event(None, EVENT, json.dumps({"round": round, "summary": summary}))])

    return afterwards
