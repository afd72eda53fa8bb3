"""Which clients take part in a round, are evaluated, are held out, and are malicious."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from fedprompt.config import AttackConfig, FederationConfig
from fedprompt.errors import ConfigError, broken, did_you_mean
from fedprompt.random_streams import SERVER, stream


def sample_cohort(
    seed: int,
    round: int,
    clients: Sequence[int],
    fraction: float,
    away: Collection[int] = (),
    attempt: int = 0,
    poisson: bool = False,
) -> list[int]:
    """The clients of a round in ascending order: the order of work must not matter, so it is not random.

    A fixed share has at least one client; Poisson sampling may draw none. Another attempt at a round draws again.

    Clients that are away lose their places, which stay empty, so the others take part in the rounds they would
    have taken part in anyway; only a cohort in which all are away is replaced by one client that is there.
    """
    generator = stream(seed, round, SERVER, f"cohort.{attempt}" if attempt else "cohort")
    if poisson:
        lots = generator.uniform(len(clients), dtype=torch.float64)
        drawn = (clients[place] for place in (lots < fraction).nonzero().flatten().tolist())
        return [client for client in drawn if client not in away]
    count = cohort_size(fraction, len(clients))
    order = generator.permutation(len(clients))
    present = (clients[place] for place in order[:count].tolist())
    chosen = [client for client in present if client not in away]
    if chosen:
        return sorted(chosen)
    others = (clients[place] for place in order[count:].tolist())
    return [client for client in others if client not in away][:1]


def sample_tested(seed: int, clients: Sequence[int], count: int | None) -> Sequence[int]:
    """The sample of clients that every evaluation of a run tests, in ascending order; all of them without a count."""
    if count is None or count >= len(clients):
        return clients
    order = stream(seed, 0, SERVER, "tested").permutation(len(clients))
    return sorted(clients[place] for place in order[:count].tolist())


def absences(settings: FederationConfig, client_names: Sequence[str], newcomers: Collection[int]) -> dict[int, range]:
    """The rounds in which each absent client cannot be picked, by client number."""
    found = {}
    for name, (first, last) in settings.away.items():
        if name not in client_names:
            some = ", ".join(client_names[:8]) + (", ..." if len(client_names) > 8 else "")
            rule = f"name clients of the partition ({some})"
            raise ConfigError(broken("federation.away", rule, name) + did_you_mean(name, client_names))
        if client_names.index(name) in newcomers:
            raise ConfigError(broken("federation.away", "name clients that are not held out of training", name))
        if first > settings.rounds:
            raise ConfigError(broken(f"federation.away.{name}", f"begin within the {settings.rounds} rounds", first))
        found[client_names.index(name)] = range(first, last + 1)
    if len(found) == len(client_names) - len(newcomers):  # else some client is always there
        first, last = max(rounds.start for rounds in found.values()), min(rounds.stop for rounds in found.values()) - 1
        if first <= last:
            raise ConfigError(broken("federation.away", "leave a client to train in every round", f"none in {first}"))
    return found


def away_by_round(
    settings: FederationConfig, client_names: Sequence[str], newcomers: Collection[int]
) -> Callable[[int], set[int]]:
    """The clients that cannot be picked in a round."""
    absent = absences(settings, client_names, newcomers)
    return lambda round: {client for client, rounds in absent.items() if round in rounds}


def sample_newcomers(seed: int, clients: int, share: float) -> frozenset[int]:
    """The clients that are held out for a whole run; at least one stays in, and one is held out if the share is not 0."""
    if not share:
        return frozenset()
    if clients < 2:
        raise ConfigError(broken("federation.held_out", "be 0 where there is only one client", share))
    count = min(max(1, round_half_up(share * clients)), clients - 1)
    return frozenset(stream(seed, 0, SERVER, "held_out").permutation(clients)[:count].tolist())


def sample_attackers(attack: AttackConfig | None, seed: int, clients: Sequence[int]) -> frozenset[int]:
    """The clients that are malicious for the whole run. A larger fraction adds clients to those of a smaller one."""
    if attack is None:
        return frozenset()
    order = stream(seed, 0, SERVER, "attackers").permutation(len(clients))
    count = min(round_half_up(attack.fraction * len(clients)), len(clients) - 1)  # at least one client is honest
    return frozenset(clients[place] for place in order[:count].tolist())


def cohort_size(fraction: float, clients: int) -> int:
    """How many clients a round has; with Poisson sampling, about how many."""
    return max(1, round_half_up(fraction * clients))


def round_half_up(value: float) -> int:
    return int(value + 0.5)
