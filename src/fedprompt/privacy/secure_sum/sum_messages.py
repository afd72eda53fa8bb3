"""The messages of a secure sum: bytes and numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a client for one sum."""

    client: int
    round: int
    sealing: bytes
    """For shares that only one other client may read."""
    masking: bytes
    """For the streams that cancel."""


@dataclass(frozen=True)
class SealedShare:
    """An encrypted share from one client to another; the server carries it and cannot read it."""

    client: int
    round: int
    recipient: int
    sealed: bytes


@dataclass(frozen=True)
class MaskedVector:
    """y_i, as little-endian 64-bit words."""

    client: int
    round: int
    masked: bytes


@dataclass(frozen=True)
class Survivors:
    """The server's request for shares: of the seeds of clients that delivered, of the masking keys of clients that dropped out."""

    round: int
    delivered: tuple[int, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class RevealedShares:
    """The answer: pairs of a client and the share held for it."""

    client: int
    round: int
    seeds: tuple[tuple[int, int], ...]
    masking_keys: tuple[tuple[int, int], ...]


Message = PublicKeys | SealedShare | MaskedVector | RevealedShares  # from a client to the server
ORDER = (PublicKeys, SealedShare, MaskedVector, RevealedShares)
