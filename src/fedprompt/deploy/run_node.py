"""`fedprompt node`: Flower's SuperNode on a site's machine, working on the site's own images."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fedprompt.deploy import expiry
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.flower_cli import check_installed
from fedprompt.deploy.folders import SiteFolder, check_site_name
from fedprompt.deploy.lockfile import claimed
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.io.safe_text import safe_text


@dataclass(frozen=True)
class Connection:
    """How a node reaches its server and authenticates there."""

    name: str
    address: Address
    ca_certificate: Path | None = None
    """The certificate of the authority that must have signed the server's certificate."""
    key: Path | None = None
    """The private key of this node."""

    @classmethod
    def of(cls, folder: SiteFolder) -> Connection:
        if not folder.secure:
            return cls(folder.name, folder.address)
        return cls(folder.name, folder.address, folder.ca_certificate, folder.key)

    @classmethod
    def insecure(cls, name: str, address: Address) -> Connection:
        """Without TLS and keys: for tests on one machine."""
        if not address.is_loopback:
            raise ConfigError(broken("--server", "be a loopback address without TLS and keys", str(address)))
        return cls(check_site_name("--name", name), address)

    @property
    def is_secure(self) -> bool:
        return self.key is not None

    def arguments(self) -> list[str]:
        """The arguments of `flower-supernode`."""
        trust = ["--insecure"]
        if self.ca_certificate is not None and self.key is not None:
            trust = ["--root-certificates", str(self.ca_certificate), "--auth-supernode-private-key", str(self.key)]
        return ["--superlink", str(self.address), *trust]


def start(
    connection: Connection,
    data: str,
    state: Path,
    format: str = "auto",
    device: str | None = None,
    weights: str | None = None,
    anew: bool = False,
    least_noise: float = 0.0,
    policy: SitePolicy | None = None,
) -> None:
    """Take part until a signal stops it. The images at `data` and the files under `state` stay here.

    `policy` is what the site allows; the default one when absent.
    """
    check_installed()
    _check_certificates(connection)
    os.environ["FLWR_HOME"] = str(state / "flwr")  # for Flower's own files; the default is the home of this user
    from fedprompt.engines.flower.supernode import attend
    from fedprompt.engines.remote.node import Site

    os.umask(0o077)  # caches contain images: no other account of this machine may read them
    with claimed(state, "--state", "node"):
        site = Site(connection.name, data, state, format, device, weights, anew, least_noise, policy)
        site.check_images()
        arguments = connection.arguments()
        log(f"runs: flower-supernode {shlex.join(arguments)} --isolation process")
        log(f"{connection.name}: images of {data}, states and caches in {state}")
        chosen = " ".join(f"{name}={value!r}" for name, value in (policy or SitePolicy()) if value is not None)
        log(f"policy{'' if policy else ' (the default: there is no policy.yaml)'}: {chosen}")
        expiry.watch(lambda: _terms(connection), log)
        try:
            attend(arguments, site.answer)
        except RunError:
            _check_certificates(connection)  # an expired certificate is a clearer reason than Flower's error
            raise


def _terms(connection: Connection) -> list[expiry.Term]:
    return [] if connection.ca_certificate is None else expiry.of_site(connection.ca_certificate, connection.address)


def _check_certificates(connection: Connection) -> None:
    """Raise if a certificate has expired: ConfigError for the site's own, RunError for the server's."""
    terms = _terms(connection)
    expiry.check(terms[:1], ConfigError)
    expiry.check(terms[1:], RunError)


def log(text: str) -> None:
    print(safe_text(text), file=sys.stderr, flush=True)
