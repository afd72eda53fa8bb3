"""A run file that was cut, flipped or forged: what it still says is true to its types, or a RunError tells what is wrong."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import forged
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.errors import RunError
from fedprompt.federation.stored_pool import StoredRows, packed
from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.report import table_formats
from fedprompt.report.tasks import by_task
from fedprompt.runs.run import Run
from fedprompt.runs.store import Event, PoolChange, RoundRecord, RunStore
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit

RESULTS = [
    ClientResult(10, correct, 5.0, 2.0, 0.0, [[10.0, 6.0, float(correct)]] * 3, {"all": [10, correct]})
    for correct in (4, 7)
]


def write_run(folder: Path) -> Path:
    facts = {
        "config": Config().model_dump(mode="json"),
        "clients": ["a", "b"],
        "classes": ["x"],
        "domains": ["all"],
        "manifest": {"source": {"fingerprint": "f"}},
        "versions": {"torch": "2"},
        "backbone": "b",
    }
    store = RunStore.create(folder, facts)
    for number in range(3):
        evaluations = {client: result.to_json() for client, result in enumerate(RESULTS)}
        tensors = wire.encode({"prompt": torch.full((2, 3), float(number))})
        record = RoundRecord(number, [0, 1] if number else [], 0.5, 10, 10, summarise(RESULTS), {"train": 0.1})
        refused = [Event(1, "refused", json.dumps({"rule": "norm", "value": "9"}))]
        pool = PoolChange({client: packed(torch.full((2, 3), float(number))) for client in range(4)}, bytes(24))
        store.commit(record, tensors, wire.encode({}), {0: tensors}, evaluations, refused, pool)
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    return folder / FILE


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_run(tmp_path_factory.mktemp("good")).read_bytes()


def read_everything(folder: Path) -> None:
    """What `compare`, `report` and `--resume` read of a run."""
    run = Run(folder)
    try:
        table_formats.markdown(by_task([run]))
        run.client_accuracies()
        state = run.reader.server_state()
        for blob in state[1:] if state is not None else ():
            wire.decode(blob)
        for client, _, blob in run.reader.client_states():
            wire.decode(blob)
            run.reader.client_state(client)
        rows = StoredRows(run.reader)
        list(rows.blocks())
        rows.chosen(rows.clients().tolist())
        run.reader.pool_cells()
        for key in ("versions", "manifest", "backbone", "classes", "domains"):
            run.reader.fact(key)
    finally:
        run.close()


def damaged_run(folder: Path, content: bytes) -> Path:
    for path in folder.iterdir():
        path.unlink()
    (folder / FILE).write_bytes(content)
    return folder


def test_a_run_file_in_order_is_read(good: bytes, tmp_path: Path) -> None:
    read_everything(damaged_run(tmp_path, good))
    assert Run(tmp_path).refused() == {"norm": 3}


def test_a_run_file_cut_short_is_told_at_every_length(good: bytes, tmp_path: Path) -> None:
    for length in range(0, len(good), 509):
        with pytest.raises(RunError, match=r"run\.db"):
            read_everything(damaged_run(tmp_path, good[:length]))


@settings(max_examples=250)
@given(data=st.data())
def test_flipped_bytes_are_harmless_or_told(
    data: st.DataObject, good: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(good)
    printable = data.draw(st.booleans())  # half of the damage goes to text: names, JSON, the schema
    places = [place for place, byte in enumerate(good) if byte and (not printable or 32 <= byte < 127)]
    for _ in range(data.draw(st.integers(1, 8))):
        content[places[data.draw(st.integers(0, len(places) - 1))]] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("flipped", numbered=True)
    with contextlib.suppress(RunError):
        read_everything(damaged_run(folder, bytes(content)))


FORGERIES = [
    "DELETE FROM facts WHERE key = 'version'",
    "UPDATE facts SET value = '\"1\"' WHERE key = 'version'",
    "UPDATE facts SET value = 'one' WHERE key = 'version'",
    "UPDATE facts SET value = x'00ff' WHERE key = 'config'",
    "UPDATE facts SET value = '[]' WHERE key = 'config'",
    "UPDATE facts SET value = '{\"seed\": -1}' WHERE key = 'config'",
    "UPDATE facts SET value = '{\"seed\": 1, \"seed\": 2}' WHERE key = 'config'",
    f"UPDATE facts SET value = '{'[' * 5000}' WHERE key = 'config'",
    "DELETE FROM facts WHERE key = 'config'",
    "DELETE FROM facts WHERE key = 'clients'",
    "UPDATE facts SET value = '{}' WHERE key = 'clients'",
    "UPDATE facts SET value = '[1, 2]' WHERE key = 'clients'",
    "UPDATE facts SET value = '[]' WHERE key = 'clients'",
    "UPDATE facts SET value = '3' WHERE key = 'manifest'",
    "UPDATE facts SET value = '3' WHERE key = 'versions'",
    "UPDATE rounds SET cohort = '{}'",
    "UPDATE rounds SET cohort = '[\"a\"]'",
    "UPDATE rounds SET cohort = '[0.5]'",
    "UPDATE rounds SET loss = 'low'",
    "UPDATE rounds SET bytes_up = 'many'",
    "UPDATE rounds SET summary = '[]'",
    "UPDATE rounds SET summary = '{}'",
    "UPDATE rounds SET summary = replace(summary, 'average', 'avarege')",
    'UPDATE rounds SET summary = replace(summary, \'"average": 0.55\', \'"average": "high"\')',
    "UPDATE rounds SET seconds = '{\"train\": null}'",
    "UPDATE rounds SET seconds = x'00'",
    "UPDATE evaluations SET result = 'null'",
    "UPDATE evaluations SET result = '{}'",
    "UPDATE evaluations SET result = replace(result, '\"samples\": 10', '\"samples\": 0')",
    "UPDATE evaluations SET client = client + 7",
    "UPDATE events SET detail = 'oops'",
    "UPDATE events SET kind = 5, detail = x'ff'",
    "UPDATE server_state SET shared = 'text'",
    "UPDATE server_state SET shared = x'ffffffffffffff7f'",
    "UPDATE server_state SET own = zeroblob(100000)",
    "UPDATE client_states SET tensors = x'0000'",
    "UPDATE pool SET row = x'0000'",
    "UPDATE pool SET kind = 'F32 3 2' WHERE client = 1",
    "UPDATE pool_cells SET centres = 'text'",
    "UPDATE links SET parts = '{}'",
    "UPDATE links SET parts = '3'",
    "DELETE FROM links",
    "DROP TABLE links",
    "DROP TABLE pool",
    "ALTER TABLE pool_cells RENAME COLUMN centres TO middles",
    "DROP TABLE evaluations",
    "ALTER TABLE rounds RENAME COLUMN cohort TO crowd",
    "DROP TABLE events; CREATE VIEW events AS SELECT 0 AS round, 0 AS client, 'x' AS kind, 'y' AS detail",
    "CREATE TRIGGER mine AFTER INSERT ON rounds BEGIN DELETE FROM facts; END",
    "CREATE VIRTUAL TABLE mine USING fts5(text)",
]


@pytest.mark.parametrize("fitting", [False, True], ids=["old digests", "fitting digests"])
@pytest.mark.parametrize("forgery", FORGERIES, ids=range(len(FORGERIES)))
def test_a_forged_run_file_is_told(forgery: str, fitting: bool, good: bytes, tmp_path: Path) -> None:
    damaged_run(tmp_path, good)
    if fitting and "links" in forgery:
        pytest.skip("these are the digests")
    with forged(tmp_path) if fitting else sqlite3.connect(tmp_path / FILE) as connection:
        connection.executescript(forgery)
    connection.close()
    with pytest.raises(RunError) as caught:
        read_everything(tmp_path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("forgery", ["DELETE FROM facts", "DROP TABLE server_state", "CREATE VIEW v AS SELECT 1"])
def test_a_writer_refuses_it_too_and_leaves_the_lock(forgery: str, good: bytes, tmp_path: Path) -> None:
    damaged_run(tmp_path, good)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.executescript(forgery)
    connection.close()
    for _ in range(2):
        with pytest.raises(RunError, match=r"run\.db"):
            RunStore(tmp_path)


def test_figures_that_are_not_finite_are_kept_as_they_were(tmp_path: Path) -> None:
    """A run that diverged has them, and its file is in order."""
    store = RunStore.create(tmp_path, {})
    values: dict[str, Any] = {"average": float("nan"), "nll": float("inf")}
    store.commit(RoundRecord(0, [], None, 0, 0, values, {}), b"", b"", {}, {})
    assert str(store.rounds()[0].summary) == str(values)
    store.close()
