"""The tables and their configs: `pfedbayespt/table1` is configs/papers/pfedbayespt/table1.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedprompt.config import config_files
from fedprompt.config.shipped_configs import FOLDER, headline, located, name_of
from fedprompt.errors import ConfigError, broken, did_you_mean

TABLES = FOLDER / "papers"


@dataclass(frozen=True)
class Experiment:
    """A config that can be reproduced."""

    name: str
    """`paper/table`, or the stem of the user's file."""
    path: Path

    @property
    def header(self) -> str:
        """The first line of the comment the file begins with, or nothing."""
        return headline(self.path)

    @property
    def title(self) -> str:
        """Its title without the citation: `Table 1 of pFedBayesPT`."""
        return re.sub(r" \([^)]*\)", "", self.header.partition(":")[0]).rstrip(".") or self.name

    @property
    def about(self) -> str:
        """The paper's experiment, from the header."""
        return self.header.partition(": ")[2]

    @property
    def called(self) -> str:
        """How a command names it."""
        return self.name if "/" in self.name else name_of(self.path)


def experiments() -> list[Experiment]:
    """All experiments in this package."""
    return [Experiment(f"{path.parent.name}/{path.stem}", path) for path in sorted(TABLES.glob("*/*.yaml"))]


def find(name: str) -> Experiment:
    """An experiment by its name, or by a path to a YAML file; an unknown name is an error with similar names."""
    known = {each.name: each for each in experiments()}
    if name in known:
        return known[name]
    path = located(name)
    if path.suffix in (".yaml", ".yml"):
        inside = [each for each in known.values() if path.exists() and each.path.samefile(path)]
        config_files.read(path)  # raises where there is none
        return inside[0] if inside else Experiment(path.stem, path)
    rule = "be the name of a table (`fedprompt reproduce --list` lists all) or a path to a YAML file"
    raise ConfigError(broken("experiment", rule, name) + did_you_mean(name, known))
