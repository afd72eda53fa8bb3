"""What an upload leaks about its training images: two attacks that an honest-but-curious server could run.

Every audited client takes part once more from the stored state of a run, in memory only. What it would send is read by
two adversaries:

    server    has all messages, down and up. It guesses local tensors: it simulates the client with its own images
              (test images of other clients, which no client trained on) for a few participations, and uses what such
              a client would have kept.
    insider   also holds the client's local tensors: an upper bound.

Membership. l(x; w) is the cross entropy of one image plus the training loss of a batch of only that image: the first
depends on the tensors that predict, the second on those that are trained, and in some methods one of them is
uninformative. With w before and w' after the participation,

    update(x) = l(x; w) - l(x; w')      what was learned in this upload
    loss(x)   = -l(x; w')               what was learned up to now

score the client's training images (members) and its test images (others); the result is the area under the ROC curve.
The participation has the full learning rates: under a cosine over the rounds the last uploads hardly change anything,
while the server has also seen the first ones.

Prototypes. A statistic with a count is a sum by rows: S_r over n_r images. The score of an image of the row is cos(S_r,
vector) with its own vector. A row of one image is that image's vector: the nearest of all candidates is then the image
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.client.client_states import ClientStates
from fedprompt.client.optimizers import round_factor, schedule_of
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch
from fedprompt.config import Config, TrainConfig
from fedprompt.core.client_sampling import sample_attackers
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Method, Server, Upload, World, without
from fedprompt.evaluation.label_check import spaced
from fedprompt.features.image_bank import CommonImages, ImageBank, Images
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.metrics.auc import Area, area
from fedprompt.privacy.budget import Terms
from fedprompt.privacy.mechanism import CLIP
from fedprompt.random_streams import SERVER, stream
from fedprompt.tensors import Tensors, pick

PUBLIC_IMAGES = 128  # largest number of images the server has
REHEARSALS = 5  # simulated participations, one epoch each, of a client that trains local tensors; else one
WORST = 1e30  # replaces a loss that is not finite


class Observed(ClientRuntime):
    """A client's side of a participation, and the loss of each of its images."""

    def working(self, round: int, client: int, received: Tensors) -> Tensors:
        """The parameters a participation begins with."""
        who = self._client(client, round)
        return self.method.begin(self.world, who, received, self._local(client, who))

    def predicting(self, round: int, client: int, received: Tensors) -> Tensors:
        who = self._client(client, round)
        return self.method.personalise(self.world, who, received, self._local(client, who))

    def losses(self, step: Method, round: int, client: int, params: Tensors, part: str) -> Tensor:
        """l(x) of every image; the draws of a step are the same for all parameters."""
        images = self.bank.images(client, part)
        generator = stream(self.config.seed, round, client, f"audit.{part}")
        found = []
        with torch.no_grad():
            for positions in torch.arange(len(images)).split(self.config.federation.evaluation_batch):
                batch = make_batch(step, images, positions, training=True)
                noise = self._noise(step, len(positions), True, generator)
                seen = forward(step, self.world, params, images, positions, batch, noise)
                logits = step.logits(self.world, params, seen, batch, noise)
                drawn = logits.double().unflatten(0, (-1, len(positions)))
                labels = batch.labels.expand(len(drawn), -1)
                entropies = F.cross_entropy(drawn.movedim(-1, 1), labels, reduction="none").mean(0)
                for entropy, only in zip(entropies, torch.eye(len(positions)).to(logits), strict=True):
                    alone = replace(batch, weights=only)
                    found.append((entropy + step.loss(self.world, params, logits, seen, alone, noise)).cpu())
        return torch.stack(found).nan_to_num(WORST, WORST, -WORST)

    def vectors(self, params: Tensors, images: Images, name: str, count: str) -> tuple[Tensor, Tensor]:
        """The row each image falls into (n,), and the statistic of that image alone, (n, D)."""
        rows, found = [], []
        generator = stream(self.config.seed, 0, SERVER, "audit.vectors")
        with torch.no_grad():
            for position in torch.arange(len(images)).split(1):
                batch = make_batch(self.method, images, position, training=False)
                noise = self._noise(self.method, 1, False, generator)
                seen = partial(forward, self.method, self.world, params, images, position, batch, noise)
                part = self.method.statistics(self.world, params, batch, seen)
                counts = part[count].flatten()
                rows.append(counts.argmax().cpu())
                found.append(part[name].reshape(len(counts), -1)[rows[-1]].double().cpu())
        return torch.stack(rows), torch.stack(found)


@dataclass(frozen=True)
class Row:
    """The result for one row of one client's prototypes."""

    members: int
    others: int
    """Test images of the client that would have fallen into it."""
    nearest_is_member: bool
    membership: Area | None
    """None without such test images."""


def at_full_rate(train: TrainConfig) -> TrainConfig:
    """The same training in which no rate falls over the rounds. A cosine within a participation is part of every upload."""
    schedules = {name: steady(schedule) for name, schedule in train.schedules.items()}
    return train.model_copy(update={"schedule": steady(train.schedule), "schedules": schedules})


def steady(schedule: str) -> str:
    return "constant" if schedule == "cosine" else schedule


@dataclass(frozen=True)
class Audit:
    """A stored federation whose clients take part once more, without anything being written."""

    config: Config
    world: World
    method: Method
    bank: ImageBank
    states: ClientStates
    domain_names: Sequence[str]
    server: Server
    terms: Terms | None = None
    """Of differential privacy."""
    clip: float | None = None
    """The bound of the next round, if it changes."""

    @property
    def round(self) -> int:
        """The next round, or the last one again: a run has none after it."""
        return min(self.server.round + 1, self.config.federation.rounds)

    @property
    def rate_share(self) -> float:
        """The smallest share of its full learning rate that a trained tensor has in this round of the run."""
        train, rounds = self.config.train, self.config.federation.rounds
        names = {name for stage in self.method.stages(self.world, train) for name in stage.trainable}
        return min((round_factor(schedule_of(train, name), self.round, rounds) for name in names), default=1.0)

    def runtime(self, states: ClientStates | None = None) -> Observed:
        """The clients as they are, but honest, and with the full learning rates."""
        config = self.config.model_copy(update={"attack": None, "train": at_full_rate(self.config.train)})
        states = states or self.states
        return Observed(config, self.world, self.method, self.bank, states, self.domain_names, self.terms)

    def player(self, images: Images) -> Observed:
        """The server simulates a new client: it trains for an epoch at a time and adds no noise."""
        train = at_full_rate(self.config.train).model_copy(update={"epochs": 1})
        config = self.config.model_copy(update={"attack": None, "privacy": None, "train": train})
        nothing = ClientStates(lambda client: None)
        return Observed(config, self.world, self.method, CommonImages(images), nothing, self.domain_names)

    def sample(self, count: int | None) -> list[int]:
        """Clients that train and are no attackers: all, or `count` of them at random."""
        attackers = sample_attackers(self.config.attack, self.config.seed, self.world.participants)
        clients = without(self.world.participants, attackers)
        order = stream(self.config.seed, 0, SERVER, "audit").permutation(len(clients))
        return sorted(clients[place] for place in order[:count].tolist())

    def download(self, server: Server, client: int) -> Tensors:
        found = self.method.download(self.world, server, client)
        return {name: tensor.detach() for name, tensor in found.items()}

    def after(self, reply: LocalUpdate) -> Tensors:
        """What the client would receive after a round with only itself: its own shared tensors."""
        alone = [Upload(reply.client, reply.upload, 1.0)]
        server = replace(self.method.aggregate(self.world, self.server, alone, weighted_mean), round=self.round)
        return {**self.download(server, reply.client), **self.sent(reply)}

    def sent(self, reply: LocalUpdate) -> Tensors:
        return pick(reply.upload, (name for name in self.world.roles.shared if name in reply.upload))

    def public_images(self, client: int) -> Images | None:
        """Images that the server is assumed to have: test images of other clients, spread evenly; None without other clients."""
        own = self.bank.images(client, "test")
        held = [self.bank.images(other, "test") for other in range(self.world.clients) if other != client]
        where = {int(index): (images, place) for images in held for place, index in enumerate(images.indices)}
        free = sorted(where.keys() - set(own.indices.tolist()))
        if not free:
            return None
        chosen = [free[place] for place in spaced(len(free), min(len(free), PUBLIC_IMAGES)).tolist()]
        found = [where[index] for index in chosen]
        labels = torch.stack([images.labels[place] for images, place in found])
        domains = np.array([images.domains[place] for images, place in found])
        return replace(own, indices=np.array(chosen), labels=labels, domains=domains)

    def membership(self, client: int) -> tuple[dict[str, dict[str, Area]], LocalUpdate]:
        """The scores' areas by adversary, and what the client would send."""
        stages = [stage for stage in self.method.stages(self.world, self.config.train) if stage.trainable]
        sending = [stage.step for stage in stages if not set(stage.trainable) <= set(self.world.roles.local)]
        received, runtime, public_images = (
            self.download(self.server, client),
            self.runtime(),
            self.public_images(client),
        )
        before = runtime.working(self.round, client, received)
        bound = {} if self.clip is None else {CLIP: torch.tensor(self.clip, dtype=torch.float64)}
        reply = runtime.train(self.round, client, {**received, **bound})
        found = {}
        if sending and public_images is not None:
            player = self.player(public_images)
            trains_own = any(set(stage.trainable) & set(self.world.roles.local) for stage in stages)
            for rehearsal in range(REHEARSALS if trains_own else bool(self.world.roles.local)):
                player.train(rehearsal + 1, client, received)
            guess = player.working(self.round, client, received)
            found["server"] = self._areas(runtime, sending[0], reply, guess, self.trained(player, guess, reply))
        if stages:
            known = self.trained(runtime, before, reply)
            found["insider"] = self._areas(runtime, stages[-1].step, reply, before, known)
        return found, reply

    def trained(self, runtime: Observed, before: Tensors, reply: LocalUpdate) -> Tensors:
        """The parameters after the participation, as known from the upload and the runtime's local tensors.

        A method that chooses among sets by its images may choose another set than the client did. If the upload then
        changes nothing, the sender's prediction parameters are used.
        """
        client = reply.client
        after = {**runtime.working(self.round, client, self.after(reply)), **self.sent(reply)}
        if any(not torch.equal(after[name], before[name]) for name in before):
            return after
        received = {**self.download(self.server, client), **reply.upload}
        return {**after, **runtime.predicting(self.round, client, received)}

    def _areas(
        self, runtime: Observed, step: Method, reply: LocalUpdate, before: Tensors, after: Tensors
    ) -> dict[str, Area]:
        old, new = (
            [runtime.losses(step, self.round, reply.client, params, part) for part in ("train", "test")]
            for params in (before, after)
        )
        return {"update": area(old[0] - new[0], old[1] - new[1]), "loss": area(-new[0], -new[1])}

    def prototypes(self, reply: LocalUpdate) -> Iterator[Row]:
        """Every row of every counted statistic a client sends, at the start and with `reply`."""
        client, roles = reply.client, self.world.roles
        for when in ("start", "round"):
            counts = {name: each.count for name, each in roles.statistics(when).items() if each.count != name}
            counted = {name: count for name, count in counts.items() if count is not None}
            if not counted:
                continue
            runtime, upload, received = self.runtime(), reply.upload, self.after(reply)
            if when == "start":
                runtime = self.runtime(ClientStates(lambda client: None))
                received = self.download(Server(roles.shared, roles.server), client)
                upload = runtime.survey(client, received).upload
            params = runtime.working(self.round if when == "round" else 0, client, received)
            for name, count in counted.items():
                yield from self._rows(runtime, client, params, upload, name, count)

    def _rows(
        self, runtime: Observed, client: int, params: Tensors, upload: Tensors, name: str, count: str
    ) -> Iterator[Row]:
        images = [self.bank.images(client, "train"), self.bank.images(client, "test"), self.public_images(client)]
        seen = [runtime.vectors(params, each, name, count) for each in images if each is not None]
        (own, _), (test, _) = seen[:2]
        candidates = torch.cat([vectors for _, vectors in seen])
        sums = upload[name].reshape(upload[count].numel(), -1).double().cpu()
        for number in own.unique().tolist():
            if not sums[number].any():  # withheld: too few images
                continue
            scores = F.cosine_similarity(sums[number].unsqueeze(0), candidates)
            member, other = (own == number).nonzero().flatten(), (test == number).nonzero().flatten()
            tested = scores[len(own) + other]
            yield Row(
                len(member),
                len(other),
                bool((member == scores.argmax()).any()),
                area(scores[member], tested) if len(other) else None,
            )
