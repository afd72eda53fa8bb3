"""What a study does: whose settings are searched, where, and with how many trials. Stored beside the study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

from fedprompt.config import Config, parse
from fedprompt.core import registry
from fedprompt.core.search_space import Choice, FloatRange, SearchSpace
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically
from fedprompt.tuning.halving import counts, stops
from fedprompt.tuning.space import applied

VALIDATION = 0.2  # `data.validation` of trials where the config has none
PLAN = "plan.json"


@dataclass(frozen=True)
class Plan:
    """One study: one method, or one config of a sweep."""

    study: str
    """Its name."""
    directory: Path
    """Of its plan, its trials and its best config."""
    config: Config
    """Complete, as it was given: the chosen values are put into it."""
    space: SearchSpace
    trials: int

    @property
    def title(self) -> str:
        """Its name without what all studies of a config file share."""
        name = self.directory.parent.name.removeprefix("tune-")
        return self.study.removeprefix(f"{name}-").removesuffix(f"-seed{self.seed}")

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def rounds(self) -> int:
        return self.config.federation.rounds

    @property
    def stops(self) -> list[int]:
        """The last round of every stage."""
        return stops(self.rounds)

    @property
    def counts(self) -> list[int]:
        """How many trials every stage has."""
        return counts(self.trials, self.rounds)

    @property
    def validation(self) -> float:
        return self.config.data.validation or VALIDATION

    def trial(self, chosen: Mapping[str, Any], folder: str, threads: int | None) -> Config:
        """The config of one trial. It is evaluated on validation images; no test image decides on anything."""
        config = registry.completed(applied(self.config, chosen))
        federation: dict[str, Any] = {"evaluate_on": "validation"}
        if config.federation.select == "last" and config.federation.patience is None:
            # no round but those that are compared, and the last ones
            federation |= {"evaluate_every": gcd(*self.stops[:-1]) or self.rounds}
        output = {"directory": str(self.directory), "threads": threads or config.output.threads}
        return config.model_copy(
            update={
                "name": folder,
                "tuned": None,
                "data": config.data.model_copy(update={"validation": self.validation}),
                "federation": config.federation.model_copy(update=federation),
                "output": config.output.model_copy(update=output),
            }
        )

    def save(self) -> None:
        write_atomically(self.directory / PLAN, json.dumps(self._content(), indent=1).encode())

    def _content(self) -> dict[str, Any]:
        space = {setting: {type(each).__name__: asdict(each)} for setting, each in self.space.items()}
        return {
            "study": self.study,
            "config": self.config.model_dump(mode="json"),
            "space": space,
            "trials": self.trials,
        }

    @classmethod
    def load(cls, directory: Path) -> Plan:
        """The plan that a study was started with."""
        try:
            found: Any = read_json(directory / PLAN)
            space = {setting: _range(each) for setting, each in found["space"].items()}
            return cls(found["study"], directory, parse(found["config"]), space, int(found["trials"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise RunError(f"study {str(directory)!r} has a plan that cannot be read: {error}") from error

    def require_same(self, stored: Plan) -> None:
        """Raise unless a stored study searches the same."""
        if self.config.digest() != stored.config.digest():
            raise RunError(
                f"study {str(self.directory)!r} was made with another config; give the new one another name="
            )
        differ = {name for name in {*self.space, *stored.space} if self.space.get(name) != stored.space.get(name)}
        if differ:
            rule = "be that of the study that is there; give the new one another name="
            raise RunError(broken("search space", rule, {name: self.space.get(name) for name in sorted(differ)}))
        if self.trials != stored.trials:
            raise RunError(broken("--trials", f"be the {stored.trials} of the study that is there", self.trials))


def _range(value: dict[str, dict[str, Any]]) -> FloatRange | Choice:
    ((kind, fields),) = value.items()
    return FloatRange(**fields) if kind == "FloatRange" else Choice(tuple(fields["values"]))
