"""Notices to people: `notify.yaml` in the server's folder names a web hook and what it is told.

    notify: https://hooks.example.org/fedprompt
    events: [absent, refused, finished, certificate]

A notice is one POST of a small JSON object: `event`, `text`, `run`, `site`, `round`, `time`. It holds no address, path, key or
setting. It is sent by a thread of its own, with limits for time, size and number; what goes wrong is a line of the log, in which
the address is not shown, since such addresses often are secrets.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import Field, ValidationError, field_validator

from fedprompt.config import Section, complaints
from fedprompt.config.strict_yaml import MOST_BYTES, read_yaml
from fedprompt.errors import ConfigError
from fedprompt.io.bounded_read import read_text
from fedprompt.io.log_lines import fact
from fedprompt.io.safe_text import safe_line

FILE = "notify.yaml"
PATIENCE = 5.0  # seconds of silence; a connection lasts twice as long at most
ATTEMPTS, PAUSE = 3, 2.0  # of a notice, and seconds between two
WAITING = 100  # notices that wait to be sent; later ones are dropped
LONGEST_TEXT = 500  # characters

Kind = Literal["absent", "refused", "finished", "certificate"]
KINDS: tuple[Kind, ...] = ("absent", "refused", "finished", "certificate")


class NotifyConfig(Section):
    """Who is told of what."""

    notify: str
    """The address of the web hook: https, or http on this machine."""
    events: list[Kind] = Field(default_factory=lambda: list(KINDS))
    """What it is told: a site that is absent, an update that was refused, a run that finished, a certificate that expires."""

    @field_validator("notify")
    @classmethod
    def _is_safe(cls, value: str) -> str:
        parts = urlsplit(value)
        if not parts.hostname or not value.isprintable() or " " in value:
            raise ValueError("be the address of a web hook")
        if parts.scheme != "https" and not (parts.scheme == "http" and _is_here(parts.hostname)):
            raise ValueError("begin with https:// (http:// only on this machine)")
        return value


def load_notify(folder: Path) -> NotifyConfig | None:
    """The settings in a server's folder; None if there are none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return NotifyConfig.model_validate(read_yaml(read_text(path, MOST_BYTES)))
    except ValidationError as error:
        lines = complaints(error, "").splitlines()
        raise ConfigError("\n".join(f"{path}: {line.partition(', got')[0]}" for line in lines)) from None
    except (yaml.YAMLError, ValueError, OSError):
        raise ConfigError(f"{path} must be readable YAML") from None  # its text may be a secret


class Webhook:
    """Sends notices, in their order and without anyone waiting for it."""

    def __init__(self, settings: NotifyConfig | None) -> None:
        self._settings = settings
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(WAITING)
        here = settings is not None and settings.notify.lower().startswith("http:")
        proxies = urllib.request.ProxyHandler({} if here else None)  # a notice to this machine does not leave it
        self._open = urllib.request.build_opener(_NoRedirects, _Http, _Https, proxies).open
        self.sent = self.failed = 0
        if settings is not None:
            threading.Thread(target=self._send_all, name="notices", daemon=True).start()

    def tell(
        self, event: Kind, text: str, *, run: str | None = None, site: str | None = None, round: int | None = None
    ) -> None:
        """Queue a notice, if it is wanted."""
        if self._settings is None or event not in self._settings.events:
            return
        when = datetime.now(UTC).isoformat(timespec="seconds")
        text = safe_line(text)[:LONGEST_TEXT]
        try:
            self._queue.put_nowait(
                {"event": event, "text": text, "run": run, "site": site, "round": round, "time": when}
            )
        except queue.Full:
            self.failed += 1

    def _send_all(self) -> None:
        while True:
            notice = self._queue.get()
            try:
                self._send(notice)
                self.sent += 1
            except Exception as error:
                self.failed += 1
                reason = f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
                fact(f"the web hook did not take a notice of {notice['event']!r}: {reason}", "warning")
            finally:
                self._queue.task_done()

    def _send(self, notice: dict[str, Any]) -> None:
        assert self._settings is not None
        body = json.dumps(notice).encode()
        request = urllib.request.Request(
            self._settings.notify, body, {"Content-Type": "application/json", "User-Agent": "fedprompt"}, method="POST"
        )
        for attempt in range(ATTEMPTS):
            try:
                with self._open(request, timeout=PATIENCE):
                    return  # its answer is not read
            except OSError as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or attempt + 1 == ATTEMPTS:
                    raise
                time.sleep(PAUSE)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A notice goes to the address that a person wrote, and nowhere else."""

    def redirect_request(self, *arguments: Any, **settings: Any) -> None:
        return None


class _Brief(http.client.HTTPConnection):
    """A connection that ends after its time, also while something still comes."""

    def connect(self) -> None:
        super().connect()
        timer = threading.Timer(2 * PATIENCE, _end, [self.sock])
        timer.daemon = True
        timer.start()


class _BriefTls(_Brief, http.client.HTTPSConnection):
    """The same with TLS."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Brief, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_BriefTls, req)


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
