"""A cohort as one reply: the same means and sums, and the server's side never holds one client's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedprompt.core.messages import COHORT, Failure, LocalUpdate
from fedprompt.core.method import shares
from fedprompt.core.roles import Roles, Statistic
from fedprompt.core.wire import find_fault
from fedprompt.engines.secure_cohort import SecureCohort, to_reply
from fedprompt.errors import ConfigError, ContractError
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.privacy.secure_sum.masking import RANGE
from fedprompt.privacy.secure_sum.sum_messages import MaskedVector, Message
from fedprompt.tensors import Tensors, pick

pytestmark = pytest.mark.unit

ROLES = Roles(
    shared={"prompt": torch.zeros(3, 4), "bias": torch.zeros((), dtype=torch.float64)},
    local={"head": torch.zeros(2)},
    stat={
        "sums": Statistic((2, 3), count="counts", minimum=3),
        "counts": Statistic((2,)),
        "early": Statistic((5,), "start"),
        "privacy.within": Statistic(()),
    },
)


def upload(client: int, when: str = "round") -> Tensors:
    draws = torch.Generator().manual_seed(client)
    if when == "start":
        return {"early": torch.randn(5, generator=draws)}
    return {
        "prompt": torch.randn(3, 4, generator=draws),
        "bias": torch.randn((), generator=draws, dtype=torch.float64),
        "sums": 100 * torch.randn(2, 3, generator=draws) * torch.tensor([[1.0], [0.0]]),
        "counts": torch.tensor([3.0 + client, 0.0]),
        "privacy.within": torch.tensor(float(client % 2)),
    }


class Scripted:
    """An engine that answers what it was told to, in the order it was told."""

    def __init__(self, messages: Iterable[LocalUpdate | Failure]) -> None:
        self.messages = list(messages)
        self.log: list[Any] = []

    def survey(self, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate | Failure]:
        self.log.append(("survey", tuple(clients)))
        yield from self.messages

    def train(
        self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]
    ) -> Iterator[LocalUpdate | Failure]:
        self.log.append(("train", round, tuple(clients)))
        yield from self.messages

    def evaluate(
        self, round: int, clients: Sequence[int], download: Callable[[int], Tensors], ahead: Any = None
    ) -> Any:
        self.log.append(("evaluate", round, tuple(clients)))
        return iter([(clients[0], "a result")])

    def discard(self, clients: Iterable[int]) -> None:
        self.log.append(("discard", tuple(clients)))

    def take_states(self) -> dict[int, bytes]:
        return {4: b"state"}


def nothing(client: int) -> Tensors:
    return {}


def replies(clients: Sequence[int], round: int = 1) -> list[LocalUpdate]:
    return [LocalUpdate(client, round, upload(client), 5 * client + 7, loss=0.5 * client) for client in clients]


def train(
    messages: Sequence[LocalUpdate | Failure], clients: Sequence[int], **options: Any
) -> list[LocalUpdate | Failure]:
    return list(SecureCohort(Scripted(messages), ROLES, **options).train(1, clients, nothing))


def check_sums(one: LocalUpdate | Failure, sent: Sequence[LocalUpdate], weights: Sequence[int]) -> None:
    """Against the mean that a server takes which sees everything."""
    assert isinstance(one, LocalUpdate)
    assert (one.client, one.round, one.samples) == (COHORT, 1, sum(weights))
    expected = weighted_mean(
        [pick(each.upload, ROLES.shared) for each in sent], shares([float(each) for each in weights])
    )
    for name, tensor in expected.items():
        assert one.upload[name].dtype == tensor.dtype
        torch.testing.assert_close(one.upload[name], tensor, rtol=1e-6, atol=1e-6)
    for name in ("sums", "counts", "privacy.within"):
        total = torch.stack([each.upload[name].double() for each in sent]).sum(0).float()
        torch.testing.assert_close(one.upload[name], total, rtol=1e-6, atol=1e-6)
    assert set(one.upload) == set(sent[0].upload)
    assert one.loss is not None
    assert np.isclose(one.loss, np.average([each.loss for each in sent], weights=weights), rtol=1e-9)


@pytest.mark.parametrize("uniform", [False, True])
def test_a_cohort_answers_as_one_with_its_means_and_sums(uniform: bool) -> None:
    sent = replies([0, 2, 3, 8])
    (one,) = train(sent[::-1], [0, 2, 3, 8], uniform=uniform)
    check_sums(one, sent, [1] * 4 if uniform else [each.samples for each in sent])
    assert isinstance(one, LocalUpdate)
    assert find_fault(one.upload, ROLES) is None


def test_the_same_replies_give_the_same_bits_whatever_the_keys_and_the_order() -> None:
    sent = replies(range(5))
    first, second = train(sent, range(5)), train(sent[::-1], range(5))
    assert isinstance(first[0], LocalUpdate)
    assert isinstance(second[0], LocalUpdate)
    assert all(torch.equal(first[0].upload[name], second[0].upload[name]) for name in first[0].upload)
    assert first[0].loss == second[0].loss


def test_failures_pass_and_the_others_are_summed() -> None:
    sent = replies(range(5))
    gone = [Failure(1, "finite", "diverged"), Failure(4, "crash", "gone")]
    found = train([sent[0], gone[0], sent[2], sent[3], gone[1]], range(5))
    assert found[:2] == gone
    check_sums(found[2], [sent[0], sent[2], sent[3]], [sent[each].samples for each in (0, 2, 3)])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"round": 0}, "round"),
        ({"samples": 0}, "samples"),
        ({"samples": 7.5}, "samples"),
        ({"upload": {**upload(0), "head": torch.zeros(2)}}, "keys"),
        ({"upload": {**upload(0), "prompt": torch.zeros(4, 3)}}, "shapes"),
        ({"upload": {**upload(0), "prompt": torch.full((3, 4), torch.nan)}}, "finite"),
        ({"upload": {**upload(0), "privacy.more": torch.tensor(1.0)}}, "keys"),
        ({"upload": {**upload(0), "prompt": torch.full((3, 4), RANGE)}}, "range"),
        ({"loss": float("nan")}, "range"),
    ],
)
def test_a_client_that_may_not_take_part_drops_out_alone(change: dict[str, Any], rule: str) -> None:
    sent = replies(range(4))
    failed, one = train([*sent[:2], replace(sent[2], **change), sent[3]], range(4))
    assert isinstance(failed, Failure)
    assert (failed.client, failed.rule) == (2, rule)
    check_sums(one, [sent[0], sent[1], sent[3]], [sent[each].samples for each in (0, 1, 3)])


def test_a_client_out_of_range_says_so_and_nothing_of_its_values() -> None:
    sent = replies(range(4))
    found = [
        train(
            [*sent[:3], replace(sent[3], samples=samples, upload={**upload(3), "prompt": torch.full((3, 4), value)})],
            range(4),
        )
        for samples, value in [(7, RANGE), (8, -3 * RANGE)]
    ]
    assert found[0][0] == found[1][0] == Failure(3, "range", f"numbers must be within ±{RANGE / 4:g} in a secure sum")


def test_statistics_may_come_in_any_precision() -> None:
    sent = replies(range(3))
    exact = replace(sent[1], upload={**sent[1].upload, "sums": sent[1].upload["sums"].double()})
    (one,) = train([sent[0], exact, sent[2]], range(3))
    check_sums(one, sent, [each.samples for each in sent])


def test_a_bad_first_reply_does_not_set_the_layout() -> None:
    sent = replies(range(4))
    failed, one = train([replace(sent[0], upload={}), *sent[1:]], range(4))
    assert isinstance(failed, Failure)
    assert (failed.client, failed.rule) == (0, "keys")
    check_sums(one, sent[1:], [each.samples for each in sent[1:]])


@pytest.mark.parametrize(
    ("share", "clients", "needed"), [(0.5, 4, 3), (0.5, 5, 3), (0.7, 10, 7), (1.0, 4, 4), (0.1, 9, 5)]
)
def test_the_threshold_is_the_share_and_more_than_half(share: float, clients: int, needed: int) -> None:
    sent = replies(range(clients))
    missing = [Failure(client, "crash", "gone") for client in range(clients)]
    kept = train([*sent[:needed], *missing[needed:]], range(clients), threshold_share=share)
    check_sums(kept[-1], sent[:needed], [each.samples for each in sent[:needed]])
    lost = train([*sent[: needed - 1], *missing[needed - 1 :]], range(clients), threshold_share=share)
    assert isinstance(lost[-1], Failure)
    assert (lost[-1].client, lost[-1].rule) == (COHORT, "quorum")
    assert not [each for each in lost if isinstance(each, LocalUpdate)]


def test_too_small_a_cohort_fails_before_anybody_trains() -> None:
    engine = Scripted(replies([0, 1]))
    (failed,) = SecureCohort(engine, ROLES).train(1, [0, 1], nothing)
    assert isinstance(failed, Failure)
    assert (failed.client, failed.rule) == (COHORT, "quorum")
    assert not engine.log
    assert not list(SecureCohort(engine, ROLES).train(1, [], nothing))


def test_only_clients_that_trained_have_a_part_in_the_loss() -> None:
    sent = replies(range(4))
    (one,) = train([replace(sent[0], loss=None), *sent[1:]], range(4))
    assert isinstance(one, LocalUpdate)
    assert one.loss is not None
    assert np.isclose(
        one.loss, np.average([each.loss for each in sent[1:]], weights=[each.samples for each in sent[1:]])
    )
    (none,) = train([replace(each, loss=None) for each in sent], range(4))
    assert isinstance(none, LocalUpdate)
    assert none.loss is None


def test_a_survey_is_summed_too() -> None:
    sent = [LocalUpdate(client, 0, upload(client, "start"), 3) for client in range(3)]
    (one,) = SecureCohort(Scripted(sent), ROLES).survey(range(3), nothing)
    assert isinstance(one, LocalUpdate)
    assert (one.client, one.round, one.samples, one.loss) == (COHORT, 0, 9, None)
    torch.testing.assert_close(one.upload["early"], sum(each.upload["early"] for each in sent), rtol=1e-6, atol=1e-6)


def test_no_tensor_of_a_client_reaches_the_server() -> None:
    seen: list[Message] = []
    sent = replies(range(4))
    (one,) = train(sent, range(4), record=seen.append)
    check_sums(one, sent, [each.samples for each in sent])
    masked = [message for message in seen if isinstance(message, MaskedVector)]
    assert {message.client for message in masked} == {0, 1, 2, 3}
    assert {len(message.masked) for message in masked} == {8 * (12 + 1 + 6 + 2 + 1 + 4)}
    everything = b"".join(value for message in seen for value in vars(message).values() if isinstance(value, bytes))
    for reply in sent:
        for factor in (1, reply.samples):
            for kind in (np.float32, np.float64):
                plain = (reply.upload["prompt"].double().numpy() * factor).astype(kind).tobytes()
                assert not any(plain[start : start + 8] in everything for start in range(0, len(plain), 8))


@pytest.mark.parametrize("figures", [[2.0, 12, 0, 0], [3.5, 12, 0, 0], [3.0, 12.25, 0, 0], [3.0, 2, 0, 0]])
def test_a_sum_under_a_mask_that_was_not_taken_off_is_found_out(figures: list[float]) -> None:
    assert to_reply(np.array([3.0, 12, 0, 0]), (), 1, 3).samples == 12
    with pytest.raises(ContractError, match="a revealed share is wrong"):
        to_reply(np.array(figures), (), 1, 3)


def test_everything_else_is_the_engines() -> None:
    engine = Scripted([])
    secure = SecureCohort(engine, ROLES)
    assert list(secure.evaluate(3, [1, 2], nothing)) == [(1, "a result")]
    secure.discard([1])
    assert secure.take_states() == {4: b"state"}
    assert engine.log == [("evaluate", 3, (1, 2)), ("discard", (1,))]


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_that_is_none_is_an_error(share: float) -> None:
    with pytest.raises(ConfigError, match=r"threshold_share must be in \(0, 1\]"):
        SecureCohort(Scripted([]), ROLES, share)
