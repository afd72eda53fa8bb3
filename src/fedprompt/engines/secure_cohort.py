"""An engine whose server learns only the sum over a cohort: one reply for all clients, computed by a secure sum.

Client i with n_i training images (n_i = 1 under uniform weights) sends a masked vector of

    n_i * shared tensors, statistics, 1, n_i, n_i * loss_i, n_i if it has a loss,

and the reply of the cohort holds sum_i(n_i * x_i) / sum_i(n_i) for shared tensors and plain sums for statistics. A client that
fails has dropped out after the exchange of keys, and its masks are recovered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedprompt.core import wire
from fedprompt.core.messages import COHORT, Download, Failure, LocalUpdate, NextTraining
from fedprompt.core.roles import Roles
from fedprompt.core.wire import Fault
from fedprompt.errors import ConfigError, ContractError, DivergenceError, QuorumError, broken
from fedprompt.federation.loop import Engine
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.privacy.secure_sum import SecureSum
from fedprompt.privacy.secure_sum.collector import Record
from fedprompt.privacy.secure_sum.masking import RANGE, Numbers
from fedprompt.tensors import Tensors

FIGURES = 4  # numbers after the tensors: clients, images, weighted loss, images with a loss


@dataclass(frozen=True)
class Entry:
    """One tensor of the vector. Its offset is the total size of the entries before it."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    averaged: bool
    """Weighted by the number of images; otherwise a plain sum."""
    device: torch.device


Layout = tuple[Entry, ...]


def layout_of(upload: Tensors, shared: Mapping[str, object]) -> Layout:
    """The tensors of an upload, sorted by name. All valid uploads have the same names and shapes."""
    return tuple(
        Entry(name, tensor.shape, tensor.dtype, name in shared, tensor.device)
        for name, tensor in sorted(upload.items())
    )


def to_vector(reply: LocalUpdate, layout: Layout, weight: int) -> Numbers:
    """The vector that a client adds to the sum."""
    parts = [
        reply.upload[entry.name].detach().to("cpu", torch.float64).flatten() * (weight if entry.averaged else 1)
        for entry in layout
    ]
    loss, trained = (0.0, 0) if reply.loss is None else (weight * reply.loss, weight)
    figures = torch.tensor([1, weight, loss, trained], dtype=torch.float64)
    vector: Numbers = torch.cat([*parts, figures]).numpy()
    return vector


def to_reply(total: Numbers, layout: Layout, round: int, clients: int) -> LocalUpdate:
    """The reply of the cohort; `clients` is how many of them are in the sum."""
    counted, images, loss, trained = total[-FIGURES:].tolist()
    if counted != clients or images < clients or not images.is_integer():
        raise ContractError(broken("secure sum", f"count {clients} clients: a revealed share is wrong", counted))
    upload, start = {}, 0
    for entry in layout:
        end = start + entry.shape.numel()
        values = torch.from_numpy(total[start:end]) / (images if entry.averaged else 1.0)
        upload[entry.name] = values.reshape(entry.shape).to(entry.dtype).to(entry.device)
        start = end
    mean_loss = loss / trained if trained else None
    return LocalUpdate(COHORT, round, upload, int(images), mean_loss)


class SecureCohort:
    """Wraps an engine. Each reply is checked and masked on the client's side; `record` receives every message that leaves it."""

    def __init__(
        self,
        engine: Engine,
        roles: Roles,
        threshold_share: float = 0.5,
        uniform: bool = False,
        record: Record | None = None,
    ) -> None:
        if not 0 < threshold_share <= 1:
            raise ConfigError(broken("threshold_share", "be in (0, 1]", threshold_share))
        self._engine, self._roles, self._uniform, self._record = engine, roles, uniform, record
        self._threshold_share = threshold_share

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        return self._as_one(0, clients, self._engine.survey(clients, download))

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        return self._as_one(round, clients, self._engine.train(round, clients, download))

    def evaluate(
        self, round: int, clients: Sequence[int], download: Download, ahead: NextTraining | None = None
    ) -> Iterator[tuple[int, ClientResult] | Failure]:
        return self._engine.evaluate(round, clients, download, ahead)

    def discard(self, clients: Iterable[int]) -> None:
        self._engine.discard(clients)

    def take_states(self) -> dict[int, bytes]:
        return self._engine.take_states()

    def threshold(self, clients: int) -> int:
        """How many clients must deliver: at least the configured share, and always more than half."""
        return max(clients // 2 + 1, math.ceil(self._threshold_share * clients - 1e-9))

    def _as_one(
        self, round: int, clients: Sequence[int], arriving: Iterable[LocalUpdate | Failure]
    ) -> Iterator[LocalUpdate | Failure]:
        """Failures as they happen, then one reply; a failure of the whole cohort if too few clients are left."""
        if not clients:
            return
        try:
            secure = SecureSum(round, clients, self.threshold(len(clients)), self._record)
        except QuorumError as error:
            yield Failure(COHORT, "quorum", str(error))
            return
        layout: Layout = ()
        for message in arriving:
            if isinstance(message, Failure):
                yield message
                continue
            fault = self._fault(message, round)
            if fault is None:
                layout = layout or layout_of(message.upload, self._roles.shared)
                fault = self._add(secure, message, layout, len(clients))
            if fault is not None:
                yield Failure(message.client, fault.rule, fault.text)
        try:
            total, survivors = secure.finish()
        except QuorumError as error:
            yield Failure(COHORT, "quorum", str(error))
            return
        yield to_reply(total, layout, round, len(survivors))

    def _add(self, secure: SecureSum, reply: LocalUpdate, layout: Layout, clients: int) -> Fault | None:
        """Add a client's vector to the sum, or return the rule it breaks. The text never contains its values."""
        try:
            secure.deliver(reply.client, to_vector(reply, layout, 1 if self._uniform else reply.samples))
        except ContractError:
            return Fault("replayed", "must answer once in a round")
        except DivergenceError:
            return Fault("range", f"numbers must be within ±{RANGE / clients:g} in a secure sum")
        return None

    def _fault(self, reply: LocalUpdate, round: int) -> Fault | None:
        """The checks of the guard, made by the client itself."""
        if reply.round != round:
            return Fault("round", f"must answer round {round}")
        if type(reply.samples) is not int or reply.samples < 1:
            return Fault("samples", "must be a positive whole number")
        return wire.find_fault(reply.upload, self._roles, "round" if round else "start")
