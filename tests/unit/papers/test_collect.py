"""From settings and runs to the cells of a result."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fedprompt.errors import ConfigError, DivergenceError, RunError
from fedprompt.papers import paper_configs, provenance, result_file
from fedprompt.papers.collect import Outcome, Request, assemble, failed
from fedprompt.papers.paper_configs import Experiment
from fedprompt.papers.published_numbers import Published, read
from fedprompt.papers.result_file import Backbone, Data, OneRun, Pair, Result
from fedprompt.papers.setting_differences import differences, method_differences, not_run
from fedprompt.papers.table_layout import Place, places

pytestmark = pytest.mark.unit

PAIRS = [("Head-Tune", "fedvpt"), ("fedvpt", "sgpt")]
TABLE = {
    "paper": "Mine",
    "columns": [
        {"title": "m = 1", "where": {"partition.domains_per_client": 1}},
        {"title": "m = 3", "where": {"partition.domains_per_client": 3}},
    ],
    "rows": [{"title": "Head-Tune", "where": {"method.name": "head_tune"}, "average": [50, 60], "worst": [40, None]}],
}
CONFIG = """# Table 7 of Mine (2026): tiny images.
name: mine
data: {source: tiny}
backbone: {name: tiny}
federation: {rounds: 9, evaluate_last: 1}
sweep:
  partition.domains_per_client: [1, 2]
  method: [head_tune, {name: fedvpt, prompt_tokens: 2}]
scales:
  small: {federation: {rounds: 1}, data: {source: /secret/place/own.parquet}}
"""


def settings(method: str = "fedvpt", m: int = 1, **more: Any) -> dict[str, Any]:
    return {"method.name": method, "partition.domains_per_client": m, "data.source": "tiny", **more}


def titles(grid: list[dict[str, Any]], published: Published) -> list[tuple[str, str]]:
    return [(place.row, place.column) for place in places(grid, published)]


def test_runs_take_the_papers_titles_and_others_are_called_alike() -> None:
    grid = [settings("head_tune", 1), settings("head_tune", 2), settings("fedvpt", 1)]
    assert titles(grid, read(TABLE)) == [("Head-Tune", "m = 1"), ("Head-Tune", "m = 2"), ("fedvpt", "m = 1")]


def test_without_a_paper_columns_are_called_by_what_differs_and_else_by_their_data() -> None:
    assert titles([settings(m=1), settings(m=2)], Published()) == [
        ("fedvpt", "domains_per_client 1"),
        ("fedvpt", "domains_per_client 2"),
    ]
    assert titles([settings(**{"data.source": "/x/pets.parquet"})], Published()) == [("fedvpt", "pets")]


def test_rows_of_one_method_are_told_apart_by_what_differs_between_them_alone() -> None:
    grid = [
        settings("pfedmoap", **{"method.experts": 3, "train.lr": 1.0}),
        settings("pfedmoap", **{"method.experts": 5, "train.lr": 1.0}),
        settings("fedvpt", **{"train.lr": 2.0}),
    ]
    assert [row for row, _ in titles(grid, Published())] == ["pfedmoap, experts 3", "pfedmoap, experts 5", "fedvpt"]


def test_a_setting_with_one_value_in_every_column_tells_no_rows_apart() -> None:
    grid = [settings(method, m, **{"train.epochs": 7 - 2 * m}) for m in (1, 2) for method in ("head_tune", "fedvpt")]
    assert {row for row, _ in titles(grid, read(TABLE))} == {"Head-Tune", "fedvpt"}
    both = [*grid, settings("fedvpt", 1, **{"train.epochs": 9})]
    assert [row for row, _ in titles(both, read(TABLE))][-1] == "fedvpt, epochs 9"


def test_a_variant_is_part_of_the_name() -> None:
    assert titles([settings(**{"variant.name": "fedprox"})], Published())[0][0] == "fedvpt+fedprox"


def test_settings_that_differ_are_told_with_both_values_the_important_ones_first() -> None:
    theirs = [settings(**{"federation.rounds": 100, "train.lr": 0.01, "data.train_per_cell": None})]
    ours = [settings(**{"federation.rounds": 5, "train.lr": lr, "data.train_per_cell": 6}) for lr in (0.1, 0.2)]
    ours = [{**each, "data.source": "/data/pacs.parquet"} for each in ours]
    assert differences(ours, theirs, read(TABLE)) == [
        "Not the paper's setting: data tiny, here pacs.parquet; rounds 100, here 5; "
        "training images of each domain and class all, here 6.",
        "Other settings that differ: train.lr 0.01, here 0.1, 0.2.",
    ]
    assert differences(theirs, theirs, read(TABLE)) == []


def test_settings_of_methods_are_told_once_for_all_rows_that_share_them() -> None:
    def grid(tokens: int) -> list[tuple[Place, dict[str, Any]]]:
        return [(Place(row, "c"), {"method.prompt_tokens": tokens}) for row in ("A", "B")]

    assert method_differences(grid(5), grid(10)) == ["Settings of methods: prompt_tokens 10, here 5 (A, B)."]


def test_what_was_not_run_is_told() -> None:
    ours = [Place("Head-Tune", "m = 1"), Place("fedvpt", "m = 1")]
    assert not_run(ours, ours, read(TABLE)) == ["Not run here: m = 3."]
    assert not_run([Place("Head-Tune", "other")], ours, read(TABLE)) == [
        "None of the paper's columns was run: m = 1, m = 3."
    ]


@pytest.fixture
def request_of(tmp_path: Path) -> Any:
    """A request for a config with four runs a seed."""

    def make(
        scale: str | None = None, *overrides: str, seeds: tuple[int, ...] = (0,), only: tuple[str, ...] = ()
    ) -> Request:
        path = tmp_path / "mine.yaml"
        path.write_text(CONFIG)
        return Request(Experiment("mine", path), scale, overrides, seeds, only)

    return make


def outcome(config: Any, average: float) -> Outcome:
    figures = {"average": average, "worst": average / 2}
    run = OneRun(
        name=config.run_name, seed=config.seed, hash=config.digest(), status="finished", rounds=1, figures=figures
    )
    data = Data(source="own.parquet", fingerprint="f" * 64, sha256="a" * 64)
    return Outcome(config, run, data, Backbone(name="tiny", digest="b" * 64), {"torch": "2", "threads": "1"})


def result_of(request: Request, averages: dict[int, float], before: Result | None = None) -> Result:
    outcomes = [outcome(config, averages[config.seed]) for config in request.configs()]
    return assemble(request, read(TABLE), outcomes, before)


def test_a_cell_holds_mean_and_deviation_over_seeds_beside_the_papers_numbers(request_of: Any) -> None:
    found = result_of(request_of(seeds=(0, 1)), {0: 0.2, 1: 0.4})
    cell = found.cell("Head-Tune", "m = 1")
    assert cell is not None
    assert cell.figures["average"].mean == pytest.approx(0.3)
    assert cell.figures["average"].std == pytest.approx(0.2 / 2**0.5)
    assert (cell.paper["average"].mean, cell.paper["worst"].mean, cell.seeds) == (0.5, 0.4, [0, 1])
    theirs = found.cell("Head-Tune", "m = 3")
    assert theirs is not None
    assert (theirs.runs, theirs.paper["average"].mean) == (None, 0.6)
    assert found.cell("fedvpt", "m = 2").paper == {}  # type: ignore[union-attr]


def test_a_seed_made_later_joins_those_that_are_stored(request_of: Any) -> None:
    first = result_of(request_of(), {0: 0.2})
    both = result_of(request_of(seeds=(1,)), {1: 0.4}, before=first)
    cell = both.cell("fedvpt", "m = 1")
    assert cell is not None
    assert cell.seeds == [0, 1]
    assert cell.figures["average"].mean == pytest.approx(0.3)
    assert both.commands == [f"fedprompt reproduce {both.commands[0].split()[2]} --seed 0,1"]


def test_stored_seeds_of_other_settings_do_not_join(request_of: Any) -> None:
    first = result_of(request_of(), {0: 0.2})
    other = result_of(request_of(None, "train.lr=0.5", seeds=(1,)), {1: 0.4}, before=first)
    assert {tuple(cell.seeds) for cell in other.cells if cell.runs} == {(1,)}


def test_one_method_is_run_again_and_the_other_rows_stay(request_of: Any) -> None:
    """Even if the settings of the others, and so their families, are not what they were."""
    first = result_of(request_of(None, "train.lr=0.5", seeds=(0, 1)), {0: 0.2, 1: 0.4})
    stored = first.cell("fedvpt", "m = 1")
    pairs = [
        Pair(column="m = 1", row=one, against=other, difference=0.1, drawn="clients", seeds=2) for one, other in PAIRS
    ]
    first = first.model_copy(update={"pairs": pairs})
    again = result_of(request_of(seeds=(0, 1), only=("head_tune",)), {0: 0.6, 1: 0.8}, before=first)
    cell = again.cell("Head-Tune", "m = 1")
    assert cell is not None
    assert cell.figures["average"].mean == pytest.approx(0.7)
    assert cell.settings["method.name"] == "head_tune"
    assert again.cell("fedvpt", "m = 1") == stored
    assert [cell.row for cell in again.cells if cell.runs] == [cell.row for cell in first.cells if cell.runs]
    assert [row.title for row in again.rows] == [row.title for row in first.rows]
    assert [(pair.row, pair.against) for pair in again.pairs] == [PAIRS[1]]
    assert again.commands == [
        *first.commands,
        f"fedprompt reproduce {first.commands[0].split()[2]} --only head_tune --seed 0,1",
    ]


def test_only_methods_of_the_grid_can_be_run_again(request_of: Any) -> None:
    asked = request_of(only=("fedvpt",))
    assert {config.method["name"] for config in asked.configs()} == {"fedvpt"}
    assert {config.method["name"] for config in asked.grid()} == {"fedvpt", "head_tune"}
    with pytest.raises(ConfigError, match=r"--only must name methods of the grid \(head_tune, fedvpt\), got 'fedpr'"):
        request_of(only=("fedpr",)).configs()


def test_a_failed_run_is_kept_with_its_reason_and_leaves_the_other_seeds_alone(request_of: Any) -> None:
    request = request_of(seeds=(0, 1))
    outcomes = [
        failed(config, DivergenceError("train.lr must be smaller:\nnan")) if config.seed else outcome(config, 0.25)
        for config in request.configs()
    ]
    cell = assemble(request, read(TABLE), outcomes, None).cell("Head-Tune", "m = 1")
    assert cell is not None
    assert cell.runs is not None
    assert (cell.seeds, cell.figures["average"].mean) == ([0], 0.25)
    assert cell.runs[1].error == "DivergenceError: train.lr must be smaller:"


def test_no_path_of_the_machine_is_stored(request_of: Any, tmp_path: Path) -> None:
    request = request_of("small", f"backbone.name={tmp_path}/weights.safetensors")
    broken = failed(request.configs()[0], RunError(f"run '{tmp_path}/runs/x' was made with another config"))
    found = assemble(request, read(TABLE), [broken, *(outcome(c, 0.5) for c in request.configs()[1:])], None)
    result_file.save(found, tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text()
    assert str(tmp_path) not in text
    assert "/secret" not in text
    assert '"data.source": "own.parquet"' in text
    assert "backbone.name=weights.safetensors" in text


def test_the_title_says_on_which_data_where_they_are_not_the_papers(request_of: Any) -> None:
    assert result_of(request_of(), {0: 0.2}).title == "Table 7 of Mine"
    assert result_of(request_of("small"), {0: 0.2}).title == "Table 7 of Mine on own"


def test_runs_are_named_as_the_command_run_names_them(request_of: Any) -> None:
    assert [config.run_name for config in request_of("small").configs()][:2] == [
        "mine-small-domains_per_client1-head_tune-seed0",
        "mine-small-domains_per_client1-fedvpt-seed0",
    ]


@pytest.mark.parametrize(
    ("path", "scale", "overrides", "name"),
    [
        ("pfedbayespt/table1", "small", (), "pfedbayespt-table1-small"),
        ("pfedbayespt/table4_cifar100", None, (), "pfedbayespt-table4_cifar100"),
        ("pfedmoap/table1", "small", ("name=pfedmoap-table1-pets",), "pfedmoap-table1-pets"),
    ],
)
def test_a_result_file_is_called_by_paper_table_and_name(path: str, scale: str, overrides: Any, name: str) -> None:
    from fedprompt.papers.paper_configs import find

    assert Request(find(path), scale, overrides, ()).name() == name


def test_hardware_says_what_the_machine_has() -> None:
    found = provenance.hardware()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**20
    assert found["cpu"]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/a/b.parquet", "b.parquet"),
        ("../b", "b"),
        ("~/b", "b"),
        ("hub:x/y", "hub:x/y"),
        ("google/vit", "google/vit"),
        (3, 3),
    ],
)
def test_only_paths_of_a_machine_are_cut_down(value: Any, kept: Any) -> None:
    assert provenance.without_path(value) == kept


def test_a_stored_command_can_be_pasted_into_a_shell() -> None:
    given = ["data.classes=[a, b's]", 'train.lrs={"gate.*": 3.0}', "name=mine", "output.directory=elsewhere"]
    words = shlex.split(provenance.command("paper/table", "small", [0, 1], given))
    assert words == ["fedprompt", "reproduce", "paper/table", "--scale", "small", *given[:3], "--seed", "0,1"]


def test_the_command_names_a_config_of_the_package_as_it_can_be_given() -> None:
    found = paper_configs.find("configs/results/texts.yaml")
    assert (
        provenance.command(found.called, None, (0, 1), ())
        == "fedprompt reproduce configs/results/texts.yaml --seed 0,1"
    )
