"""From the runs of a grid to a result file."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

from fedprompt.backbones.image_sizes import with_image_size
from fedprompt.config import NO_RESULT, Config, config_files
from fedprompt.core import registry
from fedprompt.errors import ConfigError, broken
from fedprompt.papers import provenance
from fedprompt.papers.paper_configs import Experiment, find
from fedprompt.papers.published_numbers import SOURCE, Published
from fedprompt.papers.result_file import (
    DIAGNOSTIC,
    INFORMATION,
    Backbone,
    Cell,
    Column,
    Data,
    Figure,
    OneRun,
    Pair,
    Result,
    Row,
    domain_key,
)
from fedprompt.papers.setting_differences import differences, method_differences, not_run
from fedprompt.papers.table_layout import Place, places, source_name, varied
from fedprompt.report.comparison_table import figures, spread
from fedprompt.report.paired_differences import Paired, Rights, pair, rights
from fedprompt.runs.families import Settings, flatten
from fedprompt.runs.novel_figures import stored_figures
from fedprompt.runs.run import Run
from fedprompt.runs.tables import FILE

Item = TypeVar("Item")
HEAD = "method.head"
HASH_LEAVES_OUT = {*NO_RESULT, "seed"}


@dataclass(frozen=True)
class Request:
    """An experiment to reproduce."""

    experiment: Experiment
    scale: str | None
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ()
    """Methods to run; what is stored of the others stays. All of them when empty."""

    def configs(self) -> list[Config]:
        """One complete config per run, named as `fedprompt run` would name them."""
        grid = self.grid()
        names = list(dict.fromkeys(config.method["name"] for config in grid))
        for name in self.only:
            if name not in names:
                raise ConfigError(broken("--only", f"name methods of the grid ({', '.join(names)})", name))
        return [config for config in grid if not self.only or config.method["name"] in self.only]

    def grid(self) -> list[Config]:
        """The same for the runs of all methods."""
        made = config_files.load(self.experiment.path, self._overrides(), self.seeds)
        return [registry.completed(with_image_size(config)[0]) for config in made]

    def name(self) -> str:
        """What the names of its runs begin with, and the name of its file."""
        (name,) = {each.name for each in config_files.load_alike(self.experiment.path, self._overrides(), self.seeds)}
        paper = self.experiment.name.partition("/")[0]
        inside = "/" in self.experiment.name and paper not in name
        return config_files.file_name(paper, name) if inside else config_files.file_name(name)

    def _overrides(self) -> list[str]:
        return [*([f"{config_files.SCALE}{self.scale}"] if self.scale else []), *self.overrides]

    def to_json(self) -> dict[str, object]:
        """For another process in the same folder."""
        path = str(self.experiment.path)
        lists = {"overrides": list(self.overrides), "seeds": list(self.seeds), "only": list(self.only)}
        return {"name": path, "scale": self.scale, **lists}

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Request:
        lists = (tuple(values[name]) for name in ("overrides", "seeds", "only"))
        return cls(find(values["name"]), values["scale"], *lists)

    def papers_grid(self) -> list[Settings]:
        """The settings at the paper's own size."""
        return [settings_of(registry.completed(config)) for config in config_files.load(self.experiment.path)]


@dataclass(frozen=True)
class Outcome:
    """One run of the grid, or its failure."""

    config: Config
    run: OneRun
    data: Data | None = None
    backbone: Backbone | None = None
    versions: dict[str, str] | None = None
    rights: Rights | None = None


def is_finished(config: Config) -> bool:
    """Whether the run of a complete config exists and is finished."""
    if not (config.run_directory / FILE).exists():
        return False
    with closing(Run(config.run_directory)) as run:
        tested = not config.data.tests_names or stored_figures(run.reader) is not None
        return run.config.digest() == config.digest() and run.finished and tested


def recorded(config: Config, checksums: dict[str, str | None]) -> Outcome:
    """The result of the finished run of a config; `checksums` caches data files that were read already."""
    with closing(Run(config.run_directory)) as run:
        rounds = run.rounds()[-1].round
        summary = run.summary()
        found = {**figures(run), INFORMATION: summary.get(INFORMATION)}
        numbers = {key: value for key, value in found.items() if value is not None}
        domains = summary.get("domains", {})
        numbers |= {domain_key(name): value for name, value in domains.items() if len(domains) > 1}
        numbers |= {f"{DIAGNOSTIC}{name}": value for name, value in summary.get("diagnostics", {}).items()}
        one = OneRun(
            name=run.name, seed=config.seed, hash=config.digest(), status="finished", rounds=rounds, figures=numbers
        )
        data, backbone = provenance.data_of(run, checksums), provenance.backbone_of(run)
        return Outcome(config, one, data, backbone, provenance.versions_of(run), rights(run))


def failed(config: Config, error: Exception) -> Outcome:
    """The record of a failed run."""
    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    one = OneRun(
        name=config.run_name, seed=config.seed, hash=config.digest(), status="failed", error=_without_paths(reason)
    )
    return Outcome(config, one)


def _without_paths(text: str) -> str:
    return " ".join(
        str(provenance.without_path(word.strip("'\",:;"))) if "/" in word else word for word in text.split()
    )


def assemble(request: Request, published: Published, outcomes: Sequence[Outcome], before: Result | None) -> Result:
    """The result of a grid. Seeds of the same settings that are stored already are kept, and so are cells of methods that
    were not asked for.
    """
    by_family: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_family.setdefault(outcome.config.family(), []).append(outcome)
    whole = {config.family(): settings_of(config) for config in request.grid()}
    own = varied(list(whole.values()))
    stored = {cell.family: cell for cell in before.cells if cell.family} if before else {}
    others = {(cell.row, cell.column): cell for cell in before.cells if cell.runs} if before else {}
    cells: list[Cell] = []
    grid: list[Settings] = []
    where: list[Place] = []
    for (family, settings), place in zip(whole.items(), places(list(whole.values()), published), strict=True):
        if family in by_family:
            runs = _with_other_seeds([each.run for each in by_family[family]], stored.get(family))
            differing = {name: provenance.without_path(settings[name]) for name in own if name in settings}
            paper = published.figures(place.row_entry, place.column_entry)
            cells.append(cell_of(place, family, differing, runs, paper))
        elif (place.row, place.column) in others:
            cells.append(others[place.row, place.column])
        else:
            continue
        grid.append(settings)
        where.append(place)
    groups = [by_family.get(cell.family or "", []) for cell in cells]
    again = {cell.row for cell, group in zip(cells, groups, strict=True) if group}
    papers = request.papers_grid()
    papers_places = places(papers, published)
    kept = {run.seed for cell in cells for run in cell.runs or []}
    finished = [outcome for outcome in outcomes if outcome.run.status == "finished"]
    old = before if any(len(c.runs or []) > len(g) for c, g in zip(cells, groups, strict=True)) else None
    return Result(
        name=request.experiment.name,
        experiment=request.name(),
        title=_title(request.experiment, grid, papers),
        kind="reproduction",
        scale=request.scale,
        paper=published.paper,
        about=_about(request.experiment, grid, sorted(kept)),
        notes=list(published.notes),
        differences=[
            *differences(grid, papers, published),
            *method_differences(zip(where, grid, strict=True), zip(papers_places, papers, strict=True)),
            *not_run(where, papers_places, published),
            *_heads(where, grid),
        ],
        commands=_once([*(before.commands if before and request.only else []), _command(request, sorted(kept))]),
        date=datetime.date.today().isoformat(),
        versions=_once([each.versions for each in finished if each.versions] + list((old and old.versions) or [])),
        hardware={**provenance.hardware(), "threads": _threads(finished)},
        data=_once([each.data for each in finished if each.data] + list((old and old.data) or [])),
        backbones=_once([each.backbone for each in finished if each.backbone] + list((old and old.backbones) or [])),
        settings={n: provenance.without_path(v) for n, v in grid[0].items() if n not in own},
        rows=_rows(where, grid, published),
        columns=_columns(where, published),
        cells=[*cells, *_only_the_papers(cells, published)],
        pairs=[
            *(
                pair
                for pair in (before.pairs if before and request.only else [])
                if not {pair.row, pair.against} & again
            ),
            *_pairs(cells, groups, [settings.get(HEAD) for settings in grid]),
        ],
    )


def settings_of(config: Config) -> Settings:
    """A complete config as `section.field` -> value, without settings that change no result and without the seed."""
    return flatten(config.model_dump(mode="json", exclude=HASH_LEAVES_OUT))


def cell_of(place: Place, family: str, settings: Settings, runs: list[OneRun], paper: dict[str, Figure]) -> Cell:
    done = [run for run in runs if run.status == "finished"]
    keys = dict.fromkeys(key for run in done for key in run.figures)
    over_seeds = {key: spread(run.figures.get(key) for run in done) for key in keys}
    return Cell(
        row=place.row,
        column=place.column,
        family=family,
        settings=settings,
        seeds=[run.seed for run in done],
        figures={key: Figure(mean=value.mean, std=value.std) for key, value in over_seeds.items() if value},
        runs=runs,
        paper=paper,
    )


def _pairs(cells: Sequence[Cell], groups: Sequence[Sequence[Outcome]], heads: Sequence[object]) -> list[Pair]:
    """Every two rows of a column with the same kind of head. Cells with seeds of earlier commands are left out: of those
    seeds only the figures are known.
    """
    known = []
    for cell, group, head in zip(cells, groups, heads, strict=True):
        by_seed = {each.run.seed: each.rights for each in group if each.rights is not None}
        if by_seed and set(by_seed) == set(cell.seeds):
            known.append((cell, by_seed, head))
    found = []
    for (one, ours, head), (other, theirs, others_head) in combinations(known, 2):
        if one.column == other.column and head == others_head:
            paired = pair(one.row, other.row, ours, theirs)
            found += [] if paired is None else [stored_pair(one.column, paired)]
    return found


def stored_pair(column: str, found: Paired) -> Pair:
    return Pair(
        column=column,
        row=found.label,
        against=found.against,
        difference=found.estimate,
        low=None if found.interval is None else found.interval.low,
        high=None if found.interval is None else found.interval.high,
        drawn=found.drawn,
        seeds=found.seeds,
        better=found.gained,
        worse=found.lost,
    )


def _with_other_seeds(runs: list[OneRun], stored: Cell | None) -> list[OneRun]:
    others = [run for run in (stored.runs or [] if stored else []) if run.seed not in {each.seed for each in runs}]
    return sorted([*runs, *others], key=lambda run: run.seed)


def _rows(where: Sequence[Place], grid: Sequence[Settings], published: Published) -> list[Row]:
    """The paper's rows in its order, then ours. Rows with a local head and rows with a shared head are ranked
    separately.
    """
    ran = {place.row: settings for place, settings in zip(where, grid, strict=True)}
    papers = {row.title: row.where for row in published.rows}
    return [
        Row(title=title, method=settings.get("method.name"), group=settings.get(HEAD))
        for title, settings in {**papers, **{title: ran[title] for title in ran}}.items()
    ]


def _heads(where: Sequence[Place], grid: Sequence[Settings]) -> list[str]:
    """Local or shared heads matter more than the method, so the title states it where rows differ."""
    rows: dict[str, dict[str, None]] = {}
    for place, settings in zip(where, grid, strict=True):
        if settings.get(HEAD) is not None:
            rows.setdefault(str(settings[HEAD]), {})[place.row] = None
    heads = "; ".join(f"{head} ({', '.join(titles)})" for head, titles in rows.items())
    return [f"Heads, and only rows with the same kind can be ranked: {heads}."] if len(rows) > 1 else []


def _columns(where: Sequence[Place], published: Published) -> list[Column]:
    """Ours in the order of the grid, then the paper's that were not run."""
    titles = dict.fromkeys([*(place.column for place in where), *(column.title for column in published.columns)])
    return [Column(title=title) for title in titles]


def _only_the_papers(cells: Sequence[Cell], published: Published) -> list[Cell]:
    """The paper's cells without our runs."""
    there = {(cell.row, cell.column) for cell in cells}
    return [
        Cell(row=row.title, column=column.title, paper=found)
        for row in published.rows
        for column in published.columns
        if (row.title, column.title) not in there and (found := published.figures(row, column))
    ]


def _title(experiment: Experiment, grid: Sequence[Settings], papers: Sequence[Settings]) -> str:
    ours, theirs = (dict.fromkeys(source_name(str(each[SOURCE])) for each in some) for some in (grid, papers))
    return experiment.title if ours == theirs else f"{experiment.title} on {', '.join(ours)}"


def _about(experiment: Experiment, grid: Sequence[Settings], seeds: Sequence[int]) -> list[str]:
    last = {min(each["federation.evaluate_last"], each["federation.rounds"]) for each in grid}
    rounds = (
        f", means over the last {max(last)} rounds" if len(last) == 1 and max(last) > 1 else ", after the last round"
    )
    ours = f"Ours: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}{rounds}."
    return [f"The paper: {experiment.about.rstrip('.')}. {ours}" if experiment.about else ours]


def _command(request: Request, seeds: Sequence[int]) -> str:
    shown = seeds if request.seeds or len(seeds) > 1 else ()
    return provenance.command(request.experiment.called, request.scale, shown, request.overrides, request.only)


def _threads(outcomes: Iterable[Outcome]) -> str | None:
    found = dict.fromkeys(each.versions["threads"] for each in outcomes if each.versions and "threads" in each.versions)
    return ", ".join(found) or None


def _once(items: list[Item]) -> list[Item]:
    return [item for number, item in enumerate(items) if item not in items[:number]]
