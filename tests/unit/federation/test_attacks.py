"""Simulated attacks do what they say, and the defences do what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import run, shared_tensors, worst_difference

from fedprompt.config import AttackConfig
from fedprompt.core.client_sampling import sample_attackers, sample_cohort
from fedprompt.core.messages import LocalUpdate
from fedprompt.errors import ConfigError
from fedprompt.federation.attacks import corrupted, flipped

pytestmark = pytest.mark.unit

BEFORE = {"prompt": torch.tensor([1.0, 2.0])}
HONEST = LocalUpdate(0, 1, {"prompt": torch.tensor([2.0, 4.0]), "counts": torch.tensor([3.0])}, 7, 0.5)


def attacked(kind: Any, strength: float | None = None) -> LocalUpdate:
    return corrupted(HONEST, BEFORE, AttackConfig(kind=kind, strength=strength))


def test_the_update_is_scaled_around_what_was_received() -> None:
    assert attacked("scale", 3.0).upload["prompt"].tolist() == [4.0, 8.0]
    assert attacked("scale").upload["prompt"].tolist() == [11.0, 22.0]
    assert attacked("scale", 3.0).upload["counts"].tolist() == [9.0]


def test_a_flipped_update_goes_the_other_way() -> None:
    assert attacked("sign_flip").upload["prompt"].tolist() == [0.0, 0.0]
    assert attacked("sign_flip", 2.0).upload["prompt"].tolist() == [-1.0, -2.0]


def test_a_forged_weight_leaves_the_update_alone() -> None:
    forged = attacked("forged_weight")
    assert forged.samples == 7000
    assert forged.upload is HONEST.upload


def test_nan_is_everywhere() -> None:
    assert all(tensor.isnan().all() for tensor in attacked("nan").upload.values())


def test_flipped_labels_are_a_permutation_without_fixed_pairs() -> None:
    assert flipped(torch.arange(4), 4).tolist() == [3, 2, 1, 0]


@given(st.integers(1, 40), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 5))
def test_attackers_of_a_smaller_fraction_are_among_those_of_a_larger(
    clients: int, one: float, two: float, seed: int
) -> None:
    few, many = (
        sample_attackers(AttackConfig(kind="nan", fraction=each), seed, range(clients)) for each in sorted((one, two))
    )
    assert few <= many
    assert len(many) == min(int(max(one, two) * clients + 0.5), clients - 1)  # somebody is honest


@given(st.integers(0, 200))
def test_poisson_sampling_takes_each_client_with_its_probability(seed: int) -> None:
    cohort = sample_cohort(seed, 1, range(400), 0.25, poisson=True)
    assert cohort == sorted(set(cohort))
    assert 400 * 0.25 - 5 * 8.7 < len(cohort) < 400 * 0.25 + 5 * 8.7  # five standard deviations of the binomial


def test_a_poisson_round_without_clients_changes_nothing(settings: Any) -> None:
    done = run(settings(federation={"rounds": 3, "fraction": 0.01, "sampling": "poisson"}))
    assert [record.cohort for record in done.rounds()] == [[]] * 4
    assert [record.loss for record in done.rounds()] == [None] * 4
    start = run(settings(name="start", federation={"rounds": 1, "fraction": 0.01, "sampling": "poisson"}))
    assert worst_difference(shared_tensors(done), shared_tensors(start)) == 0


def test_only_honest_clients_are_evaluated(settings: Any) -> None:
    done = run(settings(attack={"kind": "sign_flip", "fraction": 0.5}))
    attackers = sample_attackers(AttackConfig(kind="sign_flip", fraction=0.5), 0, range(4))
    assert len(attackers) == 2
    assert set(done.reader.evaluations(2)) == set(range(4)) - attackers


def test_no_attackers_is_the_plain_run(settings: Any) -> None:
    plain = run(settings(name="plain"))
    none = run(settings(name="none", attack={"kind": "scale", "fraction": 0.0}))
    assert worst_difference(shared_tensors(plain), shared_tensors(none)) == 0


def test_free_riders_send_back_what_they_received(settings: Any) -> None:
    """All but one ride free: the mean moves by that one's share."""
    lone = run(settings(name="lone", attack={"kind": "free_rider", "fraction": 0.75}, federation={"rounds": 1}))
    all_honest = run(settings(name="honest", federation={"rounds": 1}))
    assert worst_difference(shared_tensors(lone), shared_tensors(all_honest)) > 0
    assert lone.rounds()[1].loss is not None  # of the one that trained


@pytest.mark.parametrize(("head", "matters"), [("shared", True), ("local", False)])
def test_flipped_labels_are_what_attackers_train_on(settings: Any, head: str, matters: bool) -> None:
    """A head of the attacker's own only learns other names for the classes: what it shares is what an honest client shares."""
    method = {"name": "fedvpt", "prompt_tokens": 2, "head": head}
    flipped_run = run(settings(name="flip", method=method, attack={"kind": "label_flip", "fraction": 0.5}))
    plain = run(settings(name="plain", method=method))
    difference = worst_difference(shared_tensors(flipped_run), shared_tensors(plain))
    assert difference > 1e-4 if matters else difference < 1e-6
    losses = [each.rounds()[2].loss or 0.0 for each in (flipped_run, plain)]  # in round 1 every head is zero
    assert (abs(losses[0] - losses[1]) > 1e-4) == matters


def test_the_median_withstands_what_carries_the_mean_away(settings: Any) -> None:
    """One of four clients sends its update a thousandfold."""
    attack = {"kind": "scale", "fraction": 0.25, "strength": 1000.0}

    def moved(name: str, **changes: Any) -> float:
        return worst_difference(shared_tensors(run(settings(name=name, federation={"rounds": 1}, **changes))), start)

    start = shared_tensors(run(settings(name="start", federation={"rounds": 1}, train={"lr": 0.0})))
    honest = moved("honest")
    assert moved("mean", attack=attack) > 50 * honest
    assert moved("median", attack=attack, aggregation={"rule": "median"}) < 2 * honest
    assert moved("guarded", attack=attack, guard={"norm_factor": 5.0}) < 2 * honest


def test_an_unknown_attack_is_told(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"attack\.kind must"):
        run(settings(attack={"kind": "bribe"}))
