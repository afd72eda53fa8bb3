"""`fedprompt init PATH`: what it sees, what it proposes, what it writes."""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from PIL import Image

from fedprompt.cli import starter
from fedprompt.config import config_files
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


def picture(value: int, size: tuple[int, int] = (20, 16)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value % 256, value * 7 % 256, value * 31 % 256)).save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(root: Path, folders: list[str], each: int = 12) -> None:
    """Some images in every folder; no two are equal."""
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for image in range(each):
            (root / folder / f"{image}.png").write_bytes(picture(number * each + image))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_folder(tmp_path / "photos", ["cat", "dog", "owl", "fox"], each=30)
    return tmp_path / "photos"


def test_the_command_it_prints_works_as_printed(fedprompt: Any, photos: Path, tmp_path: Path) -> None:
    told = fedprompt("init", "photos", "--backbone", "tiny", "--no-compare")
    assert told.code == 0, told.err
    command = next(line for line in told.out.splitlines() if line.startswith("next: ")).removeprefix("next: ")
    assert shlex.split(command)[-2:] == ["run", "photos.yaml"]
    assert fedprompt("validate", "photos.yaml", "--deep").code == 0
    trained = fedprompt("run", "photos.yaml", "federation.rounds=1", "--quiet")
    assert trained.code == 0, trained.err
    assert len(Run(tmp_path / "runs/photos-fedvpt_deep-seed0").clients) == 3


def test_it_describes_the_images(fedprompt: Any, photos: Path) -> None:
    (photos / "cat/5.png").write_bytes(b"broken")
    (photos / "owl/new.heic").write_bytes(b"")
    told = fedprompt("init", "photos", "--backbone", "tiny")
    assert "photos: 120 images" in told.out
    assert "classes    4: cat, dog, fox, owl; 30 images each" in told.out
    assert "size       20 x 16 pixels (median), sides of 16 to 20" in told.out
    assert "1 broken images" in told.out
    assert "photos/cat/5.png: it is none of PNG, JPEG" in told.out
    assert "files in formats that are not read: 1 .heic" in told.out


def test_the_first_line_names_the_schema_for_editors(fedprompt: Any, photos: Path, tmp_path: Path) -> None:
    fedprompt("init", "photos", "--backbone", "tiny")
    first = (tmp_path / "photos.yaml").read_text().splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert json.loads(Path(first.removeprefix(prefix)).read_text())["title"] == "fedprompt config"


def test_every_proposal_has_a_reason_in_the_config(fedprompt: Any, photos: Path, tmp_path: Path) -> None:
    fedprompt("init", "photos", "--backbone", "tiny")
    lines = (tmp_path / "photos.yaml").read_text().splitlines()
    for setting in ("scheme: dirichlet", "clients: 3", "name: tiny", "- local", "- head_tune", "- {name: fedvpt_deep"):
        (number,) = [number for number, line in enumerate(lines) if line.strip().startswith(setting)]
        above = lines[number - 1].strip()
        assert lines[number].partition("#")[2].strip() or above.startswith("# "), lines[number]


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        ("fedvpt_deep", [None, None, "shared_then_finetune"]),
        ("head_tune", [None, "shared_then_finetune"]),
        ("local", [None, None]),
    ],
)
def test_only_the_proposed_method_gets_a_head_that_is_averaged_and_fitted(
    fedprompt: Any, photos: Path, tmp_path: Path, method: str, heads: list[str | None]
) -> None:
    told = json.loads(fedprompt("init", "photos", "--backbone", "tiny", "--method", method, "--json").out)
    made = config_files.load(tmp_path / "photos.yaml")
    assert [config.method.get("head") for config in made] == heads
    assert made[-1].method["name"] == method
    assert ("head" in told["proposal"]) == (method != "local")


def test_an_existing_config_is_replaced_only_with_force(fedprompt: Any, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "photos.yaml").write_text("mine")
    told = fedprompt("init", "photos", "--backbone", "tiny")
    assert (told.code, (tmp_path / "photos.yaml").read_text()) == (2, "mine")
    assert "--output must be a file that does not exist yet, or --force be given, got 'photos.yaml'" in told.err
    assert fedprompt("init", "photos", "--backbone", "tiny", "--force").code == 0
    assert (tmp_path / "photos.yaml").read_text() != "mine"


def test_every_domain_becomes_a_client(fedprompt: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "set", [f"{domain}/{name}" for domain in ("art", "ink", "real") for name in ("cat", "dog")])
    told = json.loads(fedprompt("init", "set", "--backbone", "tiny", "--json").out)
    assert (told["proposal"]["scheme"]["value"], told["proposal"]["clients"]["value"]) == ("domains", 3)
    assert told["proposal"]["method"]["value"] == "pfedbayespt"
    assert told["survey"]["domains"] == {"art": 24, "ink": 24, "real": 24}
    assert fedprompt("validate", "set.yaml", "--deep").code == 0


def test_a_csv_file_and_a_flat_folder_are_understood(fedprompt: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, ["flat"], each=40)
    rows = [f"{image}.png,{'ab'[image % 2]}" for image in range(40)]
    (tmp_path / "flat/labels.csv").write_text("\n".join(["file,class", *rows]))
    for path, name in (("flat", "flat.yaml"), ("flat/labels.csv", "labels.yaml")):
        told = fedprompt("init", path, "--backbone", "tiny")
        assert (told.code, "classes    2: a, b; 20 images each" in told.out) == (0, True), told
        assert fedprompt("validate", name, "--deep").code == 0


def test_class_names_that_are_codes_are_told(fedprompt: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "set", ["n01440764", "class_3", "7", "owl"])
    told = json.loads(fedprompt("init", "set", "--backbone", "tiny", "--json").out)
    assert told["survey"]["codes"] == ["7", "class_3", "n01440764"]


def test_a_large_set_is_cut_for_a_first_run(fedprompt: Any, photos: Path, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("fedprompt.experiment.proposal.SMALL", 0)
    monkeypatch.setattr("fedprompt.experiment.proposal.MOST_TRAINING", 48)
    fedprompt("init", "photos", "--backbone", "tiny")
    data = yaml.safe_load((tmp_path / "photos.yaml").read_text())["data"]
    assert data == {"source": "photos", "train_per_cell": 12, "test_per_cell": 6}


def test_a_method_that_reads_class_names_gets_a_backbone_with_a_text_tower(fedprompt: Any, photos: Path) -> None:
    told = json.loads(fedprompt("init", "photos", "--method", "PromptFL", "--json").out)
    assert (told["proposal"]["backbone"]["value"], told["proposal"]["method"]["value"]) == ("b16", "promptfl")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--scheme", "dirichlett"), 2, "--scheme must be one of domains, classes"),
        (("--method", "fedvtp"), 2, "did you mean 'fedvpt'"),
        (("--backbone", "dino"), 2, "did you mean 'dinov2-small'?"),
        (("--backbone", "dinov2-small", "--method", "coop"), 2, "backbone.name must be a dual encoder"),
        (("--clients", "5000", "--backbone", "tiny"), 2, "partition.clients must be at most"),
        (("--scheme", "disjoint", "--clients", "9", "--backbone", "tiny"), 2, "must be at most the 4 classes"),
    ],
)
def test_wishes_that_cannot_work_are_refused_and_nothing_is_written(
    fedprompt: Any, photos: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    told = fedprompt("init", "photos", *arguments)
    assert message in told.err, told
    assert (told.code, (tmp_path / "photos.yaml").exists()) == (code, False)


def test_a_set_with_one_class_is_refused(fedprompt: Any, tmp_path: Path) -> None:
    write_folder(tmp_path / "set", ["cat"])
    told = fedprompt("init", "set")
    assert (told.code, "PATH must have images of at least two classes, got ['cat']" in told.err) == (2, True)


def test_a_misspelt_path_gets_a_suggestion(fedprompt: Any, photos: Path) -> None:
    told = fedprompt("init", "photo")
    assert (told.code, "got 'photo'; did you mean 'photos'?" in told.err) == (3, True)


def test_what_looks_like_a_hub_id_is_one_unless_a_path_has_the_name(photos: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(photos.parent)
    assert [starter._source(text) for text in ("owner/name", "photos", "photos/cot", "./owner/name", "tiny")] == [
        "hub:owner/name",
        "photos",
        "photos/cot",
        "./owner/name",
        "tiny",
    ]


def test_on_a_terminal_it_asks_five_questions_and_takes_the_answers(
    fedprompt: Any, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    answers = iter(["IID", "none", "2", "tiny", "fedvptt", "FedVPT", "no"])
    asked: list[str] = []

    def prompt(text: str, default: str) -> str:
        asked.append(default)
        return next(answers)

    monkeypatch.setattr("fedprompt.cli.starter.typer.prompt", prompt)
    monkeypatch.setattr("fedprompt.cli.starter.sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    told = fedprompt("init", "photos")
    assert told.code == 0, told.err
    assert asked == ["dirichlet", "3", "3", "dinov2-small", "fedvpt_deep", "fedvpt_deep", "yes"]  # two were asked again
    (config,) = config_files.load(tmp_path / "photos.yaml")
    found = (config.partition.scheme, config.partition.clients, config.backbone.name, config.method)
    assert found == ("iid", 2, "tiny", {"name": "fedvpt", "head": "shared_then_finetune"})
    assert "--clients must be a whole number of at least 1, got 'none'" in told.out
    assert "did you mean 'fedvpt'" in told.out


def test_an_interrupted_question_writes_nothing(fedprompt: Any, photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def prompt(text: str, default: str) -> str:
        raise typer.Abort

    monkeypatch.setattr("fedprompt.cli.starter.typer.prompt", prompt)
    monkeypatch.setattr("fedprompt.cli.starter.sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert (fedprompt("init", "photos").code, (tmp_path / "photos.yaml").exists()) == (130, False)


def test_texts_are_refused_with_what_to_do_instead(fedprompt: Any, tmp_path: Path) -> None:
    rows = "".join(f"words {number},{('yes', 'no')[number % 2]}\n" for number in range(20))
    (tmp_path / "reviews.csv").write_text("text,label\n" + rows)
    told = fedprompt("init", "reviews.csv")
    assert told.code == 3
    assert "PATH must hold images, got 'sentences'" in told.err
    assert "backbone.name: minilm" in told.err
    assert not (tmp_path / "reviews.yaml").exists()
