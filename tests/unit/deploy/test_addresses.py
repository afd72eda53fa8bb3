"""Addresses of servers, as people write them."""

from __future__ import annotations

import pytest

from fedprompt.deploy.addresses import Address
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9092", "127.0.0.1", 9092),
        ("Fed.Example.org:443", "fed.example.org", 443),
        ("[2001:DB8::0:1]:8000", "2001:db8::1", 8000),
        ("localhost:1", "localhost", 1),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
    ],
)
def test_host_and_port_are_read(text: str, host: str, port: int) -> None:
    address = Address.parse("address", text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse("address", str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        ":9092",
        "localhost:",
        "localhost:0",
        "localhost:65536",
        "localhost:9092 ",
        "localhost:9092\n",
        "https://localhost:9092",
        "user@localhost:9092",
        "::1:9092",
        "[localhost]:9092",
        "[127.0.0.1:9092",
        "300.1.1.1:9092",
        "1.2.3:9092",
        "-a.example:1",
        "a..b:1",
        "ä.example:1",
        f"{'a.' * 127}b:1",
        "localhost:９０",
    ],
)
def test_anything_else_is_refused_by_field_rule_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--address must be HOST:PORT") as caught:
        Address.parse("--address", text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "loopback", "listening", "from_here"),
    [
        ("127.0.0.1:1", True, "127.0.0.1:1", "127.0.0.1:1"),
        ("localhost:1", True, "127.0.0.1:1", "127.0.0.1:1"),
        ("[::1]:1", True, "[::1]:1", "[::1]:1"),
        ("fed.example.org:1", False, "0.0.0.0:1", "127.0.0.1:1"),
        ("192.0.2.1:1", False, "0.0.0.0:1", "127.0.0.1:1"),
        ("[2001:db8::1]:1", False, "[::]:1", "[::1]:1"),
    ],
)
def test_a_server_listens_wide_enough_and_no_wider(text: str, loopback: bool, listening: str, from_here: str) -> None:
    address = Address.parse("address", text)
    assert address.is_loopback is loopback
    assert str(address.listening) == listening
    assert str(address.listening.from_here) == from_here
