"""Which of a site's images test: drawn once with a number that the site keeps to itself, and the same in every run.

A server that could choose the split could have single images tested, and training images too, one run after the other.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from fedprompt.config import DataConfig
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import StorageError
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically

FILE = "split.json"


@dataclass(frozen=True)
class SiteSplit:
    """How a site puts test images aside, where its images have no split of their own, and how many of them it uses."""

    seed: int
    test_fraction: float
    test_per_cell: int | None

    @classmethod
    def of(cls, directory: Path, policy: SitePolicy) -> SiteSplit:
        """The split that was fixed at the first contact; this is the first where there is none yet."""
        file = directory / FILE
        if not file.exists():
            split = cls(secrets.randbits(62), policy.test_fraction, policy.test_per_cell)
            write_atomically(file, json.dumps(asdict(split)).encode())
            return split
        try:
            return cls(**read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{file} cannot be read: {error}") from error

    def differs(self, policy: SitePolicy) -> bool:
        """Whether the policy has changed since; what was fixed counts until the file is deleted."""
        return (self.test_fraction, self.test_per_cell) != (policy.test_fraction, policy.test_per_cell)

    def applied(self, data: DataConfig) -> DataConfig:
        """The run's settings of images as they count here. How many training images it takes is the run's wish."""
        own = {"split_seed": self.seed, "test_fraction": self.test_fraction, "test_per_cell": self.test_per_cell}
        return data.model_copy(update={**own, "per_domain": None})
