"""Digests of a run file: what was written fits, whatever was changed is told with its round, and old files are read with a note."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dashboard_support import begin, commit, write
from forgery import as_version, forged

from fedprompt.dashboard.run_reader import LiveRun
from fedprompt.errors import RunError
from fedprompt.report import table_formats
from fedprompt.report.tasks import by_task
from fedprompt.runs.run import Run
from fedprompt.runs.store import Event, PoolChange, RoundRecord, RunReader, RunStore
from fedprompt.runs.tables import FILE
from fedprompt.runs.verify import Verdict, verify

pytestmark = pytest.mark.unit
Call = Callable[..., tuple[int, str, str]]

ROUNDS = 6


def result(correct: int) -> dict[str, Any]:
    return {"samples": 10, "correct": correct, "nll": 1.0, "brier": 1.0, "ece": 0.0, "bins": [[10, 5, correct]]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of rounds 0..5 in which everything that can be written is."""
    store = begin(tmp_path / "run", clients=9, rounds=ROUNDS - 1, events=(Event(None, "label_check", "hm"),))
    for round in range(1, ROUNDS):
        store.note(round, None, "privacy", json.dumps({"epsilon": round}))
        states = {client: bytes([round, client]) * 20 for client in (round, round + 1)}
        pool = PoolChange({round: ("F32 2", bytes(8)), 0: ("F32 2", bytes([round]) * 8)}, bytes([round]) * 40)
        record = RoundRecord(round, [round, round + 1], 0.5, 1, 2, {"average": 0.5}, {"train": 1.0})
        tensors = bytes([round]) * 30
        evaluations = {client: result(client) for client in range(round)}
        store.commit(record, tensors, tensors, states, evaluations, [Event(1, "refused", '{"rule": "norm"}')], pool)
    store.close()
    return store.directory


def verdict(directory: Path) -> Verdict:
    with closing(RunReader(directory)) as reader:
        return verify(reader)


def test_what_was_written_fits(directory: Path) -> None:
    found = verdict(directory)
    assert (found.problems, found.rounds, found.sealed) == ((), ROUNDS, True)
    assert len(found.heads) == 1 + 1 + 2 * (ROUNDS - 1)  # the facts, round 0, and a note before every other round
    assert list(found.heads.values()) == [None, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_run_that_goes_on_keeps_its_links(directory: Path) -> None:
    before = verdict(directory).heads
    with closing(RunStore(directory)) as store:
        commit(store, ROUNDS, [5])
    after = verdict(directory)
    assert after.problems == ()
    assert list(after.heads)[: len(before)] == list(before)
    assert len(after.heads) == len(before) + 1


def test_a_commit_that_fails_leaves_the_chain_as_it_was(directory: Path) -> None:
    before = verdict(directory).head
    with closing(RunStore(directory)) as store:
        with pytest.raises(TypeError):
            store.commit(RoundRecord(9, [], None, 0, 0, None), b"", b"", {}, {1: {"bad": object()}})
        with pytest.raises(sqlite3.IntegrityError), store._transaction() as cursor:
            cursor.execute("INSERT INTO rounds SELECT * FROM rounds")
        commit(store, ROUNDS, [5])
    after = verdict(directory)
    assert after.problems == ()
    assert before in after.heads


CHANGES = [
    ("UPDATE rounds SET loss = 0.4 WHERE round = 3", 3),
    ("UPDATE rounds SET summary = '{\"average\": 0.9}' WHERE round = 2", 2),
    ("UPDATE rounds SET seconds = '{}' WHERE round = 4", 4),
    ("DELETE FROM rounds WHERE round = 5", 5),
    ("DELETE FROM rounds WHERE round = 2", 2),
    ("INSERT INTO rounds SELECT 7, digest, cohort, loss, 1, 1, summary, seconds, evaluations FROM rounds LIMIT 1", 7),
    ("UPDATE evaluations SET result = replace(result, '\"correct\": 1', '\"correct\": 7') WHERE round = 4", 4),
    ("DELETE FROM evaluations WHERE round = 3 AND client = 1", 3),
    ("INSERT INTO evaluations SELECT 2, 8, digest, result FROM evaluations WHERE round = 3 AND client = 1", 2),
    ("INSERT INTO evaluations SELECT 8, client, digest, result FROM evaluations WHERE round = 3 AND client = 1", 8),
    ("UPDATE events SET detail = '{\"rule\": \"size\"}' WHERE round = 2 AND kind = 'refused'", 2),
    ("DELETE FROM events WHERE number = (SELECT max(number) FROM events)", 5),
    ("INSERT INTO events SELECT 99, 5, 1, kind, digest, detail FROM events LIMIT 1", 5),
    ("UPDATE client_states SET tensors = x'00' WHERE client = 3", 3),
    ("DELETE FROM client_states WHERE client = 3", 5),
    ("UPDATE server_state SET shared = x'00'", 5),
    ("DELETE FROM server_state", 5),
    ("UPDATE pool SET row = x'00' WHERE client = 4", 4),
    ("DELETE FROM pool WHERE client = 4", 5),
    ("UPDATE pool_cells SET centres = x'00'", 4),
    ("DELETE FROM pool_cells", 5),
    ("UPDATE rounds SET digest = zeroblob(16) WHERE round = 2", 2),
    ("UPDATE evaluations SET digest = zeroblob(16) WHERE round = 3 AND client = 1", 3),
    ("UPDATE events SET digest = zeroblob(16) WHERE round = 3 AND kind = 'refused'", 3),
    ("UPDATE client_states SET digest = zeroblob(16) WHERE client = 3", 3),
    ("UPDATE facts SET value = '0' WHERE key = 'backbone'", None),
    ("DELETE FROM facts WHERE key = 'backbone'", None),
    ("UPDATE links SET link = zeroblob(32) WHERE number = 4", 1),
    ("DELETE FROM links WHERE number = 11", 4),
]


@pytest.mark.parametrize(("change", "round"), CHANGES)
def test_a_change_is_told_with_its_round(directory: Path, change: str, round: int | None) -> None:
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        connection.execute(change)
    found = verdict(directory).problems
    assert found
    assert found[0].round == round, found


def test_a_forger_who_makes_all_digests_anew_is_told_by_a_noted_head_alone(directory: Path) -> None:
    noted = verdict(directory).head
    with forged(directory) as connection:
        connection.execute("UPDATE rounds SET loss = 0.4 WHERE round = 3")
    found = verdict(directory)
    assert found.problems == ()
    assert noted not in found.heads


# -- readers ------------------------------------------------------------------------------------------------------------


def compared(directory: Path) -> None:
    table_formats.markdown(by_task([Run(directory)]))


def looked_at(directory: Path) -> None:
    with closing(LiveRun(directory)) as run:
        rounds, events = list(run.reader.new_rounds(0)), list(run.reader.new_events(0))
        run.reader.complete(len(rounds), len(events))
        assert run.config


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rounds SET summary = replace(summary, '0.65', '0.75')",
        "DELETE FROM rounds WHERE round = 2",
        "UPDATE rounds SET bytes_up = 7",
        "UPDATE facts SET value = replace(value, '\"seed\": 0', '\"seed\": 1')",
        "DELETE FROM events",
    ],
)
@pytest.mark.parametrize("read", [compared, looked_at])
def test_who_prints_figures_notices(tmp_path: Path, change: str, read: Callable[[Path], None]) -> None:
    directory = write(tmp_path / "run", [[5, 8], [5, 8]])
    with closing(RunStore(directory)) as store:
        store.note(2, 0, "refused", '{"rule": "norm"}')
    read(directory)
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        assert connection.execute(change).rowcount
    with pytest.raises(RunError, match="is damaged"):
        read(directory)


def test_who_reads_results_of_clients_notices(directory: Path) -> None:
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        connection.execute("DELETE FROM evaluations WHERE round = 3 AND client = 1")
        connection.execute("UPDATE evaluations SET result = replace(result, '1.0', '2.0') WHERE round = 4")
    with closing(RunReader(directory)) as reader:
        assert len(reader.evaluations(5)) == 5
        for round in (3, 4):
            with pytest.raises(RunError, match="is damaged"):
                reader.evaluations(round)
    with closing(LiveRun(directory)) as run, pytest.raises(RunError, match="is damaged"):
        run.reader.accuracies(4, [0, 1])


def test_a_chain_that_is_broken_at_its_end_is_not_continued(directory: Path) -> None:
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        connection.execute("UPDATE links SET parts = replace(parts, '\"rounds\": 6', '\"rounds\": 7')")
    for _ in range(2):
        with pytest.raises(RunError, match="links must be unbroken"):
            RunStore(directory)


# -- time ---------------------------------------------------------------------------------------------------------------


COUNT = "WITH RECURSIVE up(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM up LIMIT 3000000) SELECT max(n) FROM up"


def test_a_query_that_takes_too_long_is_ended_and_the_next_one_is_not(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RunReader(directory)) as reader:
        monkeypatch.setattr(reader._tables._clock, "seconds", 0.01)
        with pytest.raises(RunError, match="is damaged: its content must be read within"):
            list(reader._tables.rows(COUNT, (int,)))
        assert len(reader.rounds()) == ROUNDS


def test_nobody_ends_a_write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunStore(directory)) as store:
        store.rounds()
        monkeypatch.setattr(store._tables._clock, "seconds", 0.0)
        with store._transaction() as cursor:
            assert cursor.execute(COUNT).fetchone() == (3000000,)


# -- older files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_files_without_digests_are_read_and_not_continued(directory: Path, version: int) -> None:
    with closing(RunReader(directory)) as reader:
        rounds, events, evaluations = reader.rounds(), reader.events(), reader.evaluations(4)
    as_version(directory, version)
    with closing(RunReader(directory)) as reader:
        assert (reader.rounds(), reader.events(), reader.evaluations(4)) == (rounds, events, evaluations)
        assert reader.sealed is False
    assert verdict(directory) == Verdict(version, False, ROUNDS, {}, ())
    with pytest.raises(RunError, match=rf"format version 3 to go on, got {version}: it can be read"):
        RunStore(directory)


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    from fedprompt.cli import main

    def called(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedprompt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return called


def test_the_command_tells_heads(directory: Path, call: Call) -> None:
    heads = verdict(directory).heads
    first, *_, last = heads
    code, out, _ = call("verify", directory)
    assert code == 0
    assert out == f"{directory}: whole, {ROUNDS} rounds, head {last}\n"
    assert "is that after round 5" in call("verify", directory, "--head", last)[1]
    code, out, _ = call("verify", directory, "--head", first)
    assert code == 0
    assert "is that before the first round" in out
    code, out, err = call("verify", directory, "--head", "0" * 64)
    assert (code, "never had the head" in out) == (5, True)
    assert "1 of 1" in err


def test_the_command_goes_on_after_a_damaged_file(tmp_path: Path, directory: Path, call: Call) -> None:
    write(tmp_path / "good", [[5]])
    old = write(tmp_path / "old", [[5]])
    as_version(old, 2)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / FILE).write_bytes((directory / FILE).read_bytes()[:5000])
    with closing(sqlite3.connect(directory / FILE)) as connection, connection:
        connection.execute("UPDATE rounds SET loss = 0.4 WHERE round >= 3")
    code, out, err = call("verify", tmp_path, "--json")
    found = {Path(each["run"]).name: each for each in json.loads(out)}
    assert code == 5
    assert {name: each["whole"] for name, each in found.items()} == {
        "cut": False,
        "good": True,
        "old": True,
        "run": False,
    }
    assert found["run"]["first_round"] == 3
    assert "damaged from round 3 on" in found["run"]["message"]
    assert "no digests: made by an older version" in found["old"]["message"]
    assert "2 of 4" in err
    assert call("compare", old)[2] == "note: old: no digests: made by an older version\n"


def test_a_head_belongs_to_one_run(tmp_path: Path, call: Call) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, [[5]])
    assert call("verify", tmp_path, "--head", "0" * 64)[0] == 2
