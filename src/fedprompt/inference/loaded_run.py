"""A run opened for use: its settings, its frozen backbone and its server at the last committed round.

This reads only `run.db` and the weights of the backbone. Images are opened on demand (see `lazy_client.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import identity
from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import ExperimentFactory
from fedprompt.client.stored_settings import require_images, require_weights, settings_here
from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.core.method import Method, Server, World
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_source
from fedprompt.engines.remote.node_state import KEPT_AS, MOST_BYTES, SUFFIX, number_of_run, stored_state
from fedprompt.errors import BackboneError, ConfigError, DataError, RunError, argument, broken, did_you_mean, same_name
from fedprompt.features.image_bank import CommonImages, ImageBank
from fedprompt.features.item_store import open_store
from fedprompt.federation.best_round import kept_round
from fedprompt.federation.stored_pool import open_pool
from fedprompt.inference.lazy_client import LazyBank, LazyRuntime
from fedprompt.io.bounded_read import read_bytes
from fedprompt.runs.run import Run, require_same_streams
from fedprompt.runs.store import RunReader
from fedprompt.tensors import Tensors

SHOWN = 5  # clients that an error message lists
NODE_STATES = "states"  # the folder of a node's directory with its states of every run


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run at its last committed round, or at the round that was chosen on validation images."""

    run: Run
    factory: ExperimentFactory
    """The method of the run's settings."""
    backbone: ViT
    world: World
    """The world of the run's clients."""
    server: Server
    reader: RunReader
    """The run file as it was after the round that counts: the last one, or the one that `federation.select` chose."""
    require_images: Callable[[], None] = lambda: None
    """Raises if only the run file names the path of the images."""

    @classmethod
    def open(
        cls,
        run: str | Path | Run,
        weights: str | Path | None = None,
        device: str | None = None,
        method: Method | None = None,
        data: str | Path | None = None,
        trust_config: bool = False,
    ) -> LoadedRun:
        """Open a run directory, or its `run.db`.

        `weights` and `data` are the current paths of the backbone and the images, which must be the same as in the run. If
        they are not given, a path or hub id in the config of the run is used only with `trust_config`, and so is its cache:
        a run file may come from an untrusted source. `method` is for runs of an unregistered method.
        """
        run = run if isinstance(run, Run) else Run(run)
        reader = reader_of_choice(run)
        state = reader.server_state()
        if state is None or state[0] < 1:
            raise RunError(f"run {str(run.directory)!r} must have a finished round to be used, got none")
        require_same_streams(run.reader, "used")
        require_weights(run.config, run.directory, trust_config, weights)
        factory = ExperimentFactory(settings_here(run.config, trust_config, weights, data, device))
        if method is not None:
            factory.method = method
        backbone = factory.backbone()
        _check_weights(run, identity(backbone))
        world = factory.world(backbone, _class_names(run), run.clients)
        shared, own = ({name: each.to(world.device) for name, each in wire.decode(blob).items()} for blob in state[1:])
        pool, own = open_pool(reader, own, world)
        shared = wire.require_like(shared, world.roles.shared, "stored shared tensors")
        images = partial(require_images, run.config, run.directory, trust_config, data)
        return cls(run, factory, backbone, world, Server(shared, own, state[0], pool), reader, images)

    @property
    def config(self) -> Config:
        return self.factory.config

    @property
    def method(self) -> Method:
        return self.factory.method

    @property
    def round(self) -> int:
        """The number of that round."""
        return self.server.round

    def number(self, client: str | int) -> int:
        """The number of a client, given by name or number; a name that consists of digits is first looked up as a name."""
        names = self.world.client_names
        if isinstance(client, str) and (name := same_name(client, names)) is not None:
            return names.index(name)
        number = int(client) if isinstance(client, int) or (client.isdecimal() and client.isascii()) else -1
        if not 0 <= number < len(names):
            few = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
            rule = f"be one of the {len(names)} clients of the run ({few}) or a number in 0..{len(names) - 1}"
            raise ConfigError(broken("client", rule, client) + did_you_mean(client, names))
        return number

    def received(self, client: int, world: World | None = None) -> Tensors:
        """The download of a client after the last round, audited as in the run; `world` may have more clients than the run."""
        world = world or self.world
        tensors = dict(self.method.download(world, self.server.for_clients([client]), client))
        wire.audit_download(tensors, world.roles, world.client_names[client])
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def bank(self, labelled: Source | None = None) -> LazyBank:
        """The training images of all clients: `labelled` ones if given, otherwise those of the run."""

        def own() -> ImageBank:
            source, manifest = self._source(), self.run.manifest()
            manifest.check(source)
            return self.factory.bank(source, manifest, self.backbone)

        def given(source: Source) -> ImageBank:
            store = open_store(source, self.backbone, self.config.data.resize, self.factory.cache)
            return CommonImages.of(source, np.arange(len(source)), store, self.backbone, self.config.engine)

        return LazyBank(self.backbone, own if labelled is None else lambda: given(labelled))

    def _source(self) -> Source:
        """The images the run was trained on."""
        why = f"{self.config.label} reads a client's training images before it predicts, but"
        if self.config.engine.kind == "flower":
            raise RunError(f"{why} those of run {str(self.run.directory)!r} are at the sites")
        self.require_images()
        try:
            return open_source(self.config.data, self.factory.cache)
        except DataError as error:
            raise DataError(f"{why} {error}") from error

    def states(self, node: str | Path | None = None) -> ClientStates:
        """The private states of clients: in the run file, next to it (simulated nodes), or in the `node` directory of a site."""
        if node is not None:
            return ClientStates(_of_node(self.run, Path(node)))
        if self.config.engine.kind == "flower":
            return ClientStates(_refuse_site(self.run))
        return ClientStates(stored_state(self.reader))

    def fitted(
        self, client: int, bank: ImageBank, states: ClientStates, world: World | None = None, epochs: int | None = None
    ) -> Tensors:
        """The parameters that a client predicts with, computed as in an evaluation at `federation.evaluate_at`.

        `epochs` replaces the run's setting for fitting a held-out client.
        """
        world, config = world or self.world, self.config
        if epochs is not None:
            federation = config.federation.model_copy(update={"newcomer_epochs": epochs})
            config = config.model_copy(update={"federation": federation})
        runtime = LazyRuntime(config, world, self.method, bank, states, ())
        params = runtime.fitted(self.round, client, self.received(client, world))
        return {name: tensor.detach() for name, tensor in params.items()}

    def with_newcomer(self, name: str) -> tuple[World, int]:
        """The world with one additional client that never trained, and its number."""
        number = self.world.clients
        names = (*self.world.client_names, name)
        return replace(self.world, client_names=names, newcomers=self.world.newcomers | {number}), number

    def close(self) -> None:
        self.run.close()
        self.reader.close()


def reader_of_choice(run: Run) -> RunReader:
    """The run file, or its copy after the round that was chosen on validation images."""
    last, tested = run.reader.server_state(), run.final_test
    chosen = tested is not None and last is not None and tested.round != last[0]
    return kept_round(run.reader, tested.round) if chosen and tested else run.reader


def _check_weights(run: Run, found: str) -> None:
    stored = run.reader.fact("backbone")
    if found != stored:
        rule = f"be those that run {str(run.directory)!r} was trained with ({str(stored)[:12]}...)"
        raise BackboneError(broken("weights of the backbone", rule, found[:12] + "..."))


def _class_names(run: Run) -> tuple[str, ...]:
    names: Any = run.reader.fact("classes")
    if not names or not all(isinstance(name, str) for name in names):
        raise RunError(
            f"run: {str(run.directory)!r} is damaged: the fact 'classes' is missing or not as it was written"
        )
    return tuple(names)


def _of_node(run: Run, directory: Path) -> Callable[[int], bytes | None]:
    """A function that reads the state in the directory of a site's node."""

    def read(client: int) -> bytes | None:
        blob = run.reader.client_state(client)
        if blob is None:
            return None
        kept = wire.decode(blob)
        if KEPT_AS not in kept:
            raise ConfigError(
                broken(
                    argument("state", "--state"),
                    "be absent if the run file contains the clients' states",
                    str(directory),
                )
            )
        folder = directory / NODE_STATES / number_of_run(run.reader) / str(client)
        try:
            return read_bytes(folder / f"{int(kept[KEPT_AS])}{SUFFIX}", MOST_BYTES)
        except (OSError, ValueError) as error:
            rule = f"be the directory of the node of {run.clients[client]!r}, with its state of the last round"
            raise RunError(broken(argument("state", "--state"), rule, str(directory)) + f": {error}") from error

    return read


def _refuse_site(run: Run) -> Callable[[int], bytes | None]:
    def read(client: int) -> bytes | None:
        raise RunError(
            f"client {run.clients[client]!r} keeps its own tensors at its site: predict there, with this run.db and the "
            f"node's directory as {argument('state=', '--state')}"
        )

    return read
