"""Which runs repeat each other, their labels, and the differences that make runs incomparable.

A family is one table row or one curve. Runs that stopped at different rounds never share a family: their mean would mix
a trained model with a half-trained one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations
from typing import Any

from fedprompt.config import NO_RESULT, difference
from fedprompt.runs.run import Run

# settings that must agree before two accuracies can be compared at all
MEASURED = ("evaluate_at", "evaluate_on", "evaluate_clients", "never_picked", "test_classes")
TASK = ("data", "partition", "backbone", "federation.held_out", *(f"federation.{name}" for name in MEASURED))
BUDGET = ("federation",)  # settings of the length of training and of the measurement
IGNORED = (*NO_RESULT, "seed")  # settings that `Config.family` ignores
OBVIOUS = ("method", "train", "federation")  # sections that a label leaves out where the name of the field says enough

Settings = dict[str, Any]  # a config as `section.field` -> value


@dataclass(frozen=True)
class Labelled:
    """A name in a table or a legend, and the progress of its runs."""

    label: str
    """The method, and how it differs from other families of the same method."""
    rounds: int
    of: int

    _: KW_ONLY
    ended: bool = False
    """Whether its runs ended before the last round by a rule of their settings."""

    @property
    def finished(self) -> bool:
        return self.ended or self.rounds >= self.of

    @property
    def title(self) -> str:
        """The label, with a warning if the runs are not finished."""
        return self.label if self.finished else f"{self.label} ({self.rounds}/{self.of} rounds)"


@dataclass(frozen=True)
class Family(Labelled):
    """Runs with the same settings except the seed, on the same images and weights, stopped at the same round."""

    digest: str
    """`Config.family()`."""
    runs: tuple[Run, ...]
    """One per seed."""
    repeated: tuple[str, ...]
    """Names of runs left out because their seed is already there."""
    settings: Settings


def families(runs: Sequence[Run], *swept: str) -> list[Family]:
    """Runs grouped by family, by their images and weights, and by their last round, in order of first appearance.

    Labels omit swept settings and sections, so families that differ only in these have the same label.
    """
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.config.family(), _stopped_at(run), written(found_by(run))), []).append(run)
    names = labels([group[0] for group in groups.values()], *swept)
    others = _found_elsewhere([group[0] for group in groups.values()], *swept)
    result = []
    for (digest, _, found), group in groups.items():
        by_seed: dict[int, Run] = {}
        for run in group:
            by_seed.setdefault(run.config.seed, run)
        kept = tuple(by_seed.values())
        repeated = tuple(run.name for run in group if run not in kept)
        rounds, of = max(map(rounds_done, group)), group[0].config.federation.rounds
        label, ended = names[digest] + others.get((digest, found), ""), group[0].final_test is not None
        result.append(Family(label, rounds, of, digest, kept, repeated, settings_of(group[0]), ended=ended))
    return result


def found_by(run: Run) -> Settings:
    """The identity of the images and weights of a run: the files at a path can change."""
    manifest = run.reader.fact("manifest")
    source = manifest.get("source") if isinstance(manifest, dict) else None
    return {
        "data.fingerprint": source.get("fingerprint") if isinstance(source, dict) else None,
        "backbone.digest": run.reader.fact("backbone"),
    }


def _found_elsewhere(runs: Sequence[Run], *swept: str) -> dict[tuple[str, str], str]:
    """The suffix of a label if runs of the same settings used different images or weights."""
    alike: dict[str, dict[str, Settings]] = {}
    for run in runs:
        found = found_by(run)
        alike.setdefault(run.config.family(), {})[written(found)] = found
    added = {}
    for digest, several in alike.items():
        for key, found in several.items():
            fields = [field for field in found if len({written(each[field]) for each in several.values()}) > 1]
            shown = [field for field in fields if not any(inside(field, name) for name in swept)]
            added[digest, key] = "".join(f" {field.partition('.')[0]} {written(found[field])[:8]}" for field in shown)
    return added


def rounds_done(run: Run) -> int:
    records = run.rounds()
    return records[-1].round if records else 0


def _stopped_at(run: Run) -> int:
    """The last round; of runs that end by early stopping, seeds may end at different rounds and belong together."""
    return -1 if run.final_test is not None else rounds_done(run)


def labels(runs: Sequence[Run], *swept: str) -> dict[str, str]:
    """A label for each family: the method, and the settings in which families of the same method differ."""
    configs = {run.config.family(): run.config for run in runs}
    alike: dict[str, dict[str, Settings]] = {}
    for digest, config in configs.items():
        alike.setdefault(config.label, {})[digest] = config.model_dump(mode="json", exclude=set(IGNORED))
    names: dict[str, str] = {}
    for label, found in alike.items():
        pairs = combinations(found.values(), 2)
        varied = {line.partition(": ")[0] for one, other in pairs for line in difference(one, other)}
        fields = sorted(field for field in varied if not any(inside(field, name) for name in swept))
        flat = {digest: flatten(settings) for digest, settings in found.items()}
        long, brief = (
            {digest: " ".join([label, *_differences(own, fields, nulls)]) for digest, own in flat.items()}
            for nulls in (True, False)
        )
        names |= brief if len(set(brief.values())) == len(set(long.values())) else long
    return names


def _differences(settings: Settings, fields: Sequence[str], nulls: bool) -> list[str]:
    """`field=value` for the fields of a label; null values are omitted if labels stay different without them."""
    shown = [field for field in fields if is_shown(settings, field, fields)]
    names = {field: brief(field, fields) for field in shown}
    return [f"{names[field]}={short(settings, field)}" for field in shown if nulls or short(settings, field) != "null"]


def brief(field: str, fields: Sequence[str]) -> str:
    """A field without its section, where that is obvious and no other of the fields has the same name."""
    place, _, leaf = field.partition(".")
    alone = sum(other.partition(".")[2] == leaf for other in fields) == 1
    return leaf if place in OBVIOUS and leaf not in ("", "name") and alone else field


def is_shown(settings: Settings, field: str, fields: Sequence[str]) -> bool:
    """Whether a label needs the field: no field of an absent section, and no section of which a field is shown."""
    absent = any(value is None and field != name and inside(field, name) for name, value in settings.items())
    return not absent and (field in settings or not any(field != other and inside(other, field) for other in fields))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Settings:
    """Nested sections as `section.field`, the way `key=value` overrides write them."""
    flat: Settings = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def short(settings: Settings, field: str) -> str:
    """A value as in an override; an absent field of a method has its default."""
    if field in settings:
        return written(settings[field])
    return "given" if any(inside(name, field) for name in settings) else "default"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def settings_of(run: Run) -> Settings:
    """What decides whether runs can be compared: the settings, and the images and weights."""
    federation = run.config.federation
    measured = {
        f"federation.{name}": getattr(federation, name) for name in MEASURED
    }  # a default may be absent in a dump
    return flatten(run.config.model_dump(mode="json", include={*TASK, *BUDGET})) | measured | found_by(run)


def section(settings: Settings, names: Sequence[str]) -> Settings:
    """The settings of the named sections."""
    return {field: value for field, value in settings.items() if any(inside(field, name) for name in names)}


def inside(field: str, name: str) -> bool:
    """Whether a field is the named setting, or belongs to the named section."""
    return field == name or field.startswith(f"{name}.")


def disagreements(named: Sequence[tuple[str, Settings]], names: Sequence[str]) -> list[str]:
    """Each setting of the named sections that differs between runs, with the runs of each value.

    A line reads `data.source: tiny (fedvpt, local) | cifar10 (head_tune)`.
    """
    parts = [(label, section(settings, names)) for label, settings in named]
    lines = []
    for field in sorted({field for _, settings in parts for field in settings}):
        holders: dict[str, list[str]] = {}
        for label, settings in parts:
            holders.setdefault(short(settings, field), []).append(label)
        if len(holders) > 1:
            choices = " | ".join(f"{value} ({', '.join(dict.fromkeys(labels))})" for value, labels in holders.items())
            lines.append(f"{field}: {choices}")
    return lines
