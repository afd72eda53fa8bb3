"""Refusals of `fedprompt explain` and `fedprompt export`: the kind of error is the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.errors import ConfigError, DataError, FedpromptError, RunError
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ("explain RUN image.png", ConfigError, "--client must name a client of the run"),
        ("explain RUN -c nobody image.png", ConfigError, "client must be one of the 4 clients"),
        ("explain RUN -c 4 image.png", ConfigError, "or a number in 0..3, got '4'"),
        ("explain RUN -c 0 image.png --block 9", ConfigError, "--block must be last, rollout or a number in 0..2, got"),
        ("explain RUN -c 0 image.png -o x.gif", ConfigError, "--output must end in"),
        ("explain RUN -c 0 broken.png", DataError, "broken.png"),
        ("explain RUN -c 0 absent.png", DataError, "absent.png"),
        ("explain nowhere -c 0 image.png", RunError, "nowhere"),
        ("export RUN -o new", ConfigError, "--client must name a client of the run"),
        ("export RUN -c nobody -o new", ConfigError, "client must be one of the 4 clients"),
        ("export RUN -c 0 -o full", ConfigError, "--output must be a folder that does not exist yet"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    finished: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    error: type[FedpromptError],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (16, 16)).save("image.png")
    Path("broken.png").write_bytes(b"no image")
    Path("full").mkdir()
    Path("full/file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    words = [str(finished.directory) if word == "RUN" else word for word in arguments.split()]
    found = CliRunner().invoke(app, words).exception
    assert type(found) is error
    assert message in str(found)
    assert sorted(tmp_path.rglob("*")) == before
