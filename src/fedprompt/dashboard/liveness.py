"""Whether a process is writing a run.

A writer holds a lock on `run.lock` while it runs. Testing the lock would take it for a moment, and a writer that starts
in that moment would give up. So this module only reads the list of all locks in `/proc/locks` (Linux).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path("/proc/locks")
RECENT = 15.0  # seconds after which a run without a visible writer counts as stopped, or three of its rounds
_HELD = re.compile(r"^\d+: FLOCK\s+\w+\s+WRITE\s+\S+\s+([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class Locks:
    """The locks held on this machine, by device and inode; None if the system has no such list."""

    held: frozenset[tuple[int, int, int]] | None

    @classmethod
    def now(cls, path: Path = LOCKS) -> Locks:
        try:
            return cls.parse(path.read_text(encoding="ascii", errors="replace"))
        except OSError:
            return cls(None)

    @classmethod
    def parse(cls, text: str) -> Locks:
        return cls(
            frozenset((int(major, 16), int(minor, 16), int(inode)) for major, minor, inode in _HELD.findall(text))
        )

    def writer_of(self, directory: Path) -> bool | None:
        """Whether the run's lock is held; None if unknown."""
        try:
            lock = os.stat(directory / "run.lock")
        except OSError:
            return False
        if self.held is None:
            return None
        if (os.major(lock.st_dev), os.minor(lock.st_dev), lock.st_ino) in self.held:
            return True
        # some file systems (btrfs, overlays) report different device numbers in the two places
        return None if any(inode == lock.st_ino for _, _, inode in self.held) else False


@dataclass(frozen=True)
class Signs:
    """The state of a run's writer."""

    damaged: bool
    complete: bool
    """Has all its rounds."""
    writer: bool | None
    """Holds the lock; None if unknown."""
    grown: float | None
    """Seconds since a round was seen to appear without a visible writer, such as one on another machine."""
    quiet: float
    """Seconds since the file last changed."""
    pace: float
    """Seconds a round takes."""


def status(signs: Signs) -> tuple[str, str]:
    """One of running, finished, stopped and damaged, and the reason."""
    recent = max(RECENT, 3 * signs.pace)
    if signs.damaged:
        return "damaged", "file"
    if signs.writer:
        return "running", "lock"
    if signs.complete:
        return "finished", "rounds"
    if signs.grown is not None and signs.grown < recent:
        return "running", "growth"
    if signs.writer is None and signs.quiet < recent:
        return "running", "age"
    return "stopped", "lock" if signs.writer is False else "age"
