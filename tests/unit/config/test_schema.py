"""The schema for editors: our configs fit it, it refuses what fedprompt refuses, and it explains every setting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import documents
import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.cli.config_schema import config_schema
from fedprompt.config import Config, config_files
from fedprompt.config.shipped_configs import FOLDER
from fedprompt.config.strict_yaml import read_yaml
from fedprompt.core import registry
from fedprompt.core.method import Method
from fedprompt.errors import ConfigError, StorageError
from fedprompt.papers import published_numbers

pytestmark = pytest.mark.unit

SHIPPED = documents.ROOT / "src/fedprompt/schema.json"
CONFIGS = sorted(FOLDER.rglob("*.yaml"))


@cache
def validator() -> Draft202012Validator:
    schema = json.loads(SHIPPED.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def complaints(values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator().iter_errors(values)]


@pytest.mark.parametrize("path", CONFIGS, ids=documents.name)
def test_every_config_names_the_schema_and_fits_it(path: Path) -> None:
    text = path.read_text()
    said, _, where = text.partition("\n")[0].partition("=")
    assert said == "# yaml-language-server: $schema", "the first line names the schema, for editors"
    assert (path.resolve().parent / where).resolve() == SHIPPED.resolve()
    assert complaints(read_yaml(text)) == []


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"method": "fedvpt", "variant": None},
        {"method": {"name": "pfedbayespt", "v": 3}, "variant": {"name": "fedprox", "mu": 1}},
        {"privacy": "pfedmoap-25", "engine": "flower"},
        {"train": {"lrs": {"head.*": 0.1}}, "backbone": {"mean": [0.5, 0.5, 0.5]}},
        {
            "sweep": {
                "train.lr": [0.1, 1],
                "method.rank": [2],
                "method.name": ["fedlora"],
                "privacy": [None, "pfedmoap-50"],
            }
        },
        {
            "sweep": {
                "train.lrs.prompt": [0.1],
                "seed": [0, 1],
                "cases": [{"method": {"name": "flow"}, "train.lr": 0.1}],
            }
        },
        {"method": "fedlora", "scales": {"small": {"method": {"rank": 2}, "seed": 3}}},
        {"sweep": {"train.lr": [0.1]}, "scales": {"small": {"attack": None, "sweep": {"train.lr": None}}}},
    ],
    ids=json.dumps,
)
def test_what_fedprompt_takes_fits(values: dict[str, Any], tmp_path: Path) -> None:
    assert complaints(values) == []
    (tmp_path / "some.yaml").write_text(yaml.safe_dump(values))
    for scale in [None, *values.get("scales", {})]:
        build_all(tmp_path / "some.yaml", [f"scale={scale}"] if scale else [])


def build_all(path: Path, overrides: list[str]) -> None:
    """As a run would begin."""
    for each in config_files.load(path, overrides):
        registry.build(each.method, each.variant)


WRONG = [
    {"colour": "red"},
    {"seed": -1},
    {"train": {"epochs": "3"}},
    {"train": {"epochs": True}},
    {"train": {"momentum": 1.0}},
    {"train": {"lrs": {"head.*": -1}}},
    {"federation": {"rouds": 3}},
    {"aggregation": {"rule": 3}},
    {"attack": {"fraction": 0.1}},
    {"backbone": {"mean": [0.5, 0.5]}},
    {"method": "no_such"},
    {"method": {"head": "local"}},
    {"method": {"name": "fedlora", "prompt_tokens": 3}},
    {"method": {"name": "fedvpt", "prompt_tokens": -1}},
    {"method": "fedprox"},
    {"variant": "fedvpt"},
    {"privacy": "pfedmoap-1"},
    {"engine": "cloud"},
    {"sweep": {"train.lr": 0.1}},
    {"sweep": {"train.lr": []}},
    {"sweep": {"train.lr": ["fast"]}},
    {"sweep": {"train.rate": [0.1]}},
    {"sweep": {"method": ["no_such"]}},
    {"sweep": {"cases": [{"train.rate": 1}]}},
    {"scales": {"small": {"train": {"epochs": 0}}}},
    {"scales": {"small": {"sweep": {"train.lr": 1}}}},
    {"scales": {"small": 3}},
]


@pytest.mark.parametrize("values", WRONG, ids=json.dumps)
def test_what_fedprompt_refuses_does_not_fit(values: dict[str, Any], tmp_path: Path) -> None:
    assert complaints(values) != []
    (tmp_path / "some.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError):
        build_all(tmp_path / "some.yaml", ["scale=small"] if "scales" in values else [])


ENTRY = {"title": "A", "where": {"seed": 0}}


@pytest.mark.parametrize(
    "published",
    [
        {},
        {"paper": "A", "notes": "one"},
        {"paper": "A", "columns": [{"title": "A"}]},
        {"paper": "A", "columns": [ENTRY], "rows": [{**ENTRY, "average": ["high"]}]},
        {"paper": "A", "columns": [ENTRY], "rows": [{**ENTRY, "average": [101]}]},
        {"paper": "A", "columns": [ENTRY], "rows": [{**ENTRY, "mean": [50]}]},
    ],
    ids=json.dumps,
)
def test_published_numbers_that_cannot_be_read_do_not_fit(published: dict[str, Any]) -> None:
    assert complaints({"published": published}) != []
    with pytest.raises(ConfigError):
        published_numbers.read(published)


def settings(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, definition in schema["$defs"].items():
        if name not in ("setting", "sweep", "overlay.sweep", "tune"):
            yield from ((f"{name}.{key}", each) for key, each in definition.get("properties", {}).items())
    yield from schema["properties"].items()


def test_every_setting_is_described() -> None:
    definitions, found = validator().schema["$defs"], dict(settings(validator().schema))
    assert {"TrainConfig.lr", "method.fedvpt.depth", "variant.fedprox.mu", "sweep", "method"} <= set(found)
    whole = {
        name: {**definitions.get(each.get("$ref", "").rpartition("/")[2], {}), **each} for name, each in found.items()
    }
    silent = [name for name, each in whole.items() if not each.get("description") and "const" not in each]
    assert silent == [], "write a docstring below the field"


def test_every_section_method_and_variant_is_in_it() -> None:
    schema = validator().schema
    assert set(Config.model_fields) | {"sweep", "scales", "tune", "published"} == set(schema["properties"])
    for kind, table in {"method": registry.methods(), "variant": registry.variants()}.items():
        assert {f"{kind}.{name}" for name in table} == {name for name in schema["$defs"] if name.startswith(f"{kind}.")}


def test_methods_of_other_packages_are_in_it() -> None:
    @dataclass(frozen=True)
    class Mine(Method):
        """A method of mine."""

        words: int
        share: float = 0.5

    check = Draft202012Validator(config_schema({"mine": Mine}, {}))
    assert check.is_valid({"method": {"name": "mine", "words": 3}})
    assert not check.is_valid({"method": {"name": "mine"}})
    assert not check.is_valid({"method": {"name": "mine", "words": 3, "share": "half"}})
    assert not check.is_valid({"method": "fedvpt"})


def test_the_command_prints_it_or_writes_it(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert printed.stdout == SHIPPED.read_text()
    CliRunner().invoke(app, ["schema", "--output", str(tmp_path / "schema.json")])
    assert (tmp_path / "schema.json").read_text() == SHIPPED.read_text()
    lost = CliRunner().invoke(app, ["schema", "--output", str(tmp_path / "no/such/folder.json")])
    assert isinstance(lost.exception, StorageError)
    assert "--output" in str(lost.exception)
