"""What a run file keeps of its clients, and that files of earlier versions are read as before."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import content, experiment, run

from fedprompt.data.manifest import Clients
from fedprompt.errors import RunError
from fedprompt.experiment import require_same_ground
from fedprompt.report import html, tables
from fedprompt.run import Run

pytestmark = pytest.mark.unit
Settings = Callable[..., dict[str, Any]]


def rewrite(folder: Path, change: Callable[[sqlite3.Connection], object]) -> None:
    connection = sqlite3.connect(folder / "run.db")
    with connection:
        change(connection)
    connection.close()


def as_before(done: Run) -> Callable[[sqlite3.Connection], object]:
    """The file as version 1 wrote it, which kept every client as JSON and had no pool."""
    manifest = {**json.loads(done.manifest().to_json()), "checksum": "0" * 64}
    names = [client["name"] for client in manifest["clients"]]

    def change(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM facts WHERE key = 'index_lists'")
        for table in ("pool", "pool_cells"):
            connection.execute(f"DROP TABLE {table}")
        for key, value in (("manifest", manifest), ("clients", names), ("version", 1)):
            connection.execute("UPDATE facts SET value = ? WHERE key = ?", (json.dumps(value), key))

    return change


def test_a_run_of_version_1_is_read(settings: Settings) -> None:
    whole, early = run(settings(name="whole")), run(settings(name="early"))
    rewrite(early.directory, as_before(early))
    early = Run(early.directory)
    assert early.clients == whole.clients
    assert early.client_accuracies() == whole.client_accuracies()
    assert early.manifest().to_json() == whole.manifest().to_json()
    assert "client_3" in html.render([early])
    told = tables.notes(tables.comparison([early, whole]))
    assert [line.split(":")[0] for line in told] == ["Left out, the same seed is already counted"]


def test_the_ground_of_a_run_of_version_1_is_known(settings: Settings) -> None:
    done = run(settings())
    rewrite(done.directory, as_before(done))
    made = experiment(settings())
    _, manifest, backbone, _ = made.prepare()
    require_same_ground(Run(done.directory).reader, backbone.digest(), manifest, "audited")
    other = replace(manifest, clients=Clients.of(manifest.clients[:3]))
    with pytest.raises(RunError, match="cannot be audited: the partition of the data are not the ones"):
        require_same_ground(Run(done.directory).reader, backbone.digest(), other, "audited")


def test_a_run_keeps_its_clients_in_few_bytes_and_gives_them_back(settings: Settings) -> None:
    done = run(settings(partition={"scheme": "iid", "clients": 20}))
    assert done.reader.fact("clients") == {"numbered": 20}
    assert done.manifest().checksum == done.reader.fact("manifest")["checksum"]
    again = {"scheme": "manifest", "manifest": str(done.directory / "who.json")}
    done.manifest().save(again["manifest"])
    other = run(settings(name="again", partition=again))
    assert other.client_accuracies() == done.client_accuracies()
    assert other.manifest().checksum == done.manifest().checksum


def test_names_of_a_manifest_are_kept_as_they_are(settings: Settings, tmp_path: Path) -> None:
    made = run(settings(name="first")).manifest().to_json()
    (tmp_path / "m.json").write_text(made.replace("client_", "ward "))
    done = run(settings(name="wards", partition={"scheme": "manifest", "manifest": str(tmp_path / "m.json")}))
    assert done.clients == ["ward 0", "ward 1", "ward 2", "ward 3"]
    assert list(done.client_accuracies()) == done.clients


@pytest.mark.parametrize("value", ['{"numbered": -1}', '{"train": "AAAA", "test": "AAAA"}', "3"])
def test_damaged_lists_are_told_when_they_are_asked_for(settings: Settings, value: str) -> None:
    done = run(settings())
    done.close()
    key = "clients" if "numbered" in value else "index_lists"
    rewrite(done.directory, lambda file: file.execute("UPDATE facts SET value = ? WHERE key = ?", (value, key)))
    with pytest.raises(RunError, match="is damaged"):
        Run(done.directory).manifest()


def test_equal_runs_have_equal_files(settings: Settings) -> None:
    assert content(run(settings(name="one"))) == content(run(settings(name="two")))
