"""Numbers of a paper find the runs they belong to."""

from __future__ import annotations

from typing import Any

import pytest

from fedprompt.config import config_files
from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.papers import paper_configs
from fedprompt.papers.collect import settings_of
from fedprompt.papers.published_numbers import Published, match, read

pytestmark = pytest.mark.unit

PETS = {"title": "Pets", "where": {"data.source": ["hub:timm/oxford-iiit-pet", "oxford_pets"]}}
ROW = {"title": "PromptFL", "where": {"method.name": "promptfl"}, "average": ["90.79 ± 0.61"]}


def table(**changes: Any) -> Published:
    return read({"paper": "P", "columns": [PETS], "rows": [ROW], **changes})


@pytest.mark.parametrize(
    "source", ["hub:timm/oxford-iiit-pet", "oxford_pets", "oxford_pets.parquet", "../data/oxford_pets.parquet"]
)
def test_a_data_set_is_known_by_its_name_and_by_the_stem_of_its_file(source: str) -> None:
    assert match(table().columns, {"data.source": source}) is not None


@pytest.mark.parametrize("source", ["pets", "oxford_pets_2.parquet", "oxford_pets/images"])
def test_another_data_set_is_no_match(source: str) -> None:
    assert match(table().columns, {"data.source": source}) is None


def test_the_row_that_asks_most_is_taken() -> None:
    plain = {"title": "any", "where": {"method.name": "pfedmoap"}}
    without = {"title": "lambda 0", "where": {"method.name": "pfedmoap", "method.local_weight": 0}}
    rows = table(rows=[plain, without]).rows
    found = [match(rows, {"method.name": "pfedmoap", "method.local_weight": weight}) for weight in (0.0, 0.5)]
    assert [entry.title for entry in found if entry] == ["lambda 0", "any"]


def test_null_asks_for_a_section_that_is_absent_and_no_number_is_a_truth_value() -> None:
    plain = {"title": "no noise", "where": {"privacy": None}}
    one = {"title": "one", "where": {"method.use_vision": True}}
    assert match(table(rows=[plain]).rows, {"privacy": None}) is not None
    assert match(table(rows=[plain]).rows, {"privacy.target_epsilon": 50.0}) is None
    assert match(table(rows=[one]).rows, {"method.use_vision": 1}) is None


def test_per_cents_become_fractions_with_their_spread() -> None:
    found = table()
    figure = found.figures(found.rows[0], found.columns[0])["average"]
    assert (figure.mean, figure.std) == (0.9079, 0.0061)
    assert found.figures(None, found.columns[0]) == {}


def test_figures_of_single_domains_are_told_by_column() -> None:
    other = {"title": "Others", "where": {"data.source": "others"}}
    row = {
        "title": "PromptFL",
        "where": {"method.name": "promptfl"},
        "domains": [{"cats": 90.5, "dogs": "80 ± 1"}, None],
    }
    found = table(columns=[PETS, other], rows=[row])
    pets, others = (found.figures(found.rows[0], column) for column in found.columns)
    assert {key: (value.mean, value.std) for key, value in pets.items()} == {
        "domain:cats": (0.905, None),
        "domain:dogs": (0.8, 0.01),
    }
    assert others == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"rows": [{**ROW, "average": [1, 2]}]},
            r"rows\.0\.average must have a value for each of the 1 columns, got 2",
        ),
        ({"rows": [{**ROW, "average": ["about 90"]}]}, r"must hold percentages such as 84\.77 .*, got 'about 90'"),
        ({"rows": [{**ROW, "average": [101]}]}, "must hold percentages"),
        (
            {"rows": [{**ROW, "avarage": [90]}]},
            "must hold nothing but title, where, average, worst, domains, got 'avarage'",
        ),
        ({"rows": [{**ROW, "domains": [{"a": "x"}]}]}, r"rows\.0\.domains must hold percentages .*, got 'x'"),
        ({"rows": [{**ROW, "domains": [3]}]}, r"rows\.0\.domains must be a mapping, got 3"),
        ({"rows": [{"title": "x"}]}, r"rows\.0\.where must be a mapping, got None"),
        ({"rows": [ROW, ROW]}, r"published\.rows must have every title once, got 'PromptFL'"),
        ({"paper": None}, r"published\.paper must be a text"),
        ({"year": 2025}, "must hold nothing but paper, notes, columns, rows, got 'year'"),
    ],
)
def test_a_mistake_is_told_with_its_place(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        table(**changes)


ALL = {each.name: each for each in paper_configs.experiments()}


def published(name: str) -> Published:
    return read(config_files.read(ALL[name].path)[config_files.PUBLISHED])


@pytest.mark.parametrize("name", ALL)
def test_every_paper_config_has_its_numbers_or_says_that_they_are_not_known(name: str) -> None:
    found = published(name)
    assert found.paper
    assert found.rows or any("not known to us" in note for note in found.notes)


@pytest.mark.parametrize("name", [name for name in ALL if published(name).rows])
def test_every_run_at_the_papers_size_has_its_place_in_the_papers_table(name: str) -> None:
    found = published(name)
    places = set()
    for config in config_files.load(ALL[name].path):
        settings = settings_of(registry.completed(config))
        row, column = match(found.rows, settings), match(found.columns, settings)
        assert row is not None
        assert column is not None
        places.add((row.title, column.title, config.seed))
    assert len(places) == len(config_files.load(ALL[name].path)), "no two runs may share a place"


@pytest.mark.parametrize(
    ("name", "row", "column", "average", "worst"),
    [  # a number of every table, typed a second time
        ("pfedbayespt/table1", "SGPT", "m = 3", (0.8966, None), (0.8293, None)),
        ("pfedbayespt/table2", "FedPR", "s = 50", (0.5887, None), (0.4154, None)),
        ("pfedbayespt/table3_domainnet", "pFedPG", "m = 2", (0.8907, None), None),
        ("pfedbayespt/table3_cifar100", "FedVPT-D", "s = 5", (0.9593, None), None),
        ("pfedbayespt/table4_domainnet", "pFedBayesPT-G", "m = 6", (0.8941, None), None),
        ("pfedbayespt/table4_cifar100", "pFedBayesPT", "s = 50", (0.8221, None), None),
        ("pfedmoap/table1", "pFedMoAP λ = 0", "OxfordPets", (0.9483, 0.0065), None),
        ("pfedmoap/table2", "CoOp", "CIFAR-100", (0.4874, 0.0017), None),
        ("pfedmoap/table3", "PromptFL", "DomainNet-10", (0.2448, 0.1252), None),
        ("pfedmoap/table4", "pFedMoAP", "Office-Caltech10", (0.3831, 0.0121), None),
        ("pfedmoap/table6", "Prompt+FedProx, ε = 25", "DTD", (0.3782, 0.0052), None),
        ("pfedmoap/table7", "linear gate, 10 experts", "OxfordPets", (0.5278, 0.0688), None),
        ("pfedmoap/table8", "25 experts", "DomainNet-10", (0.3886, 0.0043), None),
        ("pfedmoap/table9", "width 256", "DTD", (0.9088, None), None),
    ],
)
def test_numbers_of_the_papers(name: str, row: str, column: str, average: Any, worst: Any) -> None:
    found = published(name)
    (line,) = [each for each in found.rows if each.title == row]
    (place,) = [each for each in found.columns if each.title == column]
    figures = {key: (value.mean, value.std) for key, value in found.figures(line, place).items()}
    told = {key: value for key, value in figures.items() if not key.startswith("domain:")}
    assert told == {"average": average, **({"worst": worst} if worst else {})}


@pytest.mark.parametrize("name", ["pfedmoap/table3", "pfedmoap/table4"])
def test_the_average_of_a_paper_is_the_mean_of_its_domains(name: str) -> None:
    """Catches a number in the wrong row or a slip of the pen: the paper rounds to two places."""
    found = published(name)
    for row in found.rows:
        figures = found.figures(row, found.columns[0])
        domains = [value.mean for key, value in figures.items() if key.startswith("domain:")]
        assert sum(domains) / len(domains) == pytest.approx(figures["average"].mean, abs=1.5e-4), row.title


def test_an_unknown_name_is_told_with_names_like_it() -> None:
    with pytest.raises(ConfigError, match=r"got 'pfedbayespt/tabel1'; did you mean 'pfedbayespt/table1"):
        paper_configs.find("pfedbayespt/tabel1")


def test_a_path_to_a_paper_config_is_that_paper() -> None:
    assert paper_configs.find(str(ALL["pfedmoap/table1"].path)).name == "pfedmoap/table1"
