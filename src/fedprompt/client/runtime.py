"""One client's side of a round: the same code runs in process and on a node of a real federation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NoReturn

import torch
from torch import Tensor

from fedprompt.client.advance import Listener
from fedprompt.client.batch_sizing import BatchSizer
from fedprompt.client.client_states import ClientStates
from fedprompt.client.local_evaluation import Testing
from fedprompt.client.local_training import LocalTraining, TrainingJob, TrainingResult
from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.core.client_sampling import sample_attackers
from fedprompt.core.first_step import Gauge, Measured
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Client, Method, Stage, World
from fedprompt.errors import ContractError, DivergenceError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.federation.attacks import corrupted, flipped
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.metrics.scoring import score
from fedprompt.modules import heads
from fedprompt.privacy import mechanism
from fedprompt.privacy.budget import Terms
from fedprompt.privacy.discrete_gaussian import Words
from fedprompt.random_streams import Stream, stream
from fedprompt.tensors import Tensors

MOST_COUNTS = 4096  # clients whose class counts are kept


def _sound(result: TrainingResult | DivergenceError) -> TrainingResult:
    if isinstance(result, DivergenceError):
        raise result
    return result


def _repeatable(seed: int, round: int, client: int) -> Stream:
    """Noise for experiments: anyone with the config could remove it."""
    return stream(seed, round, client, "privacy")


class UsesTrainingImages(ContractError):
    """A method needs training images for an evaluation, but may not use them."""


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
        self.terms = terms  # of differential privacy, where it is asked for
        self.secret: Callable[[int, int], Words] = partial(_repeatable, config.seed)  # the bits of its noise
        self._counts: dict[int, Tensor] = {}
        self.blind = False  # whether a method that is evaluated may not ask for training images
        self.sizer = BatchSizer(world, config.engine.cohort, self._noise, config.train.augmented)
        self.training = LocalTraining(config, world, bank, self._noise, self.sizer)
        self.testing = Testing(config, world, method, bank, self._noise, self.sizer)

    def listen(self, listener: Listener, measured: Measured) -> None:
        """Let listeners know how far training and testing are, and how large the first gradients are, unless they are secret."""
        self.training.listener = self.testing.listener = listener
        secret = self.config.privacy is not None or self.config.federation.secure_sum
        self.training.gauge = None if secret else Gauge(measured)

    @cached_property
    def attackers(self) -> frozenset[int]:
        """Clients that are malicious, where the config simulates some."""
        return sample_attackers(self.config.attack, self.config.seed, self.world.participants)

    def attacks(self, client: int, kind: str) -> bool:
        return self.config.attack is not None and self.config.attack.kind == kind and client in self.attackers

    def train(self, round: int, client: int, received: Tensors) -> LocalUpdate:
        """What a client sends after one participation."""
        (reply,) = self.train_together(round, {client: received})
        if isinstance(reply, DivergenceError):
            raise reply
        return reply

    def train_together(self, round: int, received: Mapping[int, Tensors]) -> list[LocalUpdate | DivergenceError]:
        """What several clients send after one participation; a malicious one sends something else, and each fails alone."""
        bounds = {client: tensors.get(mechanism.CLIP) for client, tensors in received.items()}
        received = {
            client: {name: tensor for name, tensor in tensors.items() if name != mechanism.CLIP}
            for client, tensors in received.items()
        }
        who = {client: self._client(client, round) for client in received}
        begun, diverged = self._begun(who, received)
        idle = [client for client in begun if self.attacks(client, "free_rider")]
        busy = [client for client in begun if client not in idle]
        stages = self.method.stages(self.world, self.config.train)
        trained = {
            **diverged,
            **self._train_locally((), {client: begun[client] for client in idle}, round),
            **self._train_locally(stages, {client: begun[client] for client in busy}, round, private=True),
        }
        return [
            self._answer(who[client], tensors, trained[client], bounds[client]) for client, tensors in received.items()
        ]

    def _begun(
        self, who: Mapping[int, Client], received: Mapping[int, Tensors]
    ) -> tuple[dict[int, Tensors], dict[int, TrainingResult | DivergenceError]]:
        """The parameters each client trains from, and the clients that diverged before training."""
        begun: dict[int, Tensors] = {}
        diverged: dict[int, TrainingResult | DivergenceError] = {}
        for client, each in who.items():
            try:
                begun[client] = self.method.begin(self.world, each, received[client], self._local(client, each))
            except DivergenceError as error:
                diverged[client] = error
        return begun, diverged

    def _answer(
        self, who: Client, received: Tensors, trained: TrainingResult | DivergenceError, clip: Tensor | None
    ) -> LocalUpdate | DivergenceError:
        """The reply of a client that has trained. What stays local goes to the client's state."""
        if isinstance(trained, DivergenceError):
            return trained
        try:
            reply = self._finished(who, received, trained)
            if self.terms is not None:
                reply = self._private(reply, received, self.terms, None if clip is None else float(clip))
        except DivergenceError as error:
            return error
        if self.config.attack is None or who.index not in self.attackers:
            return reply
        return corrupted(reply, wire.started_from(received, self.world.roles.shared), self.config.attack)

    def _finished(self, who: Client, received: Tensors, trained: TrainingResult) -> LocalUpdate:
        upload, local = self.method.finish(self.world, who, received, trained.params, trained.progress)
        wire.audit_local(local, self.world.roles, who.name)
        upload = {**upload, **self._statistics("round", who.round, who.index, trained.params, given=upload)}
        wire.audit_upload(upload, self.world.roles, who.name)
        self.states.put(who.index, local)
        return LocalUpdate(who.index, who.round, upload, who.samples, trained.loss)

    def survey(self, client: int, received: Tensors) -> LocalUpdate:
        """The statistics every client is asked for before the first round."""
        who = self._client(client, 0)
        params = self.method.personalise(self.world, who, received, self._local(client, who))
        upload = self._statistics("start", 0, client, params)
        wire.audit_upload(upload, self.world.roles, who.name, when="start")
        reply = LocalUpdate(client, 0, upload, who.samples)
        return reply if self.terms is None else self._private(reply, received, self.terms)

    def nothing(self, round: int, client: int, received: Tensors) -> LocalUpdate:
        """What a client on terms of privacy sends where its part of a round came to nothing: zeros, noised like anything else.

        It has the names, shapes and length of any other answer, and the client's state stays as it was. Round 0 is the survey.
        """
        assert self.terms is not None
        roles, when = self.world.roles, "round" if round else "start"
        zeros = {name: torch.zeros(statistic.shape) for name, statistic in roles.statistics(when).items()}
        upload = {**(wire.started_from(received, roles.shared) if round else {}), **zeros}
        if round:
            self.states.put(client, self._local(client, self._client(client, round)))
        return self._private(LocalUpdate(client, round, upload, 1), received, self.terms)

    def _private(self, reply: LocalUpdate, received: Tensors, terms: Terms, clip: float | None = None) -> LocalUpdate:
        """A reply that keeps to the terms: bounded and perhaps noised, one client like any other, and no word on its loss."""
        roles, settings, when = self.world.roles, terms.settings, "round" if reply.round else "start"
        parts = mechanism.groups(roles, when, settings, clip)
        start = wire.started_from(received, roles.shared)
        upload, norms = mechanism.bounded(reply.upload, start, parts)
        if settings.noise_at != "server":
            upload = mechanism.noised(upload, start, parts, terms.noise, self.secret(reply.round, reply.client))
        upload = wire.withhold_small(upload, roles.statistics(when))
        if settings.quantile is not None and when == "round":
            bound = math.inf if parts[0].bound is None else parts[0].bound
            upload[mechanism.WITHIN] = torch.tensor(float(norms[0] <= bound))
        return replace(reply, upload=upload, samples=1, loss=None)

    def cohort_size(self) -> int:
        """How many clients work at the same time."""
        return self.sizer.most

    def steps(self, client: int) -> int:
        """How many steps a participation of the client takes."""
        stages = self.method.stages(self.world, self.config.train)
        return self.training.steps(stages, self._training_images(client), client)

    def evaluate(self, round: int, client: int, received: Tensors) -> ClientResult:
        """Test one client at the configured point; nothing it trains for that is kept."""
        return self.evaluate_together(round, {client: received})[client]

    def evaluate_together(self, round: int, received: Mapping[int, Tensors]) -> dict[int, ClientResult]:
        return self.test_together(round, self.fitted_together(round, received))

    def fitted(self, round: int, client: int, received: Tensors, elsewhere: World | None = None) -> Tensors:
        return self.fitted_together(round, {client: received}, elsewhere)[client]

    def fitted_together(
        self, round: int, received: Mapping[int, Tensors], elsewhere: World | None = None
    ) -> dict[int, Tensors]:
        """The parameters each client predicts with at the configured point, after what it does to fit them to itself.

        `elsewhere` is a world with other classes to predict in, of which the clients have no images: what is fitted is
        fitted here, and all else begins there.
        """
        who = {client: self._tested(client, round) for client in received}
        at = self.config.federation.evaluate_at
        local = {
            client: self._new(each) if at == "global" else self._local(client, each) for client, each in who.items()
        }
        if at == "after_local":
            received, local = self._after_local(who, received, local)
        params = {
            client: self.method.personalise(self.world, each, received[client], local[client])
            for client, each in who.items()
        }
        held_out = {client: own for client, own in params.items() if client in self.world.newcomers}
        rest = {client: own for client, own in params.items() if client not in held_out}
        first = {client: own for client, own in rest.items() if at == "personalised" and self._untrained(client)}
        others = {client: own for client, own in rest.items() if client not in first}
        for stages, group in (
            (self._newcoming, held_out),
            ((*self._first_fit, *self._adapting), first),
            (self._adapting, others),
        ):
            fitted = self._train_locally(stages, group, round, "adaptation.", fitting=True)
            for client, result in fitted.items():
                params[client] = _sound(result).params
                if elsewhere is not None:
                    own = {name: params[client][name] for stage in stages for name in stage.trainable}
                    counts = torch.zeros(elsewhere.classes, dtype=who[client].class_counts.dtype)
                    there = replace(who[client], class_counts=counts)
                    begun = self.method.personalise(elsewhere, there, received[client], local[client])
                    params[client] = {**begun, **own}
        return params

    def _after_local(
        self, who: Mapping[int, Client], received: Mapping[int, Tensors], local: Mapping[int, Tensors]
    ) -> tuple[dict[int, Tensors], dict[int, Tensors]]:
        """What each client has received and keeps after a participation that is not reported."""
        begun = {
            client: self.method.begin(self.world, each, received[client], local[client]) for client, each in who.items()
        }
        stages = self.method.stages(self.world, self.config.train)
        trained = self._train_locally(stages, begun, next(iter(who.values())).round, "after_local.")
        now, kept = dict(received), dict(local)
        for client, result in trained.items():
            own = _sound(result)
            upload, kept[client] = self.method.finish(
                self.world, who[client], received[client], own.params, own.progress
            )
            now[client] = {**received[client], **upload}
        return now, kept

    def test(self, round: int, client: int, params: Tensors) -> ClientResult:
        """Count what some parameters get right of the images that a client is evaluated on."""
        return self.test_together(round, {client: params})[client]

    def test_together(
        self, round: int, params: Mapping[int, Tensors], part: str | None = None
    ) -> dict[int, ClientResult]:
        """The same for several clients, and for the images of another part than `federation.evaluate_on`."""
        part = part or self.config.federation.evaluate_on
        images = {client: self.bank.images(client, part) for client in params}
        found = self.testing.run(params, images, round)
        last = round >= self.config.federation.rounds or part != self.config.federation.evaluate_on
        return {
            client: score(draws, images[client].labels, images[client].domains, self.domain_names, numbers, last)
            for client, (draws, numbers) in found.items()
        }

    @property
    def _newcoming(self) -> tuple[Stage, ...]:
        """What a held-out client does with the parameters it predicts with before it is evaluated."""
        return self.method.newcomer(self.world, self.config.train, self.config.federation.newcomer_epochs)

    def _untrained(self, client: int) -> bool:
        """Whether a client fits its local head before an evaluation because it was never picked."""
        wanted = self.config.federation.never_picked == "fit" and bool(self.world.roles.local)
        return wanted and self.states.get(client) is None

    @property
    def _first_fit(self) -> tuple[Stage, ...]:
        """What a client that was never picked does then: what a held-out one does, on the tensors of its head."""
        own = [(stage, [name for name in heads.NAMES if name in self.world.roles.local]) for stage in self._newcoming]
        return tuple(
            replace(stage, trainable=tuple(names)) for stage, names in own if names and set(names) <= {*stage.trainable}
        )

    @property
    def _adapting(self) -> tuple[Stage, ...]:
        """The same of any other client."""
        return self.method.adaptation(self.world, self.config.train)

    def _train_locally(
        self,
        stages: Sequence[Stage],
        params: Mapping[int, Tensors],
        round: int,
        purpose: str = "",
        fitting: bool = False,
        private: bool = False,
    ) -> dict[int, TrainingResult | DivergenceError]:
        """Train clients from these parameters. What is trained to be sent is `private` where every step is to be."""
        jobs = [TrainingJob(client, self._training_images(client), own) for client, own in params.items()]
        terms = self.terms if private and self.terms and self.terms.settings.noise_at == "step" else None
        secrets = {client: self.secret(round, client) for client in params} if terms is not None else {}

        def noised(client: int, gradients: Tensors) -> Tensors:
            assert terms is not None
            sent = {name: gradients[name] for name in self.world.roles.shared if name in gradients}
            return {
                **gradients,
                **mechanism.noised_gradients(sent, terms.settings.clip, terms.noise, secrets[client]),
            }

        changed = None if terms is None else noised
        return dict(zip(params, self.training.run(stages, jobs, round, purpose, fitting, changed), strict=True))

    def _training_images(self, client: int) -> Images:
        images = self.bank.images(client, "train")
        if self.attacks(client, "label_flip"):
            return replace(images, labels=flipped(images.labels, self.world.classes))
        return images

    def _statistics(self, when: str, round: int, client: int, params: Tensors, given: Collection[str] = ()) -> Tensors:
        """The declared statistics that `finish` has not given already, added up over the client's training images."""
        asked = self.world.roles.statistics(when)
        if not asked or not (declared := {name: each for name, each in asked.items() if name not in given}):
            return {}
        images = self._training_images(client)
        generator = stream(self.config.seed, round, client, "statistics")
        totals = {name: torch.zeros(statistic.shape, dtype=torch.float64) for name, statistic in declared.items()}
        with torch.no_grad():
            for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
                batch = make_batch(self.method, images, positions, training=False)
                noise = self._noise(self.method, len(positions), False, generator)
                seen = partial(forward, self.method, self.world, params, images, positions, batch, noise)
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

        return Client(
            index=client,
            name=self.world.client_names[client],
            round=round,
            samples=len(images),
            class_counts=self._class_counts(client, images),
            loss=loss,
            stream=lambda purpose: stream(self.config.seed, round, client, purpose),
            features=features,
        )

    def _class_counts(self, client: int, images: Images) -> Tensor:
        """Those of the training images; callers must not change them."""
        found = self._counts.get(client)
        if found is None:
            found = torch.bincount(images.labels.cpu(), minlength=self.world.classes)
            if len(self._counts) < MOST_COUNTS:
                self._counts[client] = found
        return found

    def _tested(self, client: int, round: int) -> Client:
        """A client that is evaluated; one that is `blind` tells nothing of its training images."""
        who = self._client(client, round)
        if not self.blind:
            return who

        def refused(asked: object) -> NoReturn:
            raise UsesTrainingImages(f"method {self.config.label!r} must be evaluated without training images here")

        return replace(who, samples=1, class_counts=torch.ones_like(who.class_counts), loss=refused, features=refused)

    def _local(self, client: int, who: Client) -> Tensors:
        kept = self.states.get(client) if self.world.roles.local else {}
        if kept is None:
            return self._new(who)
        return self._placed(wire.require_names(kept, self.world.roles.local, f"stored state of client {who.name!r}"))

    def _new(self, who: Client) -> Tensors:
        """The state of a client that never took part."""
        return self._placed({**self.world.roles.local, **self.method.enrol(self.world, who)})

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.world.device) for name, tensor in tensors.items()}

    def _noise(self, method: Method, size: int, training: bool, generator: Stream) -> Tensors:
        return self._placed(method.noise(self.world, size, training, generator))
