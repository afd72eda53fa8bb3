"""Keys and certificates of a federation: a private authority, the server's certificate, and a key for each site.

All keys are on the curve P-384. The authority signs only the server's certificate, and sites trust only this authority.
A site authenticates with its own key, whose public half the server stores.
"""

from __future__ import annotations

import os
import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from fedprompt.errors import ConfigError, broken
from fedprompt.io.files import BINARY

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise ConfigError(
        "a federation across machines needs the package cryptography: pip install 'fedprompt[flower]'"
    ) from error

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the maximum that common TLS clients accept
EARLIER = timedelta(hours=1)  # before now, for sites whose clocks are slow
LONGEST_KEY = 4096  # bytes of a public key file
KEY_RULE = "be an OpenSSH public key of the kind ecdsa-sha2-nistp384 (ssh-keygen -t ecdsa -b 384)"


def write_new(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a new file, with its final permissions from the start."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, mode), "wb") as stream:
        stream.write(content)


def write_authority_and_server(folder: Path, host: str) -> None:
    """`ca.crt`, `ca.key`, and `server.pem`, `server.key` for a server that sites reach as `host`."""
    authority_key = _new_key()
    write_new(folder / "ca.key", _private_pem(authority_key), 0o600)
    write_new(folder / "ca.crt", _authority(authority_key).public_bytes(serialization.Encoding.PEM))
    renew_server(folder, host)


def renew_server(folder: Path, host: str) -> datetime:
    """A new `server.pem` with a new `server.key`, from the authority that sites already trust; returns its expiry date."""
    try:
        authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} must contain the authority's ca.key and ca.crt: {error}") from error
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    key = _new_key()
    server = _server(key, host, authority, authority_key)
    for name, content, mode in (
        ("server.key", _private_pem(key), 0o600),
        ("server.pem", server.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        draft = folder / f".{name}.{secrets.token_hex(8)}"
        write_new(draft, content, mode)
        draft.replace(folder / name)
    return server.not_valid_after_utc


def write_site_key(folder: Path, name: str) -> bytes:
    """`key` and `key.pub` of a site; returns the public line."""
    key = _new_key()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = _line(key.public_key(), name)
    write_new(folder / "key", private, 0o600)
    write_new(folder / "key.pub", public)
    return public


def checked_public_key(content: bytes, name: str) -> bytes:
    """The public key of a site as one line in our format, without its comment; refuses other kinds of keys."""
    return _line(_public_key(content, name), name)


def public_pem(content: bytes, name: str) -> bytes:
    """The same key in Flower's format."""
    key = _public_key(content, name)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def names_host(certificate: Path, host: str) -> bool:
    """Whether the certificate is valid for this host name or IP address."""
    extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return _general_name(host) in names


def _public_key(content: bytes, name: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_ssh_public_key(content.strip())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(broken(f"public key of {name}", KEY_RULE, content[:80]))
    return key


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _line(key: ec.EllipticCurvePublicKey, name: str) -> bytes:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + f" {name}\n".encode()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - EARLIER
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*granted: str) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return x509.KeyUsage(**{each: each in granted for each in every.split()})


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = "fedprompt federation authority"
    builder = _builder(name, _named(name), key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage("key_cert_sign"), critical=True).sign(key, hashes.SHA384())


def _server(
    key: ec.EllipticCurvePrivateKey, host: str, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_general_name(each) for each in hosts]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
    ]
    builder = _builder("fedprompt federation server", authority.subject, key, SERVER_DAYS)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority_key, hashes.SHA384())
