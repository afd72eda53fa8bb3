"""When the certificates of a federation end: said sixty days before, and by name once it has happened."""

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
PATIENCE = 5.0  # seconds for a server to show its certificate
SERVER, AUTHORITY = "the server's certificate", "the authority's certificate"
ASK_FOR_SERVER = "ask the operator of the server to run `fedprompt federate renew` there, and to restart it; this site needs nothing new"
ASK_FOR_AUTHORITY = "ask the operator of the server for a folder of a new federation; the state of this site stays good"


@dataclass(frozen=True)
class Term:
    """Until when a certificate is good, and what to do then."""

    certificate: str
    """What it is, and where."""
    until: datetime
    advice: str

    @property
    def days(self) -> int:
        """Whole days that are left; negative once it has expired."""
        return (self.until - now()) // timedelta(days=1)

    @property
    def expired(self) -> bool:
        return self.until <= now()

    def __str__(self) -> str:
        """What there is to say about it once it is time to."""
        if self.expired:
            said = f"expired on {self.until:%Y-%m-%d}, and this machine's clock says {now():%Y-%m-%d}"
        else:
            said = f"expires on {self.until:%Y-%m-%d}, in {self.days} days"
        return f"{self.certificate} {said}: {self.advice}"

    def warning(self) -> str | None:
        """The line of a log, where it is time for one."""
        return f"WARNING: {self}" if self.until - now() < NOTICE else None


def now() -> datetime:
    return datetime.now(UTC)


def of_server(folder: ServerFolder) -> list[Term]:
    """Those in the server's folder; an insecure one has none."""
    if not folder.secure:
        return []
    renew = f"run `fedprompt federate renew --server {folder.path}`, then restart the server; sites need nothing new"
    return [Term(f"{SERVER} ({folder.certificate})", _until(folder.certificate), renew), of_authority(folder)]


def of_authority(folder: ServerFolder) -> Term:
    anew = "make a new federation with `fedprompt federate init` and hand out its folders; `runs/` and states can move over"
    return Term(f"{AUTHORITY} ({folder.ca_certificate})", _until(folder.ca_certificate), anew)


def of_site(ca_certificate: Path, address: Address) -> list[Term]:
    """The one that a site has, and the one that its server shows, where it is there."""
    own = Term(f"{AUTHORITY} ({ca_certificate})", _until(ca_certificate), ASK_FOR_AUTHORITY)
    shown = shown_until(address)
    return [own] if shown is None else [own, Term(f"{SERVER} ({address})", shown, ASK_FOR_SERVER)]


def check(terms: Iterable[Term], kind: type[FedpromptError] = ConfigError) -> None:
    """Raise where one has expired."""
    for term in terms:
        if term.expired:
            raise kind(str(term))


def why_silent(folder: ServerFolder) -> FedpromptError | None:
    """Why the server of a folder cannot be spoken to, where a certificate is the reason."""
    if not folder.secure:
        return None
    try:
        check(of_server(folder))
    except ConfigError as error:
        return error
    shown = shown_until(folder.called_as)
    if shown is None or shown > now():
        return None
    told = f"shows a certificate that expired on {shown:%Y-%m-%d}, and was renewed since"
    return RunError(f"the server at {folder.called_as} {told}: restart the server")


def watch(terms: Callable[[], Iterable[Term]], say: Callable[[str], None]) -> threading.Event:
    """Say what there is to say about certificates, now and once a day until the event that this returns."""
    enough = threading.Event()

    def tell() -> None:
        for line in filter(None, (term.warning() for term in terms())):
            say(line)

    def tell_daily() -> None:
        while not enough.wait(DAY):
            tell()

    tell()
    threading.Thread(target=tell_daily, daemon=True).start()
    return enough


def shown_until(address: Address) -> datetime | None:
    """Until when the certificate is good that a server shows; None where there is none.

    It is not verified: a date that is a lie makes for a wrong word in a log and for nothing else.
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
        raise ConfigError(f"{file} must be a certificate that can be read: {error}") from error
