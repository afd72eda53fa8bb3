"""Data of run files besides accuracies: time by phase, refused updates, privacy spent."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from fedprompt.report.comparison_table import NOTHING
from fedprompt.runs.attendance import ABSENT
from fedprompt.runs.families import Family
from fedprompt.runs.run import Run
from fedprompt.runs.store import PRIVACY, REFUSED


def phase_seconds(family: Family) -> dict[str, float]:
    """Seconds of a whole run by phase, mean over seeds."""
    each = [run.summary()["seconds"] for run in family.runs]
    phases = dict.fromkeys(phase for seconds in each for phase in seconds)
    return {phase: sum(seconds.get(phase, 0.0) for seconds in each) / len(each) for phase in phases}


@dataclass(frozen=True)
class Refusal:
    """An update that the guard refused."""

    round: int
    client: int | None
    rule: str
    value: str
    """The reason."""


def refusals(run: Run) -> list[Refusal]:
    """Updates that broke a rule, in the order in which they came."""
    return [each for each in unused(run) if each.rule not in ABSENT]


def absences(run: Run) -> list[Refusal]:
    """Updates that did not come, or not in time."""
    return [each for each in unused(run) if each.rule in ABSENT]


def unused(run: Run) -> list[Refusal]:
    """Both, in the order in which they happened."""
    found = [(round, client) for round, client, kind, _ in run.reader.events() if kind == REFUSED]
    details = run.reader.details(REFUSED)  # the same events, read strictly
    return [
        Refusal(round, client, str(detail.get("rule")), _plain(detail.get("value")))
        for (round, client), detail in zip(found, details, strict=True)
    ]


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def client_name(run: Run, client: int | None) -> str:
    if client is None:
        return NOTHING
    return run.clients[client] if 0 <= client < len(run.clients) else f"unknown client ({client})"


@dataclass(frozen=True)
class Spent:
    """The privacy that a run had spent after every round."""

    epsilons: dict[int, float]
    """By round; infinite without noise."""
    noise: float | None
    delta: float | None
    clip: float | None
    """Of the last round."""

    @property
    def total(self) -> float:
        return list(self.epsilons.values())[-1]


def privacy_spent(run: Run) -> Spent | None:
    """None without privacy, or before anything was spent."""
    rounds = [round for round, _, kind, _ in run.reader.events() if kind == PRIVACY]
    details = run.reader.details(PRIVACY)
    if not details:
        return None
    epsilons = {
        round: math.inf if (value := _number(detail.get("epsilon"))) is None else value
        for round, detail in zip(rounds, details, strict=True)
    }
    clips = [clip for detail in details if (clip := _number(detail.get("clip"))) is not None]
    last = details[-1]
    return Spent(epsilons, _number(last.get("noise")), _number(last.get("delta")), clips[-1] if clips else None)


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None
