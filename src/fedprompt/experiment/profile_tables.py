"""A profile as JSON beside the run file, and as tables. It describes one process, so it is not part of the run file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from fedprompt.experiment.profiling import BACKWARD, BETWEEN, FRAMEWORK, GRADIENTS, TOWERS, Profile, Round
from fedprompt.io.files import write_atomically

FILE, TRACE = "profile.json", "profile-trace.json"
MOST_ROWS = 12  # rounds in the table; the file has all
_PHASES = ("sample", "train", "guard", "aggregate", "evaluate", "commit", BETWEEN)
_SHARES = {
    "frozen backbone": {*TOWERS, *(tower + BACKWARD for tower in TOWERS)},
    "method": {"method", GRADIENTS},
    "images and features": {"features", "decode"},
}  # places by purpose; all others are the framework's


def as_json(profile: Profile) -> dict[str, Any]:
    """All measurements. Totals and shares leave out the round with the operator profiler, if there is another."""
    rounds = steady(profile)
    total = sum(each.seconds for each in rounds)
    return {
        "seconds": total,
        "rounds_counted": [each.number for each in rounds],
        "shares": {name: seconds / total if total else 0.0 for name, seconds in shares(rounds).items()},
        "phases": _sums(rounds, lambda phase, place: phase),
        "places": _sums(rounds, lambda phase, place: place),
        "per_client": per_client(rounds),
        "rounds": [_round(each) for each in profile.rounds],
        "operators": {
            "round": next((each.number for each in profile.rounds if each.watched), None),
            "longest": [
                {"name": each.name, "calls": each.calls, "seconds": each.seconds} for each in profile.operators
            ],
        },
    }


def save(profile: Profile, directory: Path) -> Path:
    """Write it beside the run file."""
    path = directory / FILE
    write_atomically(path, json.dumps(as_json(profile), indent=2).encode())
    return path


def steady(profile: Profile) -> list[Round]:
    """The rounds with valid times."""
    return [each for each in profile.rounds if not each.watched] or profile.rounds


def shares(rounds: Iterable[Round]) -> dict[str, float]:
    """Seconds in the backbone, in the method, in images and features, and in everything else."""
    found = dict.fromkeys([*_SHARES, FRAMEWORK], 0.0)
    for each in rounds:
        for (_, place), spent in each.spent.items():
            found[next((name for name, places in _SHARES.items() if place in places), FRAMEWORK)] += spent.seconds
    return found


def per_client(rounds: Iterable[Round]) -> dict[str, float]:
    """Seconds a client takes on average in each phase clients work in."""
    seconds, clients = {"train": 0.0, "evaluate": 0.0}, {"train": 0, "evaluate": 0}
    for each in rounds:
        for phase in seconds:
            seconds[phase] += sum(spent.seconds for (name, _), spent in each.spent.items() if name == phase)
            clients[phase] += each.clients.get(phase, 0)
    return {phase: seconds[phase] / clients[phase] for phase in seconds if clients[phase]}


def _sums(rounds: Iterable[Round], key: Callable[[str, str], str]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for each in rounds:
        for (phase, place), spent in each.spent.items():
            entry = found.setdefault(key(phase, place), {"seconds": 0.0, "calls": 0})
            entry["seconds"] += spent.seconds
            entry["calls"] += spent.calls
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def _round(each: Round) -> dict[str, Any]:
    phases: dict[str, dict[str, float]] = {}
    for (phase, place), spent in each.spent.items():
        phases.setdefault(phase, {})[place] = spent.seconds
    clients = {f"clients_{phase}": count for phase, count in each.clients.items()}
    return {"round": each.number, "seconds": each.seconds, "watched": each.watched, **clients, "phases": phases}


def tables(profile: Profile) -> list[Table]:
    """Where the time goes, round by round, and the operators that took longest."""
    rounds = steady(profile)
    if not rounds:
        return []
    return [_places(rounds), _rounds(profile.rounds), *([_operators(profile)] if profile.operators else [])]


def _places(rounds: list[Round]) -> Table:
    total = sum(each.seconds for each in rounds)
    phases, places = _sums(rounds, lambda phase, place: phase), _sums(rounds, lambda phase, place: place)
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares(rounds).items())
    each = ", ".join(f"{phase} {1000 * seconds:.1f} ms" for phase, seconds in per_client(rounds).items())
    table = Table(title=f"{total:.2f} s in {len(rounds)} rounds: {parts}", caption=f"a client takes: {each}")
    table.add_column("milliseconds in")
    shown = [phase for phase in _PHASES if phase in phases] + [phase for phase in phases if phase not in _PHASES]
    for name in (*shown, "all", "share", "calls"):
        table.add_column(name, justify="right")
    for place, entry in places.items():
        own = {
            phase: sum(each.spent[phase, place].seconds for each in rounds if (phase, place) in each.spent)
            for phase in shown
        }
        figures = [_milliseconds(own[phase]) for phase in shown]
        figures += [_milliseconds(entry["seconds"]), f"{entry['seconds'] / total:.1%}", f"{entry['calls']:.0f}"]
        table.add_row(place, *figures)
    sums = [_milliseconds(phases[phase]["seconds"]) for phase in shown]
    table.add_row("all", *sums, _milliseconds(total), "100.0%", "", style="bold")
    return table


def _rounds(rounds: list[Round]) -> Table:
    table = Table(title="round by round, in milliseconds")
    for name in ("round", "clients", *_PHASES, "all"):
        table.add_column(name, justify="right")
    for each in rounds[:MOST_ROWS]:
        phases = {
            phase: sum(spent.seconds for (name, _), spent in each.spent.items() if name == phase) for phase in _PHASES
        }
        number = f"{each.number} (watched)" if each.watched else str(each.number)
        figures = [_milliseconds(seconds) for seconds in (*phases.values(), each.seconds)]
        table.add_row(number, str(each.clients.get("train", 0)), *figures)
    if len(rounds) > MOST_ROWS:
        table.caption = f"and {len(rounds) - MOST_ROWS} more in {FILE}"
    return table


def _operators(profile: Profile) -> Table:
    number = next(each.number for each in profile.rounds if each.watched)
    table = Table(title=f"operators that took longest in round {number}")
    for name, justify in (("operator", "left"), ("calls", "right"), ("milliseconds", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for each in profile.operators:
        table.add_row(each.name, str(each.calls), _milliseconds(each.seconds))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
