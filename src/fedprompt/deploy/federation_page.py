"""What the dashboard's page of a federation shows, as plain values; the page asks every second or so."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from fedprompt.dashboard.discovery import id_of
from fedprompt.deploy import expiry
from fedprompt.deploy.federation_state import Observed, RunState, SiteState
from fedprompt.deploy.folders import ServerFolder
from fedprompt.deploy.membership import nodes
from fedprompt.errors import FedpromptError
from fedprompt.io.safe_text import safe_line

FRESH = 3.0  # seconds for which an answer of the server is repeated
SHOWN = 60  # incidents
LONGEST = 400  # characters of a text


class FederationPage:
    """The state of a federation, also while its server does not run."""

    def __init__(self, folder: ServerFolder) -> None:
        self._folder, self._observed = folder, Observed(folder)
        self._lock = threading.Lock()
        self._sites: tuple[SiteState, ...] = ()
        self._problem, self._asked = "", -math.inf

    def answer(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._asked > FRESH:
                self._ask()
            run = self._observed.latest()
            sites = self._sites
        terms = expiry.of_server(self._folder)
        return {
            "now": time.time(),
            "address": str(self._folder.address),
            "answers": not self._problem,
            "problem": self._problem or (safe_line(run.error)[:LONGEST] if run else ""),
            "sites": [_site(site, run) for site in sites],
            "run": None if run is None else self._run(run),
            "certificates": [
                {"kind": term.kind, "days": term.days, "soon": term.until - expiry.now() < expiry.NOTICE}
                for term in terms
            ],
            "incidents": [
                {
                    "round": each.round,
                    "site": each.site,
                    "kind": each.kind,
                    "rule": safe_line(each.rule)[:LONGEST],
                    "text": safe_line(each.text)[:LONGEST],
                }
                for each in sorted(run.incidents if run else (), key=lambda each: -each.round)[:SHOWN]
            ],
        }

    def _ask(self) -> None:
        try:
            self._sites = tuple(
                SiteState(node.name or f"node {node.id}", node.status, node.since) for node in nodes(self._folder)
            )
            self._problem = ""
        except FedpromptError as error:
            known = {site.name: site.since for site in self._sites}
            names = sorted(self._folder.public_keys()) if self._folder.secure else list(known)
            self._sites = tuple(SiteState(name, "unknown", known.get(name, "")) for name in names)
            self._problem = safe_line(str(error))[:LONGEST]
        self._asked = time.monotonic()

    def _run(self, run: RunState) -> dict[str, Any]:
        refused = run.counted("refused")
        left = None if run.most_epsilon is None or run.epsilon is None else run.most_epsilon - run.epsilon
        finite = run.epsilon is not None and math.isfinite(run.epsilon)
        return {
            "id": id_of(self._folder.runs / run.name),
            "name": safe_line(run.name),
            "round": run.round,
            "rounds": run.rounds,
            "finished": run.finished,
            "average": run.figures.get("average"),
            "worst": run.figures.get("worst"),
            "last_seconds": sum(run.last_seconds.values()),
            "refused": sum(refused.values()),
            "refused_by": refused,
            "missed": sum(run.counted("absent").values()),
            "late": sum(run.counted("late").values()),
            "epsilon": run.epsilon if finite else None,
            "epsilon_left": left if finite else None,
        }


def _site(site: SiteState, run: RunState | None) -> dict[str, Any]:
    own = [each for each in run.incidents if each.site == site.name] if run else []
    refused: dict[str, int] = {}
    for each in own:
        if each.kind == "refused":
            refused[safe_line(each.rule)] = refused.get(safe_line(each.rule), 0) + 1
    return {
        "name": safe_line(site.name),
        "status": site.status,
        "since": site.since,
        "last_round": run.last_round_of.get(site.name) if run else None,
        "missed": sum(each.kind == "absent" for each in own),
        "late": sum(each.kind == "late" for each in own),
        "refused": refused,
    }
