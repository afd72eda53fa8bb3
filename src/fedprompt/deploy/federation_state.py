"""How a federation stands at one moment: its sites, its latest run and its certificates, as plain values.

Metrics, log, notices and dashboard all show these. Nothing here holds a name of a class, a file or a patient: sites have the
names of their keys, refusals the names of rules.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprompt.deploy import expiry
from fedprompt.deploy.folders import ServerFolder
from fedprompt.errors import FedpromptError
from fedprompt.runs.attendance import ABSENT
from fedprompt.runs.run import Run
from fedprompt.runs.store import LATE, REFUSED, UNTESTED
from fedprompt.runs.tables import FILE

if TYPE_CHECKING:
    from fedprompt.engines.flower.node_registry import Node


@dataclass(frozen=True)
class Incident:
    """Something that happened to one client in one round of a run."""

    round: int
    site: str
    kind: str
    """absent, refused, untested or late."""
    rule: str
    text: str


@dataclass(frozen=True)
class RunState:
    """A run as its file tells it."""

    name: str
    sites: tuple[str, ...] = ()
    round: int = 0
    """The last committed round."""
    rounds: int = 0
    """Of the config."""
    finished: bool = False
    changed: float = 0.0
    """When the file last changed, in seconds since 1970."""
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, all rounds together."""
    last_seconds: dict[str, float] = field(default_factory=dict)
    """Of the last round."""
    epsilon: float | None = None
    most_epsilon: float | None = None
    incidents: tuple[Incident, ...] = ()
    last_round_of: dict[str, int] = field(default_factory=dict)
    """The last round in which the update of a site counted."""
    figures: dict[str, float | None] = field(default_factory=dict)
    error: str = ""
    """Why the file cannot be read."""

    def counted(self, kind: str) -> dict[str, int]:
        """Incidents of a kind by rule."""
        return dict(sorted(Counter(each.rule for each in self.incidents if each.kind == kind).items()))


@dataclass(frozen=True)
class SiteState:
    """A site as the server sees it."""

    name: str
    status: str
    """registered (never connected), online or offline."""
    since: str
    """When this status began, as ISO 8601 in UTC."""

    @property
    def connected(self) -> bool:
        return self.status == "online"


@dataclass(frozen=True)
class FederationState:
    """All of it."""

    sites: tuple[SiteState, ...]
    run: RunState | None
    certificates: tuple[expiry.Term, ...]


class Observed:
    """Reads the state again and again; a run file is only read when it has changed."""

    def __init__(self, folder: ServerFolder) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[tuple[float, ...], RunState]] = {}

    def state(self, nodes: Iterable[Node]) -> FederationState:
        sites = tuple(SiteState(node.name or f"node {node.id}", node.status, node.since) for node in nodes)
        return FederationState(sites, self.latest(), tuple(expiry.of_server(self._folder)))

    def latest(self) -> RunState | None:
        """The run whose file changed last."""
        files = [(_stamp(file), file) for file in self._folder.runs.glob(f"*/{FILE}")]
        found = max(files, default=None)
        if found is None or not found[0]:
            return None
        stamp, file = found
        if self._known.get(file, ((), None))[0] != stamp:
            self._known = {file: (stamp, run_state(file.parent, max(stamp)))}
        return self._known[file][1]


def run_state(directory: Path, changed: float = 0.0) -> RunState:
    """The state of one run; an unreadable file is told by its error."""
    try:
        run = Run(directory)
        try:
            return _read(run, changed)
        finally:
            run.close()
    except (FedpromptError, OSError) as error:
        return RunState(directory.name, changed=changed, error=str(error))


def _read(run: Run, changed: float) -> RunState:
    names, records, summary, config = list(run.clients), run.rounds(), run.summary(), run.config
    incidents = tuple(_incidents(run, names))
    missed = {(each.round, each.site) for each in incidents if each.kind in ("absent", "refused")}
    last: dict[str, int] = {}
    for record in records:
        for client in record.cohort:
            if 0 <= client < len(names) and (record.round, names[client]) not in missed:
                last[names[client]] = record.round
    epsilon = summary["epsilon"]
    privacy = config.privacy
    return RunState(
        name=run.name,
        sites=tuple(names),
        round=summary["rounds"],
        rounds=summary["of"],
        finished=run.finished,
        changed=changed,
        bytes_down=summary["bytes_down"],
        bytes_up=summary["bytes_up"],
        seconds=dict(summary["seconds"]),
        last_seconds=dict(records[-1].seconds) if records else {},
        epsilon=epsilon if epsilon is None or math.isfinite(epsilon) else math.inf,
        most_epsilon=None if privacy is None else privacy.max_epsilon or privacy.target_epsilon,
        incidents=incidents,
        last_round_of=last,
        figures={name: summary.get(name) for name in ("average", "worst")},
    )


def _incidents(run: Run, names: Sequence[str]) -> Iterable[Incident]:
    for round, client, kind, detail in run.reader.events():
        if client is None or not 0 <= client < len(names):
            continue
        if kind == REFUSED:
            values = _mapping(detail)
            rule, text = str(values.get("rule", "")), str(values.get("value", ""))
            yield Incident(round, names[client], "absent" if rule in ABSENT else "refused", rule, text)
        elif kind == UNTESTED:
            rule, _, text = detail.partition(": ")
            yield Incident(round, names[client], "untested", rule, text)
        elif kind == LATE:
            yield Incident(round, names[client], "late", LATE, detail)


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _stamp(file: Path) -> tuple[float, ...]:
    """When the parts of a run file last changed; empty if it is gone."""
    found = []
    for each in (file, file.with_name(f"{file.name}-wal")):
        try:
            found.append(each.stat().st_mtime)
        except OSError:
            continue
    return (max(found), *found) if found else ()
