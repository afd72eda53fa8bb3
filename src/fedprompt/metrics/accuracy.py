"""Numbers of clients, rounds and runs, from counts alone.

*Average* is the unweighted mean of the clients' test accuracies, *Worst Local* their minimum. Of a run there are two of each: that of the
last evaluated round, which is *final*, and the *mean of the last* rounds. They are one if only the last round counts.
Accuracies are fractions here; tables print them in per cent.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedprompt.metrics.calibration import calibration_error
from fedprompt.metrics.one_against_rest import RANKED, Scores, ranked_together

STAYING = ("hits", "confusion", "auroc", "sensitivity", "scores")  # what a site never sends
RANKS = ("ranked", *(f"{name}_by_domain" for name in RANKED))  # groups of a summary that are not sums over clients
MOST_SCORES = 2**25  # numbers in the predictions of all clients together, a quarter of a gigabyte


@dataclass(frozen=True)
class ClientResult:
    """The counts of an evaluation of one client. Results can be added, so pooled figures are exact.

    A site may send only the counts of images and of correct predictions: the other figures are then None, and there are no bins.
    """

    samples: int
    correct: int
    nll: float | None = None
    """Summed over samples."""
    entropy: float | None = None
    """Predictive entropy, summed."""
    mutual_information: float | None = None
    """Over the draws of a Bayesian prompt, summed."""
    bins: list[list[float]] = field(default_factory=list)
    """Per confidence bin: samples, sum of confidences, correct."""
    domains: dict[str, list[int]] = field(default_factory=dict)
    """Name -> samples, correct."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """Figures of `Method.diagnostics`, mean over samples."""
    hits: str | None = None
    """Which images are answered correctly, as `pack_hits` writes them. Never sent by a site."""
    confusion: list[list[Any]] | None = None
    """Of the last evaluation: domain, label, prediction and number of images, where there are any. Never sent by a site."""
    auroc: float | None = None
    """Likewise; None where no class can be told from another."""
    sensitivity: float | None = None
    """At the specificity `one_against_rest.SPECIFICITY`; likewise."""
    scores: Scores | None = field(default=None, compare=False, repr=False)
    """The predictions themselves, until `summarise` has ranked those of all clients. Never stored and never sent."""

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    def to_json(self) -> dict[str, Any]:
        values = asdict(replace(self, scores=None))
        return {name: value for name, value in values.items() if name not in STAYING or value is not None}

    def to_send(self) -> ClientResult:
        """Without what a site never sends."""
        withheld: dict[str, Any] = dict.fromkeys(STAYING)
        return replace(self, **withheld)


def pack_hits(right: np.ndarray) -> str:
    """One bit for each image, in the order of the client's images, as base64: six images take one character."""
    return b64encode(np.packbits(right).tobytes()).decode()


def unpack_hits(text: str, samples: int) -> np.ndarray:
    """Booleans (samples,) from the output of `pack_hits`; ValueError for anything else."""
    bits = np.unpackbits(np.frombuffer(b64decode(text, validate=True), np.uint8)).astype(bool)
    if len(bits) != 8 * -(-samples // 8) or bits[samples:].any():
        raise ValueError(f"must be one bit for each of {samples} images")
    return bits[:samples]


def is_result(values: Mapping[str, Any]) -> bool:
    """Whether a mapping that was read from a file is what `ClientResult.to_json` gives."""
    samples, correct, bins = (values.get(name) for name in ("samples", "correct", "bins"))
    groups = [values.get("domains"), values.get("diagnostics")]
    return (
        type(samples) is int
        and type(correct) is int
        and 0 <= correct <= samples != 0
        and isinstance(bins, list)
        and all(isinstance(row, list) and len(row) == 3 and all(map(_is_number, row)) for row in bins)
        and isinstance(groups[0], dict)
        and _are_numbers(groups[1])
        and isinstance(values.get("hits", ""), str)
        and _is_confusion(values.get("confusion", []), samples)
        and all(_is_number(values[name]) for name in ("auroc", "sensitivity") if name in values)
    )


def _is_confusion(cells: Any, samples: int) -> bool:
    """Whether cells are of images by domain, label and prediction, each image once."""
    if not isinstance(cells, list) or not all(isinstance(cell, list) and len(cell) == 4 for cell in cells):
        return False
    kinds = all(
        isinstance(domain, str) and all(type(number) is int and number >= 0 for number in numbers)
        for domain, *numbers in cells
    )
    return kinds and (not cells or sum(cell[3] for cell in cells) == samples)


def is_summary(values: Mapping[str, Any]) -> bool:
    """Whether a mapping that was read from a file has the figures `summarise` gives."""
    figures = all(_is_number(values[name]) if name in values else name in WITHHELD for name in AVERAGED)
    figures = figures and all(_is_number(values[name]) for name in (*PICKED, "never_picked") if name in values)
    figures = figures and all(_are_numbers(values.get(name, {})) for name in RANKS)
    return figures and _are_numbers(values.get("domains")) and _are_numbers(values.get("diagnostics", {}))


def _are_numbers(group: Any) -> bool:
    return isinstance(group, dict) and all(map(_is_number, group.values()))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def summarise(results: Iterable[ClientResult], picked: Iterable[ClientResult] | None = None) -> dict[str, Any]:
    """The figures of one evaluated round, over all clients. `picked` are those of clients that have trained, where some
    have not: their Average and Worst Local come beside those of all.
    """
    results = list(results)
    accuracies = np.array([result.accuracy for result in results])
    samples = sum(result.samples for result in results)
    lowest = np.sort(accuracies)[: max(1, len(accuracies) // 10)]
    domains: dict[str, list[int]] = {}
    for result in results:
        for name, (count, correct) in result.domains.items():
            total = domains.setdefault(name, [0, 0])
            total[0] += count
            total[1] += correct
    return {
        "average": float(accuracies.mean()),
        "worst": float(accuracies.min()),
        "pooled": sum(result.correct for result in results) / samples,
        "std": float(accuracies.std()),
        "bottom_decile": float(lowest.mean()),
        **_of_picked(results, picked),
        **_uncertainty([result for result in results if result.nll is not None]),
        "domains": {name: correct / count for name, (count, correct) in sorted(domains.items())},
        "diagnostics": _means([result.diagnostics for result in results]),
        **_ranked(results),
    }


def _ranked(results: Sequence[ClientResult]) -> dict[str, Any]:
    """Figures of all images and of domains that are not sums, where every client's predictions are here."""
    found = [(each.scores, list(each.domains)) for each in results if each.scores is not None]
    if len(found) < len(results) or sum(scores.probabilities.size for scores, _ in found) > MOST_SCORES:
        return {}
    return ranked_together(found)


def _of_picked(results: Sequence[ClientResult], picked: Iterable[ClientResult] | None) -> dict[str, float]:
    """Average and Worst Local of the clients that were picked at least once, and how many never were."""
    accuracies = [] if picked is None else [result.accuracy for result in picked]
    if not accuracies or len(accuracies) == len(results):
        return {}
    mean, lowest = float(np.mean(accuracies)), min(accuracies)
    return {"picked_average": mean, "picked_worst": lowest, "never_picked": len(results) - len(accuracies)}


def _uncertainty(results: Sequence[ClientResult]) -> dict[str, float]:
    """Calibration and spread over the clients that send more than counts; empty if none does."""
    if not results:
        return {}
    samples = sum(result.samples for result in results)
    names = ("nll", "entropy", "mutual_information")
    means = {name: sum(getattr(result, name) for result in results) / samples for name in names}
    return {"ece": calibration_error(np.sum([result.bins for result in results], axis=0)), **means}


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every name over the entries that have it: some clients may have none yet."""
    names = sorted({name for entry in entries for name in entry})
    return {name: float(np.mean([entry[name] for entry in entries if name in entry])) for name in names}


AVERAGED = ("average", "worst", "pooled", "std", "bottom_decile", "ece", "nll", "entropy", "mutual_information")
WITHHELD = ("ece", "nll", "entropy", "mutual_information")  # absent if no client sends them
PICKED = {"picked_average": "average", "picked_worst": "worst"}  # what they are where every client was picked


def final_title(title: str) -> str:
    """What the figure of the last evaluated round is called beside a mean of several."""
    return f"{title} (final)"


def mean_title(title: str, rounds: int | None) -> str:
    """`Average (mean of last 3)`, or `Average` where one round is all there is. None stands for different numbers of rounds."""
    return title if rounds in (0, 1) else f"{title} (mean of last {'rounds' if rounds is None else rounds})"


def conclude(rounds: Sequence[Mapping[str, Any]], last: int) -> dict[str, Any]:
    """The figures of a run from its evaluated rounds: the mean over the last ones, the final one and the best one."""
    if not rounds:
        return {}
    tail = rounds[-max(1, last) :]
    known = {name: [entry[name] for entry in tail if name in entry] for name in AVERAGED}
    means = {name: float(np.mean(values)) for name, values in known.items() if values}
    if any("never_picked" in entry for entry in tail):
        means |= {name: float(np.mean([entry.get(name, entry[all]) for entry in tail])) for name, all in PICKED.items()}
        means["never_picked"] = tail[-1].get("never_picked", 0)
    best = max(rounds, key=lambda entry: entry["average"])
    return {
        **means,
        "domains": _means([entry["domains"] for entry in tail]),  # an absent site has no domains here
        "diagnostics": _means([entry.get("diagnostics", {}) for entry in tail]),
        "evaluations": len(tail),
        "final_average": rounds[-1]["average"],
        "final_worst": rounds[-1]["worst"],
        "best_average": best["average"],
        "best_round": best["round"],
    }
