"""What clients predict of their test images: one client, or several as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedprompt.config import Config
from fedprompt.engines.folding import (
    Folded,
    FoldSize,
    NotFoldable,
    Together,
    alike,
    fill_up,
    image_axes,
    look_together,
    predictions_together,
    seen_by,
)
from fedprompt.engines.images import ImageBank, Images
from fedprompt.engines.step import look, make_batch
from fedprompt.errors import DivergenceError
from fedprompt.method import Method, World
from fedprompt.roles import Tensors
from fedprompt.streams import stream

Predicted = tuple[Tensor, dict[str, float]]  #: probabilities (V, images, C) of V draws, and the method's own numbers


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
        noise: Callable[[Method, int, bool, torch.Generator], Tensors],
        fold_size: FoldSize,
    ) -> None:
        self.config, self.world, self.method, self.bank = config, world, method, bank
        self.noise, self.fold_size = noise, fold_size

    def run(self, params: Mapping[int, Tensors], images: Mapping[int, Images], round: int) -> dict[int, Predicted]:
        """What each client predicts of all its images; a DivergenceError where that is no number."""
        found: dict[int, Predicted] = {}
        with torch.no_grad():
            for group in self._groups(params, images):
                found |= self._together(group, params, images, round) or {
                    client: self._alone(client, params[client], images[client], round) for client in group
                }
        for client, (probabilities, _) in found.items():
            if not torch.isfinite(probabilities).all():
                name = self.world.client_names[client]
                raise DivergenceError(
                    f"predictions of client {name!r} in round {round} must be finite, got NaN or infinity"
                )
        return found

    def _groups(self, params: Mapping[int, Tensors], images: Mapping[int, Images]) -> Iterator[list[int]]:
        """Clients that are tested together, those with more images first: as a batch goes on, those that are done fall off."""
        kinds: dict[object, list[int]] = {}
        for client in sorted(params, key=lambda client: -len(images[client])):
            kinds.setdefault(alike(params[client]), []).append(client)
        for clients in kinds.values():
            first, most = clients[0], min(len(images[clients[0]]), self.config.federation.evaluation_batch)
            demand = self.fold_size.demand(self.method, params[first], images[first], training=False)
            size = self.fold_size.of(demand, most)
            for start in range(0, len(clients), size):
                ahead = [
                    torch.from_numpy(images[client].indices) for client in clients[start + size : start + 2 * size]
                ]
                if ahead:  # decoded while these are tested
                    self.bank.prefetch(torch.cat(ahead), demand.features)
                yield clients[start : start + size]

    def _alone(self, client: int, params: Tensors, images: Images, round: int) -> Predicted:
        draws, numbers = [], Means()
        generator = stream(self.config.seed, round, client, "evaluation")
        for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
            batch = make_batch(self.method, images, positions, training=False)
            noise = self.noise(self.method, len(positions), False, generator)
            seen = look(self.method, self.world, params, images, positions, batch, noise)
            draws.append(self.method.predict(self.world, params, seen, batch, noise))
            numbers.add(self.method.diagnostics(self.world, params, seen, batch), len(positions))
        return torch.cat(draws, dim=1), numbers.values()

    def _together(
        self, clients: list[int], params: Mapping[int, Tensors], images: Mapping[int, Images], round: int
    ) -> dict[int, Predicted] | None:
        """None where there is nothing to fold, or the method cannot be."""
        if len(clients) == 1:
            return None
        method, size = self.method, self.config.federation.evaluation_batch
        together = Together.of([params[client] for client in clients])
        draws = [stream(self.config.seed, round, client, "evaluation") for client in clients]
        parts: dict[int, list[Tensor]] = {client: [] for client in clients}
        numbers = {client: Means() for client in clients}
        for start in range(0, len(images[clients[0]]), size):
            sizes = [min(size, left) for client in clients if (left := len(images[client]) - start) > 0]
            noise = [self.noise(method, each, False, draws[place]) for place, each in enumerate(sizes)]
            now = clients[: len(sizes)]
            axes = image_axes(method, self.world, False) if min(sizes) < max(sizes) else {}
            folded = self._folded([images[client] for client in now], start, sizes, fill_up(noise, sizes, axes))
            working = together.first(len(sizes))
            try:
                seen = look_together(method, self.world, working, self.bank, folded)
            except NotFoldable:
                return None
            found = predictions_together(method, self.world, working, seen, folded)
            for place, (client, each) in enumerate(zip(now, sizes, strict=True)):
                parts[client].append(found[place, :, :each])
                own = folded.of_client(place)
                told = method.diagnostics(self.world, working.of_client(place), seen_by(seen, place), own)
                numbers[client].add(told, each)
        return {client: (torch.cat(parts[client], dim=1), numbers[client].values()) for client in clients}

    def _folded(self, images: list[Images], start: int, sizes: list[int], noise: Tensors) -> Folded:
        width = max(sizes)
        positions = [torch.arange(width).clamp_max(size - 1) + start for size in sizes]
        indices = torch.stack(
            [torch.from_numpy(own.indices)[place] for own, place in zip(images, positions, strict=True)]
        )
        labels = torch.stack(
            [own.labels[place.to(own.labels.device)] for own, place in zip(images, positions, strict=True)]
        )
        return Folded.of(self.world, self.bank, self.method, indices, labels, sizes, noise, training=False)
