"""A run that is opened to be used: its settings, its frozen backbone and its server at the last committed round.

Of the run only `run.db` is read, and of the backbone its weights. Images are opened late (see `late.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.backbones.kept import identity
from fedprompt.backbones.vit import ViT
from fedprompt.config import Config
from fedprompt.data.base import Source
from fedprompt.data.sources import open_source
from fedprompt.data.transforms import ImageStore
from fedprompt.engines.images import CommonImages, ImageBank
from fedprompt.engines.kept_states import KEPT_AS, MOST_BYTES, SUFFIX, stored_state
from fedprompt.errors import BackboneError, ConfigError, DataError, RunError, broken
from fedprompt.experiment import Experiment
from fedprompt.federation import wire
from fedprompt.federation.pool import open_pool
from fedprompt.federation.states import ClientStates
from fedprompt.federation.store import RUN_ID
from fedprompt.method import Method, Server, World
from fedprompt.reading import read_bytes
from fedprompt.roles import Tensors
from fedprompt.run import Run
from fedprompt.using.late import LateBank, LateRuntime

SHOWN = 5  #: clients that a refusal names
NODE_STATES = "states"  #: the folder of a node's directory that holds what it keeps of every run


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """A run at its last committed round."""

    run: Run
    experiment: Experiment  #: of the run's settings; it is never run
    backbone: ViT
    world: World  #: as the clients of the run know it
    server: Server

    @classmethod
    def open(
        cls,
        run: str | Path | Run,
        weights: str | Path | None = None,
        device: str | None = None,
        method: Method | None = None,
    ) -> OpenedRun:
        """Open a run directory, or its `run.db`.

        `weights` says where the backbone lies now, if not where the config of the run says; it must be the very same one.
        `method` is for runs of a method that is not registered.
        """
        run = run if isinstance(run, Run) else Run(run)
        state = run.reader.server_state()
        if state is None or state[0] < 1:
            raise RunError(f"run {str(run.directory)!r} must have a finished round to be used, got none")
        experiment = Experiment(_settings(run.config, weights, device))
        if method is not None:
            experiment.method = method
        backbone = experiment.backbone()
        _check_weights(run, identity(backbone))
        world = experiment.world(backbone, _class_names(run), run.clients)
        shared, own = ({name: each.to(world.device) for name, each in wire.decode(blob).items()} for blob in state[1:])
        pool, own = open_pool(run.reader, own, world)
        shared = wire.require_like(shared, world.roles.shared, "stored shared tensors")
        return cls(run, experiment, backbone, world, Server(shared, own, state[0], pool))

    @property
    def config(self) -> Config:
        return self.experiment.config

    @property
    def method(self) -> Method:
        return self.experiment.method

    @property
    def round(self) -> int:
        """The last committed round."""
        return self.server.round

    def number(self, client: str | int) -> int:
        """The number of a client that is given by name or number; a name that is a number is a name first."""
        names = self.world.client_names
        if isinstance(client, str) and client in names:
            return names.index(client)
        number = int(client) if isinstance(client, int) or (client.isdecimal() and client.isascii()) else -1
        if not 0 <= number < len(names):
            few = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            rule = f"be one of the {len(names)} clients of the run ({few}) or a number in 0..{len(names) - 1}"
            raise ConfigError(broken("client", rule, client))
        return number

    def received(self, client: int, world: World | None = None) -> Tensors:
        """What a client is sent after the last round, audited as in the run; `world` may know more clients than the run."""
        world = world or self.world
        tensors = dict(self.method.download(world, self.server.asked_by([client]), client))
        wire.audit_download(tensors, world.roles, world.client_names[client])
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def bank(self, labelled: Source | None = None) -> LateBank:
        """The training images of all clients: those of the run, or, for whoever asks, `labelled` ones."""

        def own() -> ImageBank:
            source, manifest = self._source(), self.run.manifest()
            manifest.check(source)
            return self.experiment.bank(source, manifest, self.backbone)

        def given(source: Source) -> ImageBank:
            size, cache = self.backbone.shape.image_size, self.experiment.cache
            store = ImageStore(source, size, self.config.data.resize, cache)
            return CommonImages.of(source, np.arange(len(source)), store, self.backbone, self.config.engine)

        return LateBank(self.backbone, own if labelled is None else lambda: given(labelled))

    def _source(self) -> Source:
        """The images the run was trained on."""
        why = f"{self.config.label} looks at a client's training images before it predicts, but"
        if self.config.engine.kind == "flower":
            raise RunError(f"{why} those of run {str(self.run.directory)!r} are at the sites")
        try:
            return open_source(self.config.data, self.experiment.cache)
        except DataError as error:
            raise DataError(f"{why} {error}") from error

    def states(self, node: str | Path | None = None) -> ClientStates:
        """What the clients keep to themselves: in the run file, beside it (simulated nodes), or with a `node` of a site."""
        if node is not None:
            return ClientStates(_of_node(self.run, Path(node)))
        if self.config.engine.kind == "flower":
            return ClientStates(_refuse_site(self.run))
        return ClientStates(stored_state(self.run.reader))

    def fitted(
        self, client: int, bank: ImageBank, states: ClientStates, world: World | None = None, epochs: int | None = None
    ) -> Tensors:
        """The parameters a client predicts with, made as an evaluation makes them at the point of `federation.evaluate_at`.

        `epochs` is how long a client that is held out fits itself, where that is not what the run's settings say.
        """
        world, config = world or self.world, self.config
        if epochs is not None:
            federation = config.federation.model_copy(update={"newcomer_epochs": epochs})
            config = config.model_copy(update={"federation": federation})
        runtime = LateRuntime(config, world, self.method, bank, states, ())
        params = runtime.fitted(self.round, client, self.received(client, world))
        return {name: tensor.detach() for name, tensor in params.items()}

    def with_newcomer(self, name: str) -> tuple[World, int]:
        """The world with one client more that never trained, and its number."""
        number = self.world.clients
        names = (*self.world.client_names, name)
        return replace(self.world, client_names=names, newcomers=self.world.newcomers | {number}), number

    def close(self) -> None:
        self.run.close()


def _settings(config: Config, weights: str | Path | None, device: str | None) -> Config:
    """The settings of a run on this machine. A compiled backbone takes long to make, and rounds in another way."""
    given = {"name": None if weights is None else str(weights), "device": device}
    backbone = config.backbone.model_copy(update={key: value for key, value in given.items() if value is not None})
    engine = config.engine.model_copy(update={"compile": False})
    return config.model_copy(update={"backbone": backbone, "engine": engine})


def _check_weights(run: Run, found: str) -> None:
    stored = run.reader.fact("backbone")
    if found != stored:
        rule = f"be the ones run {str(run.directory)!r} was trained with ({str(stored)[:12]}...)"
        raise BackboneError(broken("weights of the backbone", rule, found[:12] + "..."))


def _class_names(run: Run) -> tuple[str, ...]:
    names: Any = run.reader.fact("classes")
    if not names or not all(isinstance(name, str) for name in names):
        raise RunError(
            f"run: {str(run.directory)!r} is damaged: the fact 'classes' is missing or not as it was written"
        )
    return tuple(names)


def _of_node(run: Run, directory: Path) -> Callable[[int], bytes | None]:
    """How to read a state that a node of a site keeps in its own directory."""

    def read(client: int) -> bytes | None:
        blob = run.reader.client_state(client)
        if blob is None:
            return None
        kept = wire.decode(blob)
        if KEPT_AS not in kept:
            raise ConfigError(
                broken("--state", "be absent where the run file holds the clients' states", str(directory))
            )
        folder = directory / NODE_STATES / str(run.reader.fact(RUN_ID)) / str(client)
        try:
            return read_bytes(folder / f"{int(kept[KEPT_AS])}{SUFFIX}", MOST_BYTES)
        except (OSError, ValueError) as error:
            rule = f"be the directory of the node of {run.clients[client]!r}, with its state of the last round"
            raise RunError(broken("--state", rule, str(directory)) + f": {error}") from error

    return read


def _refuse_site(run: Run) -> Callable[[int], bytes | None]:
    def read(client: int) -> bytes | None:
        raise RunError(
            f"client {run.clients[client]!r} keeps its own tensors at its site: predict there, with this run.db and the "
            "node's directory as --state"
        )

    return read
