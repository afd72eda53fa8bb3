"""Fit a client that never trained to a few labelled images, as the federation does for its held-out clients.

The fitted client can be saved to a folder (`client.json` and the tensors in `client.safetensors`) and used again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from fedprompt.client.client_states import ClientStates
from fedprompt.config import DataConfig
from fedprompt.core import wire
from fedprompt.data.site_data import Agreed, agree
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.subset import Selection
from fedprompt.engines.remote.node_state import MOST_BYTES
from fedprompt.errors import ConfigError, DataError, RunError, StorageError, broken
from fedprompt.inference.in_memory_images import blank
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.io.bounded_read import read_bytes, read_json
from fedprompt.io.files import write_atomically
from fedprompt.runs.run import Run

FORMAT = "fedprompt-client-1"
TENSORS, RECORD = "client.safetensors", "client.json"
NEWCOMER = "newcomer"  # the name of a client that is not in the run


def adapt(
    run: str | Path | Run | LoadedRun,
    labelled: str | Path | Source,
    client: str | int | None = None,
    epochs: int | None = None,
    state: str | Path | None = None,
    trust_config: bool = False,
) -> TrainedClient:
    """A client fitted to labelled images: a new one or, with `client`, one of the run.

    A new client or a held-out one is fitted by `Method.newcomer`, for `epochs` or the run's `federation.newcomer_epochs`.
    For a client that trained, the images replace its own training images if its method reads them before it predicts;
    otherwise there is nothing to adapt, and that is an error. `state` is the directory of a site's node; for
    `trust_config` see `TrainedClient.open`.
    """
    opened = run if isinstance(run, LoadedRun) else LoadedRun.open(run, trust_config=trust_config)
    source = labelled if isinstance(labelled, Source) else labelled_images(labelled, opened)
    stateless = ClientStates(lambda client: None)
    if epochs is not None and epochs < 0:
        raise ConfigError(broken("epochs", "be at least 0", epochs))
    if client is None:
        world, number = opened.with_newcomer(NEWCOMER)
        return TrainedClient(
            opened, world, number, opened.fitted(number, opened.bank(source), stateless, world, epochs)
        )
    number = opened.number(client)
    if number in opened.world.newcomers:
        params = opened.fitted(number, opened.bank(source), stateless, epochs=epochs)
        return TrainedClient(opened, opened.world, number, params)
    if epochs is not None:
        raise ConfigError(broken("epochs", f"be absent for {client!r}: it has trained in the run", epochs))
    bank = opened.bank(source)
    params = opened.fitted(number, bank, opened.states(state))
    if not bank.used:
        rule = (
            f"be absent for client {client!r}: it has trained, and {opened.config.label} predicts without more images"
        )
        raise ConfigError(broken("labelled images", rule, source.name))
    return TrainedClient(opened, opened.world, number, params)


def labelled_images(path: str | Path, opened: LoadedRun) -> Source:
    """The images of a folder `class/image`, or of a parquet file, with labels that are numbers of the run's classes.

    Classes of the run may be missing, but other classes are an error. If the images are split, the training part is used.
    """
    try:
        source = open_source(DataConfig(source=str(path)), opened.factory.cache)
    except DataError as error:
        raise DataError(str(error).replace("data.source", "labelled images", 1)) from error
    class_names = opened.world.class_names
    for reason in agree({"": list(source.class_names)}, list(class_names)).refused.values():
        raise DataError(f"labelled images: {str(path)!r}: {reason}".replace("the federation", "the run", 1))
    agreed = Agreed(source, class_names)
    if agreed.splits is None:
        return agreed
    training = np.flatnonzero(agreed.splits == "train")
    if not len(training):
        raise DataError(broken("labelled images", "have a training part if they are split", str(path)))
    return Selection(agreed, training, class_names)


def save(client: TrainedClient, folder: str | Path) -> Path:
    """Save a client. Its tensors are private: only the user who wrote them may read them."""
    folder, tensors = Path(folder), wire.encode(client.params)
    write_atomically(folder / TENSORS, tensors)
    os.chmod(folder / TENSORS, 0o600)
    record = {
        "format": FORMAT,
        "client": client.name,
        "number": client.index,
        "tensors": hashlib.sha256(tensors).hexdigest(),
        "run": client.opened.run.name,
        **_ground(client.opened),
        "method": client.config.label,
        "classes": list(client.class_names),
    }
    write_atomically(folder / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    return folder


def load(run: str | Path | Run | LoadedRun, folder: str | Path) -> TrainedClient:
    """A saved client, with the run it came from."""
    opened, folder = run if isinstance(run, LoadedRun) else LoadedRun.open(run), Path(folder)
    record, blob = _read(folder)
    for key, value in _ground(opened).items():
        if record.get(key) != value:
            rule = f"be of run {str(opened.run.directory)!r} as it is now ({key} {value!r})"
            raise RunError(broken(f"adapted client {str(folder)!r}", rule, record.get(key)))
    number, name = record.get("number"), record.get("client")
    clients = opened.world.clients
    if type(number) is not int or not 0 <= number <= clients or not isinstance(name, str):
        raise RunError(broken(f"{RECORD} of {str(folder)!r}", f"name a client in 0..{clients}", (name, number)))
    world = opened.with_newcomer(name)[0] if number == clients else opened.world
    if world.client_names[number] != name:
        raise RunError(broken(f"{RECORD} of {str(folder)!r}", f"name client {world.client_names[number]!r}", name))
    params = {key: tensor.to(world.device) for key, tensor in wire.decode(blob, MOST_BYTES).items()}
    client = TrainedClient(opened, world, number, params)
    _try(client, folder)
    return client


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The record of a folder and the bytes of its tensors, checked against their digest."""
    try:
        record = read_json(folder / RECORD)
        blob = read_bytes(folder / TENSORS, MOST_BYTES)
    except FileNotFoundError as error:
        rule = f"be a folder with {RECORD} and {TENSORS}"
        raise RunError(broken("adapted client", rule, str(folder))) from error
    except OSError as error:
        raise StorageError(f"adapted client {str(folder)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"adapted client {str(folder)!r} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        value = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise RunError(broken(f"format of {str(folder / RECORD)!r}", f"be {FORMAT!r}", value))
    if record.get("tensors") != hashlib.sha256(blob).hexdigest():
        raise RunError(f"adapted client {str(folder)!r} is damaged: {TENSORS} is not the file that {RECORD} describes")
    return record, blob


def _ground(opened: LoadedRun) -> dict[str, Any]:
    """What a saved client depends on: the server's tensors of one round, and so the run that made them."""
    state = opened.reader.server_state()
    assert state is not None  # otherwise the run would not be open
    sha = hashlib.sha256(str(opened.run.reader.fact("backbone")).encode())
    for blob in state[1:]:
        sha.update(hashlib.sha256(blob).digest())
    return {"config": opened.run.config.digest(), "round": state[0], "server": sha.hexdigest()}


def _try(client: TrainedClient, folder: Path) -> None:
    """Raise if the method cannot predict with the tensors; tested on a blank image."""
    try:
        client.predict(blank(client.backbone))
    except (KeyError, IndexError, RuntimeError, ValueError, TypeError) as error:
        what = f"adapted client {str(folder)!r} must hold the tensors {client.config.label} predicts with"
        raise RunError(f"{what}: {type(error).__name__}: {error}") from error
