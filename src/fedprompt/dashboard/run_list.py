"""All runs of the page, and a cache of answers."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprompt.dashboard.discovery import discover
from fedprompt.dashboard.follower import Follower
from fedprompt.dashboard.liveness import Locks

SCAN = 1.0  # seconds between two searches of the folders
LOOK = 0.3  # seconds between two reads of the locks
PATIENCE = 0.8  # seconds that one answer may spend on reading runs; the others follow in the next answer
KEPT = 32  # answers
REST = 10.0  # an answer is not computed again before this multiple of its computing time


class Catalogue:
    """The runs below some folders, as they are now."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.session = secrets.token_hex(8)  # changes after a restart, when numbers of answers restart too
        self.truncated = False
        self._followers: dict[str, Follower] = {}
        self._lock = threading.Lock()
        self._scanned = self._looked = float("-inf")
        self._locks = Locks(None)

    def followers(self) -> list[Follower]:
        """One for every run, in the order of their folders."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN:
                found, self.truncated = discover(self.folders)
                self._followers = {id: self._followers.get(id) or Follower(run) for id, run in found.items()}
                self._scanned = time.monotonic()
            return list(self._followers.values())

    def get(self, id: str) -> Follower | None:
        """The run of an id, after reading new data; None for any unknown id."""
        follower = {each.found.id: each for each in self.followers()}.get(id)
        if follower is not None:
            follower.refresh()
        return follower

    def refreshed(self) -> tuple[list[Follower], int]:
        """All runs, and how many of them have not been read yet."""
        followers, end = self.followers(), time.monotonic() + PATIENCE
        for each in sorted(followers, key=lambda follower: follower.read):  # unread runs come first
            if time.monotonic() < end:
                each.refresh()
        return followers, sum(not each.read for each in followers)

    def locks(self) -> Locks:
        with self._lock:
            if time.monotonic() - self._looked >= LOOK:
                self._locks, self._looked = Locks.now(), time.monotonic()
            return self._locks


@dataclass
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    key: Hashable = None
    value: Any = None
    made: float = float("-inf")
    cost: float = 0.0


class Answers:
    """Cache of expensive answers: computed again only when their input has changed, and not too often."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: Hashable, key: Hashable, make: Callable[[], Any]) -> Any:
        """The answer of a name; `key` identifies its input."""
        with self._lock:
            answer = self._answers.setdefault(name, _Answer())
            self._answers.move_to_end(name)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        with answer.lock:
            begin = time.monotonic()
            if answer.value is None or (answer.key != key and begin - answer.made > REST * answer.cost):
                answer.value = make()
                answer.made = time.monotonic()
                answer.key, answer.cost = key, answer.made - begin
            return answer.value
