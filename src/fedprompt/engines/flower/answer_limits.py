"""Limits for what a node reads from its server: httpx reads and unpacks an answer of any size into memory.

The parts of one message share a limit, however many the server lists. Compressed answers are refused before their body is
read: Flower sends none, and 2 MB of them were 4 GB in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Lock

import httpx

LARGEST_MESSAGE = 2**28  # bytes of all parts of a message, as the gate allows a node
LARGEST_ANSWER = 2**20  # bytes of any other answer; a list of parts is some hundred
PARTS = "/pull-object"


class AnswerTooLarge(httpx.RequestError):
    """The server's answer was not read to its end."""


class AnswerLimits:
    """A hook for the answers of a client of httpx. The parts of a message are pulled by several threads."""

    def __init__(self) -> None:
        self._lock, self._left = Lock(), LARGEST_MESSAGE

    def new_message(self) -> None:
        """What is read from now on is another message."""
        with self._lock:
            self._left = LARGEST_MESSAGE

    def __call__(self, answer: httpx.Response) -> None:
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise AnswerTooLarge("an answer of the server must not be compressed")
        assert isinstance(answer.stream, httpx.SyncByteStream)
        part = answer.request.url.path.endswith(PARTS)
        answer.stream = _Counted(answer.stream, self._taken if part else _Taken(LARGEST_ANSWER))

    def _taken(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise AnswerTooLarge(f"a message of the server must have at most {LARGEST_MESSAGE} bytes")


class _Taken:
    """Counts the bytes of one answer."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def __call__(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise AnswerTooLarge(f"an answer of the server must have at most {self._most} bytes")


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, taken: Callable[[int], None]) -> None:
        self._stream, self._taken = stream, taken

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._taken(len(chunk))
            yield chunk

    def close(self) -> None:
        self._stream.close()
