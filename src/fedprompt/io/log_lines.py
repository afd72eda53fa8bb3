"""The log of a server and of a node: one line a fact, on standard error, for people or as JSON.

    2026-11-19T14:50:03.120Z WARNING run=first site=hospital-a round=3 must answer within 600 s
    {"time": "2026-11-19T14:50:03.120Z", "level": "warning", "run": "first", "site": "hospital-a", "round": 3, "text": "..."}

Lines of libraries (Flower, uvicorn, warnings of Python) get the same form: `take_over` for those of this process, `Relayed` for
those of its children, which write to the same place.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from fedprompt.io.safe_text import safe_line

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

FIELDS = {"time", "level", "run", "site", "round", "text"}
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
LONGEST = 8192  # characters of a text
LIBRARIES = ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "py.warnings")
PATIENCE = 1.0  # seconds in which the last lines of a child are read

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"(?:\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\]?)(?:\s*:\s*|\s+)(.*)", re.IGNORECASE)
_OURS = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+Z (DEBUG|INFO|WARNING|ERROR) ")
_NAMES = {"warn": "warning", "critical": "error"}

_format: Format = "text"
_site: str | None = None
_stream: TextIO | None = None  # standard error, whatever it is at the moment, when absent
_lock = threading.Lock()


def configure(format: Format = "text", site: str | None = None) -> None:
    """Choose the form of all lines from now on, and the site that is named in those that name none."""
    global _format, _site
    _format, _site = format, site


def fact(
    text: str, level: Level = "info", *, run: str | None = None, site: str | None = None, round: int | None = None
) -> None:
    """Write one line."""
    line = line_of(text, level, run=run, site=site or _site, round=round)
    with _lock:
        print(line, file=_stream or sys.stderr, flush=True)


def line_of(
    text: str,
    level: Level = "info",
    *,
    run: str | None = None,
    site: str | None = None,
    round: int | None = None,
    time: datetime | None = None,
) -> str:
    """A fact as a line of the chosen form; the parts of a text of several lines are joined."""
    text = " | ".join(part.rstrip() for part in text.splitlines() if part.strip())[:LONGEST]
    now = (time or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    about: dict[str, Any] = {"run": run, "site": site, "round": round}
    if _format == "json":
        return json.dumps({"time": now, "level": level, **about, "text": text}, ensure_ascii=True)
    known = [f"{name}={_word(value)}" for name, value in about.items() if value is not None]
    return safe_line(" ".join([now, level.upper(), *known, text]))


def take_over(hidden: tuple[str, ...] = (), libraries: tuple[str, ...] = LIBRARIES) -> None:
    """Write what libraries log in this process as facts, but for lines that begin with one of some texts."""
    logging.captureWarnings(True)
    handler = _AsFacts(hidden)
    for name in libraries:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.INFO)


class _AsFacts(logging.Handler):
    """A handler of Python's logging."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        super().__init__(logging.INFO)
        self._hidden = hidden

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        if text.strip() and not text.startswith(self._hidden):
            fact(text, level_of(record.levelno))


def level_of(number: int) -> Level:
    """The level of a number of Python's logging."""
    return LEVELS[min(max(number // 10 - 1, 0), 3)]


def relayed(line: str) -> str | None:
    """A line of a child as a fact; None for an empty one. A line that is a fact already stays as it is."""
    plain = _COLOUR.sub("", line).strip()
    if not plain:
        return None
    known = _known(plain)
    if known is not None:
        return known
    found = _LEVEL.match(plain)
    level, text = (found[1].lower(), found[2]) if found else ("info", plain)
    named: Any = _NAMES.get(level, level)
    return line_of(text, named, site=_site) if text.strip() else None


def _known(line: str) -> str | None:
    """A line that has the chosen form already, made safe again: a child may print anything."""
    if _format == "text":
        return safe_line(line) if _OURS.match(line) else None
    try:
        values = json.loads(line) if line.startswith('{"time": ') else None
    except (ValueError, RecursionError):
        return None
    return json.dumps(values) if isinstance(values, dict) and values.keys() == FIELDS else None


@contextmanager
def relaying() -> Iterator[None]:
    """Within, standard output and standard error of this process and of all it starts become facts, line by line."""
    global _stream
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    reading, writing = os.pipe()
    stream = os.fdopen(os.dup(before[1]), "w", encoding="utf-8", errors="replace")

    def relay() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                made = relayed(line)
                if made is not None:
                    with _lock:
                        print(made, file=stream, flush=True)

    reader = threading.Thread(target=relay, name="log", daemon=True)
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)
    _stream = stream
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
        reader.join(PATIENCE)  # longer if a child has not ended: its lines are then lost
        _stream = None


def _word(value: object) -> str:
    text = safe_line(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text
