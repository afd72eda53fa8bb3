"""Looks at every round for signs that training does not work, and names the setting to change. Each warning comes once in a run.

| rule | sign |
|---|---|
| diverged | clients were refused because their loss or update is not finite |
| loss | the training loss has risen three rounds in a row, by a fifth in all, or is three times its lowest |
| chance | the accuracy is not clearly above that of guessing |
| collapsed | a gate, an attention or a fusion gives all weight to one part, or class weights tell no class from another |
| still | a shared group of tensors has hardly moved from its start |
| draws | all draws of a posterior predict the same |

All but the first need three rounds. `chance` and `still` wait for a third of the rounds. The server uses only what it has: losses and
figures of the run file, and the shared tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from fedprompt.config import Config
from fedprompt.core.messages import Failure
from fedprompt.core.method import Method, World
from fedprompt.core.recipe import group_of, matching
from fedprompt.runs.store import RoundRecord
from fedprompt.tensors import Tensors

FEWEST_ROUNDS = 3
RISE = 1.2  # of the loss in three rounds
FAR = 3.0  # times the lowest loss
STANDARD_ERRORS = 2.0  # above chance, within which an accuracy is still that of guessing
ALL = 0.99  # share of one part that leaves nothing to the others
STILL = 1e-3  # change of a group's tensors, relative to their norm at the start
AGREEING = 1e-5  # mutual information of draws, as a share of the entropy of their mean

# name of a diagnostic -> bounds between which it is sound, what is wrong outside, and what to change
SOUND: dict[str, tuple[float, float, str, str]] = {
    "gate.weight_local": (0.0, ALL, "the gate uses the local expert alone", "a smaller train.lrs rate of `gate.*`"),
    "gate.entropy": (1 - ALL, 1.1, "the gate uses one expert alone", "a smaller train.lrs rate of `gate.*`"),
    "*.attention_share": (
        0.0,
        ALL,
        "the fusion's attention hides the prompts",
        "a smaller train.lrs rate of `fusion.*`",
    ),
    "*.attention_peak": (
        0.0,
        ALL,
        "all queries of the fusion's attention hear one token",
        "a smaller train.lrs rate of `fusion.*`",
    ),
    "class_weights.entropy": (
        1 - ALL,
        ALL,
        "the weights of class prompts are all alike or all on one class",
        "method.temperature",
    ),
}


@dataclass(frozen=True)
class Warned:
    """A sign that something is wrong."""

    rule: str
    text: str


class Watch:
    """Remembers losses, and which warnings there were."""

    def __init__(
        self,
        config: Config,
        world: World,
        method: Method,
        past: Sequence[RoundRecord] = (),
        known: Collection[str] = (),
    ) -> None:
        self._config, self._world, self._method = config, world, method
        self._losses = [record.loss for record in past if record.loss is not None]
        self._known = set(known)
        self._late = max(FEWEST_ROUNDS, config.federation.rounds // 3)

    def look(self, record: RoundRecord, shared: Tensors, samples: int, refused: Sequence[Failure]) -> list[Warned]:
        """New warnings after a round, evaluated on that many images."""
        if record.loss is not None:
            self._losses.append(record.loss)
        summary = record.summary or {}
        found = {"diverged": diverged(refused) if self._config.attack is None else None}
        if record.round >= FEWEST_ROUNDS:
            found["loss"] = rising(self._losses)
            found |= {f"collapsed {name}": text for name, text in collapsed(summary.get("diagnostics", {})).items()}
            if self._draws > 1:
                found["draws"] = agreeing(summary.get("mutual_information"), summary.get("entropy"), self._draws)
        if record.round >= self._late:
            found["chance"] = at_chance(summary.get("pooled"), samples, self._world.classes, record.round)
            found |= self._still(shared, record.round)
        new = [Warned(rule, text) for rule, text in found.items() if text is not None and rule not in self._known]
        self._known.update(each.rule for each in new)
        return new

    @property
    def _draws(self) -> int:
        """Draws of a posterior in a prediction."""
        return int(getattr(getattr(self._method, "inner", self._method), "predict_draws", 1))

    def _still(self, shared: Tensors, round: int) -> dict[str, str | None]:
        """Groups that are trained and shared, and have not moved."""
        start = self._world.roles.shared
        return {
            f"still {group}": still(group, moved(shared, start, names), round) for group, names in self._trained.items()
        }

    @cached_property
    def _trained(self) -> dict[str, list[str]]:
        """The tensors that are trained and shared, by group."""
        train, start = self._config.train, self._world.roles.shared
        stages = self._method.stages(self._world, train)
        trained = {name for stage in stages if stage.epochs for name in stage.trainable}
        groups: dict[str, list[str]] = {}
        for name in start:
            rate = matching(train.lrs, name)
            if name in trained and start[name].is_floating_point() and (train.lr if rate is None else rate) != 0:
                groups.setdefault(group_of(name), []).append(name)
        return groups


def diverged(refused: Sequence[Failure]) -> str | None:
    count = sum(each.rule == "finite" for each in refused)
    return f"training of {count} clients diverged: try a smaller train.lr, or train.clip_norm" if count else None


def rising(losses: Sequence[float]) -> str | None:
    """Three rises in a row that make a fifth, or a loss far above the lowest."""
    if not losses:
        return None
    last, lowest = losses[-4:], min(losses)
    row = len(last) == 4 and all(earlier < later for earlier, later in itertools.pairwise(last))
    if row and last[-1] >= RISE * last[0]:
        return f"the training loss rose from {last[0]:.3g} to {last[-1]:.3g} in three rounds: try a smaller train.lr"
    if last[-1] > max(FAR * lowest, 1.0):
        return f"the training loss {last[-1]:.3g} is far above its lowest, {lowest:.3g}: try a smaller train.lr"
    return None


def at_chance(accuracy: float | None, samples: int, classes: int, round: int) -> str | None:
    """Accuracy over all test images against that of guessing."""
    if accuracy is None or classes < 2 or not samples:
        return None
    chance = 1 / classes
    if accuracy > chance + STANDARD_ERRORS * math.sqrt(chance * (1 - chance) / samples):
        return None
    return (
        f"accuracy {100 * accuracy:.1f} % after {round} rounds is not clearly above guessing ({100 * chance:.1f} %): "
        "try another train.lr, smaller where the loss is high, larger where it hardly falls"
    )


def collapsed(diagnostics: dict[str, float]) -> dict[str, str]:
    """What is wrong, by the name of a diagnostic."""
    found = {}
    for name, value in diagnostics.items():
        for pattern, (low, high, wrong, setting) in SOUND.items():
            if fnmatchcase(name, pattern) and not low <= value <= high:
                found[name] = f"{wrong} ({name} {value:.3f}): try {setting}"
    return found


def moved(now: Tensors, start: Tensors, names: Sequence[str]) -> float:
    """Length of the change of some tensors relative to that of their start; infinite where they started at zero and did move."""
    change = math.sqrt(sum(float((now[name] - start[name].to(now[name])).double().square().sum()) for name in names))
    length = math.sqrt(sum(float(start[name].double().square().sum()) for name in names))
    return change / length if length else (math.inf if change else 0.0)


def still(group: str, change: float, round: int) -> str | None:
    if change >= STILL:
        return None
    return (
        f"the shared {group} moved by {100 * change:.2g} % of its length in {round} rounds: try a larger train.lr, or "
        f"a larger rate of `{group}*` in train.lrs"
    )


def agreeing(information: float | None, entropy: float | None, draws: int) -> str | None:
    """Whether the uncertainty of a prediction comes from no disagreement at all; where there is none there is nothing to say."""
    if information is None or not entropy or information > AGREEING * entropy:
        return None
    return (
        f"all {draws} draws of the posterior predict the same (mutual information {information:.1g}): "
        "try a larger train.lrs rate of the encoder, or a smaller method.kl_weight"
    )
