"""Issue 7, "private prompts, heads and caches ... never on the wire": after a run, no file of the server has their bytes.

One site has its images in a folder, as a hospital would. What a round costs is printed on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from real_processes import CLASSES, Federation, split, tiny, until
from recording import body, encoded_images, pixels, raw, windows
from support import shared_tensors

SITES = ("client_0", "client_1")
pytestmark = pytest.mark.timeout(900)


def test_nothing_private_is_in_any_file_of_the_server(
    tmp_path: Path, found_federation: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny("recorded", partition={"scheme": "iid", "clients": len(SITES)}, federation={"rounds": 5})
    federation: Federation = found_federation(tmp_path, SITES)
    data = split(federation, settings)
    federation.serve()
    federation.node(SITES[0], data[SITES[0]])
    federation.node(SITES[1], _as_folder(data[SITES[1]], tmp_path / "images"))
    run = federation.submit(settings)
    seen = _states_on_the_way(federation, run)
    assert run.end() == 0, run.tail
    found = federation.result(settings)
    assert not [event for event in found.reader.events() if event[2] in ("refused", "untested", "kept_out")]
    assert len(seen) >= 2 * len(SITES), "states of several rounds"
    files = {path: path.read_bytes() for path in federation.folder_of_server.rglob("*") if path.is_file()}
    assert {"run.db", "superlink.db"} <= {path.name for path in files}

    control = windows(raw(shared_tensors(found)))
    assert any(window in content for window in control for content in files.values()), "the search finds what is there"
    private = {
        "what a site keeps": windows(map(body, seen.values())),
        "an image as it is stored": windows(encoded_images(data.values())),
        "an image as it is seen": windows(pixels(data.values())),
    }
    for what, pieces in private.items():
        assert len(pieces) > 10, what
        for path, content in files.items():
            assert not [piece for piece in pieces if piece in content], f"{path} has {what}"
    seconds = [sum(record.seconds.values()) for record in found.rounds()[1:]]
    with capsys.disabled():
        print(f"\nseconds a round, {len(SITES)} nodes over TLS: {', '.join(f'{each:.2f}' for each in seconds)}")


def _states_on_the_way(federation: Federation, run: Any) -> dict[Path, bytes]:
    """Every state that a site kept while the run was on; some are gone a round later."""
    seen: dict[Path, bytes] = {}

    def forward() -> bool:
        for site in SITES:
            for file in federation.folder_of(site).glob("state/states/*/*/*.safetensors"):
                if file not in seen and file.exists():
                    seen[file] = file.read_bytes()
        return not run.running

    until(forward, "the run ends", 300)
    return seen


def _as_folder(file: Path, folder: Path) -> Path:
    """The images of a parquet file as `train/class/image` and `test/class/image`."""
    for place, row in enumerate(pq.read_table(file).to_pylist()):
        target = folder / row["split"] / CLASSES[row["label"]] / f"{place}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(row["image"])
    return folder
