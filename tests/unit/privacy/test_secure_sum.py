"""The sum is exact, and nothing but the sum can be had from what the server receives."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.errors import ConfigError, ContractError, DivergenceError, QuorumError
from fedprompt.privacy.secure_sum import SecureSum, masking, secret_sharing
from fedprompt.privacy.secure_sum.collector import Collector
from fedprompt.privacy.secure_sum.masking import RANGE, SCALE, to_numbers, to_words
from fedprompt.privacy.secure_sum.party import Party
from fedprompt.privacy.secure_sum.sum_messages import (
    MaskedVector,
    Message,
    PublicKeys,
    RevealedShares,
    SealedShare,
    Survivors,
)

pytestmark = pytest.mark.unit

LONG = 20_000  # words, for statistics on their bytes


def run(
    vectors: dict[int, np.ndarray], clients: Sequence[int], threshold: int, round: int = 1
) -> tuple[np.ndarray, tuple[int, ...], list[Message]]:
    seen: list[Message] = []
    secure = SecureSum(round, clients, threshold, seen.append)
    for client, vector in vectors.items():
        secure.deliver(client, vector)
    return *secure.finish(), seen


def agreed(clients: Sequence[int], threshold: int, round: int = 1) -> tuple[Collector, dict[int, Party]]:
    """Parties that have exchanged their shares."""
    collector = Collector(round, clients, threshold)
    parties = {client: Party(client, round, threshold) for client in clients}
    for party in parties.values():
        collector.receive(party.advertise())
    roster = collector.roster()
    for party in parties.values():
        for share in party.share(roster):
            collector.receive(share)
    for client, inbox in collector.exchange().items():
        parties[client].accept(inbox)
    return collector, parties


def words(message: MaskedVector) -> np.ndarray:
    return np.frombuffer(message.masked, "<u8")


def looks_uniform(values: np.ndarray) -> bool:
    """Chi-square over the values of each of the eight bytes of a word: 255 degrees of freedom, mean 255, deviation 22.6."""
    for byte in values.astype("<u8").view(np.uint8).reshape(-1, 8).T:
        expected = len(byte) / 256
        statistic = ((np.bincount(byte, minlength=256) - expected) ** 2 / expected).sum()
        if abs(statistic - 255) > 8 * 22.6:
            return False
    return True


def masked_by(seen: Sequence[Message]) -> dict[int, np.ndarray]:
    return {message.client: words(message) for message in seen if isinstance(message, MaskedVector)}


# ---------------------------------------------------------------------------------------------------------------- the sum


@settings(max_examples=25)
@given(st.integers(3, 7), st.data())
def test_the_sum_over_any_survivors_is_exact_up_to_the_fixed_point(count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(count // 2 + 1, count))
    clients = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count, unique=True))
    there = data.draw(st.lists(st.sampled_from(clients), min_size=threshold, max_size=count, unique=True))
    numbers = st.floats(-RANGE / count, RANGE / count)
    vectors = {client: np.array(data.draw(st.lists(numbers, min_size=3, max_size=3))) for client in there}
    total, survivors, _ = run(vectors, clients, threshold)
    assert survivors == tuple(sorted(there))
    expected = (
        sum(int(np.rint(vector[0] * SCALE)) for vector in vectors.values()) / SCALE
    )  # Python's integers never wrap
    assert total[0] == expected
    assert np.abs(total - sum(vectors.values())).max() <= len(there) * 2.0**-33 + 1e-6  # doubles of 1e9 end at 1e-7


def test_quantisation_is_bounded() -> None:
    numbers = np.random.default_rng(0).normal(size=10_000)
    error = np.abs(to_numbers(to_words(numbers, 3, "client 0")) - numbers)
    assert 0.9 * 2.0**-33 < error.max() <= 2.0**-33


def test_the_largest_numbers_do_not_run_over() -> None:
    most = np.array([RANGE / 5, -RANGE / 5])
    total, _, _ = run(dict.fromkeys(range(5), most), range(5), 3)
    assert np.allclose(total, [RANGE, -RANGE], rtol=1e-12)


@pytest.mark.parametrize("value", [RANGE / 4 * 1.001, -RANGE / 4 * 1.001, np.nan, np.inf])
def test_numbers_that_could_run_over_are_refused_before_masking(value: float) -> None:
    seen: list[Message] = []
    secure = SecureSum(1, range(4), 3, seen.append)
    with pytest.raises(DivergenceError, match="numbers of client 2 must be finite and within"):
        secure.deliver(2, np.array([1.0, value]))
    assert not masked_by(seen)


# ------------------------------------------------------------------------------------------------------ what the server sees


def test_masked_vectors_look_uniform_alone_and_together_short_of_one() -> None:
    vectors = {client: np.full(LONG, float(client)) for client in range(5)}
    total, _, seen = run(vectors, range(5), 3)
    assert (total == 10).all()
    masked = masked_by(seen)
    assert not looks_uniform(to_words(vectors[3], 5, ""))  # the test itself can fail
    for some in itertools.chain.from_iterable(itertools.combinations(masked, size) for size in range(1, 6)):
        assert looks_uniform(np.sum([masked[client] for client in some], axis=0, dtype=np.uint64)), some


def test_what_is_revealed_opens_the_sum_and_no_part_of_it() -> None:
    """With the self masks of the survivors gone, pairwise masks still hide every group that is not all of them."""
    vectors = {client: np.full(LONG, float(client)) for client in (0, 1, 2, 3)}  # client 4 drops out
    total, _, seen = run(vectors, range(5), 3)
    assert (total == 6).all()
    revealed = [message for message in seen if isinstance(message, RevealedShares)]
    open_words = {}
    for client, masked in masked_by(seen).items():
        shares = {message.client + 1: dict(message.seeds)[client] for message in revealed}
        seed = secret_sharing.recover(dict(itertools.islice(shares.items(), 3))).to_bytes(32)
        open_words[client] = masked - masking.self_mask(seed, 1, client, LONG)
    for size in (1, 2, 3):
        for some in itertools.combinations(open_words, size):
            assert looks_uniform(np.sum([open_words[client] for client in some], axis=0, dtype=np.uint64)), some


def test_the_same_numbers_are_masked_anew_in_every_sum() -> None:
    vectors = dict.fromkeys(range(3), np.ones(LONG))
    first, second = (masked_by(run(vectors, range(3), 2, round)[2]) for round in (1, 2))
    for client in vectors:
        assert looks_uniform(first[client] - second[client])


def test_no_plain_number_is_in_any_message_and_every_message_is_of_a_known_kind() -> None:
    vectors = {client: np.random.default_rng(client).normal(size=200) for client in range(4)}
    _, _, seen = run(vectors, range(5), 3)
    plain = {
        encoded.tobytes()[start : start + 8]
        for vector in vectors.values()
        for encoded in (vector, vector.astype(np.float32), to_words(vector, 5, ""))
        for start in range(0, encoded.nbytes, 8)
    }
    assert {type(message) for message in seen} == {PublicKeys, SealedShare, MaskedVector, RevealedShares}
    assert len(seen) == 5 + 5 * 4 + 4 + 4
    for message in seen:
        for field in fields(message):
            value: Any = getattr(message, field.name)
            if isinstance(value, bytes):
                assert not [part for part in plain if part in value], type(message)
            else:
                assert isinstance(value, int) or all(isinstance(each, int) for pair in value for each in pair)


def test_keys_depend_on_round_and_clients() -> None:
    private, public = masking.new_key(), masking.public_key(masking.new_key())
    masks = [
        masking.pair_mask(private, public, round, client, peer, 4).tobytes()
        for round, client, peer in [(1, 2, 3), (2, 2, 3), (1, 2, 4), (1, 3, 2)]
    ]
    assert len(set(masks)) == 4
    seed = bytes(32)
    own = {masking.self_mask(seed, round, client, 4).tobytes() for round, client in [(1, 2), (2, 2), (1, 3)]}
    assert len(own) == 3
    low, high = (np.frombuffer(masks[place], np.uint64) for place in (0, 3))
    assert not (low + high).any()


# --------------------------------------------------------------------------------------------------------------- dropping out


def test_a_sum_needs_its_threshold_of_clients() -> None:
    secure = SecureSum(1, range(5), 3)
    for client in (0, 4):
        secure.deliver(client, np.ones(2))
    with pytest.raises(QuorumError, match=r"masked vectors must come from at least 3 of 5 clients, got 2"):
        secure.finish()


def test_clients_may_be_lost_between_any_two_steps() -> None:
    """One never sends keys, one no shares, one no vector and one does not reveal; the last two are in the sum or recovered."""
    collector = Collector(1, range(7), 4)
    parties = {client: Party(client, 1, 4) for client in range(6)}
    for party in parties.values():
        collector.receive(party.advertise())
    roster = collector.roster()
    for client in range(5):
        for share in parties[client].share(roster):
            collector.receive(share)
    inboxes = collector.exchange()
    assert set(inboxes) == set(range(5))
    for client, inbox in inboxes.items():
        parties[client].accept(inbox)
    for client in (0, 1, 2, 3, 4):
        masked = parties[client].mask(np.array([10.0**client]))
        if client != 2:
            collector.receive(masked)
    survivors = collector.close()
    assert survivors == Survivors(1, (0, 1, 3, 4), (2,))
    for client in (0, 1, 3):
        collector.receive(parties[client].reveal(survivors))
    with pytest.raises(QuorumError, match="revealed shares"):
        collector.total()
    collector.receive(parties[4].reveal(survivors))
    assert collector.total() == [1 + 10 + 1000 + 10_000]


def test_a_vector_that_comes_too_late_is_refused() -> None:
    collector, parties = agreed(range(4), 3)
    for client in (0, 1, 2):
        collector.receive(parties[client].mask(np.ones(1)))
    collector.close()
    with pytest.raises(ContractError, match=r"message of client 3 must be RevealedShares of round 1"):
        collector.receive(parties[3].mask(np.ones(1)))


# ------------------------------------------------------------------------------------------------------ what a client refuses


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Survivors(1, (0, 1, 2, 3), (3,)), ContractError, "both kinds of one client"),
        (Survivors(1, (0, 1, 2), ()), ContractError, "name the clients of this sum"),
        (Survivors(1, (0, 1, 2), (3, 4)), ContractError, "name the clients of this sum"),
        (Survivors(1, (1, 2, 3), (0,)), ContractError, "list it as delivered"),
        (Survivors(2, (0, 1, 2), (3,)), ContractError, "be of this round"),
        (Survivors(1, (0, 1), (2, 3)), QuorumError, "at least 3"),
    ],
)
def test_a_client_answers_no_request_that_could_lay_somebody_open(
    request_: Survivors, error: type[Exception], message: str
) -> None:
    _, parties = agreed(range(4), 3)
    parties[0].mask(np.ones(1))
    with pytest.raises(error, match=message):
        parties[0].reveal(request_)


def test_a_client_answers_each_question_once() -> None:
    _, parties = agreed(range(4), 3)
    with pytest.raises(ContractError, match="reveal must be requested once and in order"):
        parties[0].reveal(Survivors(1, (0, 1, 2), (3,)))
    parties[0].mask(np.ones(1))
    with pytest.raises(ContractError, match="mask must be requested once"):
        parties[0].mask(np.zeros(1))
    parties[0].reveal(Survivors(1, (0, 1, 2), (3,)))
    with pytest.raises(ContractError, match="reveal must be requested once"):
        parties[0].reveal(Survivors(1, (0, 1, 3), (2,)))


def spoil(roster: list[PublicKeys], how: str) -> list[PublicKeys]:
    first, second, *rest = roster
    return {
        "same": [first, replace(second, masking=rest[0].masking), *rest],
        "one for both": [first, replace(second, masking=second.sealing), *rest],
        "own": [replace(first, masking=masking.public_key(masking.new_key())), second, *rest],
        "twice": [first, second, second, *rest],
        "stale": [first, replace(second, round=0), *rest],
        "many": roster + [keys_of(client) for client in (10, 11)],
        "not a key": [first, replace(second, sealing=b"short"), *rest],
        "low order": [first, replace(second, sealing=bytes(32)), *rest],
    }[how]


def keys_of(client: int) -> PublicKeys:
    return Party(client, 1, 2).advertise()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("same", "distinct public keys"),
        ("one for both", "distinct public keys"),
        ("own", "its own keys as it sent them"),
        ("twice", "name each client once"),
        ("stale", "keys of this round"),
        ("many", "more than half of the roster"),
        ("not a key", "public key must be a point of X25519"),
        ("low order", "public key must be a point of X25519"),
    ],
)
def test_a_client_refuses_a_roster_that_is_not_sound(how: str, message: str) -> None:
    party = Party(0, 1, 3)
    with pytest.raises(ContractError, match=message):
        party.share(spoil([party.advertise(), *(keys_of(client) for client in (1, 2, 3))], how))


def test_a_sum_of_fewer_than_three_is_no_secret() -> None:
    with pytest.raises(QuorumError, match="clients must be at least 3, got 2"):
        SecureSum(1, [0, 1], 2)
    party = Party(0, 1, 2)
    with pytest.raises(QuorumError, match="at least 3 for client 0 to go on, got 2"):
        party.share([party.advertise(), keys_of(1)])


def test_a_client_does_not_go_on_when_too_few_have_shared() -> None:
    parties = {client: Party(client, 1, 3) for client in range(4)}
    roster = [party.advertise() for party in parties.values()]
    inbox = [letter for party in parties.values() for letter in party.share(roster) if letter.recipient == 0]
    with pytest.raises(ContractError, match="shares must come once from clients on the roster"):
        parties[0].accept([inbox[0], inbox[0]])
    with pytest.raises(QuorumError, match="at least 3 for client 1 to go on, got 1"):
        parties[1].accept([])


@pytest.mark.parametrize("change", ["bit", "short", "sender", "recipient"])
def test_a_share_that_was_tampered_with_is_refused(change: str) -> None:
    parties = {client: Party(client, 1, 2) for client in range(3)}
    roster = [party.advertise() for party in parties.values()]
    letters = {
        (letter.client, letter.recipient): letter for party in parties.values() for letter in party.share(roster)
    }
    good = letters[1, 0]
    bad = {
        "bit": replace(good, sealed=good.sealed[:-1] + bytes([good.sealed[-1] ^ 1])),
        "short": replace(good, sealed=good.sealed[:5]),
        "sender": replace(letters[2, 0], client=1),
        "recipient": replace(letters[1, 2], recipient=0),
    }[change]
    with pytest.raises(ContractError, match="the message from client 1 to client 0 must arrive unchanged"):
        parties[0].accept([bad, letters[2, 0]])


# --------------------------------------------------------------------------------------------------- what the server refuses


def test_the_server_takes_each_message_once_from_those_it_asked() -> None:
    collector = Collector(1, range(3), 2)
    collector.receive(keys_of(0))
    for message in (keys_of(0), keys_of(7)):
        with pytest.raises(ContractError, match="come once, from and for clients of this sum"):
            collector.receive(message)
    with pytest.raises(ContractError, match="must be PublicKeys of round 1, got 'PublicKeys of round 2'"):
        collector.receive(Party(1, 2, 2).advertise())
    with pytest.raises(ContractError, match="must be PublicKeys of round 1, got 'MaskedVector of round 1'"):
        collector.receive(MaskedVector(1, 1, bytes(8)))
    with pytest.raises(QuorumError, match="keys must come from at least 2 of 3 clients, got 1"):
        collector.roster()


def test_vectors_of_another_length_are_refused() -> None:
    collector, parties = agreed(range(3), 2)
    collector.receive(parties[0].mask(np.ones(2)))
    for masked in (bytes(8), bytes(17)):
        with pytest.raises(ContractError, match="as long as the vectors of others"):
            collector.receive(MaskedVector(1, 1, masked))


@pytest.mark.parametrize(
    ("off", "message"),
    [("by a little", "masking key that client 3 announced"), ("by far", "shares of client 3 must fit together")],
)
def test_wrong_shares_of_a_masking_key_are_found_out(off: str, message: str) -> None:
    collector, parties = agreed(range(4), 3)
    for client in (0, 1, 2):
        collector.receive(parties[client].mask(np.ones(2)))
    survivors = collector.close()
    answers = [parties[client].reveal(survivors) for client in (0, 1, 2)]
    with pytest.raises(ContractError, match="must reveal the requested shares"):
        collector.receive(replace(answers[0], masking_keys=()))
    shares = {answer.client + 1: dict(answer.masking_keys)[3] for answer in answers}
    slope = secret_sharing.recover({**shares, 1: shares[1] + 1}) - secret_sharing.recover(shares)
    other = shares[1] + 256 * pow(slope, -1, secret_sharing.PRIME)  # gives another key: the true one plus 256
    collector.receive(replace(answers[0], masking_keys=((3, other if off == "by a little" else 5),)))
    for answer in answers[1:]:
        collector.receive(answer)
    with pytest.raises(ContractError, match=message):
        collector.total()


@pytest.mark.parametrize("threshold", [0, 2, 5])
def test_a_threshold_is_more_than_half_and_at_most_all(threshold: int) -> None:
    with pytest.raises(ConfigError, match="threshold must be more than half of the 4 clients"):
        SecureSum(1, range(4), threshold)


@pytest.mark.parametrize("clients", [[0, 1, 1], [-1, 0, 1]])
def test_clients_are_distinct_numbers(clients: list[int]) -> None:
    with pytest.raises(ContractError, match="distinct numbers from 0"):
        SecureSum(1, clients, 2)


def test_a_client_nobody_asked_cannot_deliver() -> None:
    with pytest.raises(ContractError, match="must be one that was announced, got 3"):
        SecureSum(1, range(3), 2).deliver(3, np.ones(1))


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    found = importlib.util.find_spec(masking.__name__)
    assert found is not None
    assert found.loader is not None
    with pytest.raises(ConfigError, match=r"pip install 'fedprompt\[secure\]'"):
        found.loader.exec_module(importlib.util.module_from_spec(found))
