"""The front door: `Experiment(config).run() -> Run`."""

from __future__ import annotations

import json
import platform
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedprompt import config as configuration
from fedprompt import config_files, registry
from fedprompt.assets import cache_directory
from fedprompt.backbones.dual import DualEncoder
from fedprompt.backbones.kept import identity
from fedprompt.backbones.load import load_backbone
from fedprompt.backbones.vit import ViT
from fedprompt.config import Config
from fedprompt.data import class_counts
from fedprompt.data.manifest import Manifest, stored_checksum
from fedprompt.data.partition import make_manifest
from fedprompt.data.sources import Source, open_both
from fedprompt.data.transforms import ImageStore
from fedprompt.engines.client import ClientRuntime
from fedprompt.engines.images import ImageBank
from fedprompt.engines.inprocess import InProcess
from fedprompt.engines.orders import Setting
from fedprompt.engines.remote import Post, Remote
from fedprompt.engines.workers import Crew, Workers
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.evaluation.base_to_novel import BaseToNovel, remember, require_names
from fedprompt.evaluation.label_check import check_labels, warning
from fedprompt.evaluation.novel_figures import stored_figures
from fedprompt.federation.accounting import Plan
from fedprompt.federation.budget import Terms, settled
from fedprompt.federation.compatibility import check_protections
from fedprompt.federation.guard import Guard
from fedprompt.federation.messages import Download
from fedprompt.federation.privacy import as_sent
from fedprompt.federation.rounds import Engine, Federation, Observer
from fedprompt.federation.sampling import absences, away_by_round, sample_newcomers
from fedprompt.federation.states import ClientStates
from fedprompt.federation.store import FILE, RUN_ID, Event, RunReader, RunStore
from fedprompt.method import Method, World
from fedprompt.roles import Roles
from fedprompt.run import Run
from fedprompt.streams import SERVER, stream

Prepared = tuple[Source, Manifest, ViT, World]
MakeEngine = Callable[[ClientRuntime, RunStore, list[str]], Engine]
Afterwards = Callable[[int, Sequence[int], Download], None]


class Experiment:
    """One config made real. Building it checks everything that can be checked before the first image is decoded."""

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        self.config = registry.completed(config if isinstance(config, Config) else configuration.parse(config))
        self.method: Method = registry.build(self.config.method, self.config.variant)
        self.cache: Path = cache_directory(self.config.output.cache)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """The one experiment a YAML file describes; a file with a `sweep` holds several and is for `fedprompt run`."""
        configs = config_files.load(path, overrides)
        if len(configs) != 1:
            raise RunError(
                f"{str(path)!r} must describe one experiment, got {len(configs)}; use fedprompt.config_files.load"
            )
        return cls(configs[0])

    def run(self, resume: bool = False, observer: Observer | None = None) -> Run:
        """Train until the last round. With `resume`, go on after the last committed round of the same config."""
        config, observer = self.config, observer or Observer()
        if config.engine.kind == "flower":
            raise ConfigError(broken("engine.kind", "be run by `fedprompt federate run`: clients are sites", "flower"))
        self.refuse_another_run(resume)
        if config.output.threads:
            torch.set_num_threads(config.output.threads)
        if config.engine.kind == "flower-simulation":
            self._simulate(observer)
        else:
            with self._crew() as crew:  # started first: they import while this process prepares
                self._run(partial(self._engine, crew=crew), self.prepare(), observer)
                if crew is not None:
                    crew.assert_frozen()
        return Run(config.run_directory)

    def _run(self, make_engine: MakeEngine, prepared: Prepared, observer: Observer) -> None:
        source, manifest, backbone, world = prepared
        frozen = identity(backbone)
        bank = self.bank(source, manifest, backbone)
        store = self._open_store(source, manifest, frozen, world, bank)
        try:
            runtime = self.client_runtime(source, world, bank, ClientStates(store.client_state))
            afterwards = self._novel_test(runtime, source, manifest, backbone, store, observer)
            engine = self._secured(make_engine(runtime, store, [frozen, manifest.checksum]), world.roles)
            Federation(self.config, world, self.method, engine, store, observer, runtime.terms, afterwards).run()
            backbone.assert_frozen(frozen)
        finally:
            store.close()

    def _simulate(self, observer: Observer) -> None:
        """The same with every client a node of its own, which Flower simulates."""
        from fedprompt.engines.flower.simulation import simulate

        if self.config.data.novel:
            rule = "be 0 with engine.kind: flower-simulation, whose clients keep their states to themselves"
            raise ConfigError(broken("data.novel", rule, self.config.data.novel))
        self._require_own_method("engine.kind", "in-process", self.config.engine.kind)
        prepared = self.prepare()
        simulate(len(prepared[3].client_names), self.config.engine, partial(self.run_by_post, prepared, observer))

    def run_by_post(self, prepared: Prepared, observer: Observer, post: Post) -> None:
        """Every round that is still missing, with clients that are reached by post."""

        def make(runtime: ClientRuntime, store: RunStore, ground: list[str]) -> Engine:
            settings = settled(self.config, runtime.terms).model_dump(mode="json")
            return remote(post, Setting(run_id(store), settings, ground[0]), self.config, runtime.world, store)

        self._run(make, prepared, observer)

    def prepare(self) -> tuple[Source, Manifest, ViT, World]:
        """Data, partition, backbone and the world a method sees, with its roles declared."""
        config = self.config
        source, novel = open_both(config.data, self.cache)
        manifest = make_manifest(source, config.data, config.partition, config.seed)
        backbone = self.backbone()
        world = self.world(backbone, source.class_names, manifest.clients.names)
        if novel is not None:
            require_names(self.method, world, novel, backbone, config)
        return source, manifest, backbone, world

    def backbone(self) -> ViT:
        backbone = load_backbone(self.config.backbone, self.cache)
        return backbone.compiled() if self.config.engine.compile else backbone

    def world(self, backbone: ViT, class_names: tuple[str, ...], client_names: Sequence[str]) -> World:
        """What the method may know, with its roles declared; settings that do not fit are refused."""
        config, shape = self.config, backbone.shape
        world = World(
            shape.width,
            backbone.depth,
            shape.tokens,
            shape.patch,
            class_names,
            client_names,
            newcomers=sample_newcomers(config.seed, len(client_names), config.federation.held_out),
            language=backbone.language(class_names) if isinstance(backbone, DualEncoder) else None,
            device=backbone.device,
            dtype=backbone.dtype,
        )
        if self.method.uses_text:
            _ = world.text  # raises where there is none
        self.method.check(world, config.train)
        absences(config.federation, client_names, world.newcomers)  # raises where they cannot be met
        world = replace(world, roles=self.method.init(world, stream(config.seed, 0, SERVER, "init")))
        check_protections(config, self.method, world)
        return world

    def bank(self, source: Source, manifest: Manifest, backbone: ViT) -> ImageBank:
        """Every client's images as the backbone wants them."""
        pixels = ImageStore(source, backbone.shape.image_size, self.config.data.resize, self.cache)
        return ImageBank(source, manifest, pixels, backbone, self.config.engine)

    def client_runtime(self, source: Source, world: World, bank: ImageBank, states: ClientStates) -> ClientRuntime:
        """The clients' side of this experiment, on the terms of privacy it asks for."""
        runtime = ClientRuntime(self.config, world, self.method, bank, states, source.domain_names)
        runtime.terms = agreed(self.config, world, runtime.steps)
        return runtime

    def privacy_plans(self) -> tuple[Terms, list[Plan]]:
        """What the privacy of this experiment comes to after every round, without a round of training."""
        source, manifest, backbone, world = self.prepare()
        nothing = ClientStates(lambda client: None)
        terms = self.client_runtime(source, world, self.bank(source, manifest, backbone), nothing).terms
        if terms is None:
            raise ConfigError(broken("privacy", "be given: there is nothing to reckon with", None))
        away = away_by_round(self.config.federation, world.client_names, world.newcomers)
        return terms, terms.plans(self.config, bool(world.roles.statistics("start")), away)

    def _crew(self) -> AbstractContextManager[Crew | None]:
        """The processes that share the work, where some are asked for."""
        size = self.config.engine.workers
        if not size:
            return nullcontext()
        self._require_own_method("engine.workers", "0", size)
        return Crew(size)

    def _require_own_method(self, field: str, instead: str, value: object) -> None:
        """Raise where other processes could not build the method from the config."""
        if self.method != registry.build(self.config.method, self.config.variant):
            raise ConfigError(broken(field, f"be {instead} for a method that is not the config's own", value))

    def _engine(self, runtime: ClientRuntime, store: RunStore, ground: list[str], crew: Crew | None) -> Engine:
        """Where clients run: in this process, or shared out among its workers."""
        return InProcess(runtime) if crew is None else Workers(runtime, crew, ground)

    def _secured(self, engine: Engine, roles: Roles) -> Engine:
        """The engine behind a secure sum, where one is asked for."""
        if not self.config.federation.secure_sum:
            return engine
        from fedprompt.engines.secure import SecureCohort

        uniform, quorum = self.config.federation.weighting == "uniform", self.config.guard.quorum
        return SecureCohort(engine, as_sent(roles, self.config.privacy), quorum, uniform)

    def _novel_test(
        self,
        runtime: ClientRuntime,
        source: Source,
        manifest: Manifest,
        backbone: ViT,
        store: RunStore,
        observer: Observer,
    ) -> Afterwards | None:
        """What follows the last round where some classes were kept from the federation, unless it was done already."""
        _, novel = open_both(self.config.data, self.cache) if self.config.data.novel else (None, None)
        if novel is None or stored_figures(store) is not None:
            return None
        test = BaseToNovel.prepare(runtime, source, manifest, novel, backbone, self.cache)

        def afterwards(round: int, clients: Sequence[int], download: Download) -> None:
            found = store.evaluations(round)  # the last round is always evaluated
            local = {client: result["correct"] / result["samples"] for client, result in found.items()}

            def told(done: int) -> None:
                observer.evaluated(round, done, len(clients))

            remember(store, round, test.measure(round, clients, download, local, told))

        return afterwards

    def refuse_another_run(self, resume: bool) -> None:
        """Raise where the run directory holds a run of another config, or any run without `resume`."""
        directory = self.config.run_directory
        if not (directory / FILE).exists():
            return
        run = Run(directory)
        try:
            stored = run.reader.fact("config")
        finally:
            run.close()
        asked = self.config.model_dump(mode="json")
        lines = configuration.difference(
            {key: value for key, value in stored.items() if key not in configuration.NO_RESULT},
            {key: value for key, value in asked.items() if key not in configuration.NO_RESULT},
        )
        if lines:
            raise RunError(
                f"run {str(directory)!r} was made with another config (stored -> asked):\n  " + "\n  ".join(lines)
            )
        if not resume:
            raise RunError(
                f"run {str(directory)!r} exists already; continue it with --resume, or give it another name="
            )

    def _open_store(self, source: Source, manifest: Manifest, frozen: str, world: World, bank: ImageBank) -> RunStore:
        """The run file of this experiment: a new one, or the one that is there if it rests on the same data and weights."""
        if (self.config.run_directory / FILE).exists():
            return self._resumed(manifest, frozen)
        facts = {**self._facts(manifest, frozen), class_counts.FACT: class_counts.packed(manifest, source.labels)}
        return self._create_store(facts, world, bank)

    def _facts(self, manifest: Manifest, frozen: str) -> dict[str, Any]:
        """What a new run file says of itself."""
        facts = {
            "config": self.config.model_dump(mode="json"),
            "backbone": frozen,
            **manifest.to_facts(),
            "classes": list(manifest.class_names),
            "domains": list(manifest.domain_names),
            "versions": _versions(),
        }
        return facts if self.config.engine.kind == "in-process" else {**facts, RUN_ID: secrets.token_hex(16)}

    def _resumed(self, manifest: Manifest, frozen: str, patience: float = 0.0) -> RunStore:
        """The run file that is there, if it rests on the same data and weights."""
        store, versions = RunStore(self.config.run_directory, patience=patience), _versions()
        try:
            advice = "; give the new run another name=, or delete the directory"
            require_same_ground(store, frozen, manifest, "resumed", advice)
            if (store.fact(RUN_ID) is None) != (self.config.engine.kind == "in-process"):
                rule = "keep clients where they are: in the run file, or on nodes"
                raise RunError(broken("engine.kind", rule, self.config.engine.kind) + advice)
        except RunError:
            store.close()
            raise
        engine = self.config.engine.model_dump(mode="json", include={"cohort", "compile"})
        before = store.fact("config").get("engine", {})
        for what, stored, now in (
            ("versions", store.fact("versions"), versions),
            ("engine", {name: before.get(name) for name in engine}, engine),
        ):
            if stored != now:  # either may change the last bits
                store.note(len(store.rounds()), None, "resumed", f"with other {what}: {json.dumps(now)}")
        return store

    def _create_store(self, facts: dict[str, Any], world: World, bank: ImageBank) -> RunStore:
        """A new run begins with a look at the labels, where there are class names to compare them with."""
        check = check_labels(world, bank, self.config.seed) if self.method.uses_text else None
        if check is None:
            return RunStore.create(self.config.run_directory, facts)
        told = warning(check)
        events = [] if told is None else [Event(None, "label_check", told)]
        return RunStore.create(self.config.run_directory, {**facts, "label_check": check}, events)


def require_same_ground(stored: RunReader, frozen: str, manifest: Manifest, verb: str, advice: str = "") -> None:
    """Raise unless a run rests on this backbone, known by its digest, and on this partition."""
    same = {
        "weights of the backbone": stored.fact("backbone") == frozen,
        "partition of the data": stored_checksum(stored.fact) == manifest.checksum,
    }
    for what, holds in same.items():
        if not holds:
            raise RunError(
                f"run {str(stored.directory)!r} cannot be {verb}: the {what} are not the ones it was started with{advice}"
            )


def agreed(config: Config, world: World, steps: Callable[[int], int]) -> Terms | None:
    """The terms of privacy of a run; `steps` counts the training steps of a client."""
    surveys = bool(world.roles.statistics("start"))
    away = away_by_round(config.federation, world.client_names, world.newcomers)
    return Terms.of(config, world.participants, surveys, steps, away)


def run_id(store: RunStore) -> str:
    """What tells this run from all others, on every node."""
    return str(store.fact(RUN_ID))


def remote(post: Post, setting: Setting, config: Config, world: World, store: RunStore) -> Remote:
    """The engine whose clients are reached by post."""
    guard = Guard(config.guard, as_sent(world.roles, config.privacy), private=config.privacy is not None)
    most_bytes = {when: guard.most_bytes(when) for when in ("start", "round")}
    return Remote(post, setting, ClientStates(store.client_state), most_bytes, world.device)


def _versions() -> dict[str, str]:
    packages = ("fedprompt", "torch", "transformers", "numpy", "safetensors", "pillow")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        **{name: version(name) for name in packages},
    }
