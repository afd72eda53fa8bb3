"""Differential privacy in whole runs: what leaves a client keeps to the terms, and the cost is counted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    StopAfter,
    Stopped,
    content,
    experiment,
    run,
    server_tensors,
    shared_tensors,
    worst_difference,
)

from fedprompt import config as configuration
from fedprompt.config import config_files
from fedprompt.core.messages import Failure, LocalUpdate
from fedprompt.core.wire import started_from
from fedprompt.engines import kinds
from fedprompt.engines.in_process import InProcess
from fedprompt.errors import ConfigError, DivergenceError, QuorumError
from fedprompt.federation.guard import update_norm
from fedprompt.privacy.accounting import Plan, epsilon, noise_for
from fedprompt.runs.run import Run
from fedprompt.runs.store import PRIVACY
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

PEP = {"name": "pep_fedpt"}


class Recorded(InProcess):
    """Keeps what clients received and sent."""

    seen: list[tuple[Tensors, LocalUpdate]]

    def train(self, round: int, clients: Sequence[int], download: Any) -> Iterator[LocalUpdate | Failure]:
        for message in super().train(round, clients, download):
            assert isinstance(message, LocalUpdate)
            type(self).seen.append((download(message.client), message))
            yield message


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensors, LocalUpdate]]:
    seen: list[tuple[Tensors, LocalUpdate]] = []
    monkeypatch.setattr(kinds, "InProcess", type("Watching", (Recorded,), {"seen": seen}))
    return seen


def costs(done: Run) -> list[dict[str, Any]]:
    return [json.loads(detail) for _, _, kind, detail in done.reader.events() if kind == PRIVACY]


def updates(seen: list[tuple[Tensors, LocalUpdate]]) -> list[float]:
    return [update_norm(reply.upload, started_from(received, received)) for received, reply in seen]


@pytest.mark.parametrize("method", [{"name": "fedvpt", "prompt_tokens": 2}, PEP], ids=lambda each: each["name"])
@pytest.mark.parametrize("noise_at", ["client", "server", "step"])
def test_without_noise_and_bound_a_private_run_is_the_plain_one(settings: Any, method: Any, noise_at: str) -> None:
    if noise_at == "step" and method is PEP:
        pytest.skip("PEP-FedPT sends statistics, which steps do not noise")
    plain = run(settings(name="plain", method=method, federation={"weighting": "uniform"}))
    private = run(settings(name="private", method=method, privacy={"noise_at": noise_at, "clip": None, "noise": 0.0}))
    assert worst_difference(shared_tensors(plain), shared_tensors(private)) < 1e-6
    assert worst_difference(server_tensors(plain), server_tensors(private)) < 1e-5
    assert [cost["epsilon"] for cost in costs(private)] == [None] * len(costs(private))


@pytest.mark.parametrize("noise_at", ["client", "server"])
def test_no_update_is_longer_than_the_clip(settings: Any, recorded: Any, noise_at: str) -> None:
    run(settings(name="plain"))
    longest = max(updates(recorded))
    recorded.clear()
    clip = longest / 4
    run(settings(name="bounded", privacy={"noise_at": noise_at, "clip": clip, "noise": 0.0}))
    assert max(updates(recorded)) <= clip * (1 + 1e-6)
    assert max(updates(recorded)) > 0.9 * clip


def test_nothing_else_of_a_client_travels(settings: Any, recorded: Any) -> None:
    done = run(settings(privacy={"noise": 1.0}))
    assert {(reply.samples, reply.loss) for _, reply in recorded} == {(1, None)}
    assert [record.loss for record in done.rounds()] == [None] * 3


def test_noise_at_the_client_has_the_agreed_size(settings: Any, recorded: Any) -> None:
    """With a rate of zero an upload is what came down, and all that is left is noise."""
    wide = settings(
        method={"name": "fedvpt", "prompt_tokens": 40},
        train={"lr": 0.0},
        federation={"rounds": 1},
        privacy={"clip": 0.5, "noise": 2.0},
    )
    run(wide)
    drawn = torch.cat([(reply.upload["prompt"] - received["prompt"]).flatten() for received, reply in recorded])
    assert drawn.numel() > 4000
    assert float(drawn.std()) == pytest.approx(1.0, rel=0.05)
    first, second = (reply.upload["prompt"] for _, reply in recorded[:2])
    assert not torch.equal(first, second)


def test_noise_at_the_server_is_on_the_sum(settings: Any) -> None:
    """Four clients: the mean gets a quarter of the noise of the sum."""

    def values(**changes: Any) -> dict[str, Any]:
        method = {"name": "fedvpt", "prompt_tokens": 100}
        return settings(method=method, train={"lr": 0.0}, federation={"rounds": 1}, **changes)

    start = shared_tensors(run(values(name="start")))
    noisy = shared_tensors(run(values(name="noisy", privacy={"noise_at": "server", "clip": 0.5, "noise": 2.0})))
    drawn = (noisy["prompt"] - start["prompt"]).flatten()
    assert float(drawn.std()) == pytest.approx(0.25, rel=0.05)


def test_every_step_is_noised(settings: Any, recorded: Any) -> None:
    """Gradients of length clip at most, plus noise: with momentum 0 the upload is the start less rate times their sum."""
    values = settings(
        method={"name": "fedvpt", "prompt_tokens": 100},
        train={"lr": 0.1, "momentum": 0.0, "batch_size": 4},
        federation={"rounds": 1},
        privacy={"noise_at": "step", "clip": 1e-6, "noise": 1e6},
    )
    done = run(values)
    (cost,) = costs(done)
    for received, reply in recorded:
        steps = cost["releases"][str(reply.client)]
        assert steps > 1
        drawn = (reply.upload["prompt"] - received["prompt"]).flatten()
        assert float(drawn.std()) == pytest.approx(0.1 * math.sqrt(steps), rel=0.05)


def test_epsilon_after_every_round_is_the_accountants(settings: Any) -> None:
    server = run(settings(name="server", privacy={"noise_at": "server", "noise": 3.0, "delta": 1e-3}))
    for number, cost in enumerate(costs(server), start=1):
        assert cost["epsilon"] == epsilon(3.0, 1e-3, Plan("server", number, 4, 4))
    half = {"federation": {"rounds": 3, "fraction": 0.5}}
    client = run(settings(name="client", privacy={"noise": 3.0, "delta": 1e-3}, **half))
    taken = [sum(record.cohort.count(each) for record in client.rounds()[:2]) for each in range(4)]
    assert costs(client)[0]["epsilon"] == epsilon(3.0, 1e-3, Plan("client", max(taken), 4, 2))
    drawn = run(settings(name="drawn", privacy={"noise_at": "server", "noise": 3.0, "delta": 1e-3}, **half))
    assert costs(drawn)[-1]["epsilon"] == epsilon(3.0, 1e-3, Plan("server", 3, 4, 2))
    poisson = {"federation": {**half["federation"], "sampling": "poisson"}}
    lots = run(settings(name="lots", privacy={"noise_at": "server", "noise": 3.0, "delta": 1e-3}, **poisson))
    assert costs(lots)[-1]["epsilon"] == epsilon(3.0, 1e-3, Plan("server", 3, 4, 2.0, "poisson"))


def test_a_survey_costs_as_much_as_a_round(settings: Any) -> None:
    done = run(settings(method=PEP, privacy={"noise": 3.0, "delta": 1e-3, "clips": {"*.counts": 9.0}}))
    assert [cost["epsilon"] for cost in costs(done)] == [
        epsilon(3.0, 1e-3, Plan("client", number, 4, 4, surveys=1)) for number in range(3)
    ]


def test_a_target_is_met_in_the_last_round(settings: Any) -> None:
    done = run(settings(privacy={"target_epsilon": 5.0, "delta": 1e-3}))
    assert costs(done)[-1]["epsilon"] == pytest.approx(5.0, rel=1e-3)
    assert costs(done)[-1]["epsilon"] <= 5.0
    assert costs(done)[-1]["noise"] == noise_for(5.0, 1e-3, Plan("client", 2, 4, 4))


@pytest.mark.parametrize(("preset", "spent"), [("pfedmoap-25", 25.0), ("pfedmoap-50", 50.0)])
def test_the_presets_of_pfedmoap_spend_what_they_say(settings: Any, preset: str, spent: float) -> None:
    done = run(settings(privacy=preset, federation={"rounds": 3}))
    assert done.config.privacy is not None
    assert done.config.privacy.delta == 0.05
    assert costs(done)[-1]["epsilon"] == pytest.approx(spent, rel=1e-3)


def test_the_run_ends_where_the_budget_does(settings: Any) -> None:
    """Room for three of ten rounds; the third is evaluated, since it is the last."""
    third, fourth = (epsilon(3.0, 1e-3, Plan("server", rounds, 4, 4)) for rounds in (3, 4))
    privacy = {"noise_at": "server", "noise": 3.0, "delta": 1e-3, "max_epsilon": (third + fourth) / 2}
    values = settings(privacy=privacy, federation={"rounds": 10, "evaluate_every": 10, "evaluate_last": 1})
    done = run(values)
    assert [record.round for record in done.rounds()] == [0, 1, 2, 3]
    assert [record.summary is not None for record in done.rounds()] == [False, False, False, True]
    before = content(done)
    assert content(run(values, resume=True)) == before  # there is nothing more to do


def test_the_bound_follows_the_updates(settings: Any, recorded: Any) -> None:
    """Far too large at first: it shrinks until about half of the updates are within."""
    privacy = {"noise_at": "server", "clip": 100.0, "noise": 0.0, "quantile": 0.5, "quantile_rate": 2.0}
    done = run(settings(privacy=privacy, federation={"rounds": 12, "evaluate_last": 1, "evaluate_every": 12}))
    clips = [cost["clip"] for cost in costs(done)]
    assert clips[0] == 100.0
    assert clips[1] == pytest.approx(100.0 * math.exp(-1.0))
    middle = sorted(norm for (_, reply), norm in zip(recorded, updates(recorded), strict=True) if reply.round == 12)[1]
    assert clips[-1] < 20 * max(middle, 1e-3)
    assert min(clips) > 0


@pytest.mark.parametrize(
    "privacy",
    [
        {"noise": 1.0, "clip": 0.1},
        {"noise_at": "server", "noise": 1.0, "clip": 0.1, "quantile": 0.5},
        {"noise_at": "step", "noise": 1.0},
    ],
    ids=["client", "adaptive", "step"],
)
def test_an_interrupted_private_run_ends_as_an_undisturbed_one(settings: Any, privacy: Any) -> None:
    federation = {"rounds": 3, "fraction": 0.5}
    with pytest.raises(Stopped):
        run(settings(name="broken", privacy=privacy, federation=federation), observer=StopAfter(1))
    resumed = run(settings(name="broken", privacy=privacy, federation=federation), resume=True)
    assert content(resumed) == content(run(settings(name="whole", privacy=privacy, federation=federation)))


def test_statistics_are_noised_and_small_rows_withheld(settings: Any) -> None:
    plain = run(settings(name="plain", method=PEP))
    noisy = run(settings(name="noisy", method=PEP, privacy={"noise": 0.5, "clips": {"*.sums": 10.0, "*.counts": 5.0}}))
    first, second = server_tensors(plain), server_tensors(noisy)
    assert worst_difference(first, second) > 0.01
    assert all(tensor.isfinite().all() for tensor in second.values())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "ifca", "privacy": {"noise": 1.0}}, "statistic 'cluster' is a choice"),
        ({"method": "pfedpg", "privacy": {"noise": 1.0, "noise_at": "server"}}, r"privacy\.noise_at must be client"),
        (
            {"method": PEP, "privacy": {"noise": 1.0, "noise_at": "step", "clip": 9.0}},
            "send more than what its steps trained",
        ),
        ({"method": PEP, "privacy": {"noise": 1.0}}, r"privacy\.clips must have a bound above 1 for 'start\.counts'"),
        (
            {"privacy": {"noise": 1.0, "noise_at": "step"}, "train": {"clip_norm": 1.0}},
            r"train\.clip_norm must be null",
        ),
        (
            {"privacy": {"noise": 1.0, "noise_at": "server"}, "guard": {"norm_factor": 3.0}},
            r"guard\.norm_factor must be null",
        ),
        (
            {"privacy": {"noise": 1.0, "noise_at": "server"}, "federation": {"away": {"client_1": [1, 1]}}},
            r"federation\.sampling must be poisson",
        ),
        (
            {"method": "local", "privacy": {"noise": 1.0, "noise_at": "server", "quantile": 0.5}},
            r"privacy\.quantile must be null",
        ),
        ({"federation": {"secure_sum": True, "fraction": 0.5}}, r"federation\.fraction must give cohorts of 3"),
        ({"privacy": {"target_epsilon": 1e9}}, r"privacy\.target_epsilon must"),
        ({"attack": {"kind": "forged_weight", "strength": 1e308}}, r"attack\.strength must"),
        (
            {"privacy": {"noise": 1.0, "noise_at": "server"}, "aggregation": {"rule": "median"}},
            r"aggregation\.rule must be mean",
        ),
        ({"privacy": {"noise": 1.0, "target_epsilon": 1.0}}, "either noise or target_epsilon"),
        ({"privacy": {}}, "either noise or target_epsilon"),
        ({"privacy": {"noise": 1.0, "clip": None}}, "have a clip unless noise is 0"),
        ({"privacy": {"noise": 1.0, "quantile": 0.5}}, "noise_at: server"),
        ({"privacy": "pfedmoap-7"}, "one of pfedmoap-25, pfedmoap-50"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(settings: Any, changes: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        experiment(settings(**changes)).factory.prepare()


@pytest.mark.parametrize("kind", ["forged_weight", "scale", "sign_flip"])
def test_one_liar_moves_a_noised_sum_no_farther_than_the_clip(settings: Any, kind: str) -> None:
    """Four clients and a clip of 0.01: whatever one of them sends, the mean moves by a hundredth at most."""
    privacy = {"noise_at": "server", "noise": 0.0, "clip": 0.01, "quantile": 0.5}
    attack = {"kind": kind, "fraction": 0.25, "strength": 1e5}
    start = experiment(settings()).factory.prepare()[3].roles.shared
    done = run(settings(privacy=privacy, attack=attack, federation={"rounds": 1}))
    assert update_norm(shared_tensors(done), start) <= 0.01 * (1 + 1e-6)
    assert 0 < costs(done)[-1]["next_clip"] < 0.02


def test_a_budget_counts_every_attempt(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All updates of round 2 are refused twice, and the run stops: what was sent is on the bill when it is resumed."""

    class Refused(InProcess):
        def train(self, round: int, clients: Sequence[int], download: Any) -> Iterator[LocalUpdate | Failure]:
            for message in super().train(round, clients, download):
                assert isinstance(message, LocalUpdate)
                yield replace(message, samples=0) if round == 2 else message

    values = settings(privacy={"noise": 3.0, "delta": 1e-3}, federation={"rounds": 2})
    with monkeypatch.context() as patched:
        patched.setattr(kinds, "InProcess", Refused)
        with pytest.raises(QuorumError):
            run(values)
    done = run(values, resume=True)
    assert [cost["epsilon"] for cost in costs(done)] == [
        epsilon(3.0, 1e-3, Plan("client", releases, 4, 4)) for releases in (1, 3, 4)
    ]


def test_a_budget_has_no_room_for_repeats_it_cannot_pay(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(InProcess):
        def train(self, round: int, clients: Sequence[int], download: Any) -> Iterator[LocalUpdate | Failure]:
            return iter([Failure(client, "finite", "") for client in clients])

    monkeypatch.setattr(kinds, "InProcess", Refused)
    once, twice = (epsilon(3.0, 1e-3, Plan("client", releases, 4, 4)) for releases in (1, 2))
    privacy = {"noise": 3.0, "delta": 1e-3, "max_epsilon": (once + twice) / 2}
    with pytest.raises(DivergenceError):
        run(settings(privacy=privacy))
    stopped = Run(settings()["output"]["directory"] + "/tiny-fedvpt-seed0")
    assert [cost["epsilon"] for cost in costs(stopped)] == [once]


@pytest.mark.parametrize("method", [{"name": "fedvpt"}, PEP], ids=lambda each: each["name"])
def test_a_budget_that_buys_nothing_is_told(settings: Any, method: Any) -> None:
    privacy = {"noise": 1.0, "max_epsilon": 0.01, "clip": 9.0}
    with pytest.raises(ConfigError, match=r"privacy\.max_epsilon must leave room for"):
        run(settings(method=method, privacy=privacy))


def test_a_preset_can_be_changed_by_overrides() -> None:
    values = config_files.apply_overrides({"privacy": "pfedmoap-25"}, ["privacy.target_epsilon=8", "privacy.clip=0.5"])
    assert values["privacy"] == {"noise_at": "client", "target_epsilon": 8, "delta": 0.05, "clip": 0.5}
    assert configuration.PRIVACY_PRESETS["pfedmoap-25"]["target_epsilon"] == 25.0


def test_noise_on_a_secure_sum_is_noise_on_the_sum(settings: Any) -> None:
    """The same bound, bit and noise, whether the server could look at single updates or not."""
    privacy = {"noise_at": "server", "noise": 0.5, "clip": 0.05, "quantile": 0.5}
    seen = run(settings(name="seen", method=PEP, privacy={**privacy, "clips": {"*": 9.0}}))
    hidden = run(
        settings(name="hidden", method=PEP, privacy={**privacy, "clips": {"*": 9.0}}, federation={"secure_sum": True})
    )
    assert worst_difference(shared_tensors(seen), shared_tensors(hidden)) < 1e-6
    assert worst_difference(server_tensors(seen), server_tensors(hidden)) < 1e-5
    assert [cost["epsilon"] for cost in costs(seen)] == [cost["epsilon"] for cost in costs(hidden)]
