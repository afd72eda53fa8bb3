"""The far side of `engines/remote.py`: takes an order, does what it says for one client, and answers. Free of Flower.

A node runs its own copy of fedprompt on its own images. What comes from the server is settings and tensors, never code, and
what goes back has passed the audit of `federation/wire.py`. Of an error it tells the server only what cannot be about images.
"""

from __future__ import annotations

import secrets
import sys
import time
import traceback
from abc import ABC, abstractmethod
from pathlib import Path

import torch

from fedprompt import __version__, registry
from fedprompt import config as configuration
from fedprompt.assets import write_atomically
from fedprompt.backbones.catalog import NAMED
from fedprompt.backbones.kept import identity
from fedprompt.backbones.vit import ViT
from fedprompt.config import BackboneConfig, Config, DataConfig, EngineConfig, OutputConfig
from fedprompt.data.base import Source
from fedprompt.data.site import Agreed, agree, open_site, site_manifest
from fedprompt.data.transforms import ImageStore
from fedprompt.engines.client import ClientRuntime
from fedprompt.engines.images import ImageBank
from fedprompt.engines.kept_states import NODES, KeptStates
from fedprompt.engines.ledger import Entry, Ledger, question
from fedprompt.engines.orders import Answer, Meeting, Order, Setting
from fedprompt.errors import ConfigError, ContractError, DivergenceError, FedpromptError, RunError
from fedprompt.experiment import Experiment, agreed
from fedprompt.federation import privacy, wire
from fedprompt.roles import Tensors
from fedprompt.streams import sealed

TOLD: dict[type[FedpromptError], str] = {
    ConfigError: "config",
    ContractError: "contract",
    DivergenceError: "finite",
    RunError: "state",
}  #: errors whose text speaks of settings and tensors alone, and the rule they are told under


class Refusal(Exception):
    """A node will not do what it was asked; the rule in a word, and a sentence that anybody may read."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


class Node(ABC):
    """Does the orders of one run after another; data and backbone stay in memory from order to order."""

    def __init__(self) -> None:
        self._known: Setting | None = None
        self._client = -1
        self._made: tuple[ClientRuntime, KeptStates] | None = None

    def answer(self, blob: bytes) -> bytes:
        """The answer to an order, whatever it is: an error is one too."""
        try:
            order = Order.from_bytes(blob)
        except ValueError as error:
            return Answer(("order", f"order is malformed: {error}")).to_bytes()
        try:
            return self._done(order).to_bytes()
        except Refusal as refusal:
            say(f"refused: {refusal}")
            failure = (refusal.rule, str(refusal))
        except FedpromptError as error:
            say(f"{type(error).__name__}: {error}")
            failure = _told(error)
        except Exception as error:
            say(traceback.format_exc())
            failure = ("error", f"{type(error).__name__}: see the log of the node")
        return Answer(failure).to_bytes()

    @abstractmethod
    def meet(self, setting: Setting) -> Meeting:
        """How this node introduces itself to a run."""

    @abstractmethod
    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, KeptStates]:
        """The client's side of a run; a Refusal where this node cannot be that client."""

    def _done(self, order: Order) -> Answer:
        if order.setting.version != __version__:
            text = f"fedprompt must be {order.setting.version} as on the server, got {__version__}"
            raise Refusal("version", text)
        if order.kind == "meet":
            return Answer(meeting=self.meet(order.setting))
        runtime, states = self._prepared(order)
        _check_rounds(order, runtime.config.federation.rounds)
        states.begin(order)
        received = {name: tensor.to(runtime.world.device) for name, tensor in order.received.items()}
        result = None
        if order.evaluate is not None:
            own = {name: tensor for name, tensor in received.items() if name != privacy.CLIP}
            result = runtime.evaluate(order.evaluate, order.client, own)
        if order.kind == "work" and order.train is None:
            return Answer(result=result)
        try:
            return Answer(result=result, packed=self.update(order, runtime, states, received))
        except DivergenceError as error:
            return Answer(_told(error), result=result)

    def update(self, order: Order, runtime: ClientRuntime, states: KeptStates, received: Tensors) -> bytes:
        """What goes up: statistics before the first round, or what came of training."""
        if order.train is None:
            return wire.pack(runtime.survey(order.client, received))
        return wire.pack(runtime.train(order.train, order.client, received))

    def _prepared(self, order: Order) -> tuple[ClientRuntime, KeptStates]:
        if self._made is None or (self._known, self._client) != (order.setting, order.client):
            self._made = None
            self._made = self.make(order.setting, order.client)
            self._known, self._client = order.setting, order.client
        return self._made


class SimulatedNode(Node):
    """Any client of a partition, in a process that plays many of them."""

    def meet(self, setting: Setting) -> Meeting:
        raise Refusal("order", "simulated nodes need no introduction")

    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, KeptStates]:
        experiment = Experiment(setting.config)
        source, manifest, backbone, world = experiment.prepare()
        _check_backbone(backbone, setting)
        states = KeptStates(experiment.config.run_directory / NODES / setting.run)
        bank = experiment.bank(source, manifest, backbone)
        return experiment.client_runtime(source, world, bank, states), states

    def _prepared(self, order: Order) -> tuple[ClientRuntime, KeptStates]:
        self._client = order.client  # one preparation serves all clients
        return super()._prepared(order)


class Site(Node):
    """One client with images of its own. Everything it keeps is under `directory`, which nobody else needs to see."""

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
    ) -> None:
        """`device` and `weights` are this node's own choice of where to compute and where the backbone lies.

        With `least_noise` it takes part only where its updates are noised here, and at least so much.
        """
        super().__init__()
        self.name, self._data, self._format, self._directory = name, data, format, directory
        self._device, self._weights, self._anew, self._least_noise = device, weights, anew, least_noise
        self._backbone: tuple[BackboneConfig, ViT] | None = None

    def update(self, order: Order, runtime: ClientRuntime, states: KeptStates, received: Tensors) -> bytes:
        """The same, and in a private run the same again for the same round."""
        if runtime.terms is None or runtime.terms.settings.noise_at == "server":
            return super().update(order, runtime, states, received)
        ledger, round = Ledger(states.folder(order.client) / "sent"), order.train or 0
        asked = question(order.kind, order.received, states.get(order.client))
        known = ledger.answered(round, asked)
        if known is None:
            packed = super().update(order, runtime, states, received)
            known = Entry(packed, states.get(order.client) or {})
            ledger.note(round, asked, known)
        elif order.train is not None:
            states.put(order.client, known.state)
        return known.packed

    def _done(self, order: Order) -> Answer:
        begin = time.monotonic()
        say(f"begins: {_deed(order)}")
        try:
            return super()._done(order)
        finally:
            say(f"ends: {_deed(order)}, after {time.monotonic() - begin:.1f} s")

    def look(self) -> None:
        """Raise where there are no images to be used."""
        open_site(self._data, self._format, DataConfig(), self._directory / "cache")

    def meet(self, setting: Setting) -> Meeting:
        experiment = self._experiment(setting)
        return Meeting(self.name, self._source(experiment.config).class_names, identity(self._loaded(experiment)))

    def make(self, setting: Setting, client: int) -> tuple[ClientRuntime, KeptStates]:
        experiment = self._experiment(setting)
        config, names, class_names = experiment.config, setting.client_names or (), setting.class_names or ()
        if not client < len(names) or names[client] != self.name:
            raise Refusal("name", f"order must be for {self.name!r}, got one for client {client} of {list(names)}")
        self._check_privacy(config)
        backbone = self._loaded(experiment)
        _check_backbone(backbone, setting)
        own = self._source(config)
        for sentence in agree({self.name: own.class_names}, class_names).refused.values():
            raise Refusal("classes", sentence)
        source = Agreed(own, class_names)
        world = experiment.world(backbone, class_names, names)
        manifest = site_manifest(source, config.data, names, client)
        pixels = ImageStore(source, backbone.shape.image_size, config.data.resize, self._directory / "cache")
        states = KeptStates(self._directory / "states" / setting.run, self._anew)
        self._notice_changes(source, setting.run)
        bank = ImageBank(source, manifest, pixels, backbone, config.engine)
        runtime = ClientRuntime(config, world, experiment.method, bank, states, source.domain_names)
        runtime.terms = agreed(config, world, runtime.steps)
        runtime.secret = unknown_noise
        return runtime, states

    def _notice_changes(self, source: Source, run: str) -> None:
        """Say in this node's own log that its images are not those it began a run with."""
        note = self._directory / "states" / run / "images"
        if note.exists() and note.read_text(encoding="ascii") != source.fingerprint:
            say(f"WARNING: images at {self._data} have changed since this node joined the run; results may, too")
        write_atomically(note, source.fingerprint.encode())

    def _check_privacy(self, config: Config) -> None:
        """Refuse a run that would protect this site's updates less than the site asks for."""
        if not self._least_noise:
            return
        if config.federation.evaluate_at == "after_local":
            raise Refusal("privacy", "federation.evaluate_at must not be after_local here: its figures are not noised")
        settings = config.privacy
        noise = (settings.noise or 0.0) if settings is not None and settings.noise_at == "client" else 0.0
        if noise < self._least_noise:
            text = f"privacy must have noise_at: client and noise of at least {self._least_noise:g} here, got {noise:g}"
            raise Refusal("privacy", text)

    def _experiment(self, setting: Setting) -> Experiment:
        """The run's settings, with this node's own where it runs and where it keeps things."""
        config = registry.completed(configuration.parse(setting.config))
        device, weights = self._device, self._weights
        if weights is None and config.backbone.name not in NAMED:
            text = f"backbone.name must be one of {', '.join(NAMED)}, or be given to this node by --weights"
            raise Refusal("backbone", text)
        backbone = config.backbone.model_copy(
            update={"device": device or config.backbone.device, "name": weights or config.backbone.name}
        )
        return Experiment(
            config.model_copy(
                update={"backbone": backbone, "engine": EngineConfig(), "output": OutputConfig(), "attack": None}
            )
        )

    def _loaded(self, experiment: Experiment) -> ViT:
        wanted = experiment.config.backbone
        if self._backbone is None or self._backbone[0] != wanted:
            self._backbone = (wanted, experiment.backbone())
        return self._backbone[1]

    def _source(self, config: Config) -> Source:
        return open_site(self._data, self._format, config.data, self._directory / "cache")


def unknown_noise(round: int, client: int) -> torch.Generator:
    """Noise that nobody can take off again, the server included."""
    return sealed(secrets.token_bytes(32))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _deed(order: Order) -> str:
    """What an order was about, for the node's log."""
    if order.kind != "work":
        return {"meet": "introduction", "survey": "statistics"}[order.kind]
    parts = (("evaluation of round", order.evaluate), ("training of round", order.train))
    return ", ".join(f"{what} {round}" for what, round in parts if round is not None)


def _check_rounds(order: Order, last: int) -> None:
    """A private run has noise for its own rounds, not for more."""
    for asked in (order.evaluate, order.train):
        if asked is not None and not 1 <= asked <= last:
            raise Refusal("round", f"round must be one of the run's 1 to {last}, got {asked}")


def _check_backbone(backbone: ViT, setting: Setting) -> None:
    found = identity(backbone)
    if found != setting.backbone:
        text = f"weights of the backbone must be the server's ({setting.backbone[:12]}...), got {found[:12]}..."
        raise Refusal("backbone", text)


def _told(error: FedpromptError) -> tuple[str, str]:
    """What the server is told of an error: all of it, or only its kind where it may speak of images and files."""
    for kind, rule in TOLD.items():
        if isinstance(error, kind):
            return rule, str(error)
    return "node", f"{type(error).__name__}: see the log of the node"
