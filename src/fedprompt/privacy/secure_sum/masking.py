"""Masks of the secure sum: keys, streams of random words, and numbers in fixed point.

Numbers are words of 64 bits, the integer nearest to x * 2^32 with negative ones as complements, and are added modulo 2^64. Each is
off by at most 2^-33. Each of n clients may use numbers up to 2^30 / n, so that a sum can never overflow.
"""

from __future__ import annotations

import secrets
import struct

import numpy as np
from numpy.typing import NDArray

from fedprompt.errors import ConfigError, ContractError, DivergenceError, broken
from fedprompt.privacy.keystream import Keystream

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise ConfigError(
        "federation.secure_sum must be false without the package cryptography, got true: pip install 'fedprompt[secure]'"
    ) from error

SCALE = 2.0**32  # of the fixed point
RANGE = 2.0**30  # of a sum
KEY_BYTES = 32
NONCE_BYTES = 12
WORD = np.dtype("<u8")

Numbers = NDArray[np.float64]
Words = NDArray[np.uint64]


def to_words(numbers: Numbers, clients: int, whose: str) -> Words:
    """Fixed point; refuses numbers that could overflow in a sum of this many clients."""
    largest = float(np.abs(numbers).max(initial=0.0))
    if not largest <= RANGE / clients:  # also refuses NaN
        rule = f"be finite and within ±{RANGE / clients:g} in a sum of {clients}"
        raise DivergenceError(broken(f"secure sum: numbers of {whose}", rule, largest))
    return np.rint(numbers * SCALE).astype(np.int64).view(np.uint64)


def to_numbers(words: Words) -> Numbers:
    return words.view(np.int64) / SCALE


def new_key() -> bytes:
    """The private half of a key pair."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def self_mask(seed: bytes, round: int, client: int, length: int) -> Words:
    """stream(b_i)."""
    return _stream(_derive(seed, b"self", round, client), length)


def pair_mask(private: bytes, public: bytes, round: int, client: int, peer: int, length: int) -> Words:
    """The mask of a client and its peer: stream(s_ij), negative for the higher number. Either private key gives it."""
    stream = _stream(_derive(_agree(private, public), b"pair", round, *sorted((client, peer))), length)
    return stream if client < peer else np.negative(stream)


def seal(private: bytes, public: bytes, round: int, sender: int, recipient: int, content: bytes) -> bytes:
    """Only the recipient can read it, and only as a message of this sender in this round."""
    cipher, nonce = _cipher(private, public, round, sender, recipient), secrets.token_bytes(NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, content, _context(round, sender, recipient))


def unseal(private: bytes, public: bytes, round: int, sender: int, recipient: int, sealed: bytes) -> bytes:
    cipher, nonce, secret = (
        _cipher(private, public, round, sender, recipient),
        sealed[:NONCE_BYTES],
        sealed[NONCE_BYTES:],
    )
    try:
        return cipher.decrypt(nonce, secret, _context(round, sender, recipient))
    except (InvalidTag, ValueError) as error:
        raise ContractError(
            f"secure sum: the message from client {sender} to client {recipient} must arrive unchanged"
        ) from error


def _cipher(private: bytes, public: bytes, round: int, sender: int, recipient: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(_agree(private, public), b"seal", round, sender, recipient))


def _agree(private: bytes, public: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ContractError(broken("secure sum: public key", "be a point of X25519", public.hex())) from error


def _derive(secret: bytes, purpose: bytes, round: int, *clients: int) -> bytes:
    """A key for one purpose, round and client or pair of clients."""
    info = b"fedprompt secure sum/" + purpose + b"/" + _context(round, *clients)
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def _context(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _stream(key: bytes, length: int) -> Words:
    """Words of the ChaCha20 key stream. Every key is used for one stream, so the nonce may stay 0."""
    return Keystream(key).words(length)
