"""One client's side of a round: the same code runs in process and on a node of a real federation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fedprompt.config import Config
from fedprompt.engines.images import ImageBank, Images
from fedprompt.engines.step import learning_rate, look, make_batch, sgd_step, step_loss
from fedprompt.errors import ContractError, DivergenceError
from fedprompt.evaluation.metrics import ClientResult
from fedprompt.evaluation.scoring import score
from fedprompt.federation import privacy, wire
from fedprompt.federation.attacks import corrupted, flipped
from fedprompt.federation.budget import Terms
from fedprompt.federation.messages import Reply
from fedprompt.federation.sampling import sample_attackers
from fedprompt.federation.states import ClientStates
from fedprompt.method import Client, Method, Progress, Stage, World
from fedprompt.roles import Tensors
from fedprompt.streams import stream


class Means:
    """Averages of named numbers over samples."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._samples = 0

    def add(self, numbers: Mapping[str, Tensor], samples: int) -> None:
        self._samples += samples
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(number) * samples

    def values(self) -> dict[str, float]:
        return {name: total / self._samples for name, total in self._sums.items()}


class ClientRuntime:
    """Trains, evaluates and surveys clients whose images and states are at hand."""

    def __init__(
        self,
        config: Config,
        world: World,
        method: Method,
        bank: ImageBank,
        states: ClientStates,
        domain_names: Sequence[str],
        terms: Terms | None = None,
    ) -> None:
        self.config, self.world, self.method = config, world, method
        self.bank, self.states, self.domain_names = bank, states, tuple(domain_names)
        self.terms = terms  #: of differential privacy, where it is asked for

    @cached_property
    def attackers(self) -> frozenset[int]:
        """Clients that are malicious, where the config simulates some."""
        return sample_attackers(self.config.attack, self.config.seed, self.world.participants)

    def attacks(self, client: int, kind: str) -> bool:
        return self.config.attack is not None and self.config.attack.kind == kind and client in self.attackers

    def train(self, round: int, client: int, received: Tensors) -> Reply:
        """What a client sends after one participation; a malicious one sends something else."""
        clip = received.get(privacy.CLIP)
        received = {name: tensor for name, tensor in received.items() if name != privacy.CLIP}
        reply = self._participate(round, client, received)
        if self.terms is not None:
            reply = self._private(reply, received, self.terms, None if clip is None else float(clip))
        if self.config.attack is None or client not in self.attackers:
            return reply
        return corrupted(reply, wire.started_from(received, self.world.roles.shared), self.config.attack)

    def _participate(self, round: int, client: int, received: Tensors) -> Reply:
        """One participation: begin, the stages, finish. What stays local goes to the client's state."""
        who = self._client(client, round)
        params = self.method.begin(self.world, who, received, self._local(client, who))
        stages = () if self.attacks(client, "free_rider") else self.method.stages(self.world, self.config.train)
        params, progress, loss = self._run(stages, params, round, client, "", private=True)
        upload, local = self.method.finish(self.world, who, received, params, progress)
        wire.audit_local(local, self.world.roles, who.name)
        upload = {**upload, **self._statistics("round", round, client, params, given=upload)}
        wire.audit_upload(upload, self.world.roles, who.name)
        self.states.put(client, local)
        return Reply(client, round, upload, who.samples, loss)

    def survey(self, client: int, received: Tensors) -> Reply:
        """The statistics every client is asked for before the first round."""
        who = self._client(client, 0)
        params = self.method.personalise(self.world, who, received, self._local(client, who))
        upload = self._statistics("start", 0, client, params)
        wire.audit_upload(upload, self.world.roles, who.name, when="start")
        reply = Reply(client, 0, upload, who.samples)
        return reply if self.terms is None else self._private(reply, received, self.terms)

    def _private(self, reply: Reply, received: Tensors, terms: Terms, clip: float | None = None) -> Reply:
        """A reply that keeps to the terms: bounded and perhaps noised, one client like any other, and no word on its loss."""
        roles, settings, when = self.world.roles, terms.settings, "round" if reply.round else "start"
        parts = privacy.groups(roles, when, settings, clip)
        upload, norms = privacy.bounded(reply.upload, wire.started_from(received, roles.shared), parts)
        if settings.noise_at != "server":
            upload = privacy.noised(upload, parts, terms.noise, self._secret(reply.round, reply.client))
        upload = wire.withhold_small(upload, roles.statistics(when))
        if settings.quantile is not None and when == "round":
            bound = math.inf if parts[0].bound is None else parts[0].bound
            upload[privacy.WITHIN] = torch.tensor(float(norms[0] <= bound))
        return replace(reply, upload=upload, samples=1, loss=None)

    def steps(self, client: int) -> int:
        """How many steps a participation of the client takes."""
        return sum(self._steps(stage, client) for stage in self.method.stages(self.world, self.config.train))

    def _steps(self, stage: Stage, client: int) -> int:
        images = len(self._share(self._training_images(client), stage, client))
        steps = stage.epochs * math.ceil(images / self.config.train.batch_size) if stage.trainable else 0
        return steps if stage.steps is None else min(steps, stage.steps)

    def _secret(self, round: int, client: int) -> torch.Generator:
        return stream(self.config.seed, round, client, "privacy")

    def evaluate(self, round: int, client: int, received: Tensors) -> ClientResult:
        """Test one client at the configured point; nothing it trains for that is kept."""
        return self.test(round, client, self.fitted(round, client, received))

    def fitted(self, round: int, client: int, received: Tensors, elsewhere: World | None = None) -> Tensors:
        """The parameters a client predicts with at the configured point, after what it does to fit them to itself.

        `elsewhere` is a world with other classes to predict in, of which the client has no images: what is fitted is fitted
        here, and all else begins there.
        """
        who, at = self._client(client, round), self.config.federation.evaluate_at
        local = self._new(who) if at == "global" else self._local(client, who)
        if at == "after_local":
            params = self.method.begin(self.world, who, received, local)
            params, progress, _ = self._run(
                self.method.stages(self.world, self.config.train), params, round, client, "after_local."
            )
            upload, local = self.method.finish(self.world, who, received, params, progress)
            received = {**received, **upload}
        stages = self._fitting(client)
        params = self.method.personalise(self.world, who, received, local)
        params, _, _ = self._run(stages, params, round, client, "adaptation.", fitting=True)
        if elsewhere is None:
            return params
        own = {name: params[name] for stage in stages for name in stage.trainable}
        there = replace(who, class_counts=torch.zeros(elsewhere.classes, dtype=who.class_counts.dtype))
        return {**self.method.personalise(elsewhere, there, received, local), **own}

    def test(self, round: int, client: int, params: Tensors) -> ClientResult:
        """Count what some parameters get right of a client's test images."""
        images = self.bank.images(client, "test")
        generator = stream(self.config.seed, round, client, "evaluation")
        draws, numbers = [], Means()
        with torch.no_grad():
            for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
                batch = make_batch(self.method, images, positions, training=False)
                noise = self._noise(self.method, len(positions), False, generator)
                seen = look(self.method, self.world, params, images, positions, batch, noise)
                draws.append(self.method.predict(self.world, params, seen, batch, noise))
                numbers.add(self.method.diagnostics(self.world, params, seen, batch), len(positions))
        probabilities = torch.cat(draws, dim=1)
        if not torch.isfinite(probabilities).all():
            name = self.world.client_names[client]
            raise DivergenceError(
                f"predictions of client {name!r} in round {round} must be finite, got NaN or infinity"
            )
        return score(probabilities, images.labels, images.domains, self.domain_names, numbers.values())

    def _fitting(self, client: int) -> tuple[Stage, ...]:
        """What a client does with the parameters it predicts with before it is evaluated."""
        train = self.config.train
        if client in self.world.newcomers:
            return self.method.newcomer(self.world, train, self.config.federation.newcomer_epochs)
        return self.method.adaptation(self.world, train)

    def _run(
        self,
        stages: Sequence[Stage],
        params: Tensors,
        round: int,
        client: int,
        purpose: str,
        fitting: bool = False,
        private: bool = False,
    ) -> tuple[Tensors, Progress, float | None]:
        """Train the stages; `fitting` before an evaluation is no part of the schedule and starts at the full rates.

        What is trained to be sent is `private` where every step is to be.
        """
        terms = self.terms if private and self.terms and self.terms.settings.noise_at == "step" else None
        secret = self._secret(round, client)
        everything, train = self._training_images(client), self.config.train
        steps, losses, seen = 0, 0.0, 0
        sizes: dict[str, float] = {}
        for stage in stages:
            if not stage.trainable or not stage.epochs:
                continue
            order = stream(self.config.seed, round, client, f"{purpose}batches.{stage.name}")
            draws = stream(self.config.seed, round, client, f"{purpose}noise.{stage.name}")
            rates = {
                name: learning_rate(train, name, 1 if fitting else max(round, 1), self.config.federation.rounds)
                for name in stage.trainable
            }
            images = self._share(everything, stage, client)
            velocity: Tensors = {}
            number = 0
            for _ in range(stage.epochs):
                for positions in torch.randperm(len(images), generator=order).split(train.batch_size):
                    if number == stage.steps:
                        break
                    noise = self._noise(stage.step, len(positions), True, draws)
                    leaves = {name: params[name].detach().requires_grad_() for name in stage.trainable}
                    loss = step_loss(stage.step, self.world, {**params, **leaves}, images, positions, noise)
                    if not torch.isfinite(loss):
                        name = self.world.client_names[client]
                        raise DivergenceError(
                            f"training loss of client {name!r} in round {round} must be finite, got {loss.item()}; "
                            "try a smaller train.lr or train.lrs"
                        )
                    if not loss.requires_grad:
                        raise ContractError(
                            f"stage {stage.name!r} must depend on one of its trainables {', '.join(stage.trainable)}"
                        )
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                    before = {name: params[name] for name in stage.trainable}
                    gradients = dict(zip(leaves, grads, strict=True))
                    if terms is not None:
                        sent = {name: gradients[name] for name in self.world.roles.shared if name in gradients}
                        gradients |= privacy.noised_gradients(sent, terms.settings.clip, terms.noise, secret)
                    stepped = sgd_step(before, gradients, velocity, rates, train)
                    params = {**params, **stage.step.after_step(self.world, stepped, params, number)}
                    for name, rate in rates.items():
                        sizes[name] = sizes.get(name, 0.0) + rate
                    losses, seen = losses + loss.item() * len(positions), seen + len(positions)
                    number += 1
            steps += number
        return params, Progress(steps, sizes), losses / seen if seen else None

    def _training_images(self, client: int) -> Images:
        images = self.bank.images(client, "train")
        if self.attacks(client, "label_flip"):
            return replace(images, labels=flipped(images.labels, self.world.classes))
        return images

    def _share(self, images: Images, stage: Stage, client: int) -> Images:
        if stage.share == (0.0, 1.0):
            return images
        order = torch.randperm(len(images), generator=stream(self.config.seed, 0, client, "shares"))
        return images.part(*stage.share, order)

    def _statistics(self, when: str, round: int, client: int, params: Tensors, given: Collection[str] = ()) -> Tensors:
        """The declared statistics that `finish` has not given already, added up over the client's training images."""
        declared = {
            name: statistic for name, statistic in self.world.roles.statistics(when).items() if name not in given
        }
        if not declared:
            return {}
        images = self._training_images(client)
        generator = stream(self.config.seed, round, client, "statistics")
        totals = {name: torch.zeros(statistic.shape, dtype=torch.float64) for name, statistic in declared.items()}
        with torch.no_grad():
            for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
                batch = make_batch(self.method, images, positions, training=False)
                noise = self._noise(self.method, len(positions), False, generator)
                seen = partial(look, self.method, self.world, params, images, positions, batch, noise)
                part = self.method.statistics(self.world, params, batch, seen)
                for name in declared:
                    totals[name] += part[name].cpu()
        return {name: total.float() for name, total in wire.withhold_small(totals, declared).items()}

    def _client(self, client: int, round: int) -> Client:
        images = self._training_images(client)

        def loss(params: Tensors) -> float:
            generator = stream(self.config.seed, round, client, "probe")
            total = 0.0
            with torch.no_grad():
                for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
                    noise = self._noise(self.method, len(positions), True, generator)
                    loss = step_loss(self.method, self.world, params, images, positions, noise)
                    total += loss.item() * len(positions)
            return total / len(images)

        def features(name: str) -> tuple[Tensor, Tensor]:
            parts = torch.arange(len(images)).split(self.config.federation.evaluation_batch)
            return torch.cat([images.features(name, part) for part in parts]), images.labels

        counts = torch.bincount(images.labels.cpu(), minlength=self.world.classes)
        return Client(
            index=client,
            name=self.world.client_names[client],
            round=round,
            samples=len(images),
            class_counts=counts,
            loss=loss,
            stream=lambda purpose: stream(self.config.seed, round, client, purpose),
            features=features,
        )

    def _local(self, client: int, who: Client) -> Tensors:
        kept = self.states.get(client)
        if kept is None:
            return self._new(who)
        return self._placed(wire.require_names(kept, self.world.roles.local, f"stored state of client {who.name!r}"))

    def _new(self, who: Client) -> Tensors:
        """The state of a client that never took part."""
        return self._placed({**self.world.roles.local, **self.method.enrol(self.world, who)})

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.world.device) for name, tensor in tensors.items()}

    def _noise(self, method: Method, size: int, training: bool, generator: torch.Generator) -> Tensors:
        return self._placed(method.noise(self.world, size, training, generator))
