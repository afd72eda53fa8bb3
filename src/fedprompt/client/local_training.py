"""Local training of one client or of several as one batch: the same loop, on parameters with the clients in front.

Every client keeps to its own order of images, its own random draws, its own number of steps and its own momentum, so what
comes out does not depend on who trains beside it. The clients are lined up by their number of steps: those that are done
fall off at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.client.advance import Advance, Listener
from fedprompt.client.batch_schedule import BatchSchedule, batch_schedule_of, shuffled
from fedprompt.client.batch_sizing import BatchSizer, Noise, StepNeeds, shapes_of
from fedprompt.client.batched_clients import StackedBatch, StackedParams, losses_of_clients, over_clients
from fedprompt.client.optimizers import OptimizerState, RateSchedule, optimizer_step, rate_schedule
from fedprompt.client.out_of_memory import in_fitting_parts
from fedprompt.client.recorded_step import RecordedSteps, compiler
from fedprompt.client.step import step_loss
from fedprompt.config import Config
from fedprompt.core.first_step import Gauge
from fedprompt.core.method import Method, Progress, Stage, World
from fedprompt.errors import ContractError, DivergenceError
from fedprompt.features.augmentation import draw_views
from fedprompt.features.image_bank import ImageBank, Images, LoadedImages
from fedprompt.random_streams import Stream, stream
from fedprompt.tensors import Tensors

Gradients = Callable[[int, Tensors], Tensors]  # what becomes of the gradients of a client


@dataclass(frozen=True)
class TrainingJob:
    """A client with what it trains on and from."""

    client: int
    images: Images
    params: Tensors


@dataclass(frozen=True)
class TrainingResult:
    """What training made of a client."""

    params: Tensors
    progress: Progress
    loss: float | None
    """Mean over all images it stepped on."""


@dataclass(frozen=True)
class ClientBatch:
    """The clients of a stage, in the order of the rows of everything here."""

    clients: list[int]
    images: list[Images]
    table: BatchSchedule
    step_needs: StepNeeds
    draws: list[Stream]
    """Of the random draws of the steps."""
    augmentation: list[Stream]
    """Of the crops and flips of the steps."""
    rates: RateSchedule


BatchOf = Callable[[list[int]], ClientBatch]
Made = tuple[list[int], BatchOf]


class LocalTraining:
    """Runs the stages of a method for clients whose images and parameters are at hand."""

    def __init__(self, config: Config, world: World, bank: ImageBank, noise: Noise, sizer: BatchSizer) -> None:
        self.config, self.world, self.bank, self.noise, self.sizer = config, world, bank, noise, sizer
        self.begun: Tensors = world.roles.initial
        self.listener: Listener | None = None
        self.gauge: Gauge | None = None
        self._gauge: Gauge | None = None  # in the first round
        self._advance = Advance(None, "", 0, 0)
        self._compiles = config.engine.compile == "step"
        self._recorded = RecordedSteps(compiler() if self._compiles else None)
        self._steps: list[Method] = []  # that were recorded

    def run(
        self,
        stages: Sequence[Stage],
        jobs: Sequence[TrainingJob],
        round: int,
        purpose: str = "",
        fitting: bool = False,
        gradients: Gradients | None = None,
    ) -> list[TrainingResult | DivergenceError]:
        """Train all; a client whose loss is not finite fails alone.

        `fitting` before an evaluation is no part of the schedule and starts at the full rates. `gradients` changes the
        gradients of a client before they are used.
        """
        if self.listener is not None:
            steps = sum(self.steps(stages, job.images, job.client) for job in jobs)
            doing = "fitting" if fitting or purpose else "training"
            self._advance = Advance(self.listener, doing, len(jobs), steps)
        self._gauge = self.gauge if round == 1 and not purpose and not fitting else None
        found: dict[int, TrainingResult | DivergenceError] = {}
        kinds: dict[object, list[TrainingJob]] = {}
        for job in jobs:
            kinds.setdefault(shapes_of(job.params), []).append(job)
        for group in kinds.values():
            found |= self._group(stages, group, round, purpose, fitting, gradients)
        return [found[job.client] for job in jobs]

    def _group(
        self,
        stages: Sequence[Stage],
        jobs: list[TrainingJob],
        round: int,
        purpose: str,
        fitting: bool,
        gradients: Gradients | None,
    ) -> dict[int, TrainingResult | DivergenceError]:
        """Clients whose parameters have the same names and shapes."""
        tallies = {job.client: Tally() for job in jobs}
        params = {job.client: job.params for job in jobs}
        for stage in stages:
            if not stage.trainable or not stage.epochs or stage.steps == 0:
                continue
            batches = self._client_batches(stage, jobs, params, round, purpose, fitting)
            for line, stacked, losses in self._trained(stage, batches, params, gradients):
                for place, client in enumerate(line.clients):
                    params[client] = stacked.of_client(place)
                    sizes = line.table.sizes[place]
                    tallies[client].add(losses[place], sizes, line.rates.sums(place, len(sizes)))
        return {
            client: tally.outcome(params[client], self.world.client_names[client], round)
            for client, tally in tallies.items()
        }

    def _trained(
        self, stage: Stage, batches: Iterator[Made], params: Mapping[int, Tensors], gradients: Gradients | None
    ) -> Iterator[tuple[ClientBatch, StackedParams, Tensor]]:
        """Clients with their parameters and losses after the stage."""
        for group, batch_of in batches:

            def work(clients: list[int], batch_of: BatchOf = batch_of) -> tuple[ClientBatch, StackedParams, Tensor]:
                line = batch_of(clients)
                stacked = StackedParams.of([params[client] for client in clients], stage.trainable)
                return line, *self._stage(stage, stacked, line, gradients)

            yield from in_fitting_parts(group, self.sizer, self._advance, work)

    def _client_batches(
        self,
        stage: Stage,
        jobs: Sequence[TrainingJob],
        params: Mapping[int, Tensors],
        round: int,
        purpose: str,
        fitting: bool,
    ) -> Iterator[Made]:
        """The clients of a stage, those with most steps first, as many at a time as make a good batch, and how it is made."""
        train, seed = self.config.train, self.config.seed
        shares = {job.client: self.share(job.images, stage, job.client) for job in jobs}
        orders = {client: stream(seed, round, client, f"{purpose}batches.{stage.name}") for client in shares}
        counts = {client: len(images) for client, images in shares.items()}
        plans = shuffled(counts, train.batch_size, stage.epochs, stage.steps, orders)
        clients = sorted(plans, key=lambda client: -len(plans[client][1]))
        rounds = self.config.federation.rounds
        most = max(max(sizes) for _, sizes in plans.values())
        step_needs = self.sizer.of(stage.step, params[clients[0]], shares[clients[0]], training=True)

        def batch_of(group: list[int]) -> ClientBatch:
            images = [shares[client] for client in group]
            draws, augmentation = (
                [stream(seed, round, client, f"{purpose}{what}.{stage.name}") for client in group] if wanted else []
                for what, wanted in (("noise", step_needs.draws), ("augmentation", train.augmented))
            )
            steps = [len(plans[client][1]) for client in group]
            rates = rate_schedule(
                train, stage.trainable, self.begun, steps, stage.epochs, max(round, 1), rounds, fitting
            )
            table = batch_schedule_of(images, [plans[client] for client in group])
            return ClientBatch(group, images, table, step_needs, draws, augmentation, rates)

        start = 0
        while start < len(clients):
            size = self.sizer.clients(step_needs, most)
            group = clients[start : start + size]
            ahead = [torch.from_numpy(shares[client].indices) for client in clients[start + size : start + 2 * size]]
            if ahead and train.augmented:  # decoded while this group trains
                self.bank.decode_ahead(torch.cat(ahead))
            elif ahead:
                self.bank.prefetch(torch.cat(ahead), step_needs.features)
            yield group, batch_of
            start += len(group)

    def _stage(
        self, stage: Stage, stacked: StackedParams, line: ClientBatch, gradients: Gradients | None
    ) -> tuple[StackedParams, Tensor]:
        """All steps of a stage: the parameters after it, and the losses (N, steps)."""
        losses: list[Tensor] = []
        state = OptimizerState()
        for number in range(line.table.steps):
            count = len(line.table.now(number))
            now = stacked.first(count)
            inputs = self._load(stage.step, line, number)
            loss, slopes = self._slopes(stage, now, inputs, line.step_needs)
            if gradients is not None:
                each = [
                    gradients(client, {name: slope[place] for name, slope in slopes.items()})
                    for place, client in enumerate(line.clients[:count])
                ]
                slopes = StackedParams.of(each, stage.trainable).stacked
            before = {name: now.stacked[name] for name in stage.trainable}
            state = state.of_first_clients(count)
            stepped, state = optimizer_step(before, slopes, state, line.rates.at(number), self.config.train, number)
            if self._gauge is not None:
                self._gauge.add(before, slopes, stepped, last=number + 1 == line.table.steps)
            stacked = stacked.changed(self._corrected(stage.step, stepped, now, number))
            done = len(line.clients) - count
            losses.append(F.pad(loss, (0, done)) if done else loss)
            self._advance.add(count)
        return stacked, torch.stack(losses, dim=1)

    def _load(self, method: Method, line: ClientBatch, number: int) -> StackedBatch | tuple[LoadedImages, Tensors]:
        """The images and random draws of one step, of one client or of several."""
        sizes = line.table.now(number)
        noise = [self.noise(method, size, True, draws) for size, draws in zip(sizes, line.draws, strict=False)]
        noise = noise or [{} for _ in sizes]
        train = self.config.train
        pairs = zip(sizes, line.augmentation, strict=False)  # some clients may be done
        views = [draw_views(train, size, draws) for size, draws in pairs] if train.augmented else []
        if len(sizes) == 1 and not (self._compiles and line.step_needs.foldable):
            positions = line.table.positions[0, number, : sizes[0]]
            return line.images[0].load(positions, line.step_needs.features, views[0] if views else None), noise[0]
        return StackedBatch.of(line.table, number, noise, line.step_needs, method, self.world, self.bank, True, views)

    def _slopes(
        self,
        stage: Stage,
        params: StackedParams,
        inputs: StackedBatch | tuple[LoadedImages, Tensors],
        step_needs: StepNeeds,
    ) -> tuple[Tensor, Tensors]:
        """The losses (N,) of a step, and their gradients. A step without a pass is small, and recorded; so is one to compile."""
        passes = bool(step_needs.per_image or step_needs.per_client)
        if not isinstance(inputs, StackedBatch) or (passes and not self._compiles):
            loss, *found = self._differentiated(stage, params, inputs)
        else:
            batch, groups = inputs, (params.stacked, params.common, inputs.parts)
            names = [tuple(group) for group in groups]

            def step(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                left = iter(tensors)
                stacked, common, parts = ({name: next(left) for name in each} for each in names)
                return self._differentiated(stage, StackedParams(stacked, common), batch.with_parts(parts))

            key = (self._number(stage.step), stage.name, stage.trainable, *names)
            loss, *found = self._recorded.run(key, step, [each for group in groups for each in group.values()])
        return loss, dict(zip(stage.trainable, found, strict=True))

    def _differentiated(
        self, stage: Stage, params: StackedParams, inputs: StackedBatch | tuple[LoadedImages, Tensors]
    ) -> list[Tensor]:
        """The losses and the gradients by the stage's trainables."""
        leaves = {name: params.stacked[name].detach().requires_grad_() for name in stage.trainable}
        loss = self._losses(stage.step, params.changed(leaves), inputs)
        if not loss.requires_grad:
            raise ContractError(
                f"stage {stage.name!r} must depend on one of its trainables {', '.join(stage.trainable)}"
            )
        found = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return [loss.detach(), *found]

    def _number(self, step: Method) -> int:
        """The same for equal steps."""
        if step not in self._steps:
            self._steps.append(step)
        return self._steps.index(step)

    def _losses(
        self, method: Method, params: StackedParams, inputs: StackedBatch | tuple[LoadedImages, Tensors]
    ) -> Tensor:
        """The losses (N,) of one step."""
        if isinstance(inputs, StackedBatch):
            return losses_of_clients(method, self.world, params, self.bank, inputs)
        images, noise = inputs
        everything = torch.arange(len(images))
        return step_loss(method, self.world, params.of_client(0), images, everything, noise).unsqueeze(0)

    def _corrected(self, method: Method, stepped: Tensors, before: StackedParams, number: int) -> Tensors:
        """What the method makes of the optimiser's step of every client."""
        if type(method).after_step is Method.after_step:
            return stepped

        def correct(stepped: Tensors, own: Tensors) -> Tensors:
            return method.after_step(self.world, stepped, {**before.common, **own}, number)

        return dict(over_clients(correct, stepped, before.stacked))

    def share(self, images: Images, stage: Stage, client: int) -> Images:
        """The images a stage is for."""
        if stage.share == (0.0, 1.0):
            return images
        order = stream(self.config.seed, 0, client, "shares").permutation(len(images))
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
        self.diverged: float | None = None  # the first loss that is not finite

    def add(self, losses: Tensor, sizes: Sequence[int], rates: Mapping[str, float]) -> None:
        """Losses and batch sizes of the steps of a stage, and by tensor the sum of the rates."""
        self.steps += len(sizes)
        self.images += sum(sizes)
        for loss, size in zip(losses.tolist(), sizes, strict=False):  # the client may be done before the others
            self.losses += loss * size
            if self.diverged is None and not math.isfinite(loss):
                self.diverged = loss
        for name, total in rates.items():
            self.sizes[name] = self.sizes.get(name, 0.0) + total

    def outcome(self, params: Tensors, name: str, round: int) -> TrainingResult | DivergenceError:
        if self.diverged is not None:
            return DivergenceError(
                f"training loss of client {name!r} in round {round} must be finite, got {self.diverged}; "
                "try a smaller train.lr or train.lrs"
            )
        return TrainingResult(
            params, Progress(self.steps, self.sizes), self.losses / self.images if self.images else None
        )
