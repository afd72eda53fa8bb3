"""The services of `deploy/container/compose.yaml`, with their user, environment, volumes and read-only root, finish a run.

Processes in namespaces of mounts stand for containers, so that no container engine is needed; but root is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from real_processes import CLASSES, Process, free_port, tiny, until

SITES = ("site-a", "site-b")
PROGRAM = Path(__file__).with_name("service_of_compose.py")
INSIDE, CONFIG = "/var/lib/fedprompt/server", "/tmp/compose.json"
pytestmark = pytest.mark.timeout(900)


def may_mount() -> bool:
    programs = all(map(shutil.which, ("unshare", "nsenter", "setpriv", "chroot")))
    return programs and os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


def images(folder: Path, seed: int) -> None:
    """Folders class/image."""
    generator = np.random.default_rng(seed)
    for place, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 100, (16, 16, 3)) + 30 * place
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")


def inside(process: Process, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """A command in the file system of a service, as its user: what `docker compose exec` does."""
    own = dict(line.split("=", 1) for line in Path(f"/proc/{process.pid}/environ").read_text().split("\0") if line)
    rights = ("setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "env", "-i", "-C", "/tmp")
    variables = [f"{name}={value}" for name, value in own.items()]
    entered = ["nsenter", "-t", str(process.pid), "-m", "-r", *rights, *variables, *command]
    return subprocess.run(entered, input=text, capture_output=True, text=True, timeout=600, check=False)


def healthy(port: int) -> bool:
    """The health check of the image."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.skipif(not may_mount(), reason="namespaces of mounts need root and util-linux")
def test_the_services_finish_a_run_without_root_on_a_file_system_they_cannot_write(
    tmp_path: Path, found_federation: Any
) -> None:
    federation = found_federation(tmp_path, SITES)
    for seed, site in enumerate(SITES):
        images(tmp_path / "images" / site, seed)
    subprocess.run(["chown", "-R", "10001:10001", str(tmp_path / "fed"), str(tmp_path / "images")], check=True)
    started: dict[str, Process] = {}
    for name in ("server", *SITES):  # a site waits for a healthy server: `depends_on`
        port = free_port()
        started[name] = federation.python(name, str(PROGRAM), name, str(tmp_path), str(port))
        until(lambda port=port: healthy(port), f"{name} is healthy")  # type: ignore[misc]
        status = Path(f"/proc/{started[name].pid}/status").read_text()
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapBnd:\t0000000000000000\n" in status
    server = started["server"]
    assert "Read-only file system" in inside(server, "touch", "/etc/written").stderr
    assert "Read-only file system" in inside(started["site-a"], "touch", "/images/written", "/site/written").stderr
    settings = tiny("compose", federation={"rounds": 2})
    assert inside(server, "tee", CONFIG, text=json.dumps(settings)).returncode == 0
    run = inside(server, sys.executable, "-m", "fedprompt.cli", "federate", "run", CONFIG, "--server", INSIDE)
    assert run.returncode == 0, run.stdout + run.stderr
    found = federation.result(settings)
    assert list(found.clients) == list(SITES)
    assert [record.round for record in found.rounds()][-1] == 2
    assert [event for event in found.reader.events() if event[1] is not None] == [], "nobody was missing or refused"
