"""However much is asked, a writer never waits and its log does not grow."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dashboard_support import begin

from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.runs.store import RoundRecord
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit

Ask = Callable[..., tuple[int, dict[str, str], bytes]]


def test_a_writer_is_never_kept_waiting_and_its_log_begins_anew(tmp_path: Path, ask: Ask) -> None:
    store = begin(tmp_path / "run", clients=20, rounds=400)
    store._connection.execute("PRAGMA busy_timeout = 0")  # whoever is in the way is an error at once
    id = json.loads(ask("/api/runs")[2])["present"][0]
    questions = [f"/api/{question}" for question in ("runs", f"run?id={id}", f"clients?id={id}", f"compare?ids={id}")]
    over = threading.Event()
    answered: list[int] = []

    def hammer(path: str) -> None:
        while not over.is_set():
            answered.append(ask(path)[0])

    readers = [threading.Thread(target=hammer, args=(path,)) for path in questions]
    for reader in readers:
        reader.start()
    log, longest = store.directory / f"{FILE}-wal", 0
    results = [ClientResult(10, client % 11, 1, 1, 0, [[10, 5, client % 11]]) for client in range(20)]
    evaluations = {client: result.to_json() for client, result in enumerate(results)}
    try:
        for round in range(1, 301):
            record = RoundRecord(round, [0], 0.5, 1, 1, summarise(results), {"train": 0.1})
            store.commit(record, os.urandom(200_000), b"", {}, evaluations)
            longest = max(longest, log.stat().st_size)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert longest < 20_000_000  # of 60 MB written; SQLite begins anew after 4 MB
    assert set(answered) == {200}
    assert len(answered) > len(questions)
    (blocked, _, _) = store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    assert (blocked, log.stat().st_size) == (0, 0)
    store.close()
    for _ in range(100):  # who asks at once may hear what was known
        known = json.loads(ask(f"/api/run?id={id}")[2])["figures"]["round"]
        if known == 300:
            break
        time.sleep(0.05)
    assert known == 300
    assert not log.exists()
