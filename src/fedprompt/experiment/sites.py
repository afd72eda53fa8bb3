"""The entry point of a federation of sites: the usual loop, with clients that have their own images.

The server has no images. It meets the sites, agrees with them on class names and weights, and from then on knows them by the
numbers they have in the run file.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fedprompt.backbones.weight_cache import identity
from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import privacy_terms
from fedprompt.config import Config
from fedprompt.core.messages import Failure
from fedprompt.data.partition import client_names
from fedprompt.data.site_data import agree, sites_manifest
from fedprompt.engines.remote.protocol import Answer, Meeting, Order, Setting
from fedprompt.engines.remote.remote_engine import Transport, remote_engine
from fedprompt.errors import ConfigError, DataError, QuorumError, RunError, broken
from fedprompt.experiment.experiment import Experiment
from fedprompt.experiment.run_file import new_facts, refuse_another_run, resumed_store, run_id
from fedprompt.experiment.tracking import tracked
from fedprompt.federation.loop import Federation
from fedprompt.federation.observer import Observer
from fedprompt.privacy.budget import settled
from fedprompt.runs.run import Run
from fedprompt.runs.store import Event, RunStore
from fedprompt.runs.tables import FILE

SECRET_BITS = 256
MOST_GUESSED = 128  # bits; a random secret is larger, but for one in 2^128
SECRET = "secret_seed"  # the fact of a private run that no site may learn: what the server draws with
NO_RUN = "0" * 32  # the number under which sites are met, before there is a run
MOST_NAMES_BYTES = 2**25  # of a site's introduction, which is mostly names of classes
ORPHANED = 30.0  # seconds in which the process of a killed server notices that it is alone
HERE = {"engine", "output", "tuned"}  # sections of a config that are the server's own business


class SiteTransport(Transport, Protocol):
    """Carries orders to sites, identified by name."""

    def meet(self, order: bytes, names: Sequence[str]) -> Mapping[str, bytes | Failure]:
        """The answers of the sites of these names, or of all that are connected where none are given."""

    def number(self, names: Sequence[str], introduction: bytes = b"") -> None:
        """Set the numbers of sites: client i is the site names[i]. The order requests the name of an unnamed site."""


class SitesExperiment(Experiment):
    """One config, run over sites."""

    def __init__(self, config: Config | Mapping[str, Any]) -> None:
        super().__init__(config)
        _check(self.config)

    def federate(self, post: SiteTransport, resume: bool = False, observer: Observer | None = None) -> Run:
        """Train until the last round. With `resume`, go on after the last committed round of the same config."""
        refuse_another_run(self.config, resume)
        if self.config.output.threads:
            torch.set_num_threads(self.config.output.threads)
        backbone = self.factory.backbone()
        frozen = identity(backbone)
        store = self._opened(frozen) or self._met(post, frozen)
        try:
            names = client_names.from_fact(store.fact("clients"))
            world = self.factory.world(backbone, tuple(store.fact("classes")), tuple(names))
            secret = _secret(store, self.config)
            drawing = self.config if secret is None else self.config.model_copy(update={"seed": secret})
            terms = privacy_terms(drawing, world, lambda client: 1)
            settings = _travelling(settled(self.config, terms))
            setting = Setting(run_id(store), settings, frozen, world.class_names, tuple(names))
            post.number(names, Order("meet", setting).to_bytes())
            engine = remote_engine(post, setting, self.config, world, ClientStates(store.client_state))
            with tracked(self.config, observer or Observer()) as everyone:
                Federation(
                    self.config,
                    world,
                    self.method,
                    engine,
                    store,
                    everyone,
                    terms,
                    notes=self.notes,
                    secret=secret,
                ).run()
            backbone.assert_frozen(frozen)
        finally:
            store.close()
        return Run(self.config.run_directory)

    def _opened(self, frozen: str) -> RunStore | None:
        """The run file that is there: a resumed run has the sites and classes it began with."""
        directory = self.config.run_directory
        if not (directory / FILE).exists():
            return None
        run = Run(directory)
        try:
            manifest = sites_manifest(list(run.clients), tuple(run.reader.fact("classes") or ()))
        finally:
            run.close()
        return resumed_store(self.config, manifest, frozen, ORPHANED)

    def _met(self, post: SiteTransport, frozen: str) -> RunStore:
        """A new run file, after the sites have agreed on what they are about to learn."""
        wanted = list(self.config.engine.sites)
        order = Order("meet", Setting(NO_RUN, _travelling(self.config), frozen)).to_bytes()
        answers = post.meet(order, wanted)
        away = {name: f"{came.rule}: {came.value}" for name, came in answers.items() if isinstance(came, Failure)}
        met = {name: _introduced(name, came, frozen) for name, came in answers.items() if isinstance(came, bytes)}
        meetings = {name: each for name, each in met.items() if isinstance(each, Meeting)}
        unfit = {name: each for name, each in met.items() if isinstance(each, str)}
        agreement = agree({name: each.class_names for name, each in meetings.items()}, self.config.data.classes)
        unfit |= agreement.refused
        kept_out = away | unfit
        names = sorted(set(wanted or meetings) - set(unfit))  # who is away may come later
        reasons = "; ".join(f"{name}: {text}" for name, text in sorted(kept_out.items()))
        if meetings and agreement.class_names is None:
            raise DataError(broken("sites", "agree on the names of the classes", reasons or "nothing to agree on"))
        present = sorted(set(meetings) - set(agreement.refused))
        if unfit and not names:
            raise QuorumError(f"sites must fit the run, got none that does: {reasons}")
        if not present or len(present) < self.config.guard.quorum * len(names):
            rule = f"be there for {self.config.guard.quorum:g} of {len(names)} (guard.quorum) when a run begins"
            raise QuorumError(broken("sites", rule, present) + (f": {reasons}" if reasons else ""))
        assert agreement.class_names is not None
        facts = new_facts(self.config, sites_manifest(names, agreement.class_names), frozen)
        if self.config.privacy is not None:
            facts[SECRET] = secrets.randbits(SECRET_BITS)
        events = [Event(None, "kept_out", f"{name}: {text}") for name, text in sorted(kept_out.items())]
        return RunStore.create(self.config.run_directory, facts, events)


def _secret(store: RunStore, config: Config) -> int | None:
    """What the server of a private run draws with. Without it, noise would follow from the seed that every site has."""
    secret = store.fact(SECRET)
    if config.privacy is None:
        return None
    if type(secret) is not int or not 2**MOST_GUESSED <= secret < 2**SECRET_BITS:
        text = f"run: {str(store.directory)!r} must contain a {SECRET} of {SECRET_BITS} bits to go on, as every private run"
        raise RunError(f"{text} over sites does; give the new run another name=")
    return secret


def _introduced(name: str, came: bytes, frozen: str) -> Meeting | str:
    """The introduction of a site, or why it cannot take part."""
    if len(came) > MOST_NAMES_BYTES:
        return broken("introduction", f"have at most {MOST_NAMES_BYTES} bytes", len(came))
    try:
        answer = Answer.from_bytes(came)
    except ValueError as error:
        return f"message is malformed: {error}"
    met = answer.meeting
    if met is None:
        rule, text = answer.failure or ("meeting", "must say who it is")
        return f"{rule}: {text}"
    if met.name != name:
        return broken("name", f"be {name!r}, the one it is admitted under", met.name)
    if met.backbone != frozen:
        return f"weights of the backbone must be the server's ({frozen[:12]}...), got {met.backbone[:12]}..."
    return met


def _travelling(config: Config) -> dict[str, Any]:
    """The part of a config that is sent to sites."""
    return config.model_dump(mode="json", exclude=HERE)


def _check(config: Config) -> None:
    """Raise where a setting needs images, or states of clients, on the server."""
    for field, value, instead in _unfit(config):
        if value:
            message = broken(field, f"be {instead} where clients are sites with images of their own", value)
            raise ConfigError(message + MISSING.get(field, ""))


MISSING = {"federation.secure_sum": "; docs/secure_sum.md, Over sites, says what is missing"}


def _unfit(config: Config) -> Iterator[tuple[str, object, str]]:
    yield "data.novel", config.data.novel, "0"
    yield "data.other_set", config.data.other_set, "absent"
    yield "data.unseen_domain", config.data.unseen_domain, "absent"
    yield "data.imbalance", config.data.imbalance, "absent"
    yield "data.validation", config.data.validation, "absent"
    yield "federation.evaluate_on", config.federation.evaluate_on == "validation" and "validation", "test"
    yield "attack", config.attack and config.attack.kind, "absent"
    yield "federation.secure_sum", config.federation.secure_sum, "false"
    if config.privacy is not None and config.privacy.noise_at == "step":
        yield "privacy.noise_at", "step", "client or server"
