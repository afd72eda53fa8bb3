"""`fedprompt explain` and `fedprompt export` as a person uses them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documented_code import PLAIN
from remote_run import tiny_settings
from warm_processes import Call, command_line

from fedprompt.data.sources.synthetic import TinySource

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run under `runs/demo` and an image."""
    folder = tmp_path_factory.mktemp("explain")
    values = tiny_settings(folder / "runs", "demo", federation={"rounds": 1})
    (folder / "demo.yaml").write_text(yaml.safe_dump(values))
    done = command_line(folder)("run", "demo.yaml", "--quiet")
    assert done.returncode == 0, done.stderr
    shutil.move(next((folder / "runs").glob("demo*")), folder / "runs" / "demo")
    TinySource().image(0).save(folder / "image.png")
    return folder


@pytest.fixture
def call(place: Path) -> Call:
    return command_line(place)


def test_an_image_is_explained_in_a_picture_and_in_numbers(call: Call, place: Path) -> None:
    done = call("explain", "runs/demo", "--client", "client_0", "image.png", "--output", "pictures", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["picture"] == "pictures/explain-image.png"
    assert (place / said["picture"]).read_bytes().startswith(b"\x89PNG")
    assert said["attention"]["with_prompts"]["shares"]["prompts"] > 0


def test_an_exported_client_answers_as_fedprompt_does_in_a_process_without_it(call: Call, place: Path) -> None:
    done = call("export", "runs/demo", "--client", "client_0", "--output", "exported", "--with-backbone")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["exported: exported", "exact"]
    code = PLAIN + "\nimport sys\nassert 'fedprompt' not in sys.modules\n"
    alone = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=600, check=False
    )
    assert alone.returncode == 0, alone.stderr
    answer = call("predict", "runs/demo", "--client", "client_0", "image.png", "--json")
    (row,) = json.loads(answer.stdout)["predictions"]
    assert alone.stdout.strip() == row["top"][0]["class"]


def test_a_client_that_is_not_there_is_told_in_one_line(call: Call, place: Path) -> None:
    done = call("export", "runs/demo", "-c", "nobody", "-o", "new")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: client must be one of the 4 clients of the run (client_0, ")
    assert not (place / "new").exists()
