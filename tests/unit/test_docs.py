"""What the documents show is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import documents
import pytest

from fedprompt import errors
from fedprompt.config import config_files
from fedprompt.config.shipped_configs import FOLDER
from fedprompt.config.strict_yaml import read_yaml
from fedprompt.core import registry
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.sources import digits
from fedprompt.data.sources.open import open_source
from fedprompt.io.files import cache_directory

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def test_every_exit_code_is_documented() -> None:
    table = (ROOT / "docs/cli.md").read_text()
    codes = {each.exit_code for each in errors.FedpromptError.__subclasses__()}
    assert len(codes) == len(errors.FedpromptError.__subclasses__()), "one code each"
    for code in codes:
        assert f"| {code} |" in table


def scales(path: Path) -> list[list[str]]:
    """The overrides under which a config is valid: none, and each of its scales."""
    return [[], *([f"scale={scale}"] for scale in read_yaml(path.read_text()).get("scales", {}))]


PAPERS = sorted((FOLDER / "papers").glob("*/*.yaml"))
CONFIGS = sorted(FOLDER.rglob("*.yaml"))
LAUNCHES = [
    pytest.param(path, overrides, id="-".join([str(path.relative_to(FOLDER)), *overrides]))
    for path in CONFIGS
    for overrides in scales(path)
]


@pytest.mark.parametrize(("path", "overrides"), LAUNCHES)
def test_every_config_in_the_project_is_valid_and_says_how_to_launch_it(path: Path, overrides: list[str]) -> None:
    for each in config_files.load(path, overrides):
        registry.build(each.method, each.variant)
    header = path.read_text().split("\n\n")[0]
    assert " ".join(["fedprompt run", str(path.relative_to(FOLDER.parent)), *overrides]) in header


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_paper_has_a_small_scale_that_needs_only_a_package_registry(path: Path) -> None:
    for each in config_files.load(path, ["scale=small"]):
        dual = registry.build(each.method, each.variant).uses_text
        assert (each.data.source, each.backbone.name) == ("embedded", "mini" if dual else "dinov2-small")


@pytest.mark.sampled
@pytest.mark.assets
@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_the_embedded_set_can_be_divided_as_the_small_scale_of_a_paper_says(path: Path) -> None:
    if not digits.path(cache_directory()).is_file():
        pytest.skip("the embedded set is not in the cache: run `make assets`")
    for each in config_files.load(path, ["scale=small"]):
        source = open_source(each.data, cache_directory())
        manifest = make_manifest(source, each.data, each.partition, each.seed)
        assert len(manifest.clients) == each.partition.clients


@pytest.mark.parametrize(
    ("name", "axis", "values", "runs"),
    [
        ("table1", "domains_per_client", {1, 2, 3, 4, 5, 6}, 48),
        ("table2", "classes_per_client", {5, 10, 15, 20, 50}, 40),
        ("table3_domainnet", "domains_per_client", {1, 2}, 16),
        ("table3_cifar100", "classes_per_client", {5, 10}, 16),
        ("table4_domainnet", "domains_per_client", {6}, 3),
        ("table4_cifar100", "classes_per_client", {50}, 3),
        ("figure1_domainnet", "domains_per_client", {6}, 10),
        ("figure1_cifar100", "classes_per_client", {50}, 10),
    ],
)
def test_the_configs_of_pfedbayespt_hold_the_settings_of_the_paper(
    name: str, axis: str, values: set[int], runs: int
) -> None:
    made = config_files.load(f"configs/papers/pfedbayespt/{name}.yaml")
    assert len(made) == 3 * runs
    assert {each.seed for each in made} == {0, 1, 2}
    assert {getattr(each.partition, axis) for each in made} == values
    for each in made:
        full = registry.completed(each)
        assert (full.train.epochs, full.train.lr, full.federation.rounds) == (5, 0.01, 100)
        assert (full.backbone.name, full.backbone.image_size) == ("google/vit-base-patch16-224-in21k", 224)
        assert full.federation.evaluate_last == 10
        assert full.federation.held_out == (0.5 if name.startswith("table3") else 0)
        if full.partition.scheme == "domains":
            assert (full.partition.clients, full.federation.fraction, full.data.per_domain) == (6, 1.0, 1830)
            assert len(full.data.classes or []) == 10
        else:
            share = 0.1 if name.startswith("table3") else 0.05
            assert (full.partition.clients, full.federation.fraction) == (100, share)
        assert full.method.get("prompt_tokens", 10) == 10
        if full.method["name"] == "pfedbayespt":
            expected = {"instance_tokens": 1, "keep_probability": 0.9, "draws": 1, "extra_samples": 1}
            assert expected.items() <= full.method.items()
            assert full.method["predict_draws"] == 5 or name.startswith("figure1")
        if full.method["name"].startswith("pfedbayespt"):
            assert full.method["parametrisation"] == "literal"
        if full.method["name"] == "sgpt" and full.partition.scheme == "domains":
            assert full.method["shared_blocks"] == (0, 1, 2, 3, 4)
            assert full.method["group_blocks"] == (5, 6)
    if name.startswith(("table1", "table2", "table3")):
        assert {each.method.get("depth") for each in made if each.method["name"] == "fedpr"} == {None, 1}


@pytest.mark.parametrize("path", documents.PAGES, ids=documents.name)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+?)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
