"""Certificates and keys: what they allow, and who can read them."""

from __future__ import annotations

import os
import socket
import ssl
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedprompt.deploy.certificates import (
    checked_public_key,
    names_host,
    public_pem,
    renew_server,
    write_authority_and_server,
    write_new,
    write_site_key,
)
from fedprompt.errors import ConfigError

pytestmark = pytest.mark.unit


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def openssh(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def test_the_authority_can_sign_certificates_and_do_nothing_else(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path, "fed.example.org")
    authority = certificate(tmp_path / "ca.crt")
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
    allowed = (usage.key_cert_sign, usage.digital_signature, usage.crl_sign, usage.key_agreement)
    assert allowed == (True, False, False, False)
    assert authority.not_valid_after_utc - authority.not_valid_before_utc == timedelta(days=3650)


def test_the_server_certificate_is_of_the_authority_and_for_its_host_only(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path, "fed.example.org")
    authority, server = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.pem")
    server.verify_directly_issued_by(authority)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    purposes = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert server.not_valid_after_utc - server.not_valid_before_utc == timedelta(days=825)
    named = [names_host(tmp_path / "server.pem", host) for host in ("fed.example.org", "localhost", "127.0.0.1", "::1")]
    assert named == [True] * 4
    assert not names_host(tmp_path / "server.pem", "192.0.2.1")


def test_an_ip_address_is_named_as_one(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path, "192.0.2.1")
    names = certificate(tmp_path / "server.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.1", "127.0.0.1", "::1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


@pytest.mark.parametrize(("host", "trusted"), [("localhost", True), ("127.0.0.1", True), ("other.example", False)])
def test_tls_takes_the_certificate_for_the_names_in_it(tmp_path: Path, host: str, trusted: bool) -> None:
    write_authority_and_server(tmp_path, "fed.example.org")
    offered = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    offered.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    assert _shake_hands(offered, trust, host) is trusted


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_authority_and_server(tmp_path / name, "localhost")
    offered = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    offered.load_cert_chain(tmp_path / "one" / "server.pem", tmp_path / "one" / "server.key")
    assert not _shake_hands(offered, ssl.create_default_context(cafile=tmp_path / "other" / "ca.crt"), "localhost")


def _shake_hands(offered: ssl.SSLContext, trust: ssl.SSLContext, host: str) -> bool:
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            offered.wrap_socket(theirs, server_side=True).close()
        except OSError:
            theirs.close()

    other = Thread(target=serve)
    other.start()
    try:
        trust.wrap_socket(ours, server_hostname=host).close()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        ours.close()
        other.join()
    return True


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_private_keys_are_for_their_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_authority_and_server(tmp_path, "localhost")
        write_site_key(tmp_path, "a")
    finally:
        os.umask(before)
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("ca.key", "server.key", "key")} == {
        "ca.key": 0o600,
        "server.key": 0o600,
        "key": 0o600,
    }


def test_no_file_is_written_over(tmp_path: Path) -> None:
    write_new(tmp_path / "key", b"mine", 0o600)
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "key", b"yours", 0o600)
    assert (tmp_path / "key").read_bytes() == b"mine"


def test_a_public_key_keeps_its_value_and_loses_its_comment(tmp_path: Path) -> None:
    line = write_site_key(tmp_path, "a")
    words = line.split()
    foreign = b" ".join([*words[:2], b"someone@some.host"]) + b"\r\n"
    assert checked_public_key(foreign, "b") == b" ".join([*words[:2], b"b"]) + b"\n"
    private = serialization.load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    pem = private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert public_pem(line, "a") == pem


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ecdsa-sha2-nistp384 AAAA",
        b"-----BEGIN OPENSSH PRIVATE KEY-----",
        b"\xff" * 100,
        openssh(ec.generate_private_key(ec.SECP256R1())),
        openssh(ed25519.Ed25519PrivateKey.generate()),
    ],
    ids=["empty", "cut", "private", "binary", "p256", "ed25519"],
)
def test_other_kinds_of_keys_are_refused(content: bytes) -> None:
    with pytest.raises(
        ConfigError, match="public key of a must be an OpenSSH public key of the kind ecdsa-sha2-nistp384"
    ):
        checked_public_key(content, "a")


def test_a_renewed_certificate_is_another_one_of_the_same_authority(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path, "fed.example.org")
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.crt", "ca.key", "server.pem", "server.key")}
    until = renew_server(tmp_path, "fed.example.org")
    after = {name: (tmp_path / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["server.pem", "server.key"]
    certificate(tmp_path / "server.pem").verify_directly_issued_by(certificate(tmp_path / "ca.crt"))
    assert until == certificate(tmp_path / "server.pem").not_valid_after_utc
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600
    ssl.create_default_context().load_cert_chain(
        tmp_path / "server.pem", tmp_path / "server.key"
    )  # they belong together
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(before)


def test_a_certificate_cannot_be_renewed_without_the_authority(tmp_path: Path) -> None:
    write_authority_and_server(tmp_path, "fed.example.org")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key"):
        renew_server(tmp_path, "fed.example.org")
