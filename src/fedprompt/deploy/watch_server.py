"""Watches a running federation: what has changed becomes a line of the log and, where a person wants it, a notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fedprompt.deploy.expiry import NOTICE
from fedprompt.deploy.federation_state import FederationState, Observed, RunState
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.webhook import Webhook, load_notify
from fedprompt.errors import FedpromptError
from fedprompt.io.log_lines import fact

if TYPE_CHECKING:
    from fedprompt.engines.flower.node_registry import Node

EVERY = 5.0  # seconds between two looks
FRESH = 30.0  # seconds for which a look counts as news of a server that works
NEVER = float("-inf")


@dataclass
class Watch:
    """The latest state, and what was told already."""

    observed: Observed
    nodes: Callable[[], Iterable[Node]]
    webhook: Webhook
    state: FederationState | None = None
    open: bool = False
    """Whether sites can connect; set by the server."""
    _looked: float = NEVER
    _told: set[object] = field(default_factory=set)

    @classmethod
    def of(cls, folder: ServerFolder, nodes: Callable[[], Iterable[Node]]) -> Watch:
        return cls(Observed(folder), nodes, Webhook(load_notify(folder.path)))

    @property
    def ready(self) -> bool:
        """Whether sites can connect and the server answered lately."""
        return self.open and time.monotonic() - self._looked < FRESH

    def look(self) -> None:
        """Read the state; tell what is new. The first look tells nothing about the past."""
        before, now = self.state, self.observed.state(self.nodes())
        self.state, self._looked = now, time.monotonic()
        self._certificates(now)
        if before is None:
            self._told |= {each for run in [now.run] if run for each in run.incidents}
            return
        self._sites(before, now)
        if now.run is not None:
            same = before.run if before.run is not None and before.run.name == now.run.name else None
            self._run(same or RunState(now.run.name), now.run)

    def _sites(self, before: FederationState, now: FederationState) -> None:
        was = {site.name: site for site in before.sites}
        run = None if now.run is None or now.run.finished else now.run
        for site in now.sites:
            old = was.get(site.name)
            if old is None or old.connected == site.connected:
                continue
            about: dict[str, Any] = {"site": site.name, "run": run.name if run and site.name in run.sites else None}
            if site.connected:
                fact("connected", **about)
            else:
                fact("absent: its node is no longer connected", "warning", **about)
                self.webhook.tell("absent", f"{site.name} is no longer connected", **about)

    def _run(self, before: RunState, now: RunState) -> None:
        for each in now.incidents:
            if each in self._told:
                continue
            self._told.add(each)
            said = f"{each.kind}: {each.text}" if each.rule in each.text else f"{each.kind} ({each.rule}): {each.text}"
            fact(said, "info" if each.kind == "late" else "warning", run=now.name, site=each.site, round=each.round)
            if each.kind == "refused":
                text = f"the update of {each.site} was refused in round {each.round} (rule {each.rule})"
                self.webhook.tell("refused", text, run=now.name, site=each.site, round=each.round)
            elif each.kind == "absent":
                text = f"{each.site} sent no update in round {each.round} (rule {each.rule})"
                self.webhook.tell("absent", text, run=now.name, site=each.site, round=each.round)
        if now.round > before.round:
            took = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in now.last_seconds.items())
            fact(f"round {now.round} of {now.rounds} is committed: {took}", run=now.name, round=now.round)
        if now.finished and not before.finished:
            fact("finished", run=now.name, round=now.round)
            self.webhook.tell("finished", f"run {now.name} finished after {now.round} rounds", run=now.name)
        if now.error and not before.error:
            fact(f"the run file cannot be read: {now.error}", "error", run=now.name)

    def _certificates(self, now: FederationState) -> None:
        """Told once a day; `expiry.watch` writes the log."""
        for term in now.certificates:
            left = (term.until - datetime.now(UTC)).days
            if term.until - datetime.now(UTC) < NOTICE and (term.kind, left) not in self._told:
                self._told.add((term.kind, left))
                text = f"the certificate of the {term.kind} expires on {term.until:%Y-%m-%d}, in {left} days"
                self.webhook.tell("certificate", text)


def every(seconds: float, work: Callable[[], None], name: str) -> threading.Event:
    """Do something again and again in a thread until the returned event is set. An error is told once and ends nothing."""
    stop = threading.Event()

    def loop() -> None:
        told = ""
        while not stop.is_set():
            try:
                work()
                told = ""
            except (FedpromptError, OSError) as error:
                found = f"{name}: {type(error).__name__}: {error}"
                if found != told:
                    fact(found, "warning")
                told = found
            stop.wait(seconds)

    threading.Thread(target=loop, name=name, daemon=True).start()
    return stop
