"""The members of a federation: `keys/` of the server's folder decides, and Flower's register is updated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedprompt.deploy.flower_cli import check_installed, environment, no_server
from fedprompt.deploy.folders import ServerFolder, read_public_key
from fedprompt.deploy.health import is_running
from fedprompt.errors import RunError

if TYPE_CHECKING:
    from fedprompt.engines.flower.node_registry import Node, Register


def nodes(folder: ServerFolder) -> list[Node]:
    """The registered nodes of the running server, by name. The name belongs to the key that the node signs with."""
    with _register(folder) as register:
        return register.nodes()


def admit(folder: ServerFolder, name: str, public_key_file: Path) -> bytes:
    """Admit a site: immediately if the server runs, otherwise at its start. Returns its stored key file."""
    running = is_running(folder)
    path = folder.add_key(name, read_public_key(public_key_file))
    try:
        refused = reconcile(folder) if running else {}
        if name in refused:
            raise RunError(refused[name])
    except BaseException:
        path.unlink()
        raise
    return path.read_bytes()


def expel(folder: ServerFolder, name: str) -> None:
    """Expel a site: its messages are refused from now on. Its key cannot be admitted again under any name."""
    running = is_running(folder)
    path, line = folder.remove_key(name)
    try:
        if running:
            reconcile(folder)
    except BaseException:
        path.write_bytes(line)  # the site is still admitted, so it stays in the list
        raise


def reconcile(folder: ServerFolder) -> dict[str, str]:
    """Make the running server admit exactly the sites in `keys/`; returns the reasons of refusals by name."""
    from fedprompt.deploy.certificates import public_pem

    wanted = {public_pem(path.read_bytes(), name): name for name, path in folder.public_keys().items()}
    refused = {}
    with _register(folder) as register:
        known = {node.key: node for node in register.nodes()}
        for key, node in known.items():
            if wanted.get(key) != node.name:
                register.remove(node)
        for key, name in wanted.items():
            if key not in known or known[key].name != name:
                try:
                    register.add(name, key)
                except RunError as error:
                    refused[name] = f"the key of {name} must be one that was never expelled or renamed ({error})"
    return refused


@contextmanager
def _register(folder: ServerFolder) -> Iterator[Register]:
    check_installed()
    from fedprompt.engines.flower.node_registry import Register

    direct = environment(folder)
    os.environ.update({name: direct[name] for name in ("NO_PROXY", "no_proxy")})
    try:
        with Register(str(folder.called_as), folder.ca_certificate if folder.secure else None) as register:
            yield register
    except ConnectionError:
        raise no_server(folder) from None
