"""The folder of the server and the folder of each site.

`federate init` creates them; they are never overwritten. The folder of a site contains its private key and goes only to
that site. The server stores the public half in `keys/`, which is the list of admitted sites.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprompt.data.partition.manifest import LONGEST_NAME
from fedprompt.deploy.addresses import Address
from fedprompt.errors import ConfigError, RunError, StorageError, broken
from fedprompt.io.bounded_read import read_bytes, read_json

SERVER_FORMAT = "fedprompt-federation-1"
SITE_FORMAT = "fedprompt-site-1"
CONNECTION = "fedprompt"  # the name of the server in the config of `flwr`

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


@dataclass(frozen=True)
class ServerFolder:
    """`DIR/server`: the authority, the server's certificate, and the admitted sites."""

    path: Path
    """Absolute."""
    address: Address
    """Where the sites reach the server."""
    secure: bool = True
    """With TLS and keys of sites; otherwise only on loopback."""

    @classmethod
    def create(cls, path: Path, address: Address, secure: bool = True) -> ServerFolder:
        """A new folder, with a new authority and a new certificate."""
        _check_secure(address, secure)
        folder = cls(path.absolute(), address, secure)
        _make(folder.path)
        if secure:
            from fedprompt.deploy.certificates import write_authority_and_server

            write_authority_and_server(folder.path, address.host)
            _make(folder.keys)
        _make(folder.flower_home)
        _write_json(folder.path / "federation.json", {"format": SERVER_FORMAT} | _server_facts(address, secure))
        return folder

    @classmethod
    def load(cls, path: Path) -> ServerFolder:
        """Load and check a folder."""
        path = path.absolute()
        values = _read_facts(path / "federation.json", SERVER_FORMAT, {"address": str, "secure": bool})
        folder = cls(path, Address.parse(f"{path / 'federation.json'}: address", values["address"]), values["secure"])
        _check_secure(folder.address, folder.secure)
        if folder.secure:
            _check_files(folder.ca_certificate, folder.certificate)
            _check_private(folder.certificate_key)
        return folder

    @property
    def ca_certificate(self) -> Path:
        return self.path / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.path / "server.pem"

    @property
    def certificate_key(self) -> Path:
        return self.path / "server.key"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def flower_home(self) -> Path:
        """The home of Flower's programs (FLWR_HOME)."""
        return self.path / "flwr"

    @property
    def database(self) -> Path:
        return self.path / "superlink.db"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def public_keys(self) -> dict[str, Path]:
        """Key files of the admitted sites, by name."""
        return {check_site_name("name of a key file", path.stem): path for path in sorted(self.keys.glob("*.pub"))}

    def add_key(self, name: str, content: bytes) -> Path:
        """Admit a site; returns its file. One name has one key, and one key one name."""
        from fedprompt.deploy.certificates import checked_public_key, write_new

        self.check_keyed()
        line = checked_public_key(content, check_site_name("name", name))
        for other, path in self.public_keys().items():
            if other.casefold() == name.casefold():
                raise RunError(broken("name", "be that of a site that is not in the federation yet", name))
            if path.read_bytes().split()[:2] == line.split()[:2]:
                raise RunError(broken(f"public key of {name}", "differ from all other keys", f"that of {other}"))
        path = self.keys / f"{name}.pub"
        write_new(path, line)
        return path

    def remove_key(self, name: str) -> tuple[Path, bytes]:
        """Remove a site; returns the deleted file and its content."""
        self.check_keyed()
        known = self.public_keys()
        if name not in known:
            raise ConfigError(broken("name", f"be one of {', '.join(known) or '(no site is admitted)'}", name))
        line = known[name].read_bytes()
        known[name].unlink()
        return known[name], line

    def check_keyed(self) -> None:
        """Raise unless sites authenticate with keys."""
        if not self.secure:
            raise ConfigError(f"{self.path} must be secure for sites to be admitted or expelled, got an insecure one")

    @property
    def called_as(self) -> Address:
        """The address by which this machine calls the server: where it listens."""
        file = self.flower_home / "config.toml"
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))["superlink"][CONNECTION]["address"]
        except (OSError, ValueError, KeyError, TypeError):
            return self.address.listening.from_here
        return Address.parse(f"{file}: address", str(found))

    def point_flower_to(self, address: Address) -> None:
        """Write the address of the server, as seen from this machine, to the config of `flwr`."""
        lines = ["[superlink]", f"default = {toml_text(CONNECTION)}", "", f"[superlink.{CONNECTION}]"]
        lines.append(f"address = {toml_text(str(address))}")
        trust = f"root-certificates = {toml_text(str(self.ca_certificate))}" if self.secure else "insecure = true"
        _make_if_missing(self.flower_home)
        written = self.flower_home / "config.toml.new"
        written.write_text("\n".join([*lines, trust, ""]), encoding="utf-8")
        written.replace(self.flower_home / "config.toml")


@dataclass(frozen=True)
class SiteFolder:
    """`DIR/sites/NAME`: what a site needs to reach the server, to trust it, and to authenticate."""

    path: Path
    """Absolute."""
    name: str
    address: Address
    secure: bool = True

    @classmethod
    def create(cls, path: Path, name: str, server: ServerFolder, public_key: bytes | None = None) -> SiteFolder:
        """A new folder for a site of that server, with a new key that is not admitted yet.

        With `public_key`, the site has its own key pair and must add the private half to the folder itself.
        """
        folder = cls(path.absolute(), check_site_name("name", name), server.address, server.secure)
        _make(folder.path)
        if server.secure:
            from fedprompt.deploy.certificates import write_new, write_site_key

            write_new(folder.ca_certificate, server.ca_certificate.read_bytes())
            if public_key is None:
                write_site_key(folder.path, name)
            else:
                write_new(folder.public_key, public_key)
        from fedprompt.engines.remote.site_policy import FILE, default_text

        (folder.path / FILE).write_text(default_text(), encoding="utf-8")
        facts = {"format": SITE_FORMAT, "name": name} | _server_facts(server.address, server.secure)
        _write_json(folder.path / "site.json", facts)
        return folder

    @classmethod
    def load(cls, path: Path) -> SiteFolder:
        """Load and check a folder."""
        path, file = path.absolute(), path.absolute() / "site.json"
        values = _read_facts(file, SITE_FORMAT, {"name": str, "address": str, "secure": bool})
        name = check_site_name(f"{file}: name", values["name"])
        folder = cls(path, name, Address.parse(f"{file}: address", values["address"]), values["secure"])
        _check_secure(folder.address, folder.secure)
        if folder.secure:
            _check_files(folder.ca_certificate, folder.public_key)
            _check_private(folder.key)
        return folder

    @property
    def ca_certificate(self) -> Path:
        return self.path / "ca.crt"

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def public_key(self) -> Path:
        return self.path / "key.pub"


def init(directory: Path, address: Address, sites: Sequence[str], secure: bool = True) -> ServerFolder:
    """`DIRECTORY/server` and a folder for each site, all of them or none."""
    if address.is_wildcard:
        raise ConfigError(broken("address", "be one that the sites can call", str(address)))
    if not sites:
        raise ConfigError(broken("site", "be given at least once", []))
    names: set[str] = set()
    for name in sites:
        if check_site_name("site", name).casefold() in names:
            raise ConfigError(broken("site", "have names that differ by more than case", name))
        names.add(name.casefold())
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(broken("directory", "be new or empty", str(directory)))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            _fill(made, address, sites, secure)
            made.rename(directory)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror}") from error
    server = ServerFolder.load(directory / "server")
    server.point_flower_to(address.listening.from_here)
    return server


def check_site_name(field: str, name: str) -> str:
    """The name, if it is valid for a client and for a file."""
    if not _NAME.fullmatch(name):
        rule = f"have 1 to {LONGEST_NAME} letters, digits, '.', '_' or '-', and begin with a letter, a digit or '_'"
        raise ConfigError(broken(field, rule, name))
    return name


def toml_text(text: str) -> str:
    """A TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _fill(directory: Path, address: Address, sites: Sequence[str], secure: bool) -> None:
    server = ServerFolder.create(directory / "server", address, secure)
    _make(directory / "sites")
    for name in sites:
        site = SiteFolder.create(directory / "sites" / name, name, server)
        if secure:
            server.add_key(name, site.public_key.read_bytes())


def _server_facts(address: Address, secure: bool) -> dict[str, Any]:
    return {"address": str(address), "secure": secure}


def _check_secure(address: Address, secure: bool) -> None:
    if not secure and not address.is_loopback:
        raise ConfigError(broken("address", "be one of loopback without TLS and keys", str(address)))


def _make(path: Path) -> None:
    path.mkdir(mode=0o700)


def _make_if_missing(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _read_facts(path: Path, format: str, fields: dict[str, type]) -> dict[str, Any]:
    """The values of a JSON file that has exactly these fields."""
    if not path.is_file():
        meant = "".join(
            f"; did you mean {str(each.parent)!r}?" for each in sorted(path.parent.glob(f"*/{path.name}"))[:1]
        )
        raise ConfigError(broken("folder", f"contain a file {path.name}", str(path.parent)) + meant)
    try:
        values = read_json(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} must be readable JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != format:
        found = values.get("format") if isinstance(values, dict) else values
        raise ConfigError(broken(f"{path}: format", f"be {format!r}", found))
    if set(values) != {"format", *fields}:
        raise ConfigError(broken(f"{path}", f"have the fields {', '.join(['format', *fields])}", sorted(values)))
    for name, kind in fields.items():
        if type(values[name]) is not kind:
            raise ConfigError(broken(f"{path}: {name}", f"be a {kind.__name__}", values[name]))
    return values


def _check_files(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise ConfigError(broken("folder", f"contain a file {path.name}", str(path.parent)))


def _check_private(path: Path) -> None:
    """Like ssh: refuse a key that others can read."""
    _check_files(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        rule = "be readable by its owner only (chmod 600)"
        raise ConfigError(broken(str(path), rule, oct(path.stat().st_mode & 0o777)))


def read_public_key(path: Path) -> bytes:
    """The content of a public key file from another person."""
    from fedprompt.deploy.certificates import LONGEST_KEY

    try:
        return read_bytes(path, LONGEST_KEY)
    except (ValueError, OSError) as error:
        raise ConfigError(f"public key file {path} must be readable: {error}") from error
