"""`fedprompt node`: a SuperNode on a site's machine, working on the site's own images."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedprompt.deploy import expiry
from fedprompt.deploy.addresses import Address
from fedprompt.deploy.flower_cli import check_installed
from fedprompt.deploy.folders import SiteFolder, check_site_name
from fedprompt.deploy.lockfile import claimed
from fedprompt.deploy.metrics import NodeFigures
from fedprompt.deploy.operator_listener import listening
from fedprompt.engines.remote.site_policy import SitePolicy
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.io.log_lines import Format, configure, fact, take_over

if TYPE_CHECKING:
    from fedprompt.engines.remote.node import Site

HOUR = 3600.0  # seconds


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
    metrics: Address | None = None,
    log_format: Format = "text",
) -> None:
    """Take part until a signal stops it. The images at `data` and the files under `state` stay here.

    `policy` is what the site allows; the default one when absent. `metrics` is where /metrics and /ready are served.
    """
    configure(log_format, connection.name)
    check_installed()
    _check_certificates(connection)
    os.environ["FLWR_HOME"] = str(state / "flwr")  # for Flower's own files; the default is the home of this user
    from fedprompt.engines.flower.supernode import attend
    from fedprompt.engines.remote.node import Site

    take_over()
    os.umask(0o077)  # caches contain images: no other account of this machine may read them
    with claimed(state, "--state", "node"):
        site = Site(connection.name, data, state, format, device, weights, anew, least_noise, policy)
        site.check_images()
        fact(f"takes part at {connection.address}{' without TLS and keys' if not connection.is_secure else ''}")
        fact(f"images of {data}, states and caches in {state}")
        chosen = " ".join(f"{name}={value!r}" for name, value in (policy or SitePolicy()) if value is not None)
        fact(f"policy{'' if policy else ' (the default: there is no policy.yaml)'}: {chosen}")
        expiry.watch(lambda: _terms(connection), warn)
        figures = NodeFigures(connection.name, _Terms(connection), lambda: _budget(site))
        site.told = figures.done
        try:
            with listening(metrics, figures):
                address, trust = str(connection.address), (connection.ca_certificate, connection.key)
                attend(address, site.answer, *trust, heard=figures.heard)
        except RunError:
            _check_certificates(connection)  # an expired certificate is a clearer reason than Flower's error
            raise


def warn(text: str) -> None:
    fact(text, "warning")


def _budget(site: Site) -> tuple[float, float | None]:
    return site.spent.total()[0], site.policy.total_epsilon


class _Terms:
    """The certificates as they were within the last hour: asking costs a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._asked = connection, -math.inf
        self._known: list[expiry.Term] = []

    def __call__(self) -> list[expiry.Term]:
        if time.monotonic() - self._asked > HOUR:
            self._known, self._asked = _terms(self._connection), time.monotonic()
        return self._known


def _terms(connection: Connection) -> list[expiry.Term]:
    return [] if connection.ca_certificate is None else expiry.of_site(connection.ca_certificate, connection.address)


def _check_certificates(connection: Connection) -> None:
    """Raise if a certificate has expired: ConfigError for the site's own, RunError for the server's."""
    terms = _terms(connection)
    expiry.check(terms[:1], ConfigError)
    expiry.check(terms[1:], RunError)
