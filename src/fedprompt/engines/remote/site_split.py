"""A site's training and test images: chosen once, with a secret seed of the site, and the same in every run.

If the server could choose them, it could test single images, and training images too, over several runs. The difference
of two sums, over training images with one image more and without it, would be the feature of that image.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedprompt.config import DataConfig
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import StorageError
from fedprompt.io.bounded_read import read_json
from fedprompt.io.files import write_atomically

FILE = "split.json"


@dataclass(frozen=True)
class SiteSplit:
    """How a site chooses test images, if its images come without a split, and how many images it uses."""

    seed: int
    test_fraction: float
    test_per_cell: int | None
    train_per_cell: int | None = None

    @classmethod
    def of(cls, directory: Path, policy: SitePolicy) -> SiteSplit:
        """The split fixed at the first contact; created if there is none yet."""
        file = directory / FILE
        if not file.exists():
            split = cls(secrets.randbits(62), **_chosen(policy))
            write_atomically(file, json.dumps(asdict(split)).encode())
            return split
        try:
            return cls(**read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{file} cannot be read: {error}") from error

    def differs(self, policy: SitePolicy) -> bool:
        """Whether the policy has changed since; the fixed split counts until the file is deleted."""
        return {**_chosen(policy), "seed": self.seed} != asdict(self)

    def applied(self, data: DataConfig) -> DataConfig:
        """The run's data settings as they apply here: which images are used is the site's choice."""
        own = {name: value for name, value in asdict(self).items() if name != "seed"}
        return data.model_copy(update={**own, "split_seed": self.seed, "per_domain": None, "validation": None})


def _chosen(policy: SitePolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("test_fraction", "test_per_cell", "train_per_cell")}
