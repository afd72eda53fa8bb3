"""Methods against one of them: the same seeds, clients and images, with an interval and a word.

Each seed has its own clients, so clients are drawn with replacement within seeds. Seeds that test the same clients on the same
images do not repeat the experiment: the differences of each client are averaged over them first. Where there are too few
clients for an interval, the images of each client are drawn instead, if the run files say which ones are right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedprompt.data.partition.manifest import INDEX_LISTS
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.metrics.accuracy import unpack_hits
from fedprompt.metrics.significance import Interval, Stratum, bootstrap, enough, sign_test
from fedprompt.runs.families import Family
from fedprompt.runs.run import Run

SEED = 0  # of the draws: the same runs give the same interval
UNDECIDED = "too few"  # in place of ahead, level or behind

Drawn = Literal["clients", "images"]
Rights = Mapping[str, "Right"]  # by the identity of a client


@dataclass(frozen=True)
class Right:
    """The share of right answers of one client: the mean over the rounds that the figures of its run are of."""

    share: float
    images: np.ndarray | None
    """The same of every image; None where the run file does not say."""


@dataclass(frozen=True)
class Paired:
    """One method less another."""

    label: str
    against: str
    estimate: float
    """Of the Average, over the clients that both have."""
    interval: Interval | None
    """None where there are too few clients and images."""
    drawn: Drawn
    """What was drawn for the interval: clients or images."""
    clients: int
    """Pairs of clients over all seeds."""
    gained: int | None
    """Images, over all seeds, that this method answers better; None where pairs are clients."""
    lost: int | None
    ahead: int
    """Seeds with a higher Average."""
    behind: int
    seeds: int
    left_out: int
    """Clients that only one of both has."""

    @property
    def verdict(self) -> str:
        return UNDECIDED if self.interval is None else self.interval.verdict

    @property
    def p(self) -> float:
        """Of the sign test over seeds."""
        return sign_test(self.ahead, self.behind)


def reference(groups: Sequence[Family], wanted: str) -> Family | None:
    """The row that is named by its label, or by its method if only one row has it; None if there is none."""
    names = [(family.label, family.title, family.runs[0].config.label) for family in groups]
    for column in zip(*names, strict=True):
        found = [place for place, name in enumerate(column) if name.casefold() == wanted.casefold()]
        if len(found) == 1:
            return groups[found[0]]
        if found:
            rule = f"name one row, such as {' or '.join(repr(names[place][1]) for place in found)}"
            raise ConfigError(broken("--against", rule, wanted))
    return None


def require_known(tasks: Sequence[Sequence[Family]], wanted: str) -> None:
    """Raise unless some task has the row."""
    if all(reference(groups, wanted) is None for groups in tasks):
        labels = dict.fromkeys(family.title for groups in tasks for family in groups)
        raise ConfigError(broken("--against", f"be one of {', '.join(labels)}", wanted))


def paired(groups: Sequence[Family], wanted: str) -> list[Paired]:
    """All other rows of one task against the one that is named; empty if the task has none."""
    base = reference(groups, wanted)
    if base is None:
        return []
    known = _by_seed(base)
    found = [pair(each.title, base.title, _by_seed(each), known) for each in groups if each is not base]
    return [each for each in found if each is not None]


def _by_seed(family: Family) -> dict[int, Rights]:
    return {run.config.seed: rights(run) for run in family.runs}


def pair(label: str, against: str, own: Mapping[int, Rights], theirs: Mapping[int, Rights]) -> Paired | None:
    """One row against another, by seed; None if no seed of both has a client of both."""
    by_seed: dict[int, dict[str, Right]] = {}
    left_out = 0
    for seed, ours in own.items():
        other = theirs.get(seed, {})
        pairs = {client: _less(ours[client], other[client]) for client in ours if client in other}
        if pairs:
            by_seed[seed] = pairs
            left_out += len(ours) + len(other) - 2 * len(pairs)
    if not by_seed:
        return None
    averages = [float(np.mean([each.share for each in pairs.values()])) for pairs in by_seed.values()]
    images = [each.images for pairs in by_seed.values() for each in pairs.values()]
    known_images = [each for each in images if each is not None]
    paired_by_image = len(known_images) == len(images)
    interval, drawn = _interval(list(by_seed.values()), paired_by_image)
    return Paired(
        label=label,
        against=against,
        estimate=float(np.mean(averages)),
        interval=interval,
        drawn=drawn,
        clients=len(images),
        gained=sum(int((each > 0).sum()) for each in known_images) if paired_by_image else None,
        lost=sum(int((each < 0).sum()) for each in known_images) if paired_by_image else None,
        ahead=sum(average > 0 for average in averages),
        behind=sum(average < 0 for average in averages),
        seeds=len(averages),
        left_out=left_out,
    )


def _less(one: Right, other: Right) -> Right:
    fits = one.images is not None and other.images is not None and len(one.images) == len(other.images)
    images = one.images - other.images if fits else None  # type: ignore[operator]
    return Right(one.share - other.share, images)


def _interval(seeds: Sequence[Mapping[str, Right]], paired_by_image: bool) -> tuple[Interval | None, Drawn]:
    """Over clients where there are enough of them, else over images; and which of both."""
    alike: dict[frozenset[str], list[Mapping[str, Right]]] = {}
    for pairs in seeds:
        alike.setdefault(frozenset(pairs), []).append(pairs)
    clients, images = [], []
    for names, members in alike.items():
        weight = len(members) / len(seeds)
        ordered = sorted(names)
        clients.append(Stratum(np.array([np.mean([each[name].share for each in members]) for name in ordered]), weight))
        if paired_by_image:
            for name in ordered:
                known = [each[name].images for each in members]
                means = np.mean([each for each in known if each is not None], axis=0)
                images.append(Stratum(means, weight / len(ordered)))
    if not enough(clients) and enough(images):
        return bootstrap(images, np.random.default_rng(SEED)), "images"
    return bootstrap(clients, np.random.default_rng(SEED)) if enough(clients) else None, "clients"


def rights(run: Run) -> Rights:
    """What the clients of a run answer right, in the rounds that its figures are of, by the identity of each client."""
    if run.final_test is not None:
        rounds = [run.final_results()]
    else:
        evaluated = [record.round for record in run.rounds() if record.summary is not None]
        rounds = [run.evaluations(round) for round in evaluated[-max(1, run.config.federation.last_rounds) :]]
    names = _identities(run)
    found: dict[str, Right] = {}
    for client in sorted({client for results in rounds for client in results}):
        results = [each[client] for each in rounds if client in each]
        share = float(np.mean([result["correct"] / result["samples"] for result in results]))
        found[names[client]] = Right(share, _images(run, results))
    return found


def _images(run: Run, results: Sequence[Mapping[str, object]]) -> np.ndarray | None:
    """The mean over rounds of what is right; None where a round does not say or had other images."""
    if any("hits" not in result for result in results) or len({result["samples"] for result in results}) > 1:
        return None
    try:
        hits = [unpack_hits(str(result["hits"]), int(str(result["samples"]))) for result in results]
    except ValueError as error:
        raise RunError(f"run: {str(run.directory)!r} is damaged: the hits of an evaluation {error}") from error
    return np.asarray(np.mean(hits, axis=0))


def _identities(run: Run) -> Sequence[str]:
    """By client number: its images, or its name where the run file has no lists of images."""
    manifest = run.reader.fact("manifest")
    if run.reader.fact(INDEX_LISTS) is None and not (isinstance(manifest, dict) and "clients" in manifest):
        return run.clients
    tested = run.config.federation.evaluate_on == "test" or run.final_test is not None
    clients = run.manifest().clients
    lists = clients.test if tested or clients.validation is None else clients.validation
    names: dict[str, None] = {}  # in order
    for place, images in enumerate(lists):
        name = hashlib.sha256(images.astype("<i8").tobytes()).hexdigest()[:32]
        names[name if name not in names else f"{name} {place}"] = None
    return list(names)
