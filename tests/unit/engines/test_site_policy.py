"""A site's own rules: what it allows, what it tells of its test images, and who has to say yes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from one_site import NOISE, Ground, reply, told
from remote_run import SiteRecorder, exported, tiny_settings

from fedprompt import config as configuration
from fedprompt.config import config_files
from fedprompt.config.shipped_configs import FOLDER
from fedprompt.core import registry
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order, read_result
from fedprompt.engines.remote.run_records import approve, waiting_runs
from fedprompt.engines.remote.site_figures import noised, released
from fedprompt.engines.remote.site_policy import SitePolicy, default_text, load_policy, refused_settings
from fedprompt.engines.remote.site_split import SiteSplit
from fedprompt.errors import ConfigError
from fedprompt.experiment.sites import SitesExperiment
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.report.comparison_table import comparison
from fedprompt.runs.store import UNTESTED

pytestmark = pytest.mark.unit

SHARED = {"name": "fedvpt", "prompt_tokens": 60, "head": "shared"}
GLOBAL = {"rounds": 2, "evaluate_at": "global"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("ground"))


def policy(**settings: Any) -> SitePolicy:
    return SitePolicy.model_validate(settings)


def evaluation(ground: Ground, round: int = 1, **config: Any) -> Order:
    return ground.order(config, evaluate=round, train=None, keep_as=None)


def result(site: Site, order: Order) -> ClientResult | None:
    return Answer.from_bytes(site.answer(order.to_bytes())).result


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_written_policy_is_the_default_one_and_says_so_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(default_text())
    assert load_policy(tmp_path) == SitePolicy()
    lines = [line.removeprefix("# ") for line in default_text().splitlines()]
    shown = {line.partition(":")[0]: line for line in lines if line.partition(":")[0] in SitePolicy.model_fields}
    assert list(shown) == list(SitePolicy.model_fields)
    assert SitePolicy.model_validate(yaml.safe_load("\n".join(shown.values()))) == SitePolicy()
    assert load_policy(tmp_path / "older folder") is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("evaluate: some", "evaluate must"),
        ("epsilon: 3", "epsilon is not a known setting"),
        ("total_epsilon: 3", "have evaluate: none or noised if total_epsilon is given"),
        ("approve: 'yes'", "approve must be true or false"),
        ("least_noise: -1", "least_noise must"),
        ("least_noise: .nan", "least_noise must"),
        ("most_rounds: 10000000", "most_rounds must"),
        ("a: [", "must be readable YAML"),
        ("- 1", "policy.yaml"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_its_file(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with pytest.raises(ConfigError) as found:
        load_policy(tmp_path)
    assert complaint in str(found.value)
    assert "policy.yaml" in str(found.value)


# -- what it allows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "config", "words"),
    [
        ({"methods": ["head_tune"]}, {}, "method.name must be one of head_tune here, got 'fedvpt'"),
        ({"variants": []}, {"variant": {"name": "fedprox"}}, "variant.name must be one of (none) here"),
        ({"most_rounds": 1}, {}, "federation.rounds must be at most 1 here, got 2"),
        ({"most_epochs": 2}, {"train": {"epochs": 3}}, "train.epochs must be at most 2 here, got 3"),
        (
            {"most_epochs": 2},
            {"method": {**SHARED, "head": "shared_then_finetune", "finetune_epochs": 7}},
            "epochs of fitting before an evaluation must be at most 2 here, got 7",
        ),
        ({}, {"method": {"name": "pep_fedpt"}}, "images (minimum_count), got 1"),
        (
            {},
            {"data": {"validation": 0.5}, "federation": {"evaluate_on": "validation"}},
            "federation.evaluate_on must be test where clients are sites",
        ),
    ],
    ids=["methods", "variants", "rounds", "epochs", "epochs of fitting", "single images", "validation images"],
)
def test_a_run_the_policy_does_not_allow_is_refused(
    ground: Ground, tmp_path: Path, allowed: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    rule, text = told(ground.site(tmp_path, policy=policy(**allowed)), ground.order(config))
    assert (rule, words in text) == ("policy", True), text
    assert not list(tmp_path.rglob("pin.json"))


def test_a_method_of_any_size_a_paper_used_is_allowed_and_a_much_larger_one_is_not() -> None:
    """The limit is for memory and time; it must not be in the way of a default or of a reproduction."""
    files = sorted(FOLDER.rglob("*.yaml"))
    configs = [config for file in files for config in config_files.load(file)]
    names = [{"method": {"name": name}} for name in registry.methods()]
    names += [{"method": {"name": "fedvpt"}, "variant": {"name": name}} for name in registry.variants()]
    configs += [configuration.parse(values) for values in names]
    assert len(configs) > 100
    for config in configs:
        assert not [
            each for each in refused_settings(SitePolicy(), registry.completed(config)) if "method" in each.text
        ]
    for tokens, refusals in ((4096, 0), (4097, 1)):
        large = configuration.parse({"method": {"name": "fedvpt", "prompt_tokens": tokens}})
        assert len(list(refused_settings(SitePolicy(), registry.completed(large)))) == refusals


def test_the_server_hears_of_it_when_it_meets_the_site(ground: Ground, tmp_path: Path) -> None:
    site = ground.site(tmp_path, policy=policy(methods=["head_tune"], least_noise=1.0))
    assert told(site, ground.order(kind="meet", train=None))[0] == "policy"
    insisting = ground.site(tmp_path, policy=policy(least_noise=1.0))
    assert told(insisting, ground.order(kind="meet", train=None))[0] == "privacy"
    wanted = ground.order({"privacy": {"target_epsilon": 5.0}}, kind="meet", train=None)
    assert Answer.from_bytes(insisting.answer(wanted.to_bytes())).meeting is not None, "the noise is still to be found"


def test_the_stricter_of_policy_and_flag_counts(ground: Ground, tmp_path: Path) -> None:
    for flag, own in ((2.0, 0.5), (0.5, 2.0)):
        site = ground.site(tmp_path, least_noise=flag, policy=policy(least_noise=own))
        assert told(site, ground.order({"privacy": NOISE}))[0] == "privacy"


def test_a_run_has_so_much_of_the_machines_time_and_no_more(ground: Ground, tmp_path: Path) -> None:
    site = ground.site(tmp_path, policy=policy(most_seconds=1e-6))
    reply(site, ground.order())
    rule, text = told(ground.site(tmp_path, policy=policy(most_seconds=1e-6)), ground.order(train=2))
    assert (rule, "of this site's time" in text) == ("policy", True)


def test_a_run_that_is_not_noised_is_refused_where_epsilon_is_counted(ground: Ground, tmp_path: Path) -> None:
    counting = policy(total_epsilon=10.0, evaluate="none")
    for privacy in (None, {"noise": 0.0}, {"noise": 1.0, "noise_at": "server"}):
        assert told(ground.site(tmp_path, policy=counting), ground.order({"privacy": privacy}))[0] == "budget"


def test_the_budget_is_that_of_all_runs(ground: Ground, tmp_path: Path) -> None:
    """New numbers, new processes: what was given away stays given away."""
    pytest.importorskip("dp_accounting")
    site = ground.site(tmp_path)
    reply(site, ground.order({"privacy": NOISE}))
    one, _ = site.spent.total()
    assert one > 0
    counting = policy(total_epsilon=2.5 * one, evaluate="none")
    answers = []
    for number in range(4):
        order = ground.order({"privacy": NOISE})
        order = replace(order, setting=replace(order.setting, run=f"{number:032x}"))
        answers.append(Answer.from_bytes(ground.site(tmp_path, policy=counting).answer(order.to_bytes())).failure)
    assert [failure and failure[0] for failure in answers] == [None, "budget", "budget", "budget"]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_what_is_told_of_an_evaluation(ground: Ground, tmp_path: Path) -> None:
    whole = result(ground.site(tmp_path / "all", policy=policy(evaluate="all")), evaluation(ground))
    assert whole is not None
    assert whole.nll is not None
    assert whole.bins
    counts = result(ground.site(tmp_path / "counts"), evaluation(ground))
    assert counts == ClientResult(whole.samples, whole.correct, domains=whole.domains)
    assert told(ground.site(tmp_path / "none", policy=policy(evaluate="none")), evaluation(ground))[0] == "evaluation"


@pytest.mark.parametrize("evaluate", ["counts", "noised", "all"])
def test_no_policy_lets_a_site_say_which_images_are_right(evaluate: str) -> None:
    whole = ClientResult(8, 5, domains={"photo": [8, 5]}, hits="+A==")
    assert released(SitePolicy(evaluate=evaluate), whole).hits is None


def test_few_test_images_are_not_told_of(ground: Ground, tmp_path: Path) -> None:
    rule, text = told(ground.site(tmp_path, policy=policy(least_test_images=6)), evaluation(ground))
    assert (rule, "fewer than 6 test images" in text) == ("evaluation", True)


def test_a_small_domain_cannot_be_found_by_subtraction() -> None:
    """The counts of all images, minus those of the domains that are shown, were the counts of the one that is not."""
    domains = {"large": [20, 15], "medium": [5, 3], "one patient": [1, 0]}
    figures = released(SitePolicy(), ClientResult(26, 18, domains=domains))
    assert figures == ClientResult(26, 18, domains={"large": [20, 15]}), "6 images are hidden together"
    figures = released(SitePolicy(), ClientResult(21, 15, domains={"large": [20, 15], "one patient": [1, 0]}))
    assert figures == ClientResult(21, 15), "there is no other domain to hide it among"
    figures = released(SitePolicy(), ClientResult(25, 18, domains={"large": [20, 15], "medium": [5, 3]}))
    assert set(figures.domains) == {"large", "medium"}


def test_noised_counts_are_whole_numbers_that_hide_one_image(ground: Ground, tmp_path: Path) -> None:
    """The same again is the same bytes; another site with the same images tells others; each costs its epsilon."""
    pytest.importorskip("dp_accounting")
    noisy = policy(evaluate="noised", evaluation_epsilon=0.25)
    order = evaluation(ground, federation=GLOBAL)
    site = ground.site(tmp_path, policy=noisy)
    first = result(site, order)
    assert first is not None
    assert (first.nll, first.bins, first.domains, first.diagnostics) == (None, [], {}, {})
    assert result(ground.site(tmp_path, policy=noisy), order) == first
    others = {
        (found.samples, found.correct)
        for found in (result(ground.site(tmp_path / str(n), policy=noisy), order) for n in range(5))
        if found
    }
    assert len(others) > 1
    assert site.spent.total()[0] == 0.25


def test_noise_on_counts_is_as_strong_as_it_costs() -> None:
    """Hits and misses get noise of scale 2 / epsilon each; the sum is never negative and never without images."""
    whole = ClientResult(1000, 600)
    found = [noised(whole, 0.5) for _ in range(3000)]
    hits = [each.correct - 600 for each in found]
    misses = [each.samples - each.correct - 400 for each in found]
    for draws in (hits, misses):
        assert sum(draws) / len(draws) == pytest.approx(0, abs=0.6)
        assert sum(map(abs, draws)) / len(draws) == pytest.approx(4.0, rel=0.1)
    small = [noised(ClientResult(5, 5), 0.01) for _ in range(200)]
    assert all(each.samples >= 1 and 0 <= each.correct <= each.samples for each in small)
    assert all(read_result(json.loads(json.dumps(each.to_json()))) == each for each in small)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"federation": {"rounds": 2, "evaluate_at": "after_local"}, "method": SHARED},
        {"federation": {"rounds": 2, "evaluate_at": "global", "test_classes": "own"}, "method": SHARED},
    ],
    ids=["a head of its own", "after local", "own classes"],
)
def test_noise_on_counts_is_not_promised_for_what_was_fitted_to_training_images(
    ground: Ground, tmp_path: Path, config: dict[str, Any]
) -> None:
    assert told(ground.site(tmp_path, policy=policy(evaluate="noised")), evaluation(ground, **config))[0] == "privacy"


def test_a_method_that_asks_for_training_images_cannot_be_evaluated_with_noise(ground: Ground, tmp_path: Path) -> None:
    """IFCA looks for the prompt that suits its training images best."""
    settings = {**ground.settings, "method": {"name": "ifca", "clusters": 2}, "federation": GLOBAL}
    from fedprompt.experiment import Experiment

    experiment = Experiment(settings)
    world = experiment.factory.world(experiment.factory.backbone(), ground.world.class_names, ground.world.client_names)
    order = replace(
        evaluation(ground, method=settings["method"], federation=GLOBAL),
        received={**world.roles.shared, **_generated(world)},
    )
    failure = Answer.from_bytes(
        ground.site(tmp_path, policy=policy(evaluate="noised")).answer(order.to_bytes())
    ).failure
    assert failure is not None
    assert failure[0] == "privacy", failure


def _generated(world: Any) -> dict[str, Any]:
    return dict(world.roles.server)


# -- the server copes -------------------------------------------------------------------------------------------------


def test_a_run_over_sites_of_all_kinds_ends_with_the_figures_it_was_given(tmp_path: Path) -> None:
    """One tells all, one counts, one nothing; the table has what there is."""
    settings = tiny_settings(tmp_path / "runs", "mixed", engine={"kind": "flower"})
    files = exported({**settings, "engine": {"kind": "in-process"}}, tmp_path / "files")
    kinds = ["all", "counts", "none", "counts"]
    sites = {
        name: Site(name, str(file), tmp_path / name, policy=policy(evaluate=kind))
        for kind, (name, file) in zip(kinds, files.items(), strict=True)
    }
    found = SitesExperiment(settings).federate(SiteRecorder(sites))
    last = found.evaluations(2)
    assert sorted(last) == [0, 1, 3]
    assert [last[client]["nll"] is None for client in (0, 1, 3)] == [False, True, True]
    untested = [(client, detail) for _, client, kind, detail in found.reader.events() if kind == UNTESTED]
    assert untested == [(2, "evaluation: this site gives no figures of its test images")] * 2
    summary = found.summary()
    assert summary["nll"] == pytest.approx(found.history()[-1]["nll"], abs=1)
    assert comparison([found])[0].values["ece"] is not None
    none_tell = {name: Site(name, str(file), tmp_path / "b" / name) for name, file in files.items()}
    bare = SitesExperiment({**settings, "name": "bare"}).federate(SiteRecorder(none_tell))
    assert not {"nll", "ece", "entropy", "mutual_information"} & bare.summary().keys()
    assert bare.summary()["average"] is not None
    assert comparison([bare])[0].values["ece"] is None


# -- a person's yes ---------------------------------------------------------------------------------------------------


def test_a_run_waits_for_a_persons_yes_to_these_settings(ground: Ground, tmp_path: Path) -> None:
    careful = policy(approve=True)
    state, run = tmp_path / "client_1", ground.setting.run
    rule, text = told(ground.site(tmp_path, policy=careful), ground.order())
    assert (rule, run in text) == ("approval", True)
    assert list(waiting_runs(state)) == [run]
    assert waiting_runs(state)[run]["config"]["federation"]["rounds"] == 2
    approve(state, run)
    assert not waiting_runs(state)
    other = ground.order({"seed": 5})
    assert told(ground.site(tmp_path, policy=careful), other)[0] == "approval", "yes was said to other settings"
    assert reply(ground.site(tmp_path, policy=careful), ground.order()).round == 1
    for unknown in ("f" * 32, "../../etc", ""):
        with pytest.raises(ConfigError, match="RUN must be one that waits"):
            approve(state, unknown)


def test_settings_do_not_change_between_a_look_and_a_yes(ground: Ground, tmp_path: Path) -> None:
    """A person reads the settings of a waiting run; meanwhile the server sends others under the same number."""
    careful, state, run = policy(approve=True), tmp_path / "client_1", ground.setting.run
    told(ground.site(tmp_path, policy=careful), ground.order())
    seen = waiting_runs(state)[run]
    rule, text = told(ground.site(tmp_path, policy=careful), ground.order({"seed": 5}))
    assert (rule, run in text) == ("settings", True), text
    assert waiting_runs(state)[run] == seen
    approve(state, run)
    assert reply(ground.site(tmp_path, policy=careful), ground.order()).round == 1


# -- the split --------------------------------------------------------------------------------------------------------


def test_a_split_is_fixed_until_its_file_is_deleted(tmp_path: Path) -> None:
    first = SiteSplit.of(tmp_path, policy(test_fraction=0.3))
    again = SiteSplit.of(tmp_path, policy(test_fraction=0.5))
    assert again == first
    assert again.differs(policy(test_fraction=0.5))
    (tmp_path / "split.json").unlink()
    assert SiteSplit.of(tmp_path, policy(test_fraction=0.5)).test_fraction == 0.5
