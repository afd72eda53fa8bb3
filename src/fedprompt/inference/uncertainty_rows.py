"""Rows of "What uncertainty is worth": families of runs, ensembles of them, and what is the mean over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fedprompt.errors import ConfigError
from fedprompt.inference import uncertainty as measure
from fedprompt.inference.uncertainty import Answers
from fedprompt.report.comparison_table import spread
from fedprompt.report.method_grid import Arrangement
from fedprompt.report.uncertainty_part import Line, Worths
from fedprompt.runs.families import Family, families
from fedprompt.runs.run import Run


def of_runs(
    runs: Sequence[Run], draws: int | None = None, ensemble: bool = False, novel: bool = False, **options: Any
) -> Worths:
    """Every row of some runs; with `ensemble` runs that differ only in their seed are one model."""
    found = families(runs, *(["partition"] if ensemble else []))
    return _worths(found, "only" if ensemble else "no", draws, novel, options)


def of_tasks(arranged: Arrangement, **options: Any) -> dict[str, Worths]:
    """The rows of every task, by its label. Seeds with the same clients and images also give a row as an ensemble."""
    return {
        column.label: _worths(list(column.families.values()), "also", None, False, options)
        for column in arranged.columns
    }


def _worths(
    found: Sequence[Family],
    ensembles: Literal["no", "also", "only"],
    draws: int | None,
    novel: bool,
    options: dict[str, Any],
) -> Worths:
    rows: dict[str, list[Answers]] = {}
    for family in found:
        said = [measure.answers(run, draws, novel, **options) for run in family.runs]
        if ensembles == "only" and len(said) < 2:
            raise ConfigError(
                f"an ensemble must have at least two runs that differ in their seed, got one of {family.label}"
            )
        if ensembles != "only":
            rows.setdefault(family.title, []).extend(said)
        if ensembles == "only" or (ensembles == "also" and _same_images(family)):
            rows.setdefault(f"ensemble of {len(said)}: {family.title}", []).append(measure.ensemble(said))
    by_draws = {title: [measure.accuracy_by_draws(each) for each in said] for title, said in rows.items()}
    drawn = {
        title: each
        for title, each in by_draws.items()
        if min(map(len, each)) > 1 and not title.startswith("ensemble of ")
    }
    return Worths([line for title, said in rows.items() for line in _lines(title, said)], drawn)


def _same_images(family: Family) -> bool:
    """Whether several runs have one manifest."""
    manifests = [run.reader.fact("manifest") for run in family.runs]
    checksums = {each.get("checksum") if isinstance(each, dict) else None for each in manifests}
    return len(manifests) > 1 and len(checksums) == 1 and None not in checksums


def _lines(title: str, said: Sequence[Answers]) -> list[Line]:
    """One for every score."""
    found = [{each.score: each for each in measure.worth(answers)} for answers in said]
    strange = {
        "unknown": sum(each.unknown.shape[1] for each in said),
        "novel": sum(each.novel.shape[1] for each in said),
    }
    lines = []
    for score in found[0]:
        figures = {
            key: value
            for key in found[0][score].figures
            if (value := spread(each[score].figures.get(key) for each in found)) is not None
        }
        images, curves = sum(len(each.labels) for each in said), [each[score].curve for each in found]
        lines.append(Line(title, score, len(said), images, strange, figures, curves))
    return lines
