"""Who is connected to the dashboard, and whose turn it is.

A client has a time to send its request as a whole, and one to take its answer. Where there are too many connections, the one
that has kept us waiting longest goes, so that slow ones block no one. A complete request is never dropped.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import suppress
from io import BufferedIOBase

LONGEST_HEAD = 2**16  # bytes of a request's first line and headers


class Connections:
    """At most so many sockets at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: dict[
            socket.socket, tuple[float, float] | None
        ] = {}  # since when and until when it is the client's
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, patience: float) -> bool:
        """Whether there is room, if need be that of the one we have waited for longest."""
        with self._lock:
            if len(self._turns) >= self._most:
                waited_for = [(turn[0], each) for each, turn in self._turns.items() if turn is not None]
                if not waited_for:
                    return False
                self._drop(min(waited_for, key=lambda pair: pair[0])[1])
            self._turns[connection] = _turn(patience)
        return True

    def wait_for(self, connection: socket.socket, patience: float) -> None:
        """It is the client's turn from now on, for so many seconds."""
        with self._lock:
            if connection in self._turns:
                self._turns[connection] = _turn(patience)

    def answer(self, connection: socket.socket) -> None:
        """It is our turn."""
        with self._lock:
            if connection in self._turns:
                self._turns[connection] = None

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._turns.pop(connection, None)

    def end_the_late(self) -> None:
        """Drop those whose time is over."""
        now = time.monotonic()
        with self._lock:
            for late in [each for each, turn in self._turns.items() if turn is not None and turn[1] < now]:
                self._drop(late)

    def _drop(self, connection: socket.socket) -> None:
        """Its thread wakes up, and closes it."""
        del self._turns[connection]
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _turn(patience: float) -> tuple[float, float]:
    now = time.monotonic()
    return now, now + patience


class Head:
    """What a client sends, as long as it is no longer than any request of a page; Python's own limit is a hundred times that."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream, self._left = stream, LONGEST_HEAD

    def begin(self) -> None:
        """A new request."""
        self._left = LONGEST_HEAD

    def readline(self, size: int) -> bytes:
        if self._left <= 0:
            raise http.client.LineTooLong("head")
        line = self._stream.readline(min(size, self._left + 1))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._stream.close()
