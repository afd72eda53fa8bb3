"""The server's side of a secure sum."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from fedprompt.errors import ContractError, QuorumError, broken
from fedprompt.privacy.secure_sum.masking import (
    KEY_BYTES,
    WORD,
    Numbers,
    Words,
    pair_mask,
    public_key,
    self_mask,
    to_numbers,
)
from fedprompt.privacy.secure_sum.secret_sharing import recover
from fedprompt.privacy.secure_sum.sum_messages import (
    ORDER,
    MaskedVector,
    Message,
    PublicKeys,
    RevealedShares,
    SealedShare,
    Survivors,
)

Record = Callable[[Message], None]  # called with every message that reaches the server


class Collector:
    """The server's side of one sum. It learns about a client only through `receive`."""

    def __init__(self, round: int, clients: Collection[int], threshold: int, record: Record | None = None) -> None:
        self._round, self._clients, self._threshold, self._record = round, frozenset(clients), threshold, record
        self._stage = 0
        self._keys: dict[int, PublicKeys] = {}
        self._letters: dict[tuple[int, int], SealedShare] = {}  # by sender and recipient
        self._members: frozenset[int] = frozenset()
        self._delivered: set[int] = set()
        self._sum: Words = np.zeros(0, np.uint64)
        self._revealed: dict[int, RevealedShares] = {}

    def receive(self, message: Message) -> None:
        """Take a message of a client."""
        if self._record is not None:
            self._record(message)
        if message.round != self._round or not isinstance(message, ORDER[self._stage]):
            kind = f"{type(message).__name__} of round {message.round}"
            rule = f"be {ORDER[self._stage].__name__} of round {self._round}"
            raise ContractError(broken(f"secure sum: message of client {message.client}", rule, kind))
        match message:
            case PublicKeys():
                self._admit(message, message.client in self._clients, message.client in self._keys)
                self._keys[message.client] = message
            case SealedShare():
                way = (message.client, message.recipient)
                known = message.client in self._keys and message.recipient in self._keys
                self._admit(message, known and message.client != message.recipient, way in self._letters)
                self._letters[way] = message
            case MaskedVector():
                self._admit(message, message.client in self._members, message.client in self._delivered)
                self._add(message)
            case RevealedShares():
                self._admit(message, message.client in self._delivered, message.client in self._revealed)
                self._keep(message)

    def roster(self) -> list[PublicKeys]:
        """The keys of all clients that sent them; later ones are refused."""
        self._advance(self._keys, "keys")
        return [self._keys[client] for client in sorted(self._keys)]

    def exchange(self) -> dict[int, list[SealedShare]]:
        """The shares for each client, from clients that sent a share to every other one: these are the members of the sum."""
        complete = [
            client
            for client in sorted(self._keys)
            if all((client, peer) in self._letters for peer in self._keys if peer != client)
        ]
        self._members = frozenset(complete)
        self._advance(complete, "shares")
        return {
            recipient: [self._letters[sender, recipient] for sender in complete if sender != recipient]
            for recipient in complete
        }

    def close(self) -> Survivors:
        """The clients that delivered and those that did not; later vectors are refused."""
        self._advance(self._delivered, "masked vectors")
        return Survivors(self._round, tuple(sorted(self._delivered)), tuple(sorted(self._members - self._delivered)))

    def total(self) -> Numbers:
        """The sum over the clients that delivered, once enough of them have revealed their shares."""
        self._enough(self._revealed, "revealed shares")
        helpers = sorted(self._revealed)[: self._threshold]
        seeds = {helper: dict(self._revealed[helper].seeds) for helper in helpers}
        keys = {helper: dict(self._revealed[helper].masking_keys) for helper in helpers}
        words = self._sum.copy()
        for client in sorted(self._delivered):
            words -= self_mask(self._recovered(seeds, client), self._round, client, len(words))
        for gone in sorted(self._members - self._delivered):
            private = self._recovered(keys, gone)
            if public_key(private) != self._keys[gone].masking:
                raise ContractError(f"secure sum: shares must give the masking key that client {gone} announced")
            for client in sorted(self._delivered):
                public = self._keys[client].masking
                words -= pair_mask(private, public, self._round, client, gone, len(words))
        return to_numbers(words)

    def _add(self, message: MaskedVector) -> None:
        if len(message.masked) % WORD.itemsize or (self._delivered and len(message.masked) != self._sum.nbytes):
            rule = "be whole words, and as long as the vectors of others"
            raise ContractError(broken(f"secure sum: vector of client {message.client}", rule, len(message.masked)))
        words = np.frombuffer(message.masked, WORD).astype(np.uint64)
        self._sum = self._sum + words if self._delivered else words
        self._delivered.add(message.client)

    def _keep(self, message: RevealedShares) -> None:
        seeds, keys = (sorted(client for client, _ in pairs) for pairs in (message.seeds, message.masking_keys))
        if seeds != sorted(self._delivered) or keys != sorted(self._members - self._delivered):
            raise ContractError(f"secure sum: client {message.client} must reveal the requested shares")
        self._revealed[message.client] = message

    def _recovered(self, shares: dict[int, dict[int, int]], client: int) -> bytes:
        number = recover({helper + 1: held[client] for helper, held in shares.items()})
        if number >= 2 ** (8 * KEY_BYTES):
            raise ContractError(f"secure sum: shares of client {client} must fit together")
        return number.to_bytes(KEY_BYTES)

    def _admit(self, message: Message, expected: bool, seen: bool) -> None:
        if not expected or seen:
            rule = "come once, from and for clients of this sum"
            got = f"{'a second' if seen else 'one'} of client {message.client}"
            raise ContractError(broken(f"secure sum: {type(message).__name__}", rule, got))

    def _advance(self, clients: Collection[int], what: str) -> None:
        self._enough(clients, what)
        self._stage += 1

    def _enough(self, clients: Collection[int], what: str) -> None:
        if len(clients) < self._threshold:
            rule = f"come from at least {self._threshold} of {len(self._clients)} clients"
            raise QuorumError(broken(f"secure sum: {what}", rule, len(clients)))
