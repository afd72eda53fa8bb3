"""Expiry of the certificates of a federation: a warning sixty days before, and a clear error afterwards."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedprompt.deploy.addresses import Address
from fedprompt.deploy.folders import ServerFolder
from fedprompt.errors import ConfigError, FedpromptError, RunError

NOTICE = timedelta(days=60)
DAY = 24 * 3600.0  # seconds
PATIENCE = 5.0  # seconds for a server to send its certificate
SERVER, AUTHORITY = "the server's certificate", "the authority's certificate"
ASK_FOR_SERVER = "ask the operator of the server to run `fedprompt federate renew` there, and to restart it; this site needs no change"
ASK_FOR_AUTHORITY = (
    "ask the operator of the server for a folder of a new federation; the state of this site stays valid"
)


@dataclass(frozen=True)
class Term:
    """The expiry date of a certificate, and what to do then."""

    certificate: str
    """Its name and location."""
    until: datetime
    advice: str

    @property
    def kind(self) -> str:
        """`server` or `authority`, without a path."""
        return "server" if self.certificate.startswith(SERVER) else "authority"

    @property
    def days(self) -> int:
        """Whole days that are left; negative once it has expired."""
        return (self.until - now()) // timedelta(days=1)

    @property
    def expired(self) -> bool:
        return self.until <= now()

    def __str__(self) -> str:
        """The text of a warning or an error."""
        if self.expired:
            status = f"expired on {self.until:%Y-%m-%d}, and this machine's clock says {now():%Y-%m-%d}"
        else:
            status = f"expires on {self.until:%Y-%m-%d}, in {self.days} days"
        return f"{self.certificate} {status}: {self.advice}"

    def warning(self) -> str | None:
        """A line for the log if the certificate expires soon."""
        return str(self) if self.until - now() < NOTICE else None


def now() -> datetime:
    return datetime.now(UTC)


def of_server(folder: ServerFolder) -> list[Term]:
    """The certificates in the server's folder; an insecure one has none."""
    if not folder.secure:
        return []
    renew = f"run `fedprompt federate renew --server {folder.path}`, then restart the server; sites need no change"
    return [Term(f"{SERVER} ({folder.certificate})", _until(folder.certificate), renew), of_authority(folder)]


def of_authority(folder: ServerFolder) -> Term:
    advice = "make a new federation with `fedprompt federate init` and distribute its folders; `runs/` and states can be kept"
    return Term(f"{AUTHORITY} ({folder.ca_certificate})", _until(folder.ca_certificate), advice)


def of_site(ca_certificate: Path, address: Address) -> list[Term]:
    """The certificate of a site's authority, and that of its server if it answers."""
    own = Term(f"{AUTHORITY} ({ca_certificate})", _until(ca_certificate), ASK_FOR_AUTHORITY)
    shown = shown_until(address)
    return [own] if shown is None else [own, Term(f"{SERVER} ({address})", shown, ASK_FOR_SERVER)]


def check(terms: Iterable[Term], kind: type[FedpromptError] = ConfigError) -> None:
    """Raise if a certificate has expired."""
    for term in terms:
        if term.expired:
            raise kind(str(term))


def why_silent(folder: ServerFolder) -> FedpromptError | None:
    """Why the server of a folder does not answer, if a certificate is the reason."""
    if not folder.secure:
        return None
    try:
        check(of_server(folder))
    except ConfigError as error:
        return error
    shown = shown_until(folder.called_as)
    if shown is None or shown > now():
        return None
    reason = f"uses a certificate that expired on {shown:%Y-%m-%d} and was renewed since"
    return RunError(f"the server at {folder.called_as} {reason}: restart the server")


def watch(terms: Callable[[], Iterable[Term]], log: Callable[[str], None]) -> threading.Event:
    """Log warnings about certificates, now and once a day until the returned event is set."""
    stop = threading.Event()

    def warn() -> None:
        for line in filter(None, (term.warning() for term in terms())):
            log(line)

    def warn_daily() -> None:
        while not stop.wait(DAY):
            warn()

    warn()
    threading.Thread(target=warn_daily, daemon=True).start()
    return stop


def shown_until(address: Address) -> datetime | None:
    """The expiry date of a server's certificate; None if there is none.

    It is not verified: a wrong date can only cause a wrong warning or error message.
    """
    from cryptography import x509

    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address.host, address.port), PATIENCE) as plain,
            anyone.wrap_socket(plain, server_hostname=address.host) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        return None if shown is None else x509.load_der_x509_certificate(shown).not_valid_after_utc
    except (OSError, ValueError):
        return None


def _until(file: Path) -> datetime:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} must be a readable certificate: {error}") from error
