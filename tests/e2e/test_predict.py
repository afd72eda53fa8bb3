"""`fedprompt predict` as a person uses it: images in, answers out, whatever is among them."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from remote_run import exported, tiny_settings
from warm_processes import Call, command_line

from fedprompt.data.sources.synthetic import TinySource
from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).resolve().parents[2] / "docs" / "predict.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a Bayesian method under `runs/demo`, and images by class under `photos`, one of them damaged."""
    folder = tmp_path_factory.mktemp("predict")
    values = tiny_settings(folder / "runs", "demo", method={"name": "pfedbayespt"}, federation={"rounds": 1})
    (folder / "demo.yaml").write_text(yaml.safe_dump(values))
    done = command_line(folder)("run", "demo.yaml", "--quiet")
    assert done.returncode == 0, done.stderr
    shutil.move(next((folder / "runs").glob("demo*")), folder / "runs" / "demo")
    source = TinySource()
    for index in range(0, len(source), 30):
        path = folder / "photos" / source.class_names[source.labels[index]] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        source.image(index).save(path)
    shutil.copytree(folder / "photos", folder / "labelled")
    (folder / "photos" / "broken.png").write_bytes(b"no image")
    exported(values, folder / "files")
    return folder


@pytest.fixture
def call(place: Path) -> Call:
    return command_line(place)


def test_a_clients_test_images_are_predicted_as_in_its_evaluation(call: Call, place: Path) -> None:
    options = ("--split", "test", "--top", "2", "--json")
    done = call("predict", "runs/demo", "--client", "client_2", "files/client_2.parquet", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["client"], found["round"], found["summary"]["unreadable"]) == ("client_2", 1, 0)
    rows = found["predictions"]
    assert len(rows) == found["summary"]["labelled"] == found["summary"]["images"]
    assert all(len(row["top"]) == 2 and row["mutual_information"] >= 0 for row in rows)
    stored = Run(place / "runs" / "demo").evaluations(1)[2]
    assert (found["summary"]["images"], found["summary"]["correct"]) == (stored["samples"], stored["correct"])
    assert sum(row["entropy"] for row in rows) == pytest.approx(stored["entropy"], rel=1e-4)
    assert "accuracy" in done.stderr


def test_an_unreadable_image_is_told_and_the_others_are_done(call: Call, place: Path) -> None:
    done = call("predict", "runs/demo", "--client", "0", "photos", "--output", "answers.csv")
    assert done.returncode == 3
    assert "photos/broken.png: it is none of PNG" in done.stderr
    assert re.search(r"error: images must be readable: 1 of \d+ were not \(photos/broken\.png\)", done.stderr)
    rows = list(csv.DictReader((place / "answers.csv").open()))
    assert [row["image"] for row in rows if row["error"]] == ["photos/broken.png"]
    readable = [row for row in rows if not row["error"]]
    assert len(readable) == len(list(place.glob("photos/*/*.png"))) == 12
    assert all(row["class_1"] and row["label"] for row in readable)
    assert "predictions: answers.csv" in done.stdout
    assert "12 with a label" in done.stdout


def test_a_new_client_is_fitted_kept_and_used_again(call: Call) -> None:
    first = call(
        "predict", "runs/demo", "--adapt", "labelled", "--epochs", "2", "--save", "mine", "photos/disc", "--csv"
    )
    assert first.returncode == 0, first.stderr
    again = call("predict", "runs/demo", "--adapted", "mine", "photos/disc", "--csv")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    assert "adapted client: mine" in first.stderr


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--client", "nobody", "photos"], 2, "client must be one of the 4 clients of the run (client_0"),
        (["photos"], 2, "--client must name a client of the run, unless --adapt or --adapted is given"),
        (["--client", "0"], 2, "IMAGE must be at least one file or folder"),
        (["--client", "0", "photos", "--csv", "--json"], 2, "must not be given together"),
        (["--client", "0", "photos", "--save", "x"], 2, "--save must be given with --adapt"),
        (["--client", "0", "photos", "--split", "test"], 2, "--split must be given with parquet files only"),
        (["--client", "0", "a.parquet", "--split", "best"], 2, "--split must be one of train, test, val"),
        (["--client", "0", "photos", "-o", "x.txt"], 2, "--output must end in .csv or .json"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    options: list[str], code: int, told: str, place: Path, complaint: Callable[..., tuple[int, str]]
) -> None:
    ended, said = complaint("predict", "runs/demo", *options, folder=place)
    assert ended == code
    assert told in said


def test_the_examples_of_the_docs_work(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of docs/predict.md, in the folder its paths are meant for."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("FEDPROMPT_CACHE", str(place / "cache"))
    shutil.copy(next((place / "photos" / "disc").iterdir()), place / "photo.png")
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), {})
