"""A run that was written: what it was told to do and what came out. Reads `run.db` only, without torch."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from fedprompt import config as configuration
from fedprompt.config import Config
from fedprompt.evaluation.metrics import conclude
from fedprompt.federation.store import REFUSED, RoundRecord, RunReader


class Run:
    """Read access to one run directory."""

    def __init__(self, directory: str | Path) -> None:
        self.reader = RunReader(directory)
        self.directory = self.reader.directory

    @cached_property
    def config(self) -> Config:
        return configuration.parse(self.reader.fact("config"))

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def clients(self) -> list[str]:
        return list(self.reader.fact("clients"))

    def rounds(self) -> list[RoundRecord]:
        """Finished rounds; round 0 is the state before any training."""
        return self.reader.rounds()

    @property
    def finished(self) -> bool:
        records = self.rounds()
        return bool(records) and records[-1].round >= self.config.federation.rounds

    def history(self) -> list[dict[str, Any]]:
        """The metrics of every evaluated round."""
        return [{"round": record.round, **record.summary} for record in self.rounds() if record.summary is not None]

    def summary(self) -> dict[str, Any]:
        """The figures tables are made of: means over the last evaluated rounds, the best round, bytes and seconds."""
        records = self.rounds()
        seconds: dict[str, float] = {}
        for record in records:
            for phase, spent in record.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + spent
        settings = self.config
        return {
            "run": self.name,
            "method": settings.label,
            "seed": settings.seed,
            "family": settings.family(),
            "rounds": records[-1].round if records else 0,
            "of": settings.federation.rounds,
            **conclude(self.history(), settings.federation.evaluate_last),
            "bytes_down": sum(record.bytes_down for record in records),
            "bytes_up": sum(record.bytes_up for record in records),
            "refused": self.refused(),
            "seconds": seconds,
        }

    def refused(self) -> dict[str, int]:
        """How many updates the guard kept out, by rule."""
        rules = [json.loads(detail)["rule"] for _, _, kind, detail in self.reader.events() if kind == REFUSED]
        return {rule: rules.count(rule) for rule in sorted(set(rules))}

    def client_accuracies(self, round: int | None = None) -> dict[str, float]:
        """Test accuracy by client name, of one evaluated round (the last one when not given)."""
        if round is None:
            evaluated = [record.round for record in self.rounds() if record.summary is not None]
            round = evaluated[-1] if evaluated else 0
        names = self.clients
        return {
            names[client]: result["correct"] / result["samples"]
            for client, result in self.reader.evaluations(round).items()
        }

    def close(self) -> None:
        self.reader.close()
