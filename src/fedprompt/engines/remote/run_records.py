"""A site's record of a run: its settings at the start, its approval, and its progress.

The settings of a run are pinned at its first contact, also across a `kill -9`. An order with the same run number but other
rounds, noise or names is refused, so the ledgers count exactly one run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprompt.config import NO_RESULT, Config
from fedprompt.engines.remote.protocol import Setting, is_run
from fedprompt.errors import ConfigError, StorageError, broken
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically

PIN, TRAINED, SECONDS = "pin.json", "trained", "seconds"
WAITING, APPROVED = "waiting", "approved"
MOST_BYTES = 2**26


def pinned_settings(setting: Setting, config: Config, name: str) -> dict[str, Any]:
    """All settings that decide what a site does in a run, in full: equivalent settings give equal results.

    `config` is the config of the setting with its defaults. The version is checked with every order.
    """
    values = {"site": name, "config": config.model_dump(mode="json", exclude=set(NO_RESULT))}
    more = {"backbone": setting.backbone, "class_names": setting.class_names, "client_names": setting.client_names}
    read_again: dict[str, Any] = json.loads(json.dumps({**values, **more}))  # tuples become lists
    return read_again


def digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class RunRecord:
    """The files of one run in a site's state directory."""

    def __init__(self, directory: Path, run: str) -> None:
        self.folder = directory / "states" / run
        self._waiting, self._approved = directory / WAITING / f"{run}.json", directory / APPROVED / f"{run}.json"

    @property
    def pinned(self) -> str | None:
        """The digest of the settings at the start of the run; None before."""
        return _digest_in(self.folder / PIN)

    def pin(self, settings: Mapping[str, Any]) -> None:
        _write(self.folder / PIN, {"digest": digest(settings), "settings": settings})

    @property
    def begun_unpinned(self) -> bool:
        """Whether an old version without pinning has answered rounds of this run."""
        return any(self.folder.glob("[0-9]*/sent/*.answer"))

    @property
    def approved(self) -> str | None:
        """The digest of the settings that a person has approved."""
        return _digest_in(self._approved)

    def wait(self, settings: Mapping[str, Any]) -> bool:
        """Write the settings to a file for a person to read. False if other settings of this run wait already: a person
        may be reading them and must approve what was read."""
        if self._waiting.exists():
            return _digest_in(self._waiting) == digest(settings)
        _write(self._waiting, {"digest": digest(settings), "settings": settings})
        return True

    @property
    def trained(self) -> int:
        """The latest trained round; 0 before the first."""
        return int(_text(self.folder / TRAINED) or 0)

    def note_trained(self, round: int) -> None:
        if round > self.trained:
            write_atomically(self.folder / TRAINED, str(round).encode())

    @property
    def seconds(self) -> float:
        """Seconds that this machine has worked for the run."""
        return float(_text(self.folder / SECONDS) or 0)

    def add_seconds(self, more: float) -> None:
        write_atomically(self.folder / SECONDS, repr(self.seconds + more).encode())


def waiting_runs(directory: Path) -> dict[str, dict[str, Any]]:
    """The runs that wait for approval, by number, with their settings."""
    found = {}
    for file in sorted((directory / WAITING).glob("*.json")):
        if is_run(file.stem):
            found[file.stem] = dict(_read(file)["settings"])
    return found


def approve(directory: Path, run: str) -> None:
    """Approve a run with the settings in its file; other settings under its number need a new approval."""
    waiting = directory / WAITING / f"{run}.json"
    if not is_run(run) or not waiting.is_file():
        known = ", ".join(waiting_runs(directory)) or "none waits"
        raise ConfigError(broken("RUN", f"be one that waits ({known})", run))
    values = _read(waiting)
    _write(directory / APPROVED / f"{run}.json", values)
    waiting.unlink()


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, json.dumps(values, indent=2).encode())
    os.chmod(path, 0o600)


def _digest_in(path: Path) -> str | None:
    return str(_read(path)["digest"]) if path.exists() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, MOST_BYTES)
        if not isinstance(values, dict) or {"digest", "settings"} - values.keys():
            raise ValueError("it must hold a digest and settings")
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
