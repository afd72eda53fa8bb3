"""What a run file keeps of its clients, and that files of earlier versions are read as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forgery import as_version, forged
from support import StopAfter, Stopped, content, experiment, run

from fedprompt.data.partition.manifest import Clients
from fedprompt.errors import RunError
from fedprompt.evaluation.leak_audit import open_audit
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.random_streams import EDITION
from fedprompt.report import comparison_table, html_report
from fedprompt.runs.run import Run, as_it_was, require_same_ground
from fedprompt.runs.store import STREAMS

pytestmark = pytest.mark.unit
Settings = Callable[..., dict[str, Any]]


def as_before(done: Run) -> None:
    """The file as version 1 wrote it, which kept every client as JSON and had no pool."""
    manifest = {**json.loads(done.manifest().to_json()), "checksum": "0" * 64}
    names = [client["name"] for client in manifest["clients"]]
    done.close()
    as_version(done.directory, 1)
    with forged(done.directory) as connection:
        connection.execute("DELETE FROM facts WHERE key = 'index_lists'")
        for key, value in (("manifest", manifest), ("clients", names)):
            connection.execute("UPDATE facts SET value = ? WHERE key = ?", (json.dumps(value), key))


def test_a_run_of_version_1_is_read(settings: Settings) -> None:
    whole, early = run(settings(name="whole")), run(settings(name="early"))
    as_before(early)
    early = Run(early.directory)
    assert early.clients == whole.clients
    assert early.client_accuracies() == whole.client_accuracies()
    assert early.manifest().to_json() == whole.manifest().to_json()
    assert "client_3" in html_report.render([early])
    told = comparison_table.notes(comparison_table.comparison([early, whole]))
    assert [line.split(":")[0] for line in told] == ["Left out, the same seed is already counted"]


def test_the_ground_of_a_run_of_version_1_is_known(settings: Settings) -> None:
    done = run(settings())
    as_before(done)
    made = experiment(settings())
    _, manifest, backbone, _ = made.factory.prepare()
    require_same_ground(Run(done.directory).reader, backbone.digest(), manifest, "audited")
    other = replace(manifest, clients=Clients.of(manifest.clients[:3]))
    with pytest.raises(RunError, match="cannot be audited: the partition of the data are not those"):
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
    with forged(done.directory) as connection:
        connection.execute("UPDATE facts SET value = ? WHERE key = ?", (value, key))
    with pytest.raises(RunError, match="is damaged"):
        Run(done.directory).manifest()


def test_equal_runs_have_equal_files(settings: Settings) -> None:
    assert content(run(settings(name="one"))) == content(run(settings(name="two")))


def with_streams_before(done: Run) -> Path:
    """The file as it was before random streams had an edition: torch's generator drew for it."""
    done.close()
    with forged(done.directory) as connection:
        connection.execute("DELETE FROM facts WHERE key = 'streams'")
    return done.directory


def test_a_run_notes_the_edition_of_its_streams(settings: Settings) -> None:
    assert run(settings(name="new")).reader.fact(STREAMS) == EDITION == 2


def test_a_run_of_other_streams_is_not_resumed_used_or_audited(settings: Settings) -> None:
    """It would silently go on with other cohorts and shuffles, and with other starts for whoever is new."""
    stopped = settings(name="early", federation={"rounds": 3})
    with pytest.raises(Stopped):
        run(stopped, observer=StopAfter(1))
    folder = with_streams_before(Run(experiment(stopped).config.run_directory))
    sentence = r"cannot be {}: its random streams must be of edition 2, got 1; train it again under another name="
    before = (folder / "run.db").read_bytes()
    with pytest.raises(RunError, match=sentence.format("resumed")):
        experiment(stopped).run(resume=True)
    with pytest.raises(RunError, match=sentence.format("used")):
        LoadedRun.open(folder)
    with pytest.raises(RunError, match=sentence.format("audited")):
        open_audit(Run(folder))
    assert Run(folder).rounds()[-1].round == 1
    assert (folder / "run.db").read_bytes() == before


def test_a_run_of_other_streams_is_read_compared_and_reported(settings: Settings) -> None:
    new, old = run(settings(name="new")), run(settings(name="old"))
    whole = old.summary()
    old = Run(with_streams_before(old))
    assert old.summary() == whole
    comparison_table.notes(comparison_table.comparison([new, old]))
    assert "client_3" in html_report.render([old])


def test_a_stored_run_from_before_a_setting_of_its_method_says_what_the_method_did_then() -> None:
    stored = {"method": {"name": "fedmaple", "context_tokens": 2, "context_words": ""}}
    assert as_it_was(stored)["method"]["vision_start"] == "random"
    now = {"method": {"name": "fedmaple", "vision_start": "blank"}}
    assert as_it_was(now) == now
