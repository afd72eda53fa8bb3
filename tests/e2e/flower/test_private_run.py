"""docs/deploy.md, "better, the private key is made at the site", and "private runs over sites": with real processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from real_processes import split, tiny, until
from support import shared_tensors, worst_difference

FOUNDERS, NEWCOMER = ("client_0", "client_1"), "client_2"
ROUNDS = 2
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen on this machine"),
]


def test_a_site_with_a_key_of_its_own_takes_part_in_a_private_run(tmp_path: Path, found_federation: Any) -> None:
    """Noise is of the sites' own making: the same config and seed twice are two different releases."""
    privacy = {"noise_at": "client", "noise": 0.8, "clip": 1.0, "delta": 0.05}
    settings = {
        **tiny("private", partition={"scheme": "iid", "clients": 3}, federation={"rounds": ROUNDS}),
        "method": {"name": "fedvpt", "head": "shared"},
        "privacy": privacy,
    }
    federation = found_federation(tmp_path, FOUNDERS)
    data = split(federation, settings)
    federation.serve()
    for site in FOUNDERS:
        federation.node(site, data[site], "--least-noise", "0.8")
    own = tmp_path / "fedprompt-site"
    own.mkdir(mode=0o700)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", NEWCOMER, "-f", str(own / "key")], check=True
    )
    admit = ("federate", "admit", NEWCOMER, str(own / "key.pub"), "--server", "fed/server", "--output")
    code, words = federation.call(*admit, str(own))
    assert (code, "--output must be a folder that does not exist yet" in words) == (2, True), words
    code, words = federation.call(*admit, "for-newcomer")
    assert code == 0, words
    for name in ("site.json", "ca.crt"):
        shutil.copy(tmp_path / "for-newcomer" / name, own)
    federation.start(f"node-{NEWCOMER}", "node", "--site", str(own), "--data", str(data[NEWCOMER]))
    until(lambda: [site["status"] for site in federation.status()["nodes"]] == ["online"] * 3, "all sites are there")
    run = federation.run(settings)
    assert list(run.clients) == [*FOUNDERS, NEWCOMER]
    assert [record.round for record in run.rounds()] == list(range(ROUNDS + 1))
    assert run.refused() == {}
    assert run.epsilon() is not None
    for folder in (federation.folder_of(FOUNDERS[0]), own):
        answers = sorted((folder / "state" / "states").glob("*/sent/*/*.answer"))
        assert len(answers) == ROUNDS, "a node notes what it has answered to which round"
        assert {path.stat().st_mode & 0o077 for path in (folder / "state").rglob("*")} == {0}, "nobody else can read it"
    misspelt = ("federate", "run", "private.yaml", "--server", "fed/server", "engine.sites=[client_0, client_9]")
    code, words = federation.call(*misspelt)
    assert (code, "engine.sites must be among those let in" in words) == (2, True), words
    again = federation.run({**settings, "name": "again"})
    assert worst_difference(shared_tensors(run), shared_tensors(again)) > 1e-3
