"""Checks of clients' messages before the aggregation. A message that breaks a rule is refused, and every refusal is recorded.

| rule | what is refused |
|---|---|
| client | a reply of a client that is not in the cohort |
| replayed | a second reply of a client in one round |
| round | a reply to another round's download |
| samples | a number of images that is not a positive whole number, or is too large |
| bytes | a message larger than its declared tensors can be |
| keys, shapes, dtypes, finite, minimum | an upload that is not what the method declared (`wire.find_fault`) |
| counts | a count of images that is negative, or larger than the claimed number of images |
| norm | an update with a larger norm than the bound, absolute or relative to the median of the cohort |

A claimed number of images counts up to a multiple of the cohort's median. In private runs every client counts as one image
and must claim one. The median of an even number of values is the lower one of the middle two, so half of a cohort cannot
raise it at will.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

import torch

from fedprompt.config import GuardConfig
from fedprompt.core import wire
from fedprompt.core.messages import COHORT, Failure, LocalUpdate
from fedprompt.core.roles import Roles
from fedprompt.core.wire import Fault
from fedprompt.privacy.mechanism import WITHIN
from fedprompt.tensors import Tensors

ROOM = 1.5  # allowed bytes of a message per byte of its declared tensors: statistics may be in double precision
NAMES = 4096  # bytes for names and shapes
LARGEST_LOSS = 1e30  # so that the sum over a cohort is finite

Reference = Callable[[int], Tensors]  # the shared tensors a client started from


@dataclass(frozen=True)
class Admitted:
    """The accepted replies of a cohort, and the refused ones."""

    updates: list[LocalUpdate]
    refused: list[Failure]

    def answered(self, cohort: Sequence[int]) -> int:
        """How many of a cohort have an accepted update; a reply for all of it counts for all clients that did not fail."""
        if any(update.client == COHORT for update in self.updates):
            return len(cohort) - len(self.refused)
        return len({update.client for update in self.updates} & set(cohort))  # a late one may be of another cohort


class Guard:
    """Pure decisions on the replies of one round; it keeps no state between rounds."""

    def __init__(self, settings: GuardConfig, roles: Roles, private: bool = False) -> None:
        self._settings, self._roles, self._private = settings, roles, private
        self._most = {when: self._most_bytes(when) for when in ("start", "round")}

    def admit(
        self,
        replies: Iterable[LocalUpdate | Failure],
        round: int,
        cohort: Sequence[int],
        reference: Reference,
        as_one: bool = False,
    ) -> Admitted:
        """The replies that pass every rule, in the order of clients, not of arrival.

        With `as_one` a single reply for the whole cohort is expected: a secure sum.
        """
        when = "round" if round else "start"
        expected = frozenset((COHORT,) if as_one else cohort)
        clients = len(cohort) if as_one else 1
        good: dict[int, LocalUpdate] = {}
        refused: list[Failure] = []
        for message in replies:
            if isinstance(message, Failure):
                refused.append(message)
                continue
            fault = self._out_of_turn(message, round, expected, good) or self._malformed(message, when, clients)
            fault = fault or self._too_long(message, reference)
            if fault is None:
                good[message.client] = message
            else:
                refused.append(Failure(message.client, fault.rule, fault.text))
        for client, text in self._outliers(good.values(), reference, when).items():
            del good[client]
            refused.append(Failure(client, "norm", text))
        return Admitted([good[client] for client in sorted(good)], sorted(refused, key=lambda each: each.client))

    def quorum(self, cohort: Sequence[int]) -> int:
        """How many updates of a cohort must be accepted."""
        return math.ceil(self._settings.quorum * len(cohort))

    def weights(self, replies: Sequence[LocalUpdate]) -> tuple[list[float], list[Failure]]:
        """The weight of each reply, in images, and the replies whose claim was capped."""
        claims = [float(reply.samples) for reply in replies]
        if self._settings.weight_cap is None or not claims:
            return claims, []
        cap = self._settings.weight_cap * median_low(claims)
        cut = [
            Failure(reply.client, "weight", f"counts as {cap:g} images, claimed {reply.samples}")
            for reply in replies
            if reply.samples > cap
        ]
        return [min(claim, cap) for claim in claims], cut

    def _out_of_turn(
        self, reply: LocalUpdate, round: int, expected: Collection[int], good: Collection[int]
    ) -> Fault | None:
        if reply.client not in expected:
            return Fault("client", f"must be a client of the cohort, got {reply.client}")
        if reply.client in good:
            return Fault("replayed", f"must answer once in round {round}")
        if reply.round != round:
            return Fault("round", f"must answer round {round}, got {reply.round}")
        return None

    def _malformed(self, reply: LocalUpdate, when: str, clients: int) -> Fault | None:
        """What is wrong with a reply that stands for `clients` clients."""
        most_samples = clients * (1 if self._private else self._settings.max_samples)
        if type(reply.samples) is not int or not 0 < reply.samples <= most_samples:
            return Fault("samples", f"must be in 1..{most_samples}, got {reply.samples!r}")
        if reply.loss is not None and not abs(reply.loss) < LARGEST_LOSS:
            return Fault("finite", f"loss must be finite and below {LARGEST_LOSS:g}, got {reply.loss}")
        size, most = wire.size_in_bytes(reply.upload), self.most_bytes(when)
        if size > most:
            return Fault("bytes", f"must be at most {most}, got {size}")
        return wire.find_fault(reply.upload, self._roles, when) or self._wrong_tally(reply, when, clients)

    def _wrong_tally(self, reply: LocalUpdate, when: str, clients: int) -> Fault | None:
        """Counts of images must not exceed the claimed number. With noise only `WITHIN` is checked, which is sent without noise."""
        statistics = self._roles.statistics(when)
        limits: dict[str, int] = {WITHIN: clients} if WITHIN in statistics else {}
        if not self._private and reply.client != COHORT:
            choices = {name for name, statistic in statistics.items() if statistic.choice}
            limits |= dict.fromkeys(choices | self._counts(when), reply.samples)
        for name, most in limits.items():
            tally = reply.upload[name].double()
            if (tally < 0).any() or tally.sum() > most + 1e-3:
                return Fault(
                    "counts", f"{name} must be at least 0 and add up to at most {most}, got {float(tally.sum()):g}"
                )
        return None

    def counted_as(self, upload: Tensors, share: float, when: str) -> Tensors:
        """An upload with its sums over images scaled by `share`, so that the means over images stay the same."""
        statistics = self._roles.statistics(when)
        summed = self._counts(when) | {name for name, each in statistics.items() if each.count is not None}
        return {name: tensor * share if name in summed and share < 1 else tensor for name, tensor in upload.items()}

    def _too_long(self, reply: LocalUpdate, reference: Reference) -> Fault | None:
        bound = self._settings.norm
        if bound is None:
            return None
        norm = update_norm(reply.upload, reference(reply.client))
        return None if norm <= bound else Fault("norm", f"update must be at most {bound:g} long, got {norm:.4g}")

    def most_bytes(self, when: str = "round") -> int:
        """The largest possible size of an honest message."""
        return self._most[when]

    def _most_bytes(self, when: str) -> int:
        if self._settings.max_bytes is not None:
            return self._settings.max_bytes
        shared = wire.size_in_bytes(self._roles.shared) if when == "round" else 0
        numbers = sum(torch.Size(each.shape).numel() for each in self._roles.statistics(when).values())
        return int(ROOM * (shared + 8 * numbers)) + NAMES

    def _outliers(self, replies: Iterable[LocalUpdate], reference: Reference, when: str) -> dict[int, str]:
        """Clients with an update or statistic of much larger norm than the cohort's median, and which one."""
        factor, found = self._settings.norm_factor, {}
        if factor is None:
            return {}
        measured = {reply.client: self._lengths(reply, reference, when) for reply in replies}
        for part in next(iter(measured.values()), {}):
            middle = median_low(lengths[part] for lengths in measured.values())
            for client, lengths in measured.items():
                if middle > 0 and lengths[part] > factor * middle:
                    found[client] = (
                        f"{part} must be at most {factor:g} times the median {middle:.4g}, got {lengths[part]:.4g}"
                    )
        return found

    def _counts(self, when: str) -> set[str]:
        """The statistics that count the images in the rows of other statistics."""
        return {each.count for each in self._roles.statistics(when).values() if each.count is not None}

    def _lengths(self, reply: LocalUpdate, reference: Reference, when: str) -> dict[str, float]:
        """The norm of the update, and of every statistic divided by its number of images; counts are left out."""
        lengths = {"update": update_norm(reply.upload, reference(reply.client))} if when == "round" else {}
        statistics = self._roles.statistics(when)
        for name, statistic in statistics.items():
            if name in self._counts(when):
                continue
            images = 1.0 if statistic.count is None else max(1.0, float(reply.upload[statistic.count].sum()))
            lengths[name] = float(reply.upload[name].double().norm()) / images
        return lengths


def update_norm(upload: Tensors, reference: Tensors) -> float:
    """The L2 norm of what a client changed, all shared tensors together."""
    parts = [
        (upload[name].to("cpu", torch.float64) - start.to("cpu", torch.float64)).norm()
        for name, start in reference.items()
        if name in upload
    ]
    return float(torch.stack(parts).norm()) if parts else 0.0
