"""The clients of a partition as files, one each: the images, or sentences, that every site of a federation would hold.

A site that reads its file has the images of that client in the client's order, pixel by pixel, so a federation of such
sites can be compared with a run on one machine.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedprompt.data.partition.manifest import PARTS, ClientData, Manifest
from fedprompt.data.sources.base import Source
from fedprompt.errors import DataError, StorageError, broken

GROUP_ROWS = 256  # images of a row group at most
GROUP_BYTES = 64 * 2**20  # of encoded images, after which a row group is closed
SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # client names that are file names everywhere


def export_clients(source: Source, manifest: Manifest, directory: Path) -> list[Path]:
    """Write the images of every client to `directory`/NAME.parquet: training images first, then test images.

    A site has no validation images, so a manifest with some is refused. The directory must be new or empty. Each file
    appears only when it is complete.
    """
    manifest.check(source)
    if manifest.clients.validation is not None:
        rule = "be absent: a site has no validation images"
        raise DataError(broken("data.validation", rule, f"{len(manifest.clients.validation.values)} images"))
    paths = _paths(manifest, directory)
    names = {"classes": list(manifest.class_names), "domains": list(manifest.domain_names)}
    item = {"text": pa.string()} if source.holds == "sentences" else {"image": pa.binary()}
    columns = {**item, "label": pa.int64(), "domain": pa.int64(), "split": pa.string()}
    if source.groups is not None:
        columns["group"] = pa.int64()
    schema = pa.schema(list(columns.items()), metadata={"fedprompt": json.dumps(names)})
    _claim(directory)
    for client, path in zip(manifest.clients, paths, strict=True):
        _write(path, schema, _row_groups(source, client))
    return paths


def _paths(manifest: Manifest, directory: Path) -> list[Path]:
    """The path of every client; names must be file names, and differ in more than case."""
    seen: set[str] = set()
    for name in manifest.clients.names:
        if not SAFE.fullmatch(name):
            rule = "be letters, digits, '.', '_' and '-', and not begin with '.' or '-', to be the name of a file"
            raise DataError(broken("manifest.clients.name", rule, name))
        if name.lower() in seen:
            raise DataError(broken("manifest.clients.name", "differ in more than case to be the name of a file", name))
        seen.add(name.lower())
    return [directory / f"{name}.parquet" for name in manifest.clients.names]


def _claim(directory: Path) -> None:
    """Make the directory, or check that it is empty."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = any(directory.iterdir())
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(broken("--output", "be a new or an empty directory", str(directory))) from error
    except OSError as error:
        raise StorageError(f"cannot write {str(directory)!r}: {error.strerror}") from error
    if occupied:
        raise DataError(broken("--output", "be a new or an empty directory", str(directory)))


def _row_groups(source: Source, client: ClientData) -> Iterator[dict[str, list[object]]]:
    """The columns of one row group after the other, of a size that a reader can hold in memory."""
    sentences = source.holds == "sentences"
    group: dict[str, list[object]] = {"text" if sentences else "image": [], "label": [], "domain": [], "split": []}
    if source.groups is not None:
        group["group"] = []
    size = 0
    for split in PARTS:
        for index in getattr(client, split).tolist():
            item = source.sentence(index) if sentences else _png(source.image(index))
            row: list[object] = [item, int(source.labels[index]), int(source.domains[index]), split]
            row += [] if source.groups is None else [int(source.groups[index])]
            for column, value in zip(group.values(), row, strict=True):
                column.append(value)
            size += len(item)
            if len(group["label"]) == GROUP_ROWS or size >= GROUP_BYTES:
                yield group
                group, size = {name: [] for name in group}, 0
    if group["label"]:
        yield group


def _write(path: Path, schema: pa.Schema, groups: Iterator[dict[str, list[object]]]) -> None:
    """A parquet file, written under a temporary name and moved into place: it may be larger than memory."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            with pq.ParquetWriter(file, schema, compression="none") as writer:  # PNG is compressed already
                for group in groups:
                    writer.write_table(pa.table(group, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _png(image: Image.Image) -> bytes:
    """Only the pixels: metadata of the image file is dropped."""
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(image.convert("RGB"))).save(buffer, "PNG", compress_level=2)
    return buffer.getvalue()
