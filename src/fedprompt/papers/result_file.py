"""A result file: the table of one experiment with everything needed to judge and repeat it, as JSON.

What was not recorded is null, and is shown as unknown. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedprompt.config import complaints
from fedprompt.errors import RunError
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically

FORMAT = "fedprompt-results-1"
MOST_BYTES = 16 * 2**20
DOMAIN = "domain:"  # what the keys of figures of single domains begin with
DIAGNOSTIC = "diagnostic:"  # of figures that a method says of itself
INFORMATION = "mutual_information"  # between a prediction and its draws, a mean over images


class Part(BaseModel):
    """A section of the file: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(Part):
    """A number over seeds; accuracies are fractions."""

    mean: float
    std: float | None = None
    """Sample standard deviation; one seed has none."""


class OneRun(Part):
    """One seed of a cell."""

    seed: int
    name: str | None = None
    hash: str | None = None
    """Of the run's config, with paths as they were given."""
    status: Literal["finished", "failed"]
    error: str | None = None
    """Why it failed."""
    rounds: int | None = None
    figures: dict[str, float] = {}


class Cell(Part):
    """One row in one column: our figures, the paper's, or both."""

    row: str
    column: str
    family: str | None = None
    """Hash of the config without the seed."""
    settings: dict[str, Any] = {}
    """Settings that differ from other cells."""
    seeds: list[int] = []
    """Seeds behind the figures."""
    figures: dict[str, Figure] = {}
    runs: list[OneRun] | None = None
    """None if single seeds were not recorded."""
    paper: dict[str, Figure] = {}


class Pair(Part):
    """How far one row is ahead of another in a column: the difference of Averages, over the same seeds."""

    column: str
    row: str
    against: str
    difference: float
    """Negative where the row is behind."""
    low: float | None = None
    """Of the 95 % interval; None where there is too little for one."""
    high: float | None = None
    drawn: Literal["clients", "images", "seeds"]
    """What the interval is over."""
    seeds: int
    better: int | None = None
    """Images that only this row answers correctly; None where runs do not say."""
    worse: int | None = None


class Row(Part):
    """A line of the table."""

    title: str
    method: str | None = None
    """Its name in configs; None if a table is not about methods."""
    group: str | None = None
    """Rows are ranked only inside their group."""


class Column(Part):
    """A column of the table: one setting, or one figure of a setting."""

    title: str
    figures: list[str] = ["average", "worst"]
    """In one cell, with a stroke between them."""
    cell: str | None = None
    """The column of the cells it shows; its own title when absent."""


class Data(Part):
    """The images a result rests on."""

    source: str
    fingerprint: str
    """Of the images as they were used, with their classes and selection."""
    sha256: str | None = None
    """Of the file, where it is one."""


class Backbone(Part):
    name: str
    digest: str


class Result(Part):
    """One experiment."""

    format: Literal["fedprompt-results-1"] = "fedprompt-results-1"
    name: str
    """`paper/table`, or what we call it."""
    experiment: str
    """The beginning of its runs' names, and the name of its file."""
    title: str
    kind: Literal["reproduction", "measurement"]
    order: int = 0
    """Place on the page."""
    digits: int = 1
    """Decimal places of our percentages."""
    scale: str | None = None
    paper: str | None = None
    """The paper whose numbers are compared."""
    about: list[str] = []
    """Paragraphs."""
    notes: list[str] = []
    """On the paper's numbers."""
    differences: list[str] = []
    """Between the paper's settings and ours."""
    commands: list[str] = []
    pictures: list[tuple[str, str]] = []
    """Path from the page, and what it shows."""
    date: str | None = None
    versions: list[dict[str, str]] | None = None
    """Of the software, each that some run had."""
    hardware: dict[str, Any] | None = None
    data: list[Data] | None = None
    backbones: list[Backbone] | None = None
    settings: dict[str, Any] = {}
    """Common settings of all cells."""
    rows: list[Row]
    columns: list[Column]
    cells: list[Cell]
    pairs: list[Pair] = []
    """Every two rows of a column with the same kind of head."""
    details: Any = Field(default=None)
    """Other measurements, as printed."""

    def cell(self, row: str, column: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


def domain_key(name: str) -> str:
    return f"{DOMAIN}{name}"


def parse(values: Mapping[str, Any], where: str = "result") -> Result:
    """Check a plain mapping; errors name the field."""
    if values.get("format") != FORMAT:
        raise RunError(f"{where}: format must be {FORMAT!r}, got {values.get('format')!r}")
    try:
        return Result.model_validate(values)
    except ValidationError as error:
        raise RunError(f"{where}: {complaints(error, '')}") from error


def load(path: str | Path) -> Result:
    """Read one result file."""
    try:
        values = read_json(Path(path), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise RunError(f"result: cannot read {str(path)!r}: {error}") from error
    if not isinstance(values, dict):
        raise RunError(f"result: {str(path)!r} must hold a mapping, got {type(values).__name__}")
    return parse(values, f"result {str(path)!r}")


def load_all(folder: str | Path) -> list[Result]:
    """All results of a folder in the order of the page: reproductions by name, then our other results.

    Other JSON files there, such as a log of trials, are ignored.
    """
    found = [load(path) for path in sorted(Path(folder).glob("*.json")) if is_result(path)]
    return sorted(found, key=lambda each: (each.kind != "reproduction", each.order, each.name, each.experiment))


def is_result(path: Path) -> bool:
    """Whether a JSON file says that it is a result file."""
    try:
        values = read_json(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise RunError(f"result: cannot read {str(path)!r}: {error}") from error
    return isinstance(values, dict) and str(values.get("format", "")).startswith("fedprompt-results-")


def save(result: Result, path: str | Path) -> None:
    values = result.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"format": FORMAT, **values}, indent=1, ensure_ascii=False)
    write_atomically(Path(path), (text + "\n").encode())


def file_of(result: Result) -> str:
    return f"{result.experiment}.json"
