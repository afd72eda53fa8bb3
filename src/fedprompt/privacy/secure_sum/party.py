"""The client's side of a secure sum."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

from fedprompt.errors import ContractError, QuorumError, broken
from fedprompt.privacy.secure_sum.masking import (
    KEY_BYTES,
    WORD,
    Numbers,
    new_key,
    pair_mask,
    public_key,
    seal,
    self_mask,
    to_words,
    unseal,
)
from fedprompt.privacy.secure_sum.secret_sharing import SHARE_BYTES, split
from fedprompt.privacy.secure_sum.sum_messages import MaskedVector, PublicKeys, RevealedShares, SealedShare, Survivors

FEWEST = 3  # clients, so that a dropout does not leave a sum of one


class Party:
    """The client's side of one sum. It answers each request once and in order: a second vector under the same masks would reveal data."""

    def __init__(self, client: int, round: int, threshold: int) -> None:
        self._client, self._round, self._threshold = client, round, threshold
        self._steps = ["advertise", "share", "accept", "mask", "reveal"]
        self._sealing, self._masking = new_key(), new_key()
        self._public = PublicKeys(client, round, public_key(self._sealing), public_key(self._masking))
        self._seed = secrets.token_bytes(KEY_BYTES)
        self._roster: dict[int, PublicKeys] = {}
        self._held: dict[
            int, tuple[int, int]
        ] = {}  # shares of the seed and masking key of every client, including its own

    def advertise(self) -> PublicKeys:
        self._enter("advertise")
        return self._public

    def share(self, roster: Sequence[PublicKeys]) -> list[SealedShare]:
        """Shares of its seed and of its masking key, one sealed message for every other client on the list."""
        self._enter("share")
        self._roster = {keys.client: keys for keys in roster}
        self._check(len(self._roster) == len(roster), "roster must name each client once")
        distinct = {key for keys in roster for key in (keys.sealing, keys.masking)}
        self._check(len(distinct) == 2 * len(roster), "roster must hold distinct public keys")
        self._check(self._roster.get(self._client) == self._public, "roster must hold its own keys as it sent them")
        self._check(all(keys.round == self._round for keys in roster), "roster must hold keys of this round only")
        self._check(2 * self._threshold > len(roster), "threshold must be more than half of the roster")
        self._enough(self._roster)
        points = {client: client + 1 for client in self._roster}
        seed = split(int.from_bytes(self._seed), self._threshold, points.values())
        key = split(int.from_bytes(self._masking), self._threshold, points.values())
        shares = {client: (seed[point], key[point]) for client, point in points.items()}
        self._held = {self._client: shares.pop(self._client)}
        return [self._sealed(client, pair) for client, pair in shares.items()]

    def accept(self, inbox: Sequence[SealedShare]) -> None:
        """Decrypt the shares of the others. The clients that sent one are the members of the sum."""
        self._enter("accept")
        for letter in inbox:
            known = letter.client in self._roster and letter.client not in self._held
            self._check(known, "shares must come once from clients on the roster")
            self._held[letter.client] = self._opened(letter)
        self._enough(self._held)

    def mask(self, numbers: Numbers) -> MaskedVector:
        """Its numbers under all of its masks."""
        self._enter("mask")
        masked = to_words(numbers, len(self._held), f"client {self._client}")
        masked += self_mask(self._seed, self._round, self._client, len(masked))
        for peer in self._held:
            if peer != self._client:
                public = self._roster[peer].masking
                masked += pair_mask(self._masking, public, self._round, self._client, peer, len(masked))
        return MaskedVector(self._client, self._round, masked.astype(WORD).tobytes())

    def reveal(self, survivors: Survivors) -> RevealedShares:
        """Its share of the seed or of the masking key of every client. A request that could reveal a client's data is refused."""
        self._enter("reveal")
        delivered, dropped = set(survivors.delivered), set(survivors.dropped)
        self._check(survivors.round == self._round, "request for shares must be of this round")
        self._check(not delivered & dropped, "request for shares must not ask for both kinds of one client")
        self._check(delivered | dropped == set(self._held), "request for shares must name the clients of this sum")
        self._check(self._client in delivered, "request for shares must list it as delivered")
        self._enough(delivered, fewest=2)
        return RevealedShares(
            self._client,
            self._round,
            tuple((client, self._held[client][0]) for client in sorted(delivered)),
            tuple((client, self._held[client][1]) for client in sorted(dropped)),
        )

    def _sealed(self, recipient: int, shares: tuple[int, int]) -> SealedShare:
        content = b"".join(share.to_bytes(SHARE_BYTES) for share in shares)
        public = self._roster[recipient].sealing
        sealed = seal(self._sealing, public, self._round, self._client, recipient, content)
        return SealedShare(self._client, self._round, recipient, sealed)

    def _opened(self, letter: SealedShare) -> tuple[int, int]:
        public = self._roster[letter.client].sealing
        content = unseal(self._sealing, public, self._round, letter.client, self._client, letter.sealed)
        return int.from_bytes(content[:SHARE_BYTES]), int.from_bytes(content[SHARE_BYTES:])

    def _enough(self, clients: Collection[int], fewest: int = FEWEST) -> None:
        if len(clients) < max(self._threshold, fewest):
            rule = f"be at least {max(self._threshold, fewest)} for client {self._client} to go on"
            raise QuorumError(broken("secure sum: clients", rule, len(clients)))

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise ContractError(f"secure sum: client {self._client} refuses: {rule}")

    def _enter(self, step: str) -> None:
        self._check(self._steps[:1] == [step], f"{step} must be requested once and in order")
        self._steps.pop(0)
