"""What a run will need, from a few measured steps: seconds of a round and of the run, memory, bytes on the wire.

Some clients take a few steps of every stage, send what they learned, begin a second round and predict one batch each;
nothing of that is kept but features, which the run would compute as well. A second round is what most rounds are like:
contexts differ from client to client then, so each is encoded, and experts have arrived. The rest is counting: steps of
all clients, clients and images of all evaluations, features that are not computed yet. What the server does is left out;
it is small (docs/scale.md).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedprompt.client.local_training import TrainingJob, TrainingResult
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.core.client_sampling import cohort_size, sample_cohort
from fedprompt.core.method import Server, Stage, Upload
from fedprompt.experiment.pace import as_time
from fedprompt.features.image_bank import Images
from fedprompt.federation.aggregate import rule
from fedprompt.federation.loop import is_evaluated
from fedprompt.report.comparison_table import format_bytes
from fedprompt.tensors import Tensors

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

WORTH_SAYING = 60.0  # seconds that a run must take for an estimate before round 1
STEPS = 3  # that are measured after a first one
SIDE, REPEATS = 512, 3  # of the product that tells how fast this machine is at most
MULTIPLY_ADDS = 12  # times width squared: of a token in a block, about


@dataclass(frozen=True)
class Estimate:
    """What a run will need."""

    rounds: int
    evaluations: int
    features: float
    """Seconds for features that are not computed yet, once."""
    training: float
    """Seconds in a round."""
    evaluation: float
    """Seconds, each time."""
    megabytes: float | None
    """Of resident memory, at most; None where the system does not tell."""
    bytes_down: int
    """In a round, to all clients of a cohort."""
    bytes_up: int
    augmented: bool = False
    """Whether the steps of training also compute the features of their new views."""

    @property
    def total(self) -> float:
        """Seconds from round 1 to the end."""
        return self.features + self.rounds * self.training + self.evaluations * self.evaluation

    def sentence(self) -> str:
        once = f" and {as_time(self.features)} once for features" if self.features >= 1 else ""
        once += ", those of augmented images in every step" if self.augmented else ""
        memory = "" if self.megabytes is None else f"{self.megabytes:.0f} MB of memory; "
        share = 100 * self.evaluations * self.evaluation / self.total if self.total else 0.0
        often = (
            f" ({share:.0f} % of the time; federation.evaluate_every says how often)" if self.evaluations > 1 else ""
        )
        return (
            f"about {as_time(self.total)} in {self.rounds} rounds: {self.training:.3g} s of training in a round, "
            f"{self.evaluation:.3g} s for each of {self.evaluations} evaluations{often}{once}; {memory}"
            f"{format_bytes(self.bytes_down)} down and {format_bytes(self.bytes_up)} up in a round"
        )


def may_be_long(config: Config, runtime: ClientRuntime) -> bool:
    """Whether a run could take long enough for an estimate, from sizes and the speed of a large product.

    An estimate costs about as much as half a round of a few clients, so a short run has none.
    """
    world, settings = runtime.world, config.federation
    blocks = MULTIPLY_ADDS * 2 * world.width**2 * world.blocks
    tokens = float(runtime.bank.sizes("train").sum() * settings.fraction * config.train.epochs * 2) * world.tokens
    if world.language is not None:
        steps = runtime.bank.sizes("train").sum() * settings.fraction * config.train.epochs / config.train.batch_size
        tokens += 2 * 10 * world.classes * (steps + len(world.participants))
    draws = int(getattr(runtime.method, "predict_draws", 1))
    tokens += float(runtime.bank.sizes(settings.evaluate_on).sum()) * world.tokens * draws / settings.evaluate_every
    return settings.rounds * tokens * blocks / product_speed(world.device) > WORTH_SAYING / 2


def product_speed(device: torch.device) -> float:
    """FLOPs a second of a large product: runs reach half of it or more."""
    square = torch.ones(SIDE, SIDE, device=device)
    (square @ square).sum().item()  # the first time also prepares
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        (square @ square).sum().item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


def estimate(config: Config, runtime: ClientRuntime, tested: Sequence[int]) -> Estimate:
    """Measure a few steps of the clients of round 1, and what comes after them."""
    settings = config.federation
    cohort = sample_cohort(config.seed, 1, runtime.world.participants, settings.fraction)
    probe = _Probe(config, runtime, cohort[: runtime.cohort_size()])
    workers = max(1, min(config.engine.workers, -(-len(cohort) // max(1, len(probe.clients)))))
    taking_part = cohort_size(settings.fraction, len(runtime.world.participants))
    steps = sum(
        probe.step(stage) * probe.steps(stage, runtime.world.participants, settings.fraction)
        for stage in runtime.method.stages(runtime.world, config.train)
    )
    training = steps + probe.next_round() * taking_part
    image, client, once = probe.test()
    evaluation = (
        once + client * len(tested) + image * float(runtime.bank.sizes(settings.evaluate_on)[np.asarray(tested)].sum())
    )
    evaluation += sum(probe.step(stage) * probe.steps(stage, tested, 1.0) for stage in runtime._adapting)
    down = wire.size_in_bytes(next(iter(probe.received.values()))) * taking_part
    up = sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in runtime.world.roles.uploaded("round").values()
    )
    held = peak_megabytes()
    return Estimate(
        rounds=settings.rounds,
        evaluations=sum(is_evaluated(number, settings) for number in range(1, settings.rounds + 1)),
        features=probe.missing() / workers,
        training=training / workers,
        evaluation=evaluation / workers,
        megabytes=None if held is None else held + probe.missing_megabytes(),
        bytes_down=down,
        bytes_up=up * taking_part,
        augmented=config.train.augmented,
    )


def peak_megabytes() -> float | None:
    """The most memory this process has had."""
    if resource is None:
        return None
    units = 2**20 if sys.platform == "darwin" else 2**10
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / units


class _Probe:
    """Some clients that take a few steps, and what they and the server have after them."""

    def __init__(self, config: Config, runtime: ClientRuntime, clients: Sequence[int]) -> None:
        self._config, self._runtime, self._world = config, runtime, runtime.world
        roles, method = self._world.roles, runtime.method
        self._server = Server(wire.in_order(roles.shared), wire.in_order(roles.server)).for_clients(clients)
        self.received: dict[int, Tensors] = {}
        self.params: dict[int, Tensors] = {}
        self._local: dict[int, Tensors] = {}
        self._trained: dict[int, TrainingResult] = {}
        self.clients = list(clients)
        for client in clients:
            who = runtime._client(client, 1)
            self._local[client] = runtime._local(client, who)
            self.received[client] = dict(method.download(self._world, self._server, client))
            self.params[client] = method.begin(self._world, who, self.received[client], self._local[client])
        self._part = config.federation.evaluate_on
        self._fresh: list[tuple[float, int]] = []  # seconds beyond those of a step, and features that were new then
        self._names: dict[str, list[np.ndarray]] = {}  # images by feature that is asked of them

    def step(self, stage: Stage) -> float:
        """Seconds of one step of one client, among others."""
        runtime = self._runtime
        jobs = [TrainingJob(client, runtime._training_images(client), self.params[client]) for client in self.clients]
        jobs = [job for job in jobs if runtime.training.steps((stage,), job.images, job.client)]
        if not jobs or not stage.trainable:
            return 0.0
        needs = runtime.sizer.of(stage.step, jobs[0].params, jobs[0].images, training=True)
        jobs = jobs[: max(2, runtime.sizer.clients(needs, min(len(jobs[0].images), self._config.train.batch_size)))]
        if not self._config.train.augmented:
            self._wanted(needs.features, "train", self._world.participants)

        def take(steps: int) -> int:
            short = replace(stage, steps=min(steps, stage.steps or steps))
            found = zip(jobs, runtime.training.run((short,), jobs, 1, "estimate."), strict=True)
            self._trained |= {job.client: each for job, each in found if isinstance(each, TrainingResult)}
            return sum(runtime.training.steps((short,), job.images, job.client) for job in jobs)

        return self._steady(take, needs.features)

    def next_round(self) -> float:
        """Seconds of a client from the end of its steps to the beginning of those of the next round."""
        runtime, method, world = self._runtime, self._runtime.method, self._world
        began, uploads = time.perf_counter(), []
        for client, result in self._trained.items():
            who, received = runtime._client(client, 1), self.received[client]
            upload, self._local[client] = method.finish(world, who, received, result.params, result.progress)
            statistics = runtime._statistics("round", 1, client, result.params, given=upload)
            uploads.append(Upload(client, {**upload, **statistics}, 1 / len(self._trained)))
        if uploads:
            server = method.aggregate(world, self._server, uploads, rule(self._config.aggregation))
            self._server = replace(server, round=1).for_clients(sorted(self._trained))
        for client in self._trained:
            received = dict(method.download(world, self._server, client))
            method.begin(world, runtime._client(client, 2), received, self._local[client])
        return (time.perf_counter() - began) / max(1, len(uploads))

    def test(self) -> tuple[float, float, float]:
        """Seconds of an image in an evaluation, of a client on top of its images, and of all clients on top of that."""
        runtime, batch = self._runtime, self._config.federation.evaluation_batch
        clients = [client for client in self._trained or self.clients if len(runtime.bank.images(client, self._part))]
        if not clients:
            return 0.0, 0.0, 0.0
        images = {client: _first(runtime.bank.images(client, self._part), batch) for client in clients}
        params = self.params[clients[0]]
        needs = runtime.sizer.of(runtime.method, params, images[clients[0]], training=False)
        self._wanted(needs.features, self._part, self._world.participants)
        before, began = self._missing(), time.perf_counter()
        runtime.bank.load(torch.from_numpy(np.concatenate([own.indices for own in images.values()])), needs.features)
        self._note_fresh(time.perf_counter() - began, before)

        def seconds(some: Sequence[int]) -> float:
            began = time.perf_counter()
            params = {client: self._personalised(client) for client in some}
            runtime.testing.run(params, {client: images[client] for client in some}, 0)
            return time.perf_counter() - began

        first, rest = seconds(clients[:1]), seconds(clients[1:]) if clients[1:] else 0.0
        image = seconds(clients) / sum(map(len, images.values()))
        first = max(0.0, first - image * len(images[clients[0]]))
        if not clients[1:]:
            return image, first, 0.0
        each = max(0.0, rest - image * sum(len(images[client]) for client in clients[1:])) / len(clients[1:])
        return image, each, max(0.0, first - each)

    def _personalised(self, client: int) -> Tensors:
        """What a client predicts with after its first round."""
        method, who = self._runtime.method, self._runtime._tested(client, 1)
        received = dict(method.download(self._world, self._server, client))
        return method.personalise(self._world, who, received, self._local[client])

    def steps(self, stage: Stage, clients: Sequence[int], fraction: float) -> float:
        """That all of these clients take in a round, where a fraction of them takes part."""
        sizes = self._runtime.bank.sizes("train")[np.asarray(clients)]
        images = np.maximum(1, np.floor((stage.share[1] - stage.share[0]) * sizes + 0.5))
        steps = stage.epochs * np.ceil(images / self._config.train.batch_size)
        return fraction * float((steps if stage.steps is None else np.minimum(steps, stage.steps)).sum())

    def missing(self) -> float:
        """Seconds for all features that are not computed yet."""
        seconds, new = sum(s for s, _ in self._fresh), sum(n for _, n in self._fresh)
        return seconds / new * sum(self._missing().values()) if new else 0.0

    def missing_megabytes(self) -> float:
        tables = self._runtime.bank.tables
        bytes_each = {name: tables._feature(name).numbers * tables.backbone.dtype.itemsize for name in self._names}
        return sum(count * bytes_each[name] for name, count in self._missing().items()) / 2**20

    def _steady(self, take: Callable[[int], int], features: Sequence[str]) -> float:
        """Seconds of one of the things that `take` does so many of, after a first time that may compute features."""
        before, began = self._missing(), time.perf_counter()
        done = take(1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        again = take(STEPS)
        each = (time.perf_counter() - began) / max(again, 1)
        self._note_fresh(first - done * each, before)
        return each

    def _note_fresh(self, seconds: float, before: Mapping[str, int]) -> None:
        """That features which were missing before took so long."""
        new = sum(before.values()) - sum(self._missing().values())
        if new > 0:
            self._fresh.append((max(0.0, seconds), new))

    def _wanted(self, names: Sequence[str], part: str, clients: Sequence[int]) -> None:
        lists = self._runtime.bank._clients[part]
        for name in names:
            self._names.setdefault(name, []).extend(lists[client] for client in clients)

    def _missing(self) -> Mapping[str, int]:
        """By feature, the images that lack it. Those that nothing keeps are part of every step."""
        tables, found = self._runtime.bank.tables, {}
        for name, lists in self._names.items():
            kept = tables._kept(tables._feature(name))
            images = np.unique(np.concatenate(lists))
            lacking = np.ones(len(images), dtype=bool)
            for rows in kept:
                lacking &= ~rows.holds(images)
            found[name] = int(lacking.sum()) if kept else 0
        return found


def _first(images: Images, count: int) -> Images:
    """Some of a client's images."""
    return images if len(images) <= count else images.part(0.0, count / len(images), torch.arange(len(images)))
