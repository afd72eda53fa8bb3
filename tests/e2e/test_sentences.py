"""Sentences through the command line: run, predict, the files of sites, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from warm_processes import Call, command_line

from fedprompt.data.sources.tiny_sentences import tiny_sentences
from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e

CONFIG: dict[str, Any] = {
    "name": "said",
    "data": {"source": "tiny-text", "train_per_cell": 4, "test_per_cell": 2},
    "partition": {"scheme": "domains", "clients": 4},
    "backbone": {"name": "tiny-bert", "max_tokens": 32},
    "method": {"name": "fedvpt_deep", "prompt_tokens": 2},
    "federation": {"rounds": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    (folder / "said.yaml").write_text(yaml.safe_dump({**CONFIG, "output": {"cache": "cache", "threads": 1}}))
    done = command_line(folder)("run", "said.yaml", "--quiet")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def call(place: Path) -> Call:
    return command_line(place)


RUN = "runs/said-fedvpt_deep-seed0"


def test_predictions_of_a_clients_test_sentences_are_those_of_its_evaluation(call: Call, place: Path) -> None:
    done = call("federate", "split", "said.yaml", "--output", "sites")
    assert done.returncode == 0, done.stderr
    counts = Run(place / RUN).reader.evaluations(2)
    for client in range(4):
        name = f"client_{client}"
        done = call("predict", RUN, "--client", name, f"sites/{name}.parquet", "--split", "test", "--json")
        assert done.returncode == 0, done.stderr
        tally = json.loads(done.stdout)["summary"]
        assert (tally["correct"], tally["texts"]) == (counts[client]["correct"], counts[client]["samples"])


def test_unlabelled_sentences_of_a_csv_file_are_predicted(call: Call, place: Path) -> None:
    source = tiny_sentences()
    (place / "new.csv").write_text("text\n" + "".join(f"{source.sentence(i)}\n" for i in (0, 50, 100)))
    done = call("predict", RUN, "--client", "client_0", "new.csv", "--csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [row["text"] for row in rows] == ["new.csv:0", "new.csv:1", "new.csv:2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "said.yaml", "backbone=tiny", "backbone.max_tokens=null", "name=other"),
            "data.source must hold images for backbone.name 'tiny'",
        ),
        (
            ("run", "said.yaml", "data.source=tiny", "name=other"),
            "data.source must hold sentences for backbone.name 'tiny-bert'",
        ),
        (("run", "said.yaml", "train.random_flip=0.5", "name=other"), "must be absent for sentences"),
        (("run", "said.yaml", "method=promptfl", "name=other"), "backbone.name must be a dual encoder"),
        (
            ("run", "said.yaml", "engine.compile=true", "name=other"),
            "engine.compile must be false for an encoder of sentences",
        ),
        (("explain", RUN, "--client", "client_0", "a pear"), "must be a backbone of images for an explanation"),
        (("export", RUN, "--client", "client_0", "--output", "out"), "must be a backbone of images for an export"),
    ],
)
def test_what_is_made_for_images_is_refused(call: Call, arguments: tuple[str, ...], message: str) -> None:
    done = call(*arguments)
    assert done.returncode not in (0, 1)
    assert message in " ".join(done.stderr.split())
