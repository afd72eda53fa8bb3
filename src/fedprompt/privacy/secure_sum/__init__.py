"""A sum over clients, of which the server learns only the sum.

The protocol of Bonawitz et al. (CCS 2017) against an honest but curious server. Every client i draws a seed b_i and
two X25519 key pairs; every two clients agree on a secret seed s_ij. Client i sends its numbers x_i as

    y_i = x_i + stream(b_i) + sum_{j > i} stream(s_ij) - sum_{j < i} stream(s_ij)   (mod 2^64),

so the pairwise streams cancel in the sum over all clients. Before that, it has sent every other client an encrypted share
of b_i and of its masking key. After the delivery, each survivor reveals its shares of b_i for clients that delivered, and its
shares of the masking key for clients that did not, never both for one client: both together would reveal x_i. Since the
threshold is more than half, the server cannot collect both from two groups of clients either. `docs/secure_sum.md` describes
what this protects and what it does not.

`Party` is a client, `Collector` the server. They exchange only the frozen messages of `sum_messages.py`, carried by `SecureSum`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedprompt.errors import ConfigError, ContractError, QuorumError, broken
from fedprompt.privacy.secure_sum.collector import Collector, Record
from fedprompt.privacy.secure_sum.masking import Numbers
from fedprompt.privacy.secure_sum.party import FEWEST, Party


class SecureSum:
    """One sum from the keys to the result; carries the messages between the parties and the collector.

    Announced clients that have not delivered before `finish` have dropped out.
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
        """Add a client's numbers to the sum."""
        if client not in self._parties:
            raise ContractError(broken("secure sum: client", "be one that was announced", client))
        self._collector.receive(self._parties[client].mask(numbers))

    def finish(self) -> tuple[Numbers, tuple[int, ...]]:
        """The sum, and the clients in it."""
        survivors = self._collector.close()
        for client in survivors.delivered:
            self._collector.receive(self._parties[client].reveal(survivors))
        return self._collector.total(), survivors.delivered
