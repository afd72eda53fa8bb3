"""The answers for the page as plain values: the list, one run, its clients, its settings, a comparison."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from fedprompt.config import Config
from fedprompt.dashboard.class_view import class_view
from fedprompt.dashboard.discovery import printable
from fedprompt.dashboard.downsampling import clip, ends_and_middle, evenly, kept, plain, stride
from fedprompt.dashboard.follower import Follower
from fedprompt.dashboard.history import History
from fedprompt.dashboard.run_list import Answers, Catalogue
from fedprompt.dashboard.run_reader import LiveRun
from fedprompt.errors import FedpromptError
from fedprompt.report import comparison_table
from fedprompt.runs.families import Family, families

MOST_COMPARED = 40  # runs
HEAT_ROUNDS, HEAT_CLIENTS = 60, 48
LAST_ROUNDS = 12
NAME = 120  # characters of a name

Query = Mapping[str, str]


class Missing(Exception):
    """There is no such run."""


class Unusable(Exception):
    """A request that cannot be answered, and why."""


class Views:
    """The requests of the page. Each method takes the fields of its query."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._answers = Answers()
        self._entries: dict[str, tuple[int, dict[str, Any]]] = {}  # each with the number of its last change
        self._stamp = 0
        self._lock = threading.Lock()

    def runs(self, query: Query) -> dict[str, Any]:
        """Every run in a line; with `after` and `session` of an earlier answer, only those that have changed."""
        after = _whole(query, "after", 0) if query.get("session") == self.catalogue.session else 0
        followers, waiting = self.catalogue.refreshed()
        entries = {each.found.id: self._entry(each) for each in followers if each.read}
        with self._lock:
            for id, entry in entries.items():
                if id not in self._entries or self._entries[id][1] != entry:
                    self._stamp += 1
                    self._entries[id] = (self._stamp, entry)
            self._entries = {id: self._entries[id] for id in entries}
            known, stamp = self._entries, self._stamp
        return {
            "session": self.catalogue.session,
            "stamp": stamp,
            "now": time.time(),
            "folders": [printable(str(folder)) for folder in self.catalogue.folders],
            "waiting": waiting,
            "truncated": self.catalogue.truncated,
            "present": list(known),
            "changed": [entry for number, entry in known.values() if number > after],
        }

    def run(self, query: Query) -> dict[str, Any]:
        """One run: its figures, and the points of its curves after the round `after`, if the sampling step is unchanged."""
        follower = self._follower(query)
        with follower.lock:
            history, config = follower.history, follower.config
            every = [stride(len(history.rounds)), stride(len(history.evaluated)), stride(len(history.spent))]
            version = "-".join(map(str, (self.catalogue.session, follower.generation, *every)))
            after = _whole(query, "after", -1) if query.get("version") == version else -1
            return {
                "now": time.time(),
                "version": version,
                "after": after,
                "entry": self._entry(follower),
                "figures": _figures(history, config.federation.last_rounds if config else 1),
                "rounds_on": config.federation.evaluate_on if config else "test",
                "tested": None if history.final_test is None else [plain(each) for each in history.final_test],
                "curves": _curves(history, after, every),
                "every": every[:2],
                "phases": history.phases,
                "domains": {clip(name, NAME): value for name, value in history.domains.items()},
                "events": _events(history),
                "last": _last_rounds(history),
                "privacy": None if config is None or config.privacy is None else config.privacy.model_dump(mode="json"),
            }

    def clients(self, query: Query) -> dict[str, Any]:
        """Accuracies of the clients in the last evaluated round, and of some clients in some of the rounds."""
        follower = self._follower(query)
        with follower.lock:
            evaluated, key = list(follower.history.evaluated), (follower.generation, len(follower.history.evaluated))
            if follower.reason is not None:
                raise Unusable(follower.reason)
        return self._answers.get(("clients", follower.found.id), key, lambda: _clients(follower, evaluated))

    def classes(self, query: Query) -> dict[str, Any]:
        """Classification metrics of the last test, with the confusion matrix."""
        follower = self._follower(query)
        with follower.lock:
            key = (follower.generation, len(follower.history.evaluated), follower.history.final_test is None)
            if follower.reason is not None:
                raise Unusable(follower.reason)

        def read() -> dict[str, Any]:
            with follower.opened() as run:
                return class_view(run)

        return self._answers.get(("classes", follower.found.id), key, read)

    def settings(self, query: Query) -> dict[str, Any]:
        """The config of a run, and the versions that made it."""
        follower = self._follower(query)
        return self._answers.get(("settings", follower.found.id), follower.generation, lambda: _settings(follower))

    def compare(self, query: Query) -> dict[str, Any]:
        """The table of `fedprompt compare`, and a curve for each of its rows."""
        ids = list(dict.fromkeys(query.get("ids", "").split(",")))
        if len(ids) > MOST_COMPARED:
            raise Unusable(f"a comparison has at most {MOST_COMPARED} runs, got {len(ids)}")
        followers = [each for id in ids if (each := self.catalogue.get(id)) is not None]
        key = tuple((each.generation, each.signature) for each in followers)
        answer = self._answers.get(("compare", *ids), key, lambda: _compared(followers))
        return {
            **answer,
            "now": time.time(),
            "entries": [self._entry(each) for each in followers],
            "missing": len(ids) - len(followers),
        }

    def _follower(self, query: Query) -> Follower:
        follower = self.catalogue.get(query.get("id", ""))
        if follower is None:
            raise Missing("there is no such run; it may have been moved or deleted")
        return follower

    def _entry(self, follower: Follower) -> dict[str, Any]:
        with follower.lock:
            history, config, found = follower.history, follower.config, follower.found
            state, by = follower.status(self.catalogue.locks())
            left = (config.federation.rounds - history.done) * history.pace if config and history.pace else None
            return {
                "id": found.id,
                "name": clip(found.name, 2 * NAME),
                "folder": clip(found.folder, 2 * NAME),
                "status": state,
                "by": by,
                "reason": None if follower.reason is None else clip(printable(follower.reason), 600),
                "method": config.label if config else None,
                "seed": config.seed if config else None,
                "data": _short(config.data.source) if config else None,
                "backbone": _short(config.backbone.name) if config else None,
                "rounds": history.done,
                "of": config.federation.rounds if config else None,
                **_counted(history),
                "images": _images(history, config),
                "changed": follower.signature.changed if follower.signature else None,
                "left": left if state == "running" else None,
            }


def _counted(history: History) -> dict[str, Any]:
    """Average and Worst Local of the final test if there was one, else of the latest evaluated round."""
    latest = (history.average[-1], history.worst[-1]) if history.average else (None, None)
    average, worst = latest if history.final_test is None else history.final_test[1:]
    return {"average": plain(average), "worst": plain(worst)}


def _images(history: History, config: Config | None) -> str | None:
    """Which images these two are of."""
    if config is None:
        return None
    return "test" if history.final_test is not None else config.federation.evaluate_on


def _short(source: str) -> str:
    """A name, or the end of a path."""
    return clip(printable(source.rstrip("/").rsplit("/", 1)[-1] if source.startswith(("/", ".")) else source), NAME)


def _whole(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.removeprefix("-").isdecimal() or len(text) > 18 or not text.isascii():
        raise Unusable(f"{name} must be a whole number")
    return int(text)


def _figures(history: History, last: int) -> dict[str, Any]:
    """`average` and `worst` are final, or of the latest evaluated round; `mean` is that of the last evaluated rounds."""
    counted = history.average[-max(1, last) :]
    best = max(range(len(history.average)), key=lambda place: history.average[place], default=None)
    trained = [loss for loss in history.losses[-1:] if loss == loss]
    return {
        "round": history.done,
        "average": plain(history.average[-1]) if history.average else None,
        "worst": plain(history.worst[-1]) if history.worst else None,
        "mean": plain(sum(counted) / len(counted)) if counted else None,
        "mean_of": len(counted),
        "evaluated": history.evaluated[-1] if history.evaluated else None,
        "best": None if best is None else plain(history.average[best]),
        "best_round": None if best is None else history.evaluated[best],
        "loss": plain(trained[0]) if trained else None,
        "cohort": history.cohort,
        "bytes_up": history.bytes_up,
        "bytes_down": history.bytes_down,
        "seconds": plain(sum(history.phases.values())),
        "pace": plain(history.pace),
        "epsilon": plain(history.spent[-1]) if history.spent else None,
        "private": bool(history.spent),
        "refused": dict(history.refused.most_common(20)),
        "absent": history.absent,
    }


def _curves(history: History, after: int, every: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Points (round, value, ...) that follow a round; they replace the page's points after `behind`."""

    def points(rounds: Sequence[int], step: int, *columns: Sequence[float]) -> dict[str, Any]:
        settled = (
            (_behind(rounds, after) - 1) // step * step
        )  # the last point sent may have been included only because it was last
        places = kept(len(rounds), step, settled)
        return {
            "behind": rounds[settled] if settled >= 0 else -1,
            "points": [[rounds[place], *(plain(column[place]) for column in columns)] for place in places],
        }

    return {
        "loss": points(history.rounds, every[0], history.losses, history.seconds),
        "accuracy": points(history.evaluated, every[1], history.average, history.worst),
        "epsilon": points(history.spent_rounds, every[2], history.spent),
    }


def _behind(rounds: Sequence[int], after: int) -> int:
    """The first place whose round is later."""
    low, high = 0, len(rounds)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if rounds[middle] <= after else (low, middle)
    return low


def _events(history: History) -> dict[str, Any]:
    latest = [
        {"round": each.round, "client": each.client, "kind": clip(each.kind, NAME), "detail": printable(each.detail)}
        for each in reversed(history.latest)
    ]
    return {"counts": dict(history.kinds.most_common(20)), "latest": latest, "number": history.last_event}


def _last_rounds(history: History) -> list[dict[str, Any]]:
    first = max(0, len(history.rounds) - LAST_ROUNDS)
    tested = {
        round: (history.average[place], history.worst[place])
        for place, round in list(enumerate(history.evaluated))[-LAST_ROUNDS:]
    }
    found = []
    for place in range(first, len(history.rounds)):
        average, worst = tested.get(history.rounds[place], (None, None))
        sent = history.sent[place] - (history.sent[place - 1] if place else 0)
        row = {"loss": history.losses[place], "average": average, "worst": worst, "bytes": sent}
        found.append({"round": history.rounds[place], "seconds": history.seconds[place], **row})
    return [plain(row) for row in reversed(found)]


def _settings(follower: Follower) -> dict[str, Any]:
    with follower.opened() as run:
        fact = run.reader.fact
        return {
            "config": run.config.model_dump(mode="json"),
            "versions": fact("versions") or {},
            "facts": {
                "clients": len(run.clients),
                "classes": len(fact("classes") or []),
                "domains": len(fact("domains") or []),
                "backbone digest": fact("backbone"),
                "config hash": run.config.digest(),
            },
        }


def _clients(follower: Follower, evaluated: Sequence[int]) -> dict[str, Any]:
    if not evaluated:
        return {"count": 0, "rounds": [], "clients": [], "accuracy": [], "quantiles": []}
    rounds = evenly(evaluated, HEAT_ROUNDS)
    with follower.opened() as run:
        last, names = run.reader.accuracies(rounds[-1]), run.clients
        ranked = sorted(last, key=lambda client: (last[client], client))
        shown = ends_and_middle(ranked, HEAT_CLIENTS)
        table = [run.reader.accuracies(round, shown) if shown else {} for round in rounds]
    return {
        "count": len(ranked),
        "rounds": rounds,
        "evaluations": len(evaluated),
        "clients": [clip(names[client], NAME) if 0 <= client < len(names) else f"client {client}" for client in shown],
        "accuracy": [[found.get(client) for found in table] for client in shown],
        "quantiles": [last[client] for client in evenly(ranked, 101)],
    }


def _compared(followers: Sequence[Follower]) -> dict[str, Any]:
    left_out: list[dict[str, str]] = []
    with ExitStack() as stack:
        opened: dict[str, LiveRun] = {}
        for each in sorted(followers, key=lambda follower: follower.found.id):  # the same order for all: no deadlock
            try:
                run = stack.enter_context(each.opened())
                comparison_table.comparison([run])  # errors of this run appear here, before it is combined with others
                opened[each.found.id] = run
            except (FedpromptError, OSError) as error:
                left_out.append({"name": each.found.name, "reason": clip(printable(str(error)), 600)})
        groups = families([opened[each.found.id] for each in followers if each.found.id in opened])
        rows = [comparison_table.row_of(group) for group in groups]
    by_directory = {each.found.path: each for each in followers}
    shown = comparison_table.columns(rows)
    return {
        "header": comparison_table.header(shown),
        "cells": [[[clip(cell.text, 300), cell.bold] for cell in line] for line in comparison_table.cells(rows, shown)],
        "notes": [clip(note, 2000) for note in comparison_table.notes(rows)],
        "explanations": comparison_table.explanations(rows) if rows else [],
        "curves": [_family_curve(group, [by_directory[run.directory] for run in group.runs]) for group in groups],
        "left_out": left_out,
    }


def _family_curve(group: Family, followers: Sequence[Follower]) -> dict[str, Any]:
    """Mean, lowest and highest over the seeds, at the rounds that all of them have evaluated."""
    seeds = []
    for each in followers:
        with each.lock:
            own = each.history
            columns = zip(own.evaluated, own.average, own.worst, own.evaluated_sent, strict=True)
            seeds.append({round: values for round, *values in columns if round <= group.rounds})
    rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
    points = []
    for place in kept(len(rounds), stride(len(rounds))):
        averages, worsts, sent = zip(*(seed[rounds[place]] for seed in seeds), strict=True)
        mean, worst = sum(averages) / len(averages), sum(worsts) / len(worsts)
        points.append(plain([rounds[place], mean, min(averages), max(averages), worst, sum(sent) / len(sent)]))
    return {
        "label": clip(group.title, 300)
        + (", validation images" if group.runs[0].config.federation.evaluate_on == "validation" else ""),
        "ids": [each.found.id for each in followers],
        "names": [clip(each.found.name, NAME) for each in followers],
        "seeds": [run.config.seed for run in group.runs],
        "points": points,
    }
