"""Nothing that breaks a rule gets into the aggregation, and nothing is refused silently."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import forged
from hypothesis import given
from hypothesis import strategies as st
from support import StopAfter, Stopped, content, run, shared_tensors, worst_difference

from fedprompt.config import GuardConfig
from fedprompt.core import wire
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.messages import COHORT, Failure, LocalUpdate
from fedprompt.core.roles import Roles, Statistic
from fedprompt.engines import kinds
from fedprompt.engines.in_process import InProcess
from fedprompt.errors import DivergenceError, QuorumError, RunError
from fedprompt.federation.guard import Guard
from fedprompt.runs.run import Run
from fedprompt.runs.store import REFUSED
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

ROLES = Roles(
    shared={"prompt": torch.zeros(2, 3)},
    local={"head": torch.zeros(3)},
    stat={"sums": Statistic((2, 3), count="counts", minimum=3), "counts": Statistic((2,))},
)
COHORT_OF_FIVE = range(5)


def upload(value: float = 1.0, **changes: Any) -> Tensors:
    return {
        "prompt": torch.full((2, 3), value),
        "sums": torch.ones(2, 3),
        "counts": torch.tensor([3.0, 5.0]),
        **changes,
    }


def reply(client: int = 0, **changes: Any) -> LocalUpdate:
    return replace(LocalUpdate(client, 1, upload(), 10, 0.5), **changes)


def admit(replies: Sequence[LocalUpdate | Failure], **settings: Any) -> Any:
    guard = Guard(GuardConfig(**settings), ROLES)
    return guard.admit(replies, 1, COHORT_OF_FIVE, lambda client: ROLES.shared)


HOSTILE = {
    "client": reply(7),
    "round": reply(1, round=0),
    "samples": reply(1, samples=0),
    "finite": reply(1, upload=upload(float("nan"))),
    "keys": reply(1, upload=upload(head=torch.zeros(3))),
    "shapes": reply(1, upload=upload(prompt=torch.zeros(3, 2))),
    "dtypes": reply(1, upload=upload(prompt=torch.zeros(2, 3, dtype=torch.float64))),
    "minimum": reply(1, upload=upload(counts=torch.tensor([1.0, 5.0]))),
    "norm": reply(1, upload=upload(100.0)),
    "bytes": reply(1, upload=upload(junk=torch.zeros(100_000))),
    "counts": reply(1, upload=upload(counts=torch.tensor([3.0, 50.0]))),
}


@pytest.mark.parametrize("rule", HOSTILE)
def test_each_rule_keeps_its_offender_out_and_lets_the_others_in(rule: str) -> None:
    found = admit([reply(0), HOSTILE[rule], reply(2)], norm=10.0)
    assert [each.client for each in found.updates] == [0, 2]
    assert [(each.client, each.rule) for each in found.refused] == [(HOSTILE[rule].client, rule)]
    assert found.refused[0].value


@pytest.mark.parametrize("samples", [-5, 0, 10**12, 2.0, True, float("nan")])
def test_a_claim_of_images_is_a_positive_number_that_can_be_believed(samples: Any) -> None:
    assert [each.rule for each in admit([reply(1, samples=samples)]).refused] == ["samples"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_is_finite(loss: float) -> None:
    assert [each.rule for each in admit([reply(1, loss=loss)]).refused] == ["finite"]


def test_a_second_reply_of_a_client_is_refused_and_the_first_one_kept() -> None:
    found = admit([reply(0), reply(1, samples=30), reply(1, samples=9)])
    assert [(each.client, each.samples) for each in found.updates] == [(0, 10), (1, 30)]
    assert [(each.client, each.rule) for each in found.refused] == [(1, "replayed")]


def test_a_client_that_failed_is_among_the_refused() -> None:
    assert admit([reply(0), Failure(1, "finite", "diverged")]).refused == [Failure(1, "finite", "diverged")]


def test_an_update_is_held_against_the_median_of_the_cohort() -> None:
    """Norms 1, 1, 1, 2 and 9 times the same: with a factor of 3 only the last is out."""
    replies = [reply(client, upload=upload(value)) for client, value in enumerate([1.0, 1.0, -1.0, 2.0, 9.0])]
    assert [each.client for each in admit(replies, norm_factor=3.0).refused] == [4]
    assert [each.client for each in admit(replies, norm_factor=1.5).refused] == [3, 4]
    assert admit(replies).refused == []


def test_a_statistic_is_held_against_the_median_per_image() -> None:
    """Ten times the images may be ten times the sum; the same sum from a tenth of the images is too much."""
    large = upload(sums=torch.full((2, 3), 10.0), counts=torch.tensor([30.0, 50.0]))
    forged = upload(sums=torch.full((2, 3), 10.0))
    replies = [reply(0), reply(1), reply(2), reply(3, upload=large, samples=100), reply(4, upload=forged)]
    refused = admit(replies, norm_factor=5.0).refused
    assert [each.client for each in refused] == [4]
    assert "sums must be at most 5 times the median" in refused[0].value


def test_the_reference_of_an_update_is_what_the_client_received() -> None:
    guard = Guard(GuardConfig(norm=1.0), ROLES)
    replies = [reply(client, upload=upload(5.0)) for client in (0, 1)]
    found = guard.admit(replies, 1, (0, 1), lambda client: {"prompt": torch.full((2, 3), 5.0 * client)})
    assert [each.client for each in found.updates] == [1]


def test_a_secure_sum_is_one_reply_for_the_cohort() -> None:
    guard = Guard(GuardConfig(max_samples=10), ROLES)
    whole = reply(COHORT, samples=50)
    found = guard.admit([whole, Failure(3, "finite", "")], 1, COHORT_OF_FIVE, lambda client: {}, as_one=True)
    assert found.updates == [whole]
    assert found.answered(COHORT_OF_FIVE) == 4
    assert guard.admit([reply(0)], 1, COHORT_OF_FIVE, lambda client: {}, as_one=True).updates == []
    assert guard.admit([reply(COHORT)], 1, COHORT_OF_FIVE, lambda client: {}).updates == []


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.floats(1, 50))
def test_no_claim_counts_more_than_the_cap(claims: list[int], cap: float) -> None:
    replies = [reply(client, samples=samples) for client, samples in enumerate(claims)]
    weights, cut = Guard(GuardConfig(weight_cap=cap), ROLES).weights(replies)
    middle = float(torch.tensor(claims, dtype=torch.float64).quantile(0.5))
    assert max(weights) <= cap * middle * (1 + 1e-9)
    for claim, weight, client in zip(claims, weights, range(len(claims)), strict=True):
        assert (weight == claim) == (client not in [each.client for each in cut])


def test_half_of_a_cohort_cannot_move_the_median() -> None:
    """The lower one of two: a forger beside one honest client counts as the cap, not as half of what it claims."""
    replies = [reply(0, samples=100), reply(1, samples=10**7)]
    assert Guard(GuardConfig(weight_cap=20.0), ROLES).weights(replies)[0] == [100.0, 2000.0]
    two = [reply(0, upload=upload(1.0)), reply(1, upload=upload(1e9))]
    assert [each.client for each in admit(two, norm_factor=3.0).refused] == [1]


def test_sums_of_a_capped_client_count_in_part_and_keep_their_means() -> None:
    sent = upload(sums=torch.full((2, 3), 6.0))
    part = Guard(GuardConfig(), ROLES).counted_as(sent, 0.5, "round")
    assert torch.equal(part["sums"] / part["counts"][:, None], sent["sums"] / sent["counts"][:, None])
    assert part["counts"].tolist() == [1.5, 2.5]
    assert torch.equal(part["prompt"], sent["prompt"])


@pytest.mark.parametrize("choice", [[-1.0, 2.0], [11.0, 0.0]])
def test_a_choice_is_no_lever(choice: list[float]) -> None:
    roles = Roles(shared=ROLES.shared, stat={"which": Statistic((2,), choice=True)})
    sent = {"prompt": torch.zeros(2, 3), "which": torch.tensor(choice)}
    found = Guard(GuardConfig(), roles).admit([reply(0, upload=sent)], 1, (0,), lambda client: roles.shared)
    assert [each.rule for each in found.refused] == ["counts"]


def test_a_private_client_counts_once() -> None:
    guard = Guard(GuardConfig(), ROLES, private=True)
    found = guard.admit([reply(0, samples=1), reply(1, samples=2)], 1, (0, 1), lambda client: ROLES.shared)
    assert [(each.client, each.rule) for each in found.refused] == [(1, "samples")]


def test_without_a_cap_claims_count_in_full() -> None:
    replies = [reply(0, samples=1), reply(1, samples=10**6)]
    assert Guard(GuardConfig(weight_cap=None), ROLES).weights(replies) == ([1.0, 1e6], [])


@pytest.mark.parametrize(("quorum", "clients", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (1.0, 3, 3), (0.01, 3, 1)])
def test_a_quorum_is_rounded_up(quorum: float, clients: int, needed: int) -> None:
    assert Guard(GuardConfig(quorum=quorum), ROLES).quorum(range(clients)) == needed


def test_an_empty_cohort_needs_nobody() -> None:
    assert Guard(GuardConfig(), ROLES).quorum([]) == 0


# in a run


class Hostile(InProcess):
    """Some clients answer otherwise than they should."""

    change: Callable[[LocalUpdate], list[LocalUpdate]]

    def train(self, round: int, clients: Sequence[int], download: Any) -> Iterator[LocalUpdate | Failure]:
        for message in super().train(round, clients, download):
            yield from [message] if isinstance(message, Failure) else type(self).change(message)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Callable[..., Run]:
    """A run in which replies are changed on their way."""

    def make(change: Callable[[LocalUpdate], list[LocalUpdate]], resume: bool = False, **changes: Any) -> Run:
        engine = type("Changed", (Hostile,), {"change": staticmethod(change)})
        monkeypatch.setattr(kinds, "InProcess", engine)
        return run(settings(**changes), resume=resume)

    return make


def as_sent(message: LocalUpdate) -> list[LocalUpdate]:
    return [message]


def refusals(done: Run) -> list[tuple[int, int | None, str]]:
    return [
        (round, client, json.loads(detail)["rule"])
        for round, client, kind, detail in done.reader.events()
        if kind == REFUSED
    ]


def test_one_nan_update_does_not_touch_the_others(hostile: Any) -> None:
    """The run is, to the last bit of the shared tensors, the one in which that client is not there for the round."""

    def poisoned(message: LocalUpdate) -> list[LocalUpdate]:
        upload = {name: torch.full_like(tensor, torch.nan) for name, tensor in message.upload.items()}
        return [replace(message, upload=upload)] if message.client == 2 else [message]

    done = hostile(poisoned, name="poisoned")
    absent = hostile(lambda message: [] if message.client == 2 else [message], name="absent")
    assert worst_difference(shared_tensors(done), shared_tensors(absent)) == 0
    assert refusals(done) == [(1, 2, "finite"), (2, 2, "finite")]
    assert done.reader.client_state(2) is None  # a participation that was refused leaves no trace
    assert done.reader.client_state(1) is not None
    assert done.summary()["refused"] == {"finite": 2}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"samples": 10**12}, "samples"),
        ({"samples": -1}, "samples"),
        ({"round": 0}, "round"),
        ({"client": 99}, "client"),
    ],
)
def test_a_forged_reply_is_refused_and_the_round_goes_on(hostile: Any, changes: dict[str, int], rule: str) -> None:
    done = hostile(lambda message: [replace(message, **changes)] if message.client == 1 else [message])
    assert {found for _, _, found in refusals(done)} == {rule}
    assert done.finished


def test_replies_of_an_earlier_round_are_refused(hostile: Any) -> None:
    kept: dict[int, LocalUpdate] = {}
    done = hostile(lambda message: [kept.setdefault(message.client, message)] if message.client == 1 else [message])
    assert refusals(done) == [(2, 1, "round")]


def test_a_duplicate_changes_nothing_but_the_record(hostile: Any) -> None:
    twice = hostile(lambda message: [message, message], name="twice")
    plain = hostile(as_sent, name="plain")
    assert worst_difference(shared_tensors(twice), shared_tensors(plain)) == 0
    assert twice.reader.client_state(0) == plain.reader.client_state(0)
    assert {rule for _, _, rule in refusals(twice)} == {"replayed"}


def test_too_few_good_updates_stop_the_run_with_the_state_intact(hostile: Any, settings: Any) -> None:
    def bad_later(message: LocalUpdate) -> list[LocalUpdate]:
        return [replace(message, samples=0)] if message.round == 2 and message.client < 3 else [message]

    with pytest.raises(QuorumError, match=r"round 2 must have 2 accepted updates of 4 \(guard.quorum\), got 1: "):
        hostile(bad_later, name="stopped", guard={"repeats": 0})
    stopped = Run(settings(name="stopped")["output"]["directory"] + "/stopped-fedvpt-seed0")
    assert [record.round for record in stopped.rounds()] == [0, 1]
    assert [client for _, client, _ in refusals(stopped)] == [0, 1, 2]
    resumed = hostile(as_sent, resume=True, name="stopped", guard={"repeats": 0})
    plain = hostile(as_sent, name="plain", guard={"repeats": 0})
    assert worst_difference(shared_tensors(resumed), shared_tensors(plain)) == 0


def test_a_round_without_quorum_is_repeated_with_another_cohort(hostile: Any) -> None:
    """Half of ten clients: whoever is asked first in round 1 is refused, the second draw counts."""
    first = sample_cohort(0, 1, range(10), 0.5)
    second = sample_cohort(0, 1, range(10), 0.5, attempt=1)
    assert first != second
    seen: list[int] = []

    def refuse_first(message: LocalUpdate) -> list[LocalUpdate]:
        seen.append(message.client)
        return [replace(message, samples=0)] if message.round == 1 and len(seen) <= 5 else [message]

    done = hostile(
        refuse_first,
        partition={"scheme": "iid", "clients": 10},
        federation={"rounds": 1, "fraction": 0.5},
        guard={"repeats": 1},
    )
    assert done.rounds()[1].cohort == second
    assert [client for _, client, _ in refusals(done)] == first
    assert {client for client, _, _ in done.reader.client_states()} == set(second)
    assert [kind for _, _, kind, _ in done.reader.events()].count("repeated") == 1


def test_a_capped_weight_is_recorded_and_counts_as_the_cap(hostile: Any) -> None:
    forged = hostile(lambda message: [replace(message, samples=10**6 if message.client == 0 else 10)], name="forged")
    honest = hostile(
        lambda message: [replace(message, samples=200 if message.client == 0 else 10)],
        name="honest",
        guard={"weight_cap": None},
    )
    assert worst_difference(shared_tensors(forged), shared_tensors(honest)) == 0
    assert [(client, kind) for _, client, kind, _ in forged.reader.events()] == [(0, "capped"), (0, "capped")]


def test_a_client_that_diverges_alone_is_left_out(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedprompt.client.runtime import ClientRuntime

    train_together = ClientRuntime.train_together

    def failing(self: ClientRuntime, round: int, received: dict[int, Tensors]) -> list[LocalUpdate | DivergenceError]:
        replies = train_together(self, round, received)
        astray = DivergenceError("training loss of client 'three' must be finite, got nan")
        return [astray if client == 3 else reply for client, reply in zip(received, replies, strict=True)]

    monkeypatch.setattr(ClientRuntime, "train_together", failing)
    done = run(settings())
    assert refusals(done) == [(1, 3, "finite"), (2, 3, "finite")]


def test_a_run_that_diverges_everywhere_says_so(settings: Any) -> None:
    with pytest.raises(DivergenceError, match=r"smaller train\.lr"):
        run(settings(train={"lr": 1e30}))


def test_finite_updates_that_overflow_together_do_not_reach_the_run_file(settings: Any, monkeypatch: Any) -> None:
    from fedprompt.methods.fedvpt import FedVPT

    aggregate = FedVPT.aggregate

    def overflowing(self: FedVPT, *arguments: Any) -> Any:
        server = aggregate(self, *arguments)
        return replace(server, own={"sum": torch.tensor([float("inf")])})

    monkeypatch.setattr(FedVPT, "aggregate", overflowing)
    with pytest.raises(DivergenceError, match="server tensor 'sum' after round 1 must be finite"):
        run(settings())
    assert [record.round for record in Run(Path(settings()["output"]["directory"]) / "tiny-fedvpt-seed0").rounds()] == [
        0
    ]


def test_refusals_are_the_same_after_an_interruption(hostile: Any) -> None:
    """The record is part of the round's transaction."""

    def poisoned(message: LocalUpdate) -> list[LocalUpdate]:
        return [replace(message, samples=0)] if message.client == 2 else [message]

    assert content(hostile(poisoned, name="one")) == content(hostile(poisoned, name="two"))


@pytest.mark.parametrize("table", ["server_state", "client_states"])
def test_stored_tensors_of_another_method_are_told(settings: Any, table: str) -> None:
    """Valid bytes, wrong names: a resumed run must not stumble over them later."""
    with pytest.raises(Stopped):
        run(settings(), observer=StopAfter(1))
    directory = Path(settings()["output"]["directory"]) / "tiny-fedvpt-seed0"
    column = "shared" if table == "server_state" else "tensors"
    with forged(directory) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (wire.encode({"other": torch.zeros(2)}),))
    with pytest.raises(RunError, match="must hold the tensors the method declares"):
        run(settings(), resume=True)
