"""The front door: `Experiment(config).run() -> Run`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedprompt import config as configuration
from fedprompt.backbones.image_sizes import with_image_size
from fedprompt.backbones.load import builder
from fedprompt.backbones.weight_cache import identity
from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import ExperimentFactory, Prepared
from fedprompt.client.runtime import ClientRuntime
from fedprompt.config import Config, config_files
from fedprompt.config.registries import REMOTE_ENGINES, TRACKERS
from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_tested
from fedprompt.core.method import Method
from fedprompt.core.roles import Roles
from fedprompt.data.partition.divide import scheme
from fedprompt.data.sources.open import check_format
from fedprompt.engines import kinds
from fedprompt.engines.remote.protocol import Setting
from fedprompt.engines.remote.remote_engine import Transport, remote_engine
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.evaluation.final_test import tests_at_the_end
from fedprompt.experiment.estimate import WORTH_SAYING, Estimate, estimate, may_be_long
from fedprompt.experiment.precision_check import autocast_note
from fedprompt.experiment.progress import fitting_progress, is_interactive
from fedprompt.experiment.run_file import open_store, refuse_another_run, run_id
from fedprompt.experiment.tracking import tracked
from fedprompt.federation.aggregate import rule
from fedprompt.federation.loop import Engine, Federation
from fedprompt.federation.observer import Observer, Several
from fedprompt.privacy.budget import settled
from fedprompt.privacy.mechanism import as_sent
from fedprompt.runs.run import Run
from fedprompt.runs.store import RunStore
from fedprompt.runs.tables import FILE

MakeEngine = Callable[[ClientRuntime, RunStore, list[str]], Engine]


class Experiment:
    """One config, ready to run. Building it checks everything that can be checked before the first image is decoded."""

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        config = config if isinstance(config, Config) else configuration.parse(config)
        check_extensions(config)
        config, sentence = with_image_size(config)
        self.notes = () if sentence is None else (sentence,)  # on defaults that were chosen
        self.factory = ExperimentFactory(config)
        self.config = self.factory.config

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """The one experiment a YAML file describes; a file with a `sweep` holds several and is for `fedprompt run`."""
        configs = config_files.load(path, overrides)
        if len(configs) != 1:
            raise RunError(
                f"{str(path)!r} must describe one experiment, got {len(configs)}; use fedprompt.config.config_files.load"
            )
        return cls(configs[0])

    @property
    def method(self) -> Method:
        return self.factory.method

    def run(
        self, resume: bool = False, observer: Observer | Sequence[Observer] | None = None, test: bool = True
    ) -> Run:
        """Train until the last round. With `resume`, go on after the last committed round of the same config.

        Without an observer, progress is shown in a notebook and on a terminal; `Observer()` is silent. Where someone types
        the code, in a notebook or at a prompt, an interrupt gives the run with the rounds that are finished so far.
        Without `test`, the tests after the last round are left out: where rounds are evaluated on validation images, no
        test image is read.
        """
        if observer is None:
            with fitting_progress() as progress:
                return self.run(resume, progress, test)
        config = self.config
        observer = observer if isinstance(observer, Observer) else Several(*observer)
        if config.engine.kind == "flower":
            raise ConfigError(broken("engine.kind", "be run by `fedprompt federate run`: clients are sites", "flower"))
        refuse_another_run(config, resume)
        if config.output.threads:
            torch.set_num_threads(config.output.threads)
        try:
            with tracked(config, observer) as everyone:
                self._train(everyone, test)
        except KeyboardInterrupt:
            if not (is_interactive() and (config.run_directory / FILE).exists()):
                raise
            observer.noted("interrupted: here are the rounds that are finished; run(resume=True) continues")
        return Run(config.run_directory)

    def _train(self, observer: Observer, test: bool) -> None:
        """Every round that is still missing, with clients where the engine has them."""
        if self.config.engine.kind == "flower-simulation":
            self._simulate(observer)
            return
        if self.config.engine.workers:
            self._require_own_method("engine.workers", "0", self.config.engine.workers)
        with kinds.opener(self.config)() as make:
            prepared = self.factory.prepare()
            self._run(lambda runtime, store, ground: make(runtime, ground), prepared, observer, test)

    def estimate(self) -> Estimate:
        """What a run will need, measured with a few steps; nothing is trained or stored but features."""
        if self.config.engine.kind != "in-process":
            raise ConfigError(broken("engine.kind", "be in-process for an estimate", self.config.engine.kind))
        if self.config.output.threads:
            torch.set_num_threads(self.config.output.threads)
        source, manifest, backbone, world = self.factory.prepare()
        bank = self.factory.bank(source, manifest, backbone)
        runtime = self.factory.client_runtime(source, world, bank, ClientStates(lambda client: None))
        everyone = sorted(world.newcomers) or list(world.participants)
        tested = sample_tested(self.config.seed, everyone, self.config.federation.evaluate_clients)
        return estimate(self.config, runtime, tested)

    def run_remotely(self, prepared: Prepared, observer: Observer, post: Transport) -> None:
        """Every round that is still missing, with clients that are reached by post."""

        def make(runtime: ClientRuntime, store: RunStore, ground: list[str]) -> Engine:
            settings = settled(self.config, runtime.terms).model_dump(mode="json")
            setting = Setting(run_id(store), settings, ground[0])
            return remote_engine(post, setting, self.config, runtime.world, ClientStates(store.client_state))

        self._run(make, prepared, observer)

    def _run(self, make_engine: MakeEngine, prepared: Prepared, observer: Observer, test: bool = True) -> None:
        source, manifest, backbone, world = prepared
        frozen = identity(backbone)
        bank = self.factory.bank(source, manifest, backbone)
        store = open_store(self.factory, source, manifest, frozen, world, bank)
        try:
            runtime = self.factory.client_runtime(source, world, bank, ClientStates(store.client_state))
            runtime.listen(observer.stepped, observer.measured)
            afterwards = tests_at_the_end(runtime, prepared, self.factory.cache, store, observer) if test else None
            engine = _secured(
                make_engine(runtime, store, [frozen, manifest.checksum]), world.roles, self.config, self.method
            )
            federation = Federation(
                self.config, world, self.method, engine, store, observer, runtime.terms, afterwards, self.notes
            )
            slower = autocast_note(self.config.backbone, backbone)
            federation.notes = (*self.notes, *([] if slower is None else [slower]))
            if self.config.engine.kind == "in-process" and not store.rounds() and may_be_long(self.config, runtime):
                needed = estimate(self.config, runtime, federation.tested)
                if needed.total >= WORTH_SAYING:
                    federation.notes = (*federation.notes, needed.sentence())
            federation.run()
            backbone.assert_frozen(frozen)
        finally:
            store.close()

    def _simulate(self, observer: Observer) -> None:
        """The same with every client as a separate node, simulated by Flower."""
        from fedprompt.engines.flower.simulation import simulate

        for field, value, instead in (
            ("data.novel", self.config.data.novel, "0"),
            ("data.other_set", self.config.data.other_set, "absent"),
            ("federation.evaluate_on", self.config.federation.evaluate_on, "test"),
        ):
            if value not in (0, None, "test"):
                rule = (
                    f"be {instead} with engine.kind: flower-simulation, whose clients keep their states to themselves"
                )
                raise ConfigError(broken(field, rule, value))
        self._require_own_method("engine.kind", "in-process", self.config.engine.kind)
        prepared = self.factory.prepare()
        clients = len(prepared.world.client_names)
        simulate(clients, self.config.engine, partial(self.run_remotely, prepared, observer))

    def _require_own_method(self, field: str, instead: str, value: object) -> None:
        """Raise where other processes could not build the method from the config."""
        if self.method != registry.build(self.config.method, self.config.variant):
            raise ConfigError(broken(field, f"be {instead} for a method that is not the config's own", value))


def check_extensions(config: Config) -> None:
    """Raise where a config names something that is not registered, or gives it options that are not its own."""
    rule(config.aggregation)
    check_format(config.data)
    builder(config.backbone)
    if config.partition.scheme != "manifest":
        scheme(config.partition)
    if config.engine.kind not in REMOTE_ENGINES:
        kinds.opener(config)
    for name in config.output.trackers:
        TRACKERS.get(name).check()


def _secured(engine: Engine, roles: Roles, config: Config, method: Method) -> Engine:
    """The engine, wrapped in a secure sum if the config requires one."""
    if not config.federation.secure_sum:
        return engine
    from fedprompt.engines.secure_cohort import SecureCohort

    uniform = method.weighs_evenly or config.federation.weighting == "uniform"
    return SecureCohort(engine, as_sent(roles, config.privacy), config.guard.quorum, uniform)
