"""The node side of `engines/remote/remote_engine.py`: takes an order, carries it out for one client, and answers. Free of Flower.

A node runs its own copy of fedprompt on its own images. The server sends settings and tensors, never code. Every
update passes the audit of `core/wire.py`. An error message for the server never contains anything about images.
"""

from __future__ import annotations

import json
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprompt import __version__
from fedprompt import config as configuration
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import identity
from fedprompt.client.factory import ExperimentFactory, privacy_terms
from fedprompt.client.runtime import ClientRuntime, UsesTrainingImages
from fedprompt.config import BackboneConfig, Config, DataConfig, EngineConfig, OutputConfig
from fedprompt.config.registries import BACKBONES
from fedprompt.core import registry, wire
from fedprompt.data.site_data import Agreed, agree, open_site, site_manifest
from fedprompt.data.sources.base import Source
from fedprompt.engines.remote import site_figures
from fedprompt.engines.remote.node_state import NODES, NodeState
from fedprompt.engines.remote.order_checks import (
    Refusal,
    check_backbone,
    check_received,
    check_rounds,
    is_about_files,
    is_private,
    refuse,
    reported,
)
from fedprompt.engines.remote.privacy_ledger import EXACT, PrivacyLedger
from fedprompt.engines.remote.protocol import LONGEST_NAME, Answer, Meeting, Order, Setting, read_result
from fedprompt.engines.remote.release_ledger import Entry, Ledger, question
from fedprompt.engines.remote.run_records import RunRecord, digest, pinned_settings
from fedprompt.engines.remote.site_policy import Refused, SitePolicy, refused_method, refused_settings
from fedprompt.engines.remote.site_split import SiteSplit
from fedprompt.errors import DivergenceError, FedpromptError, RunError
from fedprompt.features.image_bank import ImageBank
from fedprompt.features.item_store import open_store
from fedprompt.io.bounded_read import strict_json
from fedprompt.io.files import write_atomically
from fedprompt.io.log_lines import fact
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.privacy import mechanism
from fedprompt.privacy.keystream import Keystream, new_keystream
from fedprompt.tensors import Tensors


@dataclass(frozen=True)
class Done:
    """An order and its answer, as far as someone who watches the node may know."""

    kind: str
    run: str
    """The name of the run, or its number."""
    round: int | None
    seconds: float
    rule: str | None
    """Why it was refused, or failed."""
    bytes_in: int
    bytes_out: int


class Node(ABC):
    """Carries out the orders of one run at a time; data and backbone stay in memory between orders."""

    def __init__(self) -> None:
        self.told: Callable[[Done], None] = lambda done: None
        """Called after every order."""
        self._known: Setting | None = None
        self._client = -1
        self._made: tuple[ClientRuntime, NodeState] | None = None

    def answer(self, blob: bytes) -> bytes:
        """The answer to an order. An error is also returned as an answer."""
        begin = time.monotonic()
        try:
            order = Order.from_bytes(blob)
        except ValueError as error:
            return Answer(("order", f"order is malformed: {error}")).to_bytes()
        answer = self._answered(order)
        packed, about = answer.to_bytes(), _about(order)
        rule = (answer.failure or answer.withheld or (None,))[0]
        seconds = time.monotonic() - begin
        self.told(Done(order.kind, about["run"], about["round"], seconds, rule, len(blob), len(packed)))
        return packed

    def _answered(self, order: Order) -> Answer:
        try:
            return self._done(order)
        except Refusal as refusal:
            fact(f"refused: {refusal}", "warning", **_about(order))
            failure = (refusal.rule, str(refusal))
        except FedpromptError as error:
            fact(f"{type(error).__name__}: {error}", "error", **_about(order))
            failure = reported(error)
        except Exception as error:
            fact(traceback.format_exc(), "error", **_about(order))
            failure = ("error", f"{type(error).__name__}: see the log of the node")
        return Answer(failure)

    @abstractmethod
    def meet(self, setting: Setting) -> Meeting:
        """How this node introduces itself to a run."""

    @abstractmethod
    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, NodeState]:
        """The client's side of a run; a Refusal if this node cannot be that client."""

    def _done(self, order: Order) -> Answer:
        if order.setting.version != __version__:
            text = f"fedprompt must be {order.setting.version} as on the server, got {__version__}"
            raise Refusal("version", text)
        if order.kind == "meet":
            return Answer(meeting=self.meet(order.setting))
        runtime, states = self._prepared(order)
        check_rounds(order, runtime.config.federation.rounds)
        check_received(order.received, runtime)
        states.begin(order)
        received = {name: tensor.to(runtime.world.device) for name, tensor in order.received.items()}
        result = withheld = None
        if order.evaluate is not None:
            own = {name: tensor for name, tensor in received.items() if name != mechanism.CLIP}
            try:
                result = self.evaluate(order.evaluate, order, runtime, states, own)
            except Refusal as refusal:
                if order.train is None:
                    raise
                withheld = (refusal.rule, str(refusal))
        if order.kind == "work" and order.train is None:
            return Answer(result=result)
        try:
            packed = self.update(order, runtime, states, received)
            return Answer(result=result, withheld=withheld, packed=packed)
        except DivergenceError as error:
            return Answer(reported(error), result=result, withheld=withheld)

    def evaluate(
        self, round: int, order: Order, runtime: ClientRuntime, states: NodeState, received: Tensors
    ) -> ClientResult:
        """The figures of a round; a Refusal if they are withheld."""
        return runtime.evaluate(round, order.client, received)

    def update(self, order: Order, runtime: ClientRuntime, states: NodeState, received: Tensors) -> bytes:
        """The upload: statistics before the first round, otherwise the result of training."""
        if order.train is None:
            return wire.pack(runtime.survey(order.client, received))
        return wire.pack(runtime.train(order.train, order.client, received))

    def _prepared(self, order: Order) -> tuple[ClientRuntime, NodeState]:
        if self._made is None or (self._known, self._client) != (order.setting, order.client):
            self._made = None
            self._made = self.make(order.setting, order.client)
            self._known, self._client = order.setting, order.client
        return self._made


class SimulatedNode(Node):
    """Any client of a partition, in a process that acts as many of them."""

    def meet(self, setting: Setting) -> Meeting:
        raise Refusal("order", "simulated nodes need no introduction")

    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, NodeState]:
        factory = ExperimentFactory(setting.config)
        source, manifest, backbone, world = factory.prepare()
        check_backbone(backbone, setting)
        states = NodeState(factory.config.run_directory / NODES / setting.run)
        bank = factory.bank(source, manifest, backbone)
        return factory.client_runtime(source, world, bank, states), states

    def _prepared(self, order: Order) -> tuple[ClientRuntime, NodeState]:
        self._client = order.client  # one preparation serves all clients
        return super()._prepared(order)


class Site(Node):
    """One client with its own images. All its files are under `directory`, which is private."""

    def __init__(
        self,
        name: str,
        data: str,
        directory: Path,
        format: str = "auto",
        device: str | None = None,
        weights: str | None = None,
        anew: bool = False,
        least_noise: float = 0.0,
        policy: SitePolicy | None = None,
    ) -> None:
        """`device` and `weights` are this node's own choice of device and backbone file.

        `policy` is what the site allows, the default one when absent. `least_noise` may require more noise than the policy.
        """
        super().__init__()
        self.name, self._data, self._format, self._directory = name, data, format, directory
        self._device, self._weights, self._anew = device, weights, anew
        policy = policy or SitePolicy()
        self.policy = policy.model_copy(update={"least_noise": max(policy.least_noise, least_noise)})
        self.spent = PrivacyLedger(directory, self.policy)
        self._backbone: tuple[BackboneConfig, ViT] | None = None

    def evaluate(
        self, round: int, order: Order, runtime: ClientRuntime, states: NodeState, received: Tensors
    ) -> ClientResult:
        """The figures that the policy allows. Each round has one answer, which is repeated for the same question."""
        if self.policy.evaluate == "none":
            raise Refusal("evaluation", "this site gives no figures of its test images")
        record, images = RunRecord(self._directory, order.setting.run), runtime.bank.images(order.client, "test")
        if len(images) < self.policy.least_test_images:
            text = f"this site gives no figures of fewer than {self.policy.least_test_images} test images"
            raise Refusal("evaluation", text)
        ledger, request = (
            Ledger(record.folder / "tested" / self.name),
            question("evaluate", received, states.get(order.client)),
        )
        try:
            known = ledger.answered(round, request)
        except RunError as error:
            raise Refusal("evaluation", f"evaluation: {error}") from error
        if known is not None and not known.packed:
            raise Refusal("evaluation", f"evaluation of round {round} has failed")
        if known is not None:
            return read_result(strict_json(known.packed.decode()))
        if record.trained > round:
            text = f"evaluation: round {round} must be tested before round {record.trained} is trained"
            raise Refusal("evaluation", text)
        cost = self.policy.evaluation_epsilon if self.policy.evaluate == "noised" else 0.0
        self._afford(self.spent.charge_evaluation(order.setting.run, round, cost))
        try:
            result = runtime.evaluate(round, order.client, received)
        except UsesTrainingImages as error:
            raise Refusal("privacy", str(error)) from error
        except Exception as error:
            if is_about_files(error):
                raise
            if not is_private(runtime) and self.policy.evaluate != "noised":
                ledger.note(round, request, Entry(b"", {}))  # that it fails may depend on images: it is the answer
                raise
            fact(f"evaluation of round {round} failed: {type(error).__name__}: {error}", "error", **_about(order))
            result = site_figures.nothing_right(len(images))
        result = site_figures.released(self.policy, result)
        ledger.note(round, request, Entry(json.dumps(result.to_json()).encode(), {}))
        return result

    def update(self, order: Order, runtime: ClientRuntime, states: NodeState, received: Tensors) -> bytes:
        """The same; a private run repeats the stored answer for a round that was already answered."""
        if order.train is not None and order.keep_as is None:
            raise RunError("order.keep_as must be a number where a state is to be kept, got None")
        run, round = order.setting.run, order.train or 0
        record = RunRecord(self._directory, run)
        if not is_private(runtime):
            self._afford(self.spent.charge_update(run, round, EXACT))
            record.note_trained(round)
            return super().update(order, runtime, states, received)
        ledger = Ledger(record.folder / "sent" / self.name)
        request = question(order.kind, order.received, states.get(order.client))
        known = ledger.answered(round, request)
        if known is None:
            assert runtime.terms is not None
            self._afford(self.spent.charge_update(run, round, runtime.terms.noise))
            record.note_trained(round)
            packed = self._private_update(order, runtime, states, received)
            known = Entry(packed, states.get(order.client) or {})
            ledger.note(round, request, known)
        elif order.train is not None:
            states.put(order.client, known.state)
        return known.packed

    def _private_update(self, order: Order, runtime: ClientRuntime, states: NodeState, received: Tensors) -> bytes:
        """An update, or noise alone if training fails: whether it diverges depends on images, too."""
        try:
            return super().update(order, runtime, states, received)
        except Exception as error:
            if is_about_files(error):
                raise
            fact(f"{_description(order)} failed: {type(error).__name__}: {error}", "error", **_about(order))
            return wire.pack(runtime.nothing(order.train or 0, order.client, received))

    def _afford(self, complaint: str | None) -> None:
        if complaint is not None:
            raise Refusal("budget", complaint)

    def _done(self, order: Order) -> Answer:
        begin = time.monotonic()
        fact(f"begins: {_description(order)}", **_about(order))
        try:
            for name, tensor in order.received.items():
                if not wire.is_finite(tensor):
                    raise Refusal("finite", f"tensor {name!r} from the server must be finite, got NaN or infinity")
            return super()._done(order)
        finally:
            taken = time.monotonic() - begin
            fact(f"ends: {_description(order)}, after {taken:.1f} s", **_about(order))
            if self._made is not None and self._known is not None and self._known.run == order.setting.run:
                RunRecord(self._directory, order.setting.run).add_seconds(taken)

    def check_images(self) -> None:
        """Raise if there are no usable images."""
        open_site(self._data, self._format, DataConfig(), self._directory / "cache")

    def inspect(self, config: Mapping[str, Any]) -> list[Refused]:
        """All reasons to refuse a run of this config here; nothing is started."""
        setting = Setting("0" * 32, config, "")
        found = list(refused_settings(self.policy, self._parsed(setting)))
        if found:
            return found  # a model with refused sizes is not built
        try:
            factory = self._factory(setting)
        except Refusal as refusal:
            return [Refused(refusal.rule, str(refusal))]
        own = self._source(factory.config)
        class_names = tuple(factory.config.data.classes or own.class_names)
        refused = agree({self.name: own.class_names}, class_names).refused.values()
        found = [Refused("classes", sentence) for sentence in refused]
        world = factory.world(self._loaded(factory), class_names, (self.name, f"{self.name}-and-others"))
        found += refused_method(self.policy, factory.config, factory.method, world, 0)
        if not found and self.policy.evaluate != "none":
            data = self._split().applied(factory.config.data)
            tested = len(site_manifest(Agreed(own, class_names), data, (self.name,), 0).clients[0].test)
            if tested < self.policy.least_test_images:
                text = (
                    f"test images must be {self.policy.least_test_images} for figures of them to be given, got {tested}"
                )
                found.append(Refused("evaluation", text))
        return found

    def meet(self, setting: Setting) -> Meeting:
        factory = self._factory(setting)
        return Meeting(self.name, self._source(factory.config).class_names, identity(self._loaded(factory)))

    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, NodeState]:
        factory = self._factory(setting)
        config, names, class_names = factory.config, setting.client_names or (), setting.class_names or ()
        if len(set(names)) < len(names):
            raise Refusal("name", "setting.client_names must hold every name once")
        if not client < len(names) or names[client] != self.name:
            raise Refusal("name", f"order must be for {self.name!r}, got one for client {client} of {list(names)}")
        if config.privacy is not None and config.privacy.noise is None:
            raise Refusal("privacy", "privacy.noise must be given in an order: the server finds it for target_epsilon")
        pinned = pinned_settings(setting, self._parsed(setting), self.name)
        record = RunRecord(self._directory, setting.run)
        if record.begun_unpinned or record.pinned not in (None, digest(pinned)):
            raise Refusal("settings", f"settings of run {setting.run} must be those it began with at this site")
        backbone = self._loaded(factory)
        check_backbone(backbone, setting)
        world = factory.world(backbone, class_names, names)
        refuse(refused_method(self.policy, config, factory.method, world, client))
        own = self._source(config)
        for sentence in agree({self.name: own.class_names}, class_names).refused.values():
            raise Refusal("classes", sentence)
        if self.policy.approve and record.approved != digest(pinned):
            if not record.wait(pinned):
                raise Refusal("settings", f"settings of run {setting.run} must be those that wait for approval here")
            raise Refusal("approval", f"run {setting.run} must be approved by a person at this site first")
        record.pin(pinned)
        source = Agreed(own, class_names)
        manifest = site_manifest(source, self._split().applied(config.data), names, client)
        pixels = open_store(source, backbone, config.data.resize, self._directory / "cache")
        states = NodeState(record.folder, self._anew)
        self._notice_changes(source, setting.run)
        bank = ImageBank(source, manifest, pixels, backbone, config.engine)
        runtime = ClientRuntime(config, world, factory.method, bank, states, source.domain_names)
        runtime.terms = privacy_terms(config, world, runtime.steps)
        runtime.secret = unknown_noise
        runtime.blind = self.policy.evaluate == "noised" or self.policy.least_noise > 0
        return runtime, states

    def _prepared(self, order: Order) -> tuple[ClientRuntime, NodeState]:
        made = super()._prepared(order)
        most, used = self.policy.most_seconds, RunRecord(self._directory, order.setting.run).seconds
        if most is not None and used > most:
            raise Refusal("policy", f"a run must take at most {most:g} s of this site's time")
        return made

    def _split(self) -> SiteSplit:
        split = SiteSplit.of(self._directory, self.policy)
        if split.differs(self.policy):
            fact(f"the choice of images is still the one of this site's first contact: {split}", "warning")
        return split

    def _notice_changes(self, source: Source, run: str) -> None:
        """Log a warning if the images have changed since this node joined the run."""
        note = self._directory / "states" / run / "images"
        if note.exists() and note.read_text(encoding="ascii") != source.fingerprint:
            fact(f"images at {self._data} have changed since this node joined the run; results may, too", "warning")
        write_atomically(note, source.fingerprint.encode())

    def _parsed(self, setting: Setting) -> Config:
        """The run's settings, with all defaults spelled out."""
        return registry.completed(
            configuration.parse(setting.config, check_names=False)
        )  # the server may have other names registered

    def _factory(self, setting: Setting) -> ExperimentFactory:
        """The run's settings, with this node's own device, weights and output directory."""
        config = self._parsed(setting)
        refuse(refused_settings(self.policy, config))
        device, weights = self._device, self._weights
        if weights is None and config.backbone.name not in BACKBONES:
            text = f"backbone.name must {BACKBONES.rule()}, or be given to this node by --weights"
            raise Refusal("backbone", text)
        backbone = config.backbone.model_copy(
            update={"device": device or config.backbone.device, "name": weights or config.backbone.name}
        )
        return ExperimentFactory(
            config.model_copy(
                update={"backbone": backbone, "engine": EngineConfig(), "output": OutputConfig(), "attack": None}
            )
        )

    def _loaded(self, factory: ExperimentFactory) -> ViT:
        wanted = factory.config.backbone
        if self._backbone is None or self._backbone[0] != wanted:
            self._backbone = (wanted, factory.backbone())
        return self._backbone[1]

    def _source(self, config: Config) -> Source:
        data = config.data.model_copy(update={"per_domain": None})  # the server does not choose the images
        return open_site(self._data, self._format, data, self._directory / "cache")


def unknown_noise(round: int, client: int) -> Keystream:
    """Noise that the server cannot remove, because every release has a new secret key."""
    return new_keystream()


def _about(order: Order) -> dict[str, Any]:
    """Run and round of an order, for the log; the run by its number where its settings cannot be read."""
    try:
        name = configuration.parse(order.setting.config, check_names=False).run_name
    except FedpromptError:
        name = order.setting.run
    return {"run": name[:LONGEST_NAME], "round": order.evaluate if order.train is None else order.train}


def _description(order: Order) -> str:
    """A short description of an order, for the node's log."""
    if order.kind != "work":
        return {"meet": "introduction", "survey": "statistics"}[order.kind]
    parts = (("evaluation of round", order.evaluate), ("training of round", order.train))
    return ", ".join(f"{what} {round}" for what, round in parts if round is not None)
