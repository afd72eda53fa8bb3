"""Where a server listens: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from fedprompt.errors import ConfigError, broken

LONGEST_HOST = 253
RULE = "be HOST:PORT with a host name or an IP address (IPv6 in brackets) and a port in 1..65535"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?=.*[A-Za-z]){_LABEL}(?:\.{_LABEL})*")
_PARTS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """A host, as a name or a normalised IP address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, field: str, text: str) -> Address:
        """Parse an address; `field` names its origin in an error."""
        match = _PARTS.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise ConfigError(broken(field, RULE, text))
        host = match["six"] or match["host"]
        address = _ip(host)
        if address is None and (match["six"] or len(host) > LONGEST_HOST or not _NAME.fullmatch(host)):
            raise ConfigError(broken(field, RULE, text))
        return cls(host.lower() if address is None else str(address), int(match["port"]))

    @property
    def ip(self) -> IPv4Address | IPv6Address | None:
        """The host as an IP address; None if it is a name."""
        return _ip(self.host)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" if self.ip is None else self.ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every address of this machine."""
        return self.ip is not None and self.ip.is_unspecified

    @property
    def listening(self) -> Address:
        """The default address to listen on, for a server that is reached by this address."""
        if self.is_loopback:
            return self if self.ip else Address("127.0.0.1", self.port)
        return Address("::" if isinstance(self.ip, IPv6Address) else "0.0.0.0", self.port)

    @property
    def from_here(self) -> Address:
        """How this machine calls a server that listens here."""
        if not self.is_wildcard:
            return self
        return Address("::1" if isinstance(self.ip, IPv6Address) else "127.0.0.1", self.port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if isinstance(self.ip, IPv6Address) else f"{self.host}:{self.port}"


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None
