"""Run files, run folders and caches that somebody else made: what they say is checked, and they decide on nothing here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from dashboard_support import begin, commit, write
from forgery import endless, forged
from support import run

from fedprompt.data.cache import fingerprint
from fedprompt.data.cache.row_file import RowFile
from fedprompt.errors import ConfigError, FedpromptError, RunError, StorageError
from fedprompt.evaluation.leak_audit import open_audit
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.runs.run import Run
from fedprompt.runs.store import Event, RunReader, RunStore
from fedprompt.runs.tables import FILE
from fedprompt.runs.verify import verify

pytestmark = pytest.mark.unit
Settings = Callable[..., dict[str, Any]]

PATIENCE = 30.0  # seconds for what takes one: an import, and a look at a small file
LIST = """
import json, sys
from pathlib import Path
from fedprompt.dashboard.run_list import Catalogue
from fedprompt.dashboard.views import Views
views = Views(Catalogue([Path(sys.argv[1])]))
for _ in range(3):
    found = views.runs({})
print(json.dumps(found["changed"]))
"""


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own, which can be ended where it does not end by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)


def noted_run(directory: Path) -> Path:
    """A run of a round, with an event."""
    store = begin(directory, clients=2, rounds=1, events=(Event(None, "label_check", "hm"),))
    commit(store, 1, [5, 6])
    store.close()
    return directory


# -- a tree without end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["rounds", "events"])
@pytest.mark.parametrize("command", ["compare", "report"])
def test_a_run_file_of_endless_rows_is_told(tmp_path: Path, table: str, command: str) -> None:
    path = endless(noted_run(tmp_path / "run"), table)
    assert path.stat().st_size < 2**17
    output = ["--output", tmp_path / "out"] if command == "report" else []
    ended = called("-m", "fedprompt.cli", command, tmp_path / "run", *output)
    assert ended.returncode == 5, ended.stderr
    assert "run.db" in ended.stderr


def test_the_dashboard_lists_the_others(tmp_path: Path) -> None:
    write(tmp_path / "good", [[5, 6]])
    for table in ("rounds", "events"):
        endless(noted_run(tmp_path / table), table)
    ended = called("-c", LIST, tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = {entry["name"]: entry for entry in json.loads(ended.stdout)}
    assert found["good"]["status"] == "finished"
    for table in ("rounds", "events"):
        assert found[table]["status"] == "damaged"
        assert found[table]["reason"]


# -- settings of strangers ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPROMPT_CACHE", str(tmp_path / "own"))
    return tmp_path / "own"


def stranger(settings: Settings, **sections: dict[str, Any]) -> Path:
    """A finished run whose stored config says something else than what was run."""
    done = run(settings())
    done.close()
    with forged(done.directory) as connection:
        (text,) = connection.execute("SELECT value FROM facts WHERE key = 'config'").fetchone()
        config = json.loads(text)
        for section, values in sections.items():
            config[section].update(values)
        connection.execute("UPDATE facts SET value = ? WHERE key = 'config'", (json.dumps(config),))
    return done.directory


def test_an_audit_writes_to_no_cache_that_the_run_names(settings: Settings, tmp_path: Path, own_cache: Path) -> None:
    directory = stranger(settings, output={"cache": str(tmp_path / "theirs")})
    open_audit(Run(directory)).sample(1)
    TrainedClient.open(directory, 0)
    assert not (tmp_path / "theirs").exists()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the hub."""
    asked: list[str] = []

    def refuse(name: str, *rest: object, **more: object) -> None:
        asked.append(name)
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    return asked


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("backbone", {"name": "stranger/model"}),
        ("data", {"source": "hub:stranger/set"}),
        ("data", {"source": "tiny", "format": "hub"}),
        ("data", {"source": "embedded", "format": "hub"}),
    ],
)
def test_no_run_file_makes_anybody_call_the_hub(
    settings: Settings, own_cache: Path, hub: list[str], section: str, value: dict[str, Any]
) -> None:
    directory = stranger(settings, **{section: value})
    name = "backbone.name" if section == "backbone" else "data.source"
    with contextlib.suppress(FedpromptError):
        open_audit(Run(directory))
    with contextlib.suppress(FedpromptError):
        LoadedRun.open(directory)._source()
    assert hub == []
    with pytest.raises(ConfigError, match=rf"{name} .*trust_config=True"):
        open_audit(Run(directory))
    with pytest.raises(ConfigError, match=rf"{name} .*trust_config=True"):
        LoadedRun.open(directory)._source()
    with pytest.raises(FedpromptError):
        LoadedRun.open(directory, trust_config=True)._source()
    assert len(hub) == 1


@pytest.mark.parametrize("data", [None, "tiny"])
def test_the_other_set_of_a_stranger_is_not_opened(
    settings: Settings, own_cache: Path, hub: list[str], data: str | None
) -> None:
    """Only the run itself was tested on it: whoever uses a stored run needs no second place."""
    directory = stranger(settings, data={"other_set": "hub:stranger/set"})
    for trusted in (False, True):
        with contextlib.suppress(FedpromptError):
            open_audit(Run(directory), data=data, trust_config=trusted)
        with contextlib.suppress(FedpromptError):
            LoadedRun.open(directory, data=data, trust_config=trusted)._source()
    assert hub == []


# -- links --------------------------------------------------------------------------------------------------------------


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", [[5]])
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (directory / "run.lock").unlink()
    (directory / "run.lock").symlink_to(precious)
    with contextlib.suppress(RunError, StorageError):
        RunStore(directory).close()
    assert precious.read_text() == "years of work"
    with pytest.raises(RunError, match=r"run\.lock' must be a plain file"):
        RunStore(directory)


def test_a_lock_that_is_a_file_is_not_emptied(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", [[5]])
    (directory / "run.lock").write_text("years of work")
    RunStore(directory).close()
    assert (directory / "run.lock").read_text() == "years of work"


@pytest.mark.parametrize("suffix", [".rgb", ".mac"])
def test_a_cache_file_that_is_a_link_leaves_its_target_alone(tmp_path: Path, suffix: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "pixels" / "some.rgb"
    precious.write_text("years of work")
    path.parent.mkdir()
    path.with_suffix(suffix).symlink_to(precious)
    file = RowFile(path, 4, 8)
    file.write(np.array([1]), np.ones((1, 8), dtype=np.uint8))
    assert precious.read_text() == "years of work"
    assert file.problem is not None


# -- caches -------------------------------------------------------------------------------------------------------------


def test_rows_of_a_stranger_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "pixels" / "some.rgb"
    RowFile(path, 4, 8).write(np.arange(4), np.zeros((4, 8), dtype=np.uint8))
    forgery = bytes(range(8))
    with path.open("r+b") as file:
        file.seek(2 * 8)
        file.write(forgery)
    sums = {
        ".crc": zlib.crc32(forgery).to_bytes(4, "little"),
        ".mac": hashlib.blake2b(forgery, digest_size=16).digest(),
    }
    for suffix, sum in sums.items():
        with path.with_suffix(suffix).open("r+b" if path.with_suffix(suffix).exists() else "w+b") as file:
            file.seek(2 * len(sum))
            file.write(sum)
    assert RowFile(path, 4, 8).holds(np.arange(4)).tolist() == [True, True, False, True]


def test_images_that_changed_behind_the_same_size_and_time_are_noticed(tmp_path: Path) -> None:
    image, cache = tmp_path / "image.png", tmp_path / "cache"
    image.write_bytes(b"one")
    before, status = fingerprint.of_file(image, cache), image.stat()
    image.write_bytes(b"two")
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (image.stat().st_size, image.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert fingerprint.of_file(image, cache) != before


# -- flipped bits -------------------------------------------------------------------------------------------------------


def reported(directory: Path) -> str:
    """All a run tells: what `compare`, `report`, the dashboard, `predict` and `--resume` read of it."""
    opened = Run(directory)
    try:
        reader = opened.reader
        facts = {key: reader.fact(key) for key in ("config", "clients", "classes", "manifest", "backbone", "versions")}
        rounds = opened.rounds()
        evaluations = [opened.evaluations(record.round) for record in rounds]
        pool = [list(reader.pool_rows(-1, 100)), reader.pool_cells()]
        states = [reader.server_state(), list(reader.client_states())]
        told = [facts, rounds, evaluations, opened.summary(), reader.events(), states, pool]
        return hashlib.sha256(repr(told).encode()).hexdigest()
    finally:
        opened.close()


def proves(directory: Path) -> bool:
    """What `fedprompt verify` says."""
    try:
        with contextlib.closing(RunReader(directory)) as reader:
            return not verify(reader).problems
    except RunError:
        return False


def flips(directory: Path, chosen: Callable[[bytes], list[tuple[int, int]]]) -> dict[str, int]:
    """How single flipped bits, each given by its byte and its place in it, end: told, or without any effect."""
    path = directory / FILE
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    whole, truth = path.read_bytes(), reported(directory)
    ends = {"told": 0, "harmless": 0}
    for place, bit in chosen(whole):
        content = bytearray(whole)
        content[place] ^= 1 << bit
        shutil.rmtree(directory)
        directory.mkdir()
        path.write_bytes(content)
        try:
            same = reported(directory) == truth
        except RunError:
            assert not proves(directory), f"bit {bit} of byte {place}: readers tell what `verify` does not"
            ends["told"] += 1
            continue
        assert same, f"bit {bit} of byte {place} changes what is reported, and nobody tells"
        ends["harmless"] += 1
    return ends


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_told_or_changes_nothing(tmp_path: Path, count: int) -> None:
    chance = random.Random(count)

    def in_the_used_part(whole: bytes) -> list[tuple[int, int]]:
        places = [place for place, byte in enumerate(whole) if byte]  # most of the others is room for more
        return [(chance.choice(places), chance.randrange(8)) for _ in range(count)]

    directory = write(tmp_path / "run", [[3, 9, 7], [4, 9, 6], [5, 8, 8]])
    ends = flips(directory, in_the_used_part)
    assert ends["told"] > count / 2, ends


def test_damage_that_sqlite_finds_in_the_middle_of_a_query_is_a_damaged_run(tmp_path: Path) -> None:
    """The kind of every page: some of these end a query, and its transaction could then not be ended in the usual way."""
    directory = noted_run(tmp_path / "run")

    def kinds_of_pages(whole: bytes) -> list[tuple[int, int]]:
        size = int.from_bytes(whole[16:18], "big")
        return [(place, bit) for place in range(size, len(whole), size) for bit in range(8)]

    assert flips(directory, kinds_of_pages)["told"] > 30
