"""Local training of one client or of several as one batch: the same loop, on parameters with the clients in front.

Every client keeps to its own order of images, its own random draws, its own number of steps and its own momentum, so what
comes out does not depend on who trains beside it. The clients are lined up by their number of steps: those that are done
fall off at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprompt.config import Config
from fedprompt.engines.folding import Folded, NotFoldable, Together, alike, fill_up, image_axes, losses_together
from fedprompt.engines.images import ImageBank, Images
from fedprompt.engines.step import learning_rate, sgd_step, step_loss
from fedprompt.errors import ContractError, DivergenceError
from fedprompt.method import Method, Progress, Stage, World
from fedprompt.roles import Tensors
from fedprompt.streams import stream

Noise = Callable[[Method, int, bool, torch.Generator], Tensors]
Gradients = Callable[[int, Tensors], Tensors]  #: what becomes of the gradients of the client at a place


@dataclass(frozen=True)
class Trainee:
    """A client with what it trains on and from."""

    client: int
    images: Images
    params: Tensors


@dataclass(frozen=True)
class Trained:
    """What training made of a client."""

    params: Tensors
    progress: Progress
    loss: float | None  #: mean over all images it stepped on


@dataclass(frozen=True)
class Timetable:
    """The batches of several clients in one stage, by step. Short batches and short clients are filled up."""

    indices: Tensor  # (N, steps, batch size) of the images in the source
    labels: Tensor  # (N, steps, batch size)
    positions: list[list[Tensor]]  # by client and step: which of the client's images
    sizes: Tensor  # (N, steps); 0 where a client is done

    def clients(self, step: int) -> int:
        return int((self.sizes[:, step] > 0).sum())


def batches(count: int, size: int, epochs: int, steps: int | None, order: torch.Generator) -> list[Tensor]:
    """Positions of the images of every step: a new random order in each epoch, cut after `steps`."""
    found: list[Tensor] = []
    for _ in range(epochs):
        found += torch.randperm(count, generator=order).split(size)
        if steps is not None and len(found) >= steps:
            return found[:steps]
    return found


def timetable(images: Sequence[Images], positions: list[list[Tensor]]) -> Timetable:
    """Everything the steps of a stage look up, laid out once."""
    longest = max(len(each) for each in positions)
    width = max(len(batch) for each in positions for batch in each)
    places = torch.zeros(len(images), longest, width, dtype=torch.long)
    sizes = torch.zeros(len(images), longest, dtype=torch.long)
    for row, each in enumerate(positions):
        for step, batch in enumerate(each):
            places[row, step, : len(batch)] = batch
            places[row, step, len(batch) :] = batch[0]
            sizes[row, step] = len(batch)
    indices = torch.stack([torch.from_numpy(own.indices)[place] for own, place in zip(images, places, strict=True)])
    labels = torch.stack([own.labels[place.to(own.labels.device)] for own, place in zip(images, places, strict=True)])
    return Timetable(indices, labels, positions, sizes)


class LocalTraining:
    """Runs the stages of a method for clients whose images and parameters are at hand."""

    def __init__(self, config: Config, world: World, bank: ImageBank, noise: Noise) -> None:
        self.config, self.world, self.bank, self.noise = config, world, bank, noise

    def run(
        self,
        stages: Sequence[Stage],
        trainees: Sequence[Trainee],
        round: int,
        purpose: str = "",
        fitting: bool = False,
        gradients: Callable[[int, Tensors], Tensors] | None = None,
    ) -> list[Trained | DivergenceError]:
        """Train all; a client whose loss is not finite fails alone.

        `fitting` before an evaluation is no part of the schedule and starts at the full rates. `gradients` changes the
        gradients of a client before they are used.
        """
        found: dict[int, Trained | DivergenceError] = {}
        kinds: dict[object, list[Trainee]] = {}
        for trainee in trainees:
            kinds.setdefault(alike(trainee.params), []).append(trainee)
        for group in kinds.values():
            found |= self._group(stages, group, round, purpose, fitting, gradients)
        return [found[trainee.client] for trainee in trainees]

    def _group(
        self,
        stages: Sequence[Stage],
        trainees: list[Trainee],
        round: int,
        purpose: str,
        fitting: bool,
        gradients: Gradients | None,
    ) -> dict[int, Trained | DivergenceError]:
        """Clients whose parameters have the same names and shapes."""
        tallies = {trainee.client: Tally() for trainee in trainees}
        params = {trainee.client: trainee.params for trainee in trainees}
        for stage in stages:
            if not stage.trainable or not stage.epochs or stage.steps == 0:
                continue
            lined_up = self._lined_up(stage, trainees, round, purpose)
            together = Together.of([params[trainee.client] for trainee, _, _ in lined_up], stage.trainable)
            rates = {
                name: learning_rate(
                    self.config.train, name, 1 if fitting else max(round, 1), self.config.federation.rounds
                )
                for name in stage.trainable
            }
            draws = [
                stream(self.config.seed, round, trainee.client, f"{purpose}noise.{stage.name}")
                for trainee, _, _ in lined_up
            ]
            table = timetable([images for _, images, _ in lined_up], [steps for _, _, steps in lined_up])
            clients = [trainee.client for trainee, _, _ in lined_up]
            images = [images for _, images, _ in lined_up]
            together, losses = self._stage(stage, together, table, images, clients, rates, draws, gradients)
            for place, client in enumerate(clients):
                params[client] = together.of_client(place)
                tallies[client].add(losses[place], table.sizes[place], rates)
        return {
            client: tally.outcome(params[client], self.world.client_names[client], round)
            for client, tally in tallies.items()
        }

    def _lined_up(
        self, stage: Stage, trainees: Sequence[Trainee], round: int, purpose: str
    ) -> list[tuple[Trainee, Images, list[Tensor]]]:
        """Each client with its images and its batches, those with most steps first."""
        found = []
        for trainee in trainees:
            order = stream(self.config.seed, round, trainee.client, f"{purpose}batches.{stage.name}")
            images = self.share(trainee.images, stage, trainee.client)
            steps = batches(len(images), self.config.train.batch_size, stage.epochs, stage.steps, order)
            found.append((trainee, images, steps))
        return sorted(found, key=lambda each: -len(each[2]))

    def _stage(
        self,
        stage: Stage,
        together: Together,
        table: Timetable,
        images: Sequence[Images],
        clients: Sequence[int],
        rates: dict[str, float],
        draws: Sequence[torch.Generator],
        gradients: Gradients | None,
    ) -> tuple[Together, Tensor]:
        """All steps of a stage: the parameters after it, and the losses (N, steps)."""
        method, losses = stage.step, []
        velocity: Tensors = {}
        axes = image_axes(method, self.world, True) if len(clients) > 1 else {}
        foldable = len(clients) > 1
        for number in range(table.sizes.shape[1]):
            count = table.clients(number)
            sizes = table.sizes[:count, number].tolist()
            now = together.first(count)
            leaves = {name: now.stacked[name].detach().requires_grad_() for name in stage.trainable}
            working = now.changed(leaves)
            noise = [self.noise(method, size, True, draws[place]) for place, size in enumerate(sizes)]
            loss: Tensor | None = None
            if foldable and count > 1:
                folded = self._folded(method, table, number, sizes, fill_up(noise, sizes, axes))
                try:
                    loss = losses_together(method, self.world, working, self.bank, folded)
                except NotFoldable:
                    foldable = False
            if loss is None:
                loss = torch.stack(
                    [
                        step_loss(
                            method,
                            self.world,
                            working.of_client(place),
                            images[place],
                            table.positions[place][number],
                            noise[place],
                        )
                        for place in range(count)
                    ]
                )
            if not loss.requires_grad:
                raise ContractError(
                    f"stage {stage.name!r} must depend on one of its trainables {', '.join(stage.trainable)}"
                )
            found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
            slopes = dict(zip(leaves, found, strict=True))
            if gradients is not None:
                each = [
                    gradients(client, {name: slope[place] for name, slope in slopes.items()})
                    for place, client in enumerate(clients[:count])
                ]
                slopes = Together.of(each, stage.trainable).stacked
            before = {name: now.stacked[name] for name in stage.trainable}
            kept = {name: speed[:count] for name, speed in velocity.items()}
            stepped, velocity = sgd_step(before, slopes, kept, rates, self.config.train)
            together = together.changed(self._corrected(method, stepped, now, number))
            losses.append(torch.nn.functional.pad(loss.detach(), (0, len(clients) - count)))
        return together, torch.stack(losses, dim=1)

    def _corrected(self, method: Method, stepped: Tensors, before: Together, number: int) -> Tensors:
        """What the method makes of the optimiser's step of every client."""
        if type(method).after_step is Method.after_step:
            return stepped

        def correct(stepped: Tensors, own: Tensors) -> Tensors:
            return method.after_step(self.world, stepped, {**before.common, **own}, number)

        return dict(torch.func.vmap(correct)(stepped, before.stacked))

    def _folded(self, method: Method, table: Timetable, number: int, sizes: Sequence[int], noise: Tensors) -> Folded:
        count, width = len(sizes), max(sizes)
        indices = table.indices[:count, number, :width]
        features = {
            name: self.bank.features(name, indices.flatten()).unflatten(0, indices.shape) for name in method.needs
        }
        weights = None
        if min(sizes) < width:
            real = torch.arange(width) < table.sizes[:count, number, None]
            weights = real.to(self.world.device, self.world.dtype)
        return Folded(indices, table.labels[:count, number, :width], features, weights, noise)

    def share(self, images: Images, stage: Stage, client: int) -> Images:
        """The images a stage is for."""
        if stage.share == (0.0, 1.0):
            return images
        order = torch.randperm(len(images), generator=stream(self.config.seed, 0, client, "shares"))
        return images.part(*stage.share, order)

    def steps(self, stages: Sequence[Stage], images: Images, client: int) -> int:
        """How many steps a client takes."""
        total = 0
        for stage in stages:
            count = len(self.share(images, stage, client))
            steps = stage.epochs * math.ceil(count / self.config.train.batch_size) if stage.trainable else 0
            total += steps if stage.steps is None else min(steps, stage.steps)
        return total


class Tally:
    """What the steps of one client add up to."""

    def __init__(self) -> None:
        self.steps, self.losses, self.images = 0, 0.0, 0
        self.sizes: dict[str, float] = {}
        self.astray: float | None = None  #: the first loss that is not finite

    def add(self, losses: Tensor, sizes: Tensor, rates: dict[str, float]) -> None:
        """Losses and batch sizes of a stage; steps behind the client's last one have size 0."""
        count = int((sizes > 0).sum())
        for loss, size in zip(losses[:count].tolist(), sizes[:count].tolist(), strict=True):
            if self.astray is None and not math.isfinite(loss):
                self.astray = loss
            self.losses, self.images = self.losses + loss * size, self.images + size
        for name, rate in rates.items():
            for _ in range(count):  # one by one, as the steps were made
                self.sizes[name] = self.sizes.get(name, 0.0) + rate
        self.steps += count

    def outcome(self, params: Tensors, name: str, round: int) -> Trained | DivergenceError:
        if self.astray is not None:
            return DivergenceError(
                f"training loss of client {name!r} in round {round} must be finite, got {self.astray}; "
                "try a smaller train.lr or train.lrs"
            )
        return Trained(params, Progress(self.steps, self.sizes), self.losses / self.images if self.images else None)


def groups(clients: Sequence[int], size: int) -> Iterator[list[int]]:
    """The clients in order, as many at a time."""
    for start in range(0, len(clients), size):
        yield list(clients[start : start + size])
