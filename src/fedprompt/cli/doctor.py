"""What this machine has, and what is missing for the embedded default."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedprompt import assets
from fedprompt.data.sources import digits
from fedprompt.data.sources.wheel_photos import open_photos
from fedprompt.errors import ConfigError, broken, did_you_mean
from fedprompt.io.files import cache_directory
from fedprompt.io.memory_size import memory_bytes

PACKAGES = ("fedprompt", "torch", "transformers", "safetensors", "datasets", "numpy", "pydantic")
OPTIONAL = {
    "flwr": "flower",
    "ray": "flower-simulation",
    "cryptography": "secure",
    "dp-accounting": "dp",
    "faiss-cpu": "index",
    "optuna": "tune",
    "prometheus-client": "metrics",
    "pydicom": "medical",
    "nibabel": "medical",
    "tensorboard": "trackers",
}  # and their extras
DATA_SET = "digits"


def asset_rows(cache: Path) -> list[dict[str, Any]]:
    """The weights and images that can be fetched: name, whether they are in the cache, how large, licence, where."""
    path = digits.path(cache)
    size = path.stat().st_size if path.is_file() else 0
    rendered = assets.AssetStatus(DATA_SET, path.is_file(), size, assets.DIGITS_LICENCE, path)
    return [{**row._asdict(), "path": str(row.path)} for row in (*assets.status(cache), rendered)]


def fetch(name: str, cache: Path) -> None:
    """Download and convert one asset, or all of them; existing ones are only checked."""
    names = [*assets.ASSETS, *assets.IMAGE_SETS, DATA_SET]
    if name not in (*names, "all"):
        raise ConfigError(broken("asset", f"be one of {', '.join(names)} or all", name) + did_you_mean(name, names))
    for each in names if name == "all" else [name]:
        if each == DATA_SET:
            digits.open_embedded(cache)
        elif each in assets.IMAGE_SETS:
            open_photos(each, cache)
        else:
            assets.prepare(each, cache)


def examine() -> dict[str, Any]:
    """Versions, cores, memory, disk, assets; `missing` says what to do about each gap."""
    cache = cache_directory()
    rows = asset_rows(cache)
    missing = [f"asset {row['name']}: fedprompt assets {row['name']}" for row in rows if not row["present"]]
    found: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
            missing.append(f"package {package}: pip install -c constraints.txt {package}")
    for package, extra in OPTIONAL.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = f"not installed; pip install 'fedprompt[{extra}]' brings it"
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    memory = memory_bytes()
    if not os.access(existing, os.W_OK):
        missing.append(f"a writable cache directory: {cache} is not; set FEDPROMPT_CACHE")
    return {
        **found,
        "cores": os.cpu_count(),
        "memory": "unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
        "cache": str(cache),
        "cache free": f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB",
        "assets": rows,
        "missing": missing,
    }
