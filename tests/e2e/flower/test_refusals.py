"""Issue 7, "an unregistered key refused, a wrong class list refused", "insecure only on loopback and only with a flag"."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from real_processes import Federation, Process, split, tiny, until

pytest.importorskip("cryptography")

from fedprompt.deploy.certificates import write_site_key
from fedprompt.errors import ConfigError, DataError, RunError

SITES = ("client_0", "client_1", "client_2", "client_3")
HONEST = SITES[:2]
STRANGE, IMPOSTOR = SITES[2:]  # one with class names of its own, one that says it were somebody else
ELSEWHERE = "192.0.2.1:9999"  # an address that is nobody's
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, found_federation: Any) -> Federation:
    federation = found_federation(tmp_path_factory.mktemp("refusals"), SITES)
    data = split(federation, tiny("split"))
    federation.serve()
    for site in HONEST:
        federation.node(site, data[site])
    return federation


@pytest.fixture(scope="module")
def outsiders(federation: Federation) -> dict[str, Process]:
    """The two sites that cannot be taken as they are."""
    file = federation.folder_of(IMPOSTOR) / "site.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "name": HONEST[0]}))
    data = {STRANGE: _renamed(_data(federation, STRANGE), {"disc": "Disc"}), IMPOSTOR: _data(federation, IMPOSTOR)}
    return {site: federation.node(site, data[site]) for site in data}


def test_sites_with_other_classes_end_a_run_that_names_none(
    federation: Federation, outsiders: dict[str, Process]
) -> None:
    settings = tiny("unnamed", federation={"rounds": 1}, data={"classes": None})
    run = federation.submit(settings)
    assert run.end() == DataError.exit_code, run.tail
    assert "sites must agree on the names of the classes" in run.words
    assert f"{STRANGE}: class names must be the same at all sites" in run.words
    assert "'Disc' (did you mean 'disc'?)" in run.words
    assert federation.rounds(settings) == -1, "there is no run file"


def test_sites_that_do_not_fit_are_kept_out_of_a_run_that_names_its_classes(
    federation: Federation, outsiders: dict[str, Process]
) -> None:
    run = federation.run(tiny("named", federation={"rounds": 1}))
    assert list(run.clients) == list(HONEST)
    kept_out = [detail for _, _, kind, detail in run.reader.events() if kind == "kept_out"]
    assert kept_out[0].startswith(f"{STRANGE}: class names must be among those of the federation, got 'Disc'")
    assert kept_out[1:] == [f"{IMPOSTOR}: name must be {IMPOSTOR!r}, the one it is admitted under, got {HONEST[0]!r}"]
    assert sorted(run.evaluations(1)) == [0, 1]


def test_a_key_that_nobody_admitted_is_refused(federation: Federation) -> None:
    stranger = _copied(federation, HONEST[0], "stranger")
    for file in ("key", "key.pub"):
        (stranger / file).unlink()
    write_site_key(stranger, "stranger")
    node = federation.node("stranger", _data(federation, HONEST[0]))
    node.wait_for("not admitted yet: its key must be admitted there")
    assert node.end() == RunError.exit_code, node.tail
    assert "the server does not admit this node: its key must be admitted there" in node.words
    assert "Traceback" not in node.words
    assert [node["name"] for node in federation.status()["nodes"]] == list(SITES)


def test_a_server_whose_certificate_comes_from_elsewhere_is_refused(federation: Federation) -> None:
    code, words = federation.call("federate", "init", "other", "--address", federation.address, "--site", "any")
    assert code == 0, words
    astray = _copied(federation, HONEST[0], "astray")
    shutil.copy(federation.folder / "other" / "sites" / "any" / "ca.crt", astray / "ca.crt")
    node = federation.node("astray", _data(federation, HONEST[0]))
    assert node.end() == RunError.exit_code, node.tail
    assert "error: no connection to the server: [SSL: CERTIFICATE_VERIFY_FAILED]" in node.words
    assert "Traceback" not in node.words


def test_an_expelled_site_is_sent_away_and_stays_out(federation: Federation, outsiders: dict[str, Process]) -> None:
    outsiders[STRANGE].wait_for("connected to")
    code, words = federation.call("federate", "expel", STRANGE, "--server", "fed/server")
    assert code == 0, words
    assert STRANGE not in [each["name"] for each in federation.status()["nodes"]]
    until(lambda: not outsiders[STRANGE].running, "an expelled node ends")
    again = federation.node(STRANGE, _data(federation, STRANGE))
    assert again.end() == RunError.exit_code, again.tail


def test_the_state_of_a_node_that_runs_is_its_own(federation: Federation) -> None:
    second = federation.node(HONEST[0], _data(federation, HONEST[0]))
    assert second.end() == RunError.exit_code
    assert "--state must not be in use by another running node" in second.words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            f"federate init new --insecure --address {ELSEWHERE} --site a",
            f"address must be one of loopback without TLS and keys, got '{ELSEWHERE}'",
        ),
        ("server insecure/server", "--insecure must be given for a federation without certificates"),
        (f"server insecure/server --insecure --bind {ELSEWHERE}", "bind must be a loopback address"),
        ("server fed/server --insecure", "--insecure must be absent for a federation with certificates"),
        (
            f"node --insecure --server {ELSEWHERE} --name a --state s --data split/client_0.parquet",
            "--server must be a loopback address without TLS and keys",
        ),
        ("node --data split/client_0.parquet --server 127.0.0.1:1 --name a --state s", "--site must be given"),
        ("node --site insecure/sites/a --data split/client_0.parquet", "--insecure must be given"),
        ("node --site fed/sites/client_0 --data split/client_0.parquet --insecure", "--insecure must be left out"),
        ("run here.yaml engine.kind=flower", "engine.kind must be run by `fedprompt federate run`"),
    ],
)
def test_what_is_not_secure_or_not_here_is_refused_before_anything_starts(
    federation: Federation, insecure: None, arguments: str, words: str
) -> None:
    code, said = federation.call(*arguments.split())
    assert code == ConfigError.exit_code, said
    assert words in said


@pytest.fixture(scope="module")
def insecure(federation: Federation) -> None:
    """A folder of a federation without certificates, and a config, beside the secure one."""
    code, words = federation.call(
        "federate", "init", "insecure", "--insecure", "--address", "127.0.0.1:9", "--site", "a"
    )
    assert code == 0, words
    (federation.folder / "here.yaml").write_text(json.dumps(tiny("here")))


def _data(federation: Federation, site: str) -> Path:
    return federation.folder / "split" / f"{site}.parquet"


def _copied(federation: Federation, site: str, name: str) -> Path:
    """A second folder of a site, under another name in the file system, without its state."""
    made = federation.folder_of(name)
    shutil.copytree(federation.folder_of(site), made, ignore=shutil.ignore_patterns("state"))
    return made


def _renamed(file: Path, names: dict[str, str]) -> Path:
    """The same images with other class names."""
    table = pq.read_table(file)
    told = json.loads(table.schema.metadata[b"fedprompt"])
    told["classes"] = [names.get(each, each) for each in told["classes"]]
    made = file.with_name(f"renamed-{file.name}")
    pq.write_table(table.replace_schema_metadata({"fedprompt": json.dumps(told)}), made)
    return made
