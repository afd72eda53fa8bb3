"""The connections of the dashboard, with their time limits.

A client has limited time to send its request and to receive its answer. If there are too many connections, the one that
the server has waited for longest is closed, so slow clients block no one. A complete request is never dropped.
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
    """A limited number of open sockets."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turns: dict[
            socket.socket, tuple[float, float] | None
        ] = {}  # start and end of the time in which the server waits for the client
        self._lock = threading.Lock()

    def add(self, connection: socket.socket, patience: float) -> bool:
        """Whether there is room; if needed, the socket with the longest wait is closed."""
        with self._lock:
            if len(self._turns) >= self._most:
                waited_for = [(turn[0], each) for each, turn in self._turns.items() if turn is not None]
                if not waited_for:
                    return False
                self._drop(min(waited_for, key=lambda pair: pair[0])[1])
            self._turns[connection] = _turn(patience)
        return True

    def wait_for(self, connection: socket.socket, patience: float) -> None:
        """Wait for the client from now on, for this many seconds."""
        with self._lock:
            if connection in self._turns:
                self._turns[connection] = _turn(patience)

    def answer(self, connection: socket.socket) -> None:
        """The server is working on the answer: stop the timer."""
        with self._lock:
            if connection in self._turns:
                self._turns[connection] = None

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._turns.pop(connection, None)

    def end_the_late(self) -> None:
        """Drop connections whose time is over."""
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
    """The bytes of a request, up to a limit for requests of the page; Python's own limit is a hundred times larger."""

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
