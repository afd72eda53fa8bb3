"""The origin of a result: machine, software, images and weights; without paths of the machine."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedprompt.errors import StorageError
from fedprompt.io.files import file_sha256
from fedprompt.io.memory_size import memory_bytes
from fedprompt.papers.result_file import Backbone, Data
from fedprompt.runs.run import Run


def hardware() -> dict[str, Any]:
    """Processor, cores and memory of this machine; threads are those of torch, from the run files."""
    return {
        "cpu": _processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def data_of(run: Run, checksums: dict[str, str | None]) -> Data:
    """The images of a run; `checksums` caches files that were read already."""
    source = run.config.data.source
    manifest = run.reader.fact("manifest")
    head = manifest.get("source") if isinstance(manifest, Mapping) else None
    fingerprint = head.get("fingerprint") if isinstance(head, Mapping) else None
    if source not in checksums:
        checksums[source] = _sha256(Path(source))
    return Data(source=without_path(source), fingerprint=str(fingerprint), sha256=checksums[source])


def _sha256(path: Path) -> str | None:
    try:
        return file_sha256(path) if path.is_file() else None
    except StorageError:
        return None


def backbone_of(run: Run) -> Backbone:
    return Backbone(name=without_path(run.config.backbone.name), digest=str(run.reader.fact("backbone")))


def versions_of(run: Run) -> dict[str, str]:
    found = run.reader.fact("versions")
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}


def without_path(value: Any) -> Any:
    """A path of this machine reduced to its last name; hub ids, relative names and other values unchanged."""
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return Path(value).name
    return value


def command(
    name: str, scale: str | None, seeds: Iterable[int], overrides: Iterable[str], only: Iterable[str] = ()
) -> str:
    """The command for the same result, run from the folder of the data; output paths are left out."""
    words = ["fedprompt reproduce", without_path(name)]
    words += ["--scale", scale] if scale else []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not key.startswith(("output.", "engine.")):
            words.append(shlex.quote(f"{key}{equals}{without_path(value)}"))
    for method in only:
        words += ["--only", method]
    numbers = ",".join(map(str, seeds))
    return " ".join([*words, *(["--seed", numbers] if numbers else [])])
