"""A sum over clients of which the server sees nothing but the sum.

The protocol of Bonawitz et al. (CCS 2017) against a server that keeps to it and is curious. Every client i draws a seed b_i and
two X25519 key pairs; every two clients agree on a seed s_ij that only they know. Client i sends its numbers x_i as

    y_i = x_i + stream(b_i) + sum_{j > i} stream(s_ij) - sum_{j < i} stream(s_ij)   (mod 2^64),

so the pairwise streams cancel in the sum over all clients. Before that, it has given every other client a sealed share of b_i
and of its masking key. When all who will deliver have done so, each survivor reveals its shares of b_i of those who delivered
and its shares of the masking key of those who did not, never both of one client: with both, y_i would be laid open. Since a
threshold is more than half, the server cannot collect both from two groups of clients either. `docs/secure_sum.md` says what
this protects and what it does not.

`Party` is a client, `Collector` the server; they exchange the frozen messages of `messages.py` and nothing else. `SecureSum` carries them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedprompt.errors import ConfigError, ContractError, QuorumError, broken
from fedprompt.privacy.secure_sum.collector import Collector, Record
from fedprompt.privacy.secure_sum.masking import Numbers
from fedprompt.privacy.secure_sum.party import FEWEST, Party


class SecureSum:
    """One sum from the keys to the result; carries the messages between the parties and the collector.

    Clients that were announced and have delivered nothing by the time of `finish` have dropped out.
    """

    def __init__(self, round: int, clients: Sequence[int], threshold: int, record: Record | None = None) -> None:
        if len(set(clients)) < len(clients) or min(clients, default=0) < 0:
            raise ContractError(broken("secure sum: clients", "be distinct numbers from 0", list(clients)))
        if len(clients) < FEWEST:
            raise QuorumError(broken("secure sum: clients", f"be at least {FEWEST}", len(clients)))
        if not len(clients) < 2 * threshold <= 2 * len(clients):
            rule = f"be more than half of the {len(clients)} clients and not more than all"
            raise ConfigError(broken("secure sum: threshold", rule, threshold))
        self._collector = Collector(round, clients, threshold, record)
        self._parties = {client: Party(client, round, threshold) for client in clients}
        for party in self._parties.values():
            self._collector.receive(party.advertise())
        roster = self._collector.roster()
        for party in self._parties.values():
            for share in party.share(roster):
                self._collector.receive(share)
        for client, inbox in self._collector.exchange().items():
            self._parties[client].accept(inbox)

    def deliver(self, client: int, numbers: Numbers) -> None:
        """What a client adds to the sum."""
        if client not in self._parties:
            raise ContractError(broken("secure sum: client", "be one that was announced", client))
        self._collector.receive(self._parties[client].mask(numbers))

    def finish(self) -> tuple[Numbers, tuple[int, ...]]:
        """The sum, and the clients it goes over."""
        survivors = self._collector.close()
        for client in survivors.delivered:
            self._collector.receive(self._parties[client].reveal(survivors))
        return self._collector.total(), survivors.delivered
