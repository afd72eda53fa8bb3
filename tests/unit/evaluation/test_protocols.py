"""Which runs a protocol makes of a config."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedprompt.config import Config, DataConfig, PartitionConfig, parse
from fedprompt.core import registry
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.partition.manifest import Clients
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError
from fedprompt.evaluation import protocols
from fedprompt.evaluation.protocols import Axis

pytestmark = pytest.mark.unit

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str = "{}") -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return path

    return write


def names(configs: list[Config]) -> list[str]:
    return [config.run_name for config in configs]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1..4", (1, 2, 3, 4)),
        ("-1..1", (-1, 0, 1)),
        ("3..3", (3,)),
        ("0,0.01,1e-1,1", (0, 0.01, 0.1, 1)),
        ("[0, 1e-3]", (0, 0.001)),
        ("random,zero", ("random", "zero")),
        ("1,null", (1, None)),
        ("true,false", (True, False)),
        ("1..3,5", (1, 2, 3, 5)),
        ("[[1, 2], [3]]", ([1, 2], [3])),
        ("../a.json,../b.json", ("../a.json", "../b.json")),
    ],
)
def test_values_are_ranges_or_lists(text: str, values: tuple) -> None:
    axis = Axis.parse(f"method.thing={text}")
    assert (axis.field, axis.values) == ("method.thing", values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1..", "sweep of train.lr must have a whole number at both ends of a range, got '1..'"),
        ("..4", "must have a whole number at both ends of a range, got '..4'"),
        ("..", "must have a whole number at both ends of a range, got '..'"),
        ("5..1", "must go from the smaller end of a range to the larger, got '5..1'"),
        ("", "must have at least one value, got ''"),
        ("[]", "must have at least one value, got '[]'"),
        ("1,1.0", "must have every value once, got '1,1.0'"),
        ("1..3,2", "must have every value once"),
        ("1,,2", "must be a range such as 1..10, or a list of values, got '1,,2'"),
        ("[1", "must be a range such as 1..10, or a list of values, got '[1'"),
    ],
)
def test_values_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Axis.parse(f"train.lr={text}")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["train.lr", "1..3", "=1..3"])
def test_an_axis_has_a_field_and_values(text: str) -> None:
    with pytest.raises(ConfigError, match="sweep must"):
        Axis.parse(text)


@pytest.mark.parametrize("field", ["seed", "name", "method", "method.name", "output.threads", "nothing.here", "train."])
def test_an_axis_is_a_setting_inside_a_section_that_changes_results(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"sweep must name a setting inside one of .*, got '{field}'"):
        Axis.parse(f"{field}=1,2")


def test_a_sweep_makes_one_run_for_each_value_method_and_seed(written: Written) -> None:
    path = written("sweep: {method: [fedvpt, fedvpt_deep]}")
    series = protocols.sweep("method.prompt_tokens=1..3", path, ["train.lr=0.5"], [0, 1])
    found = {(c.method["prompt_tokens"], c.method["name"], c.seed, c.train.lr) for c in series.configs}
    assert found == {(k, name, seed, 0.5) for k in (1, 2, 3) for name in ("fedvpt", "fedvpt_deep") for seed in (0, 1)}
    assert len(series.configs) == 12
    assert "x-prompt_tokens2-fedvpt_deep-seed1" in names(series.configs)


def test_the_name_of_a_run_does_not_depend_on_the_other_values(written: Written) -> None:
    """So that more values can be added later with --resume."""
    few = protocols.sweep("train.lr=0.1", written(), seeds=[0]).configs
    many = protocols.sweep("train.lr=0.1,0.2", written(), seeds=[0, 1]).configs
    assert names(few) == ["x-lr0.1-fedvpt-seed0"]
    assert set(names(few)) < set(names(many))


def test_values_that_no_file_system_likes_still_make_names(written: Written) -> None:
    made = protocols.sweep("data.source=../a b,c/d", written()).configs
    assert names(made) == ["x-source.._a_b-fedvpt-seed0", "x-sourcec_d-fedvpt-seed0"]


def test_the_axis_wins_over_the_file_and_the_overrides(written: Written) -> None:
    series = protocols.sweep("train.lr=0.1,0.2", written("sweep: {train.lr: [7, 8]}"), ["train.lr=9"])
    assert [config.train.lr for config in series.configs] == [0.1, 0.2]


def test_the_picture_of_a_sweep_lies_beside_its_runs(written: Written) -> None:
    path = written("sweep: {method: [{name: fedvpt, head: local}, {name: fedvpt, head: shared}]}")
    series = protocols.sweep("train.lr=0.1,0.2", path, ["output.directory=out", "name=mine"])
    assert series.picture == Path("out/sweep-mine-train.lr.png")
    assert len(set(names(series.configs))) == 4


def test_a_setting_no_section_knows_is_refused(written: Written) -> None:
    with pytest.raises(ConfigError, match=r"partition\.colour is not a known setting"):
        protocols.sweep("partition.colour=1,2", written())


def test_new_clients_are_held_out_and_the_name_says_so(written: Written) -> None:
    made = protocols.new_clients(written("federation: {rounds: 7}"), seeds=[0, 1], share=0.25, epochs=3)
    assert names(made) == ["x-new-clients-fedvpt-seed0", "x-new-clients-fedvpt-seed1"]
    for config in made:
        federation = config.federation
        assert (federation.held_out, federation.newcomer_epochs, federation.rounds) == (0.25, 3, 7)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_a_share_holds_out_some_but_not_all(written: Written, share: float) -> None:
    with pytest.raises(ConfigError, match="--share must be greater than 0 and less than 1, got"):
        protocols.new_clients(written(), share=share)


def test_base_to_novel_keeps_a_share_of_the_classes_and_the_name_says_so(written: Written) -> None:
    made = protocols.base_to_novel(written("sweep: {method: [promptfl, coop]}"), ["data.novel=0.1"], share=0.25)
    assert names(made) == ["x-base-to-novel-promptfl-seed0", "x-base-to-novel-coop-seed0"]
    assert [config.data.novel for config in made] == [0.25, 0.25]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_a_share_keeps_some_but_not_all_classes(written: Written, share: float) -> None:
    with pytest.raises(ConfigError, match="--share must be greater than 0 and less than 1, got"):
        protocols.base_to_novel(written(), share=share)


def test_a_comeback_is_every_run_with_and_without_the_absence(written: Written) -> None:
    path = written("{federation: {rounds: 10, evaluate_every: 5}, partition: {clients: 12}}")
    series = protocols.comeback(path, seeds=[0, 1], client="3", missed=5)
    assert (series.client, series.away) == ("client_03", (3, 7))
    assert names(series.configs) == [
        f"x-comeback-{how}-fedvpt-seed{seed}" for seed in (0, 1) for how in ("present", "away3to7")
    ]
    assert [config.federation.away for config in series.configs] == [{}, {"client_03": (3, 7)}] * 2
    assert {config.federation.evaluate_every for config in series.configs} == {1}
    assert series.picture == Path("runs/comeback-x-client_03.png")
    for config in series.configs:
        assert parse(config.model_dump(mode="json")).digest() == config.digest()  # as a run file gives it back


def test_a_comeback_takes_its_place_from_the_caller(written: Written) -> None:
    path = written("{federation: {rounds: 10, away: {client_5: [1, 1]}}}")
    series = protocols.comeback(path, ["federation.evaluate_every=2"], client="client_1", missed=2, first=8)
    assert series.away == (8, 9)
    assert series.configs[1].federation.away == {"client_5": (1, 1), "client_1": (8, 9)}
    assert series.configs[0].federation.evaluate_every == 2


def test_the_clients_of_a_manifest_have_its_names(written: Written, tmp_path: Path) -> None:
    source, data = TinySource(), DataConfig(source="tiny")
    manifest = make_manifest(source, data, PartitionConfig(scheme="iid", clients=2), 0)
    renamed = (replace(each, name=name) for each, name in zip(manifest.clients, ("ward", "clinic"), strict=True))
    replace(manifest, clients=Clients.of(renamed)).save(tmp_path / "m.json")
    path = written(f"partition: {{scheme: manifest, manifest: {tmp_path / 'm.json'}}}")
    assert protocols.comeback(path, client="1").client == "clinic"
    assert protocols.comeback(path, client="ward").client == "ward"
    with pytest.raises(ConfigError, match=r"--client must be a client \(ward .. clinic\) or a number below 2, got '2'"):
        protocols.comeback(path, client="2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client": "nobody"}, r"--client must be a client \(client_0 .. client_5\) or a number below 6, got 'nobody'"),
        (
            {"missed": 0},
            r"--rounds must be at least 1 and leave a round before and after .*\(10 rounds in all\), got 0",
        ),
        ({"missed": 9}, "--rounds must be at least 1 and leave a round before and after"),
        ({"first": 0}, "--first must be at least 1 and leave a round after the absence of 5, got 0"),
        ({"first": 6}, "--first must be at least 1 and leave a round after the absence of 5, got 6"),
    ],
)
def test_an_absence_that_is_no_comeback_is_refused(written: Written, given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        protocols.comeback(written(), **given)


def test_one_name_must_fit_all_runs_of_a_comeback(written: Written) -> None:
    with pytest.raises(ConfigError, match="--client must be one client of all runs, not client_0, client_00, got '0'"):
        protocols.comeback(written("sweep: {partition.clients: [4, 20]}"), client="0")


def test_negative_epochs_are_refused(written: Written) -> None:
    with pytest.raises(ConfigError, match=r"federation\.newcomer_epochs must be greater than or equal to 0, got -1"):
        protocols.new_clients(written(), epochs=-1)


BAYES = "method: {name: pfedbayespt, prompt_tokens: 3, kl_weight: 0.5, predict_draws: 2}"


def test_an_ablation_keeps_the_settings_each_form_has(written: Written) -> None:
    made = protocols.ablation(written(BAYES))
    assert [config.method for config in made] == [
        {"name": "pfedbayespt_d", "prompt_tokens": 3},
        {"name": "pfedbayespt_g", "prompt_tokens": 3, "kl_weight": 0.5},
        {"name": "pfedbayespt", "prompt_tokens": 3, "kl_weight": 0.5, "predict_draws": 2},
    ]
    assert names(made) == [f"x-ablation-{name}-seed0" for name in ("pfedbayespt_d", "pfedbayespt_g", "pfedbayespt")]


def test_an_ablation_starts_from_the_whole_form_where_the_config_holds_it(written: Written) -> None:
    path = written(
        "sweep: {method: [head_tune, {name: fedvpt, prompt_tokens: 9}, {name: pfedbayespt, prompt_tokens: 3}]}"
    )
    made = protocols.ablation(path, seeds=[0, 1])
    assert len(made) == 6
    assert {config.method["prompt_tokens"] for config in made} == {3}


def test_an_ablation_of_other_methods_makes_each_run_once(written: Written) -> None:
    made = protocols.ablation(written("sweep: {method: [head_tune, fedvpt]}"))
    assert [config.method for config in made] == [{"name": name} for name in protocols.ABLATED]


def test_a_misspelt_setting_does_not_vanish_in_an_ablation(written: Written) -> None:
    with pytest.raises(ConfigError, match=r"method\.promt_tokens is not a setting of pfedbayespt"):
        protocols.ablation(written("method: {name: pfedbayespt, promt_tokens: 3}"))


def test_every_form_of_the_ablation_is_registered() -> None:
    assert set(protocols.ABLATED) <= set(registry.methods())


def test_heterogeneity_separates_the_subsets_and_mixes_them(written: Written) -> None:
    made = protocols.heterogeneity(written("partition: {scheme: domains, clients: 4}"), ["train.lr=0.5"], [1])
    found = [(c.partition.scheme, c.partition.subsets, c.partition.subsets_per_client, c.train.lr) for c in made]
    assert found == [("label_subsets", 2, 1, 0.5), ("label_subsets", 2, 2, 0.5)]
    assert names(made) == [f"x-subsets_per_client{count}-fedvpt-seed1" for count in (1, 2)]


def test_protocols_are_planned_without_torch() -> None:
    code = "import sys, fedprompt.evaluation.protocols; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_papers_symbol_stands_for_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "bayes.yaml"
    path.write_text(BAYES)
    by_symbol, by_name = (protocols.sweep(f"method.{name}=1..3", path) for name in ("V", "predict_draws"))
    assert by_symbol == by_name
    assert [config.method["predict_draws"] for config in by_symbol.configs] == [1, 2, 3]
    assert registry.build({"name": "pfedbayespt", "V": 7}) == registry.build(
        {"name": "pfedbayespt", "predict_draws": 7}
    )


@pytest.mark.parametrize("name", ["pfedbayespt", "pfedbayespt_g", "pfedbayespt_d"])
def test_small_v_is_the_length_of_an_instance_prompt_as_in_the_paper(name: str) -> None:
    assert registry.build({"name": name, "v": 3}) == registry.build({"name": name, "instance_tokens": 3})
