"""Which images of which clients go into which batch, laid out once for many clients and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.features.image_bank import Images
from fedprompt.random_streams import Stream, permutations

Plan = tuple[Tensor, list[int]]  # positions (steps, batch size) of a client's images, and how many of each row count


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of N clients, those with most steps first. Short batches and short clients are filled up."""

    positions: Tensor  # (N, steps, batch size) among the client's images
    indices: Tensor  # the same images in the source
    labels: Tensor  # and their labels
    sizes: list[list[int]]  # by client and step

    @property
    def steps(self) -> int:
        return self.positions.shape[1]

    def now(self, step: int) -> list[int]:
        """The sizes of the batches of those clients, the first ones, that are not done yet."""
        return [each[step] for each in self.sizes if step < len(each)]


def shuffled(
    counts: Mapping[int, int], size: int, epochs: int, steps: int | None, orders: Mapping[int, Stream]
) -> dict[int, Plan]:
    """For every client batches of its `counts` images in a new random order in every epoch, cut after `steps`."""
    alike: dict[int, list[int]] = {}
    for client, count in counts.items():
        alike.setdefault(count, []).append(client)
    found: dict[int, Plan] = {}
    for count, clients in alike.items():
        rounds = [permutations([orders[client] for client in clients], count) for _ in range(epochs)]
        for place, client in enumerate(clients):
            plans = [_cut(positions[place], size) for positions in rounds]
            rows = plans[0][0] if epochs == 1 else torch.cat([positions for positions, _ in plans])
            found[client] = rows[:steps], [each for _, sizes in plans for each in sizes][:steps]
    return {client: found[client] for client in counts}


def in_order(count: int, size: int) -> Plan:
    """Every image once."""
    return _cut(torch.arange(count), size)


def mixed_order(count: int, size: int) -> Plan:
    """Every image once, in batches that each hold images from everywhere in the list."""
    return _cut(
        torch.cat([torch.arange(count)[start :: -(-count // size)] for start in range(-(-count // size))]), size
    )


def _cut(positions: Tensor, size: int) -> Plan:
    """Batches of that size; a short last one is filled up with copies of its first image."""
    count = len(positions)
    if count <= size:
        return positions.unsqueeze(0), [count]
    rest = count % size
    sizes = [size] * (count // size) + [rest] * (rest > 0)
    if rest:
        positions = torch.cat([positions, positions[count - rest].expand(size - rest)])
    return positions.view(-1, size), sizes


def batch_schedule_of(images: Sequence[Images], plans: Sequence[Plan]) -> BatchSchedule:
    longest, width = (max(positions.shape[axis] for positions, _ in plans) for axis in (0, 1))
    places = torch.stack([_filled_up(positions, longest, width) for positions, _ in plans])
    before = np.cumsum([0, *(len(own) for own in images[:-1])])
    everywhere = places + torch.from_numpy(before).view(-1, 1, 1)  # in all clients' images, one after the other
    indices = torch.from_numpy(np.concatenate([own.indices for own in images]))[everywhere]
    labels = torch.cat([own.labels for own in images])
    return BatchSchedule(places, indices, labels[everywhere.to(labels.device)], [sizes for _, sizes in plans])


def _filled_up(positions: Tensor, steps: int, width: int) -> Tensor:
    """A plan of that size. Batches get copies of their first image; the steps after the last one are not used."""
    lacking = width - positions.shape[1]
    if lacking:
        positions = torch.cat([positions, positions[:, :1].expand(-1, lacking)], dim=1)
    return F.pad(positions, (0, 0, 0, steps - len(positions))) if len(positions) < steps else positions
