"""What clients predict of their test images: one client, or several as one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedprompt.client.advance import Advance, Listener
from fedprompt.client.batch_schedule import Plan, batch_schedule_of, in_order, mixed_order
from fedprompt.client.batch_sizing import Axes, BatchSizer, Noise, StepNeeds, shapes_of
from fedprompt.client.batched_clients import (
    StackedBatch,
    StackedParams,
    forward_of_clients,
    predictions_of_clients,
    seen_by,
)
from fedprompt.client.out_of_memory import in_fitting_parts
from fedprompt.client.step import forward, make_batch
from fedprompt.config import Config
from fedprompt.core.method import Method, World
from fedprompt.errors import DivergenceError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors

ROW = 16  # most images of one client side by side: many rows fill a batch, few of them have to be filled up

Predicted = tuple[Tensor, dict[str, float]]  # probabilities (V, images, C) of V draws, and the method's own numbers


def among_classes_of(labels: Tensor, probabilities: Tensor) -> Tensor:
    """Probabilities among the classes of a client's training images; a newcomer without any has all."""
    if not len(labels):
        return probabilities
    own = torch.zeros(probabilities.shape[-1], dtype=torch.bool, device=probabilities.device)
    own[labels.unique().to(own.device)] = True
    among = probabilities * own
    return among / among.sum(-1, keepdim=True).clamp_min(torch.finfo(among.dtype).tiny)


@dataclass(frozen=True)
class Row:
    """Some images of a client that go through the backbone beside those of others."""

    client: int
    positions: Tensor
    """Among its images."""
    ends: bool
    """Whether an evaluation batch of the client ends with it."""


def part_of_draws(noise: Tensors, axes: Axes, size: int, start: int, count: int) -> Tensors:
    """The draws of some of the images of a batch; `axes` says where the images are."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        if name not in axes or count == size:
            return tensor
        axis, times = axes[name]
        found: Tensor = tensor.unflatten(axis, (times, size)).narrow(axis + 1, start, count).flatten(axis, axis + 1)
        return found

    return {name: cut(name, tensor) for name, tensor in noise.items()}


class Means:
    """Averages of named numbers over samples."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._samples = 0

    def add(self, numbers: Mapping[str, Tensor], samples: int) -> None:
        """Numbers for all samples of a batch, or for each of them, of which those behind `samples` do not count."""
        self._samples += samples
        for name, number in numbers.items():
            mean = number[:samples].mean() if number.dim() else number
            self._sums[name] = self._sums.get(name, 0.0) + float(mean) * samples

    def values(self) -> dict[str, float]:
        return {name: total / self._samples for name, total in self._sums.items()}


class Testing:
    """Asks a method for its predictions."""

    def __init__(
        self,
        config: Config,
        world: World,
        method: Method,
        bank: ImageBank,
        noise: Noise,
        sizer: BatchSizer,
    ) -> None:
        self.config, self.world, self.method, self.bank = config, world, method, bank
        self.noise, self.sizer = noise, sizer
        self.listener: Listener | None = None
        self._advance = Advance(None, "", 0, 0)

    def run(self, params: Mapping[int, Tensors], images: Mapping[int, Images], round: int) -> dict[int, Predicted]:
        """What each client predicts of all its images; a DivergenceError where that is no number."""
        found: dict[int, Predicted] = {}
        batch = self.config.federation.evaluation_batch
        steps = sum(math.ceil(len(each) / batch) for each in images.values())
        self._advance = Advance(self.listener, "testing", len(params), steps)
        with torch.no_grad():
            for group, step_needs, rows in self._groups(params, images):

                def work(clients: list[int], needs: StepNeeds = step_needs, rows: int = rows) -> dict[int, Predicted]:
                    if rows == 1:
                        return {
                            client: self._alone(client, needs, params[client], images[client], round)
                            for client in clients
                        }
                    return self._together(clients, needs, params, images, round)

                for part in in_fitting_parts(group, self.sizer, self._advance, work):
                    found |= part
        if self.config.federation.test_classes == "own":
            found = {client: (self._among_own(client, each), numbers) for client, (each, numbers) in found.items()}
        for client, (probabilities, _) in found.items():
            if not torch.isfinite(probabilities).all():
                name = self.world.client_names[client]
                raise DivergenceError(
                    f"predictions of client {name!r} in round {round} must be finite, got NaN or infinity"
                )
        return found

    def _among_own(self, client: int, probabilities: Tensor) -> Tensor:
        return among_classes_of(self.bank.images(client, "train").labels, probabilities)

    def _groups(
        self, params: Mapping[int, Tensors], images: Mapping[int, Images]
    ) -> Iterator[tuple[list[int], StepNeeds, int]]:
        """Clients that are tested together, and how many rows of images of them make a batch of good size."""
        kinds: dict[object, list[int]] = {}
        for client in params:
            kinds.setdefault(shapes_of(params[client]), []).append(client)
        for clients in kinds.values():
            clients.sort(key=lambda client: -self._row(len(images[client])))  # rows of a batch are about as long
            first, longest = clients[0], self._row(len(images[clients[0]]))
            step_needs = self.sizer.of(self.method, params[first], images[first], training=False)
            rows = self.sizer.clients(step_needs, longest)
            several = len(clients) > 1 or len(images[first]) > longest
            for group in [clients] if rows > 1 and several else [[client] for client in clients]:
                yield group, step_needs, rows if several else 1

    def _row(self, count: int) -> int:
        """How many images of a client with that many go through the backbone as one row of a batch."""
        count = min(count, self.config.federation.evaluation_batch)
        return count if self.method.mixed_batches or not count else math.ceil(count / math.ceil(count / ROW))

    def _alone(self, client: int, step_needs: StepNeeds, params: Tensors, images: Images, round: int) -> Predicted:
        draws, numbers = [], Means()
        generator = stream(self.config.seed, round, client, "evaluation")
        rows, sizes = self._plan(len(images))
        for row, size in zip(rows, sizes, strict=True):
            positions = row[:size]
            loaded, everything = images.load(positions, step_needs.features), torch.arange(len(positions))
            batch = make_batch(self.method, loaded, everything, training=False)
            noise = self.noise(self.method, len(positions), False, generator)
            seen = forward(self.method, self.world, params, loaded, everything, batch, noise)
            draws.append(self.method.predict(self.world, params, seen, batch, noise))
            numbers.add(self.method.diagnostics(self.world, params, seen, batch), len(positions))
            self._advance.add(1)
        return self._restored(torch.cat(draws, dim=1)), numbers.values()

    def _together(
        self,
        clients: list[int],
        step_needs: StepNeeds,
        params: Mapping[int, Tensors],
        images: Mapping[int, Images],
        round: int,
    ) -> dict[int, Predicted]:
        method = self.method
        parts: dict[int, list[Tensor]] = {client: [] for client in clients}
        numbers = {client: Means() for client in clients}
        batches = list(self._batches(self._rows(clients, images), step_needs))
        draws = {client: self._draws(client, step_needs, images[client], round) for client in clients}
        for number, rows in enumerate(batches):
            if number + 1 < len(batches):  # decoded while these are tested
                ahead = [images[row.client].indices[row.positions.numpy()] for row in batches[number + 1]]
                self.bank.prefetch(torch.from_numpy(np.concatenate(ahead)), step_needs.features)
            table = batch_schedule_of(
                [images[row.client] for row in rows], [(row.positions[None], [len(row.positions)]) for row in rows]
            )
            noise = [next(draws[row.client]) for row in rows]
            folded = StackedBatch.of(table, 0, noise, step_needs, method, self.world, self.bank, training=False)
            stacked = StackedParams.of([params[row.client] for row in rows])
            seen = forward_of_clients(method, self.world, stacked, self.bank, folded)
            found = predictions_of_clients(method, self.world, stacked, seen, folded)
            for place, row in enumerate(rows):
                own, size = folded.of_client(place), len(row.positions)
                parts[row.client].append(found[place, :, :size])
                measured = method.diagnostics(self.world, stacked.of_client(place), seen_by(seen, place), own)
                numbers[row.client].add(measured, size)
            self._advance.add(sum(row.ends for row in rows))
        return {
            client: (self._restored(torch.cat(parts[client], dim=1)), numbers[client].values()) for client in clients
        }

    def _rows(self, clients: Sequence[int], images: Mapping[int, Images]) -> Iterator[Row]:
        """The images of all clients as one stream, client by client and batch by batch."""
        for client in clients:
            positions, sizes = self._plan(len(images[client]))
            for each, size in zip(positions, sizes, strict=True):
                pieces = each[:size].split(self._row(size))
                for number, piece in enumerate(pieces):
                    yield Row(client, piece, number + 1 == len(pieces))

    def _batches(self, rows: Iterable[Row], step_needs: StepNeeds) -> Iterator[list[Row]]:
        """As many rows at a time as make a good batch, whoever they belong to."""
        batch: list[Row] = []
        longest = 0
        for row in rows:
            longest = max(longest, len(row.positions))
            if batch and len(batch) >= self.sizer.clients(step_needs, longest):
                yield batch
                batch, longest = [], len(row.positions)
            batch.append(row)
        yield batch

    def _draws(self, client: int, step_needs: StepNeeds, images: Images, round: int) -> Iterator[Tensors]:
        """The random draws of each row of a client, made for whole batches."""
        generator = stream(self.config.seed, round, client, "evaluation")
        for size in self._plan(len(images))[1]:
            noise = self.noise(self.method, size, False, generator)
            piece = self._row(size)
            for start in range(0, size, piece):
                yield part_of_draws(noise, step_needs.axes, size, start, min(piece, size - start))

    def _plan(self, count: int) -> Plan:
        """The batches of that many images."""
        plan = mixed_order if self.method.mixed_batches else in_order
        return plan(count, self.config.federation.evaluation_batch)

    def _restored(self, probabilities: Tensor) -> Tensor:
        """Probabilities (V, images, C) of images as they were batched, in the order of the images."""
        if not self.method.mixed_batches:
            return probabilities
        rows, sizes = self._plan(probabilities.shape[1])
        order = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        return probabilities[:, order.argsort().to(probabilities.device)]
