"""`fedprompt node --check`: whether a site is set up correctly, and whether it would take part in a run."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedprompt.config import Config
from fedprompt.deploy.folders import SiteFolder
from fedprompt.engines.remote.site_policy import FILE, load_policy
from fedprompt.errors import ConfigError, FedpromptError

if TYPE_CHECKING:
    from fedprompt.engines.remote.node import Site

PATIENCE = 10.0  # seconds for an answer of the server
SKEW = 120.0  # seconds by which clocks may differ
HERE = {"engine", "output"}  # sections that a server does not send


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    fine: bool
    text: str


def check_site(
    folder: SiteFolder,
    data: str,
    state: Path,
    configs: Sequence[Config] = (),
    format: str = "auto",
    device: str | None = None,
    weights: str | None = None,
    least_noise: float = 0.0,
) -> Iterator[Finding]:
    """Check name, key, connection, clock, images, policy, and whether the policy allows some configs."""
    yield Finding("name", True, f"{folder.name}, at {folder.address}")
    if folder.secure:
        yield _key(folder)
    yield from _server(folder)
    try:
        policy = load_policy(folder.path)
    except ConfigError as error:
        yield Finding("policy", False, str(error))
        return
    where = str(folder.path / FILE)
    yield Finding("policy", True, where if policy else f"there is no {where}: the default policy applies")
    from fedprompt.engines.remote.node import Site

    site = Site(folder.name, data, state, format, device, weights, False, least_noise, policy)
    try:
        site.check_images()
    except FedpromptError as error:
        yield Finding("data", False, str(error))
        return
    yield Finding("data", True, data)
    yield _budget(site)
    for config in configs:
        try:
            found = site.inspect(config.model_dump(mode="json", exclude=HERE))
        except FedpromptError as error:
            yield Finding(config.run_name, False, f"{type(error).__name__}: {error}")
            continue
        for each in found:
            yield Finding(config.run_name, False, f"would be refused ({each.rule}): {each.text}")
        if not found:
            yield Finding(config.run_name, True, "settings, method and weights are fine here")


def _key(folder: SiteFolder) -> Finding:
    from cryptography.hazmat.primitives import serialization

    from fedprompt.deploy.certificates import public_pem

    try:
        key = serialization.load_ssh_private_key(folder.key.read_bytes(), None)
    except ValueError:
        try:
            key = serialization.load_pem_private_key(folder.key.read_bytes(), None)  # type: ignore[assignment]
        except (ValueError, TypeError) as error:
            return Finding("key", False, f"{folder.key} must be a private key without a password: {error}")
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    if public.strip() != public_pem(folder.public_key.read_bytes(), folder.name).strip():
        return Finding("key", False, f"{folder.key} and {folder.public_key} must be a key pair")
    return Finding("key", True, f"{folder.key}, readable by its owner only")


def _server(folder: SiteFolder) -> Iterator[Finding]:
    """Whether the server answers with a certificate of the trusted authority, and the time of its clock."""
    what, address = ("TLS" if folder.secure else "server"), folder.address
    connection: http.client.HTTPConnection
    if folder.secure:
        context = ssl.create_default_context(cafile=folder.ca_certificate)
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=PATIENCE, context=context)
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=PATIENCE)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        date = answer.getheader("date")
    except ssl.SSLCertVerificationError as error:
        text = f"the certificate of {address} must come from the authority of {folder.ca_certificate}, be issued for that name "
        yield Finding(what, False, text + f"and be valid today by the clock of this machine: {error.verify_message}")
        return
    except (OSError, http.client.HTTPException) as error:
        yield Finding(what, False, f"{address} must answer: {error or type(error).__name__}")
        return
    finally:
        connection.close()
    yield Finding(what, answer.status == 200, f"{address} answers {answer.status}")
    if date is not None:
        yield _clock(date)


def _clock(date: str) -> Finding:
    try:
        apart = abs((datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds())
    except (TypeError, ValueError):
        return Finding("clock", False, f"the server must send its time, got {date!r}")
    return Finding("clock", apart <= SKEW, f"{apart:.0f} s off the server's clock, at most {SKEW:g} s allowed")


def _budget(site: Site) -> Finding:
    try:
        epsilon, delta = site.spent.total()
    except FedpromptError as error:
        return Finding("budget", False, str(error))
    most = site.policy.total_epsilon
    text = f"epsilon {epsilon:.3g} and delta {delta:.3g} spent in all runs so far"
    return Finding(
        "budget", most is None or epsilon < most, f"{text}, {'no limit' if most is None else f'at most {most:g}'}"
    )
