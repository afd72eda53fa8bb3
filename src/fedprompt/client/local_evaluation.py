"""What clients predict of their test images: one client, or several as one batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedprompt.client.advance import Advance, Listener
from fedprompt.client.batch_schedule import Plan, batch_schedule_of, in_order, mixed_order
from fedprompt.client.batch_sizing import BatchSizer, Noise, StepNeeds, shapes_of
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

Predicted = tuple[Tensor, dict[str, float]]  # probabilities (V, images, C) of V draws, and the method's own numbers


def among_classes_of(labels: Tensor, probabilities: Tensor) -> Tensor:
    """Probabilities among the classes of a client's training images; a newcomer without any has all."""
    if not len(labels):
        return probabilities
    own = torch.zeros(probabilities.shape[-1], dtype=torch.bool, device=probabilities.device)
    own[labels.unique().to(own.device)] = True
    among = probabilities * own
    return among / among.sum(-1, keepdim=True).clamp_min(torch.finfo(among.dtype).tiny)


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
            for group, step_needs in self._groups(params, images):

                def work(clients: list[int], needs: StepNeeds = step_needs) -> dict[int, Predicted]:
                    if len(clients) == 1:
                        client = clients[0]
                        return {client: self._alone(client, needs, params[client], images[client], round)}
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
    ) -> Iterator[tuple[list[int], StepNeeds]]:
        """Clients that are tested together, those with more images first: as a batch goes on, those that are done fall off."""
        kinds: dict[object, list[int]] = {}
        for client in sorted(params, key=lambda client: -len(images[client])):
            kinds.setdefault(shapes_of(params[client]), []).append(client)
        for clients in kinds.values():
            first, most = clients[0], min(len(images[clients[0]]), self.config.federation.evaluation_batch)
            step_needs = self.sizer.of(self.method, params[first], images[first], training=False)
            size = self.sizer.clients(step_needs, most)
            for start in range(0, len(clients), size):
                ahead = [
                    torch.from_numpy(images[client].indices) for client in clients[start + size : start + 2 * size]
                ]
                if ahead:  # decoded while these are tested
                    self.bank.prefetch(torch.cat(ahead), step_needs.features)
                yield clients[start : start + size], step_needs

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
        stacked = StackedParams.of([params[client] for client in clients])
        draws = [stream(self.config.seed, round, client, "evaluation") for client in clients]
        own = [images[client] for client in clients]
        table = batch_schedule_of(own, [self._plan(len(each)) for each in own])
        parts: dict[int, list[Tensor]] = {client: [] for client in clients}
        numbers = {client: Means() for client in clients}
        for step in range(table.steps):
            sizes = table.now(step)
            noise = [self.noise(method, each, False, draws[place]) for place, each in enumerate(sizes)]
            folded = StackedBatch.of(table, step, noise, step_needs, method, self.world, self.bank, training=False)
            working = stacked.first(len(sizes))
            seen = forward_of_clients(method, self.world, working, self.bank, folded)
            found = predictions_of_clients(method, self.world, working, seen, folded)
            for place, (client, each) in enumerate(zip(clients, sizes, strict=False)):  # some may be done
                parts[client].append(found[place, :, :each])
                batch = folded.of_client(place)
                measured = method.diagnostics(self.world, working.of_client(place), seen_by(seen, place), batch)
                numbers[client].add(measured, each)
            self._advance.add(len(sizes))
        return {
            client: (self._restored(torch.cat(parts[client], dim=1)), numbers[client].values()) for client in clients
        }

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
