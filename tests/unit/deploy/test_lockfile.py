"""One process for a folder, also after the one before was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedprompt.deploy.lockfile import claimant, claimed, still_claimed
from fedprompt.errors import RunError, StorageError

pytestmark = pytest.mark.unit

HOLD = "import sys, time; from pathlib import Path; from fedprompt.deploy.lockfile import claimed\n"
HOLD += "with claimed(Path(sys.argv[1]), 'folder', 'server'): print('mine', flush=True); time.sleep(60)"


def test_a_folder_that_is_claimed_is_refused_to_others(tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "new", "--state", "node"),
        pytest.raises(RunError, match=r"--state must not be in use by another running node, got '.*new'"),
        claimed(tmp_path / "new", "--state", "node"),
    ):
        pass
    with claimed(tmp_path / "new", "--state", "node"):
        assert claimant(tmp_path / "new") == os.getpid()


def test_a_killed_process_lets_go_although_nobody_has_noticed_its_end(tmp_path: Path) -> None:
    """Its parent, here, has not asked for it: it is a zombie, which still has its number."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mine\n"
        assert claimant(tmp_path) == process.pid
        assert still_claimed(tmp_path, process.pid)
        assert not still_claimed(tmp_path, os.getpid())
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays as it is
        os.kill(process.pid, 0)
        assert not still_claimed(tmp_path, process.pid)
        with claimed(tmp_path, "folder", "server"):
            assert claimant(tmp_path) == os.getpid()
            assert still_claimed(tmp_path, os.getpid())
            assert not still_claimed(tmp_path, process.pid)
    assert not still_claimed(tmp_path, os.getpid())


def test_looking_at_a_lock_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    with claimed(tmp_path, "folder", "server"):
        pass
    looker = threading.Thread(target=lambda: [still_claimed(tmp_path, os.getpid()) for _ in range(2000)])
    looker.start()
    for _ in range(20):
        with claimed(tmp_path, "folder", "server"):
            pass
    looker.join()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"), claimed(tmp_path / "file", "--state", "node"):
        pass


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").symlink_to(target)
    with pytest.raises(StorageError, match="state"), claimed(tmp_path / "state", "--state", "node"):
        pass
    assert target.read_text() == "keep me"
