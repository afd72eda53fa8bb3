"""Which runs are repetitions of each other, what to call them, and what keeps them from being compared.

A family is what one table row or one curve stands for. Runs that stopped at different rounds never share one: their
mean would mix a trained model with a half-trained one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from fedprompt.config import NO_RESULT, difference
from fedprompt.runs.run import Run

# settings that must agree before two accuracies can be compared at all
TASK = ("data", "partition", "backbone", "federation.held_out")
BUDGET = ("federation",)  # settings that change how long was trained and how it was measured
IGNORED = (*NO_RESULT, "seed")  # what `Config.family` leaves out: none of it makes another family

Settings = dict[str, Any]  # a config as `section.field` -> value


@dataclass(frozen=True)
class Labelled:
    """A name in a table or a legend, and how far its runs got."""

    label: str
    """The method, and what tells it from a family of the same method."""
    rounds: int
    of: int

    @property
    def finished(self) -> bool:
        return self.rounds >= self.of

    @property
    def title(self) -> str:
        """The label, with the warning that belongs to it wherever it is printed."""
        return self.label if self.finished else f"{self.label} ({self.rounds}/{self.of} rounds)"


@dataclass(frozen=True)
class Family(Labelled):
    """Runs with the same settings apart from the seed, on the same images and weights, that got equally far."""

    digest: str
    """`Config.family()`."""
    runs: tuple[Run, ...]
    """One per seed."""
    repeated: tuple[str, ...]
    """Names of runs left out because their seed is already there."""
    settings: Settings


def families(runs: Sequence[Run], *swept: str) -> list[Family]:
    """Runs grouped by family, by what they found and by the round they reached, in the order in which each first appears.

    Labels leave swept settings and sections out, so that families that differ in nothing else have the same one.
    """
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.config.family(), rounds_done(run), written(found_by(run))), []).append(run)
    names = labels([group[0] for group in groups.values()], *swept)
    others = _found_elsewhere([group[0] for group in groups.values()], *swept)
    result = []
    for (digest, rounds, found), group in groups.items():
        by_seed: dict[int, Run] = {}
        for run in group:
            by_seed.setdefault(run.config.seed, run)
        kept = tuple(by_seed.values())
        repeated = tuple(run.name for run in group if run not in kept)
        of = group[0].config.federation.rounds
        label = names[digest] + others.get((digest, found), "")
        result.append(Family(label, rounds, of, digest, kept, repeated, settings_of(group[0])))
    return result


def found_by(run: Run) -> Settings:
    """The identity of the images and weights a run found: the same path can hold other files next week."""
    manifest = run.reader.fact("manifest")
    source = manifest.get("source") if isinstance(manifest, dict) else None
    return {
        "data.fingerprint": source.get("fingerprint") if isinstance(source, dict) else None,
        "backbone.digest": run.reader.fact("backbone"),
    }


def _found_elsewhere(runs: Sequence[Run], *swept: str) -> dict[tuple[str, str], str]:
    """What a label has to add where runs of the same settings found different images or weights."""
    alike: dict[str, dict[str, Settings]] = {}
    for run in runs:
        found = found_by(run)
        alike.setdefault(run.config.family(), {})[written(found)] = found
    added = {}
    for digest, several in alike.items():
        for key, found in several.items():
            fields = [field for field in found if len({written(each[field]) for each in several.values()}) > 1]
            told = [field for field in fields if not any(inside(field, name) for name in swept)]
            added[digest, key] = "".join(f" {field.partition('.')[0]} {written(found[field])[:8]}" for field in told)
    return added


def rounds_done(run: Run) -> int:
    records = run.rounds()
    return records[-1].round if records else 0


def labels(runs: Sequence[Run], *swept: str) -> dict[str, str]:
    """A label for each family: the method, and where several families share it, the settings in which they differ."""
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
            {digest: " ".join([label, *_told(own, fields, nulls)]) for digest, own in flat.items()}
            for nulls in (True, False)
        )
        names |= brief if len(set(brief.values())) == len(set(long.values())) else long
    return names


def _told(settings: Settings, fields: Sequence[str], nulls: bool) -> list[str]:
    """`field=value` of what a label has to tell; what is switched off is left out where labels stay different."""
    told = [field for field in fields if tells(settings, field, fields)]
    return [f"{field}={short(settings, field)}" for field in told if nulls or short(settings, field) != "null"]


def tells(settings: Settings, field: str, fields: Sequence[str]) -> bool:
    """Whether a label needs the field: not one of a section that is absent, nor a section of which something else is told."""
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
    """A value as an override would write it; a method's own field may be absent, and then has its default."""
    if field in settings:
        return written(settings[field])
    return "given" if any(inside(name, field) for name in settings) else "default"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def settings_of(run: Run) -> Settings:
    """What decides whether runs can be compared: the settings, and what they found."""
    return flatten(run.config.model_dump(mode="json", include={*TASK, *BUDGET})) | found_by(run)


def section(settings: Settings, names: Sequence[str]) -> Settings:
    """The part of the settings that lies in the named sections."""
    return {field: value for field, value in settings.items() if any(inside(field, name) for name in names)}


def inside(field: str, name: str) -> bool:
    """Whether a field is the named setting, or lies in the named section."""
    return field == name or field.startswith(f"{name}.")


def disagreements(named: Sequence[tuple[str, Settings]], names: Sequence[str]) -> list[str]:
    """Each setting of the named sections that is not the same everywhere, and who has which value.

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
