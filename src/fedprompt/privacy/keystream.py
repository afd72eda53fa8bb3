"""Random words that cannot be predicted without a key: the key stream of ChaCha20 (RFC 8439).

Noise protects only if it cannot be computed. The output of a statistical generator can: the state of a Mersenne Twister is
a linear function of its output, so a few hundred noised numbers with known true values reveal all others. A key is used for
one release and then discarded, so the nonce may stay 0.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import numpy as np
from numpy.typing import NDArray

from fedprompt.errors import ConfigError

KEY_BYTES = 32
WORD = np.dtype("<u8")


class Keystream:
    """Words of 64 bits. A key stream gives each of its words once."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        except ModuleNotFoundError as error:
            text = "secret noise must have the package cryptography, try: pip install 'fedprompt[dp]'"
            raise ConfigError(text) from error
        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        encrypted = self._cipher.update(bytes(WORD.itemsize * count))
        return np.frombuffer(encrypted, WORD).astype(np.uint64, copy=False)


def new_keystream() -> Keystream:
    """A key stream with a new random key."""
    return Keystream(secrets.token_bytes(KEY_BYTES))


def derived_keystream(secret: int, *inputs: bytes) -> Keystream:
    """A key stream derived from a secret of 256 bits and all inputs, by HMAC-SHA-256."""
    message = b"".join(hashlib.sha256(each).digest() for each in inputs)
    return Keystream(hmac.digest(secret.to_bytes(KEY_BYTES, "little"), message, "sha256"))
