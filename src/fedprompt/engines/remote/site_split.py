"""A site's test images: drawn once with a secret seed of the site, and the same in every run.

If the server could choose the split, it could test single images, and training images too, over several runs.
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
    """How a site chooses test images, if its images come without a split, and how many of them it uses."""

    seed: int
    test_fraction: float
    test_per_cell: int | None

    @classmethod
    def of(cls, directory: Path, policy: SitePolicy) -> SiteSplit:
        """The split fixed at the first contact; created if there is none yet."""
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
        """Whether the policy has changed since; the fixed split counts until the file is deleted."""
        return (self.test_fraction, self.test_per_cell) != (policy.test_fraction, policy.test_per_cell)

    def applied(self, data: DataConfig) -> DataConfig:
        """The run's data settings as they apply here. The run still decides how many training images it uses."""
        own = {"split_seed": self.seed, "test_fraction": self.test_fraction, "test_per_cell": self.test_per_cell}
        return data.model_copy(update={**own, "per_domain": None})
