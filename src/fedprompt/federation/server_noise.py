"""What the server adds to a private round: noise on a sum of updates, and the bound that follows their norms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedprompt.config import Config
from fedprompt.federation import privacy, wire
from fedprompt.federation.budget import Terms
from fedprompt.federation.messages import Reply
from fedprompt.method import Server, World
from fedprompt.roles import Tensors
from fedprompt.streams import SERVER, sealed, stream


@dataclass(frozen=True)
class ServerNoise:
    """The noise of one run. With a `secret` it is one that clients cannot know."""

    config: Config
    world: World
    terms: Terms
    secret: int | None = None

    def total(self, replies: Sequence[Reply], server: Server, when: str, clip: float | None) -> Tensors:
        """The noised mean of what arrived, with rows of too few images withheld."""
        terms = self.terms
        parts = privacy.groups(self.world.roles, when, terms.settings, clip)
        noise = terms.noise if when == "start" else privacy.update_noise(terms.noise, self._bit_noise)
        reference = server.shared if when == "round" else {}
        secure = self.config.federation.secure_sum
        total = privacy.noised_sum(
            [reply.upload if secure else privacy.bounded(reply.upload, reference, parts)[0] for reply in replies],
            reference,
            parts,
            terms.expected,
            noise,
            self._generator("privacy", server.round + (when == "round"), replies),
            [float(reply.samples) for reply in replies],  # of how many clients it is the mean: one, or a secure sum's
        )
        return wire.withhold_small(total, self.world.roles.statistics(when))

    def next_clip(self, replies: Sequence[Reply], round: int, clip: float | None) -> float | None:
        """The bound of the next round, where it follows the updates."""
        settings = self.terms.settings
        if clip is None or settings.quantile is None:
            return None
        within = sum(float(reply.upload[privacy.WITHIN]) for reply in replies)
        asked = float(sum(reply.samples for reply in replies))
        generator = self._generator("privacy.clip", round, replies)
        share = privacy.noised_share(within, asked, self.terms.expected, self._bit_noise, generator)
        return privacy.next_clip(clip, share, settings.quantile, settings.quantile_rate)

    @property
    def _bit_noise(self) -> float:
        """Noise on the number of updates within the bound; infinite where nobody asks for it."""
        if self.terms.settings.quantile is None:
            return math.inf
        return privacy.bit_noise_for(self.terms.noise, self.terms.expected)

    def _generator(self, purpose: str, round: int, replies: Sequence[Reply]) -> torch.Generator:
        """Where sites must not know the noise, it is that of the very updates it hides: the noise of a round that is made
        again from others, after the server was killed, must not be the same.
        """
        if self.secret is None:
            return stream(self.config.seed, round, SERVER, purpose)
        hidden = hashlib.sha256(b"".join(hashlib.sha256(wire.pack(reply)).digest() for reply in replies))
        return sealed(f"{self.secret}/{round}/{purpose}/{hidden.hexdigest()}".encode())
