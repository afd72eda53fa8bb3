"""The server's part of a private round: noise on a sum of updates, and the bound that follows their norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedprompt.config import Config
from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Server, World
from fedprompt.privacy import mechanism
from fedprompt.privacy.budget import Terms
from fedprompt.privacy.discrete_gaussian import Words
from fedprompt.privacy.keystream import derived_keystream
from fedprompt.random_streams import SERVER, stream
from fedprompt.tensors import Tensors


@dataclass(frozen=True)
class ServerNoise:
    """The noise of one run. With a `secret`, clients cannot compute it."""

    config: Config
    world: World
    terms: Terms
    secret: int | None = None

    def total(self, replies: Sequence[LocalUpdate], server: Server, when: str, clip: float | None) -> Tensors:
        """The noised mean of the replies, without rows of too few images."""
        terms = self.terms
        parts = mechanism.groups(self.world.roles, when, terms.settings, clip)
        noise = terms.noise if when == "start" else mechanism.update_noise(terms.noise, self._bit_noise)
        reference = server.shared if when == "round" else {}
        secure = self.config.federation.secure_sum
        total = mechanism.noised_sum(
            [reply.upload if secure else mechanism.bounded(reply.upload, reference, parts)[0] for reply in replies],
            reference,
            parts,
            terms.expected,
            noise,
            self._words("privacy", server.round + (when == "round"), replies, reference, clip),
            [
                float(reply.samples) for reply in replies
            ],  # number of clients in the mean: one, or the cohort of a secure sum
        )
        return wire.withhold_small(total, self.world.roles.statistics(when))

    def next_clip(self, replies: Sequence[LocalUpdate], round: int, clip: float | None) -> float | None:
        """The bound of the next round, if it follows the updates."""
        settings = self.terms.settings
        if clip is None or settings.quantile is None:
            return None
        within = sum(float(reply.upload[mechanism.WITHIN]) for reply in replies)
        clients = float(sum(reply.samples for reply in replies))
        source = self._words("privacy.clip", round, replies, {}, clip)
        share = mechanism.noised_share(within, clients, self.terms.expected, self._bit_noise, source)
        return mechanism.next_clip(clip, share, settings.quantile, settings.quantile_rate)

    @property
    def _bit_noise(self) -> float:
        """Noise on the number of updates within the bound; infinite if it is not used."""
        if self.terms.settings.quantile is None:
            return math.inf
        return mechanism.bit_noise_for(self.terms.noise, self.terms.expected)

    def _words(
        self, purpose: str, round: int, replies: Sequence[LocalUpdate], reference: Tensors, clip: float | None
    ) -> Words:
        """If sites must not know the noise, its key is derived from a secret and from all data that the noise is added to.
        A round that is repeated after a crash of the server then has the same noise for the same updates, so they are
        never published twice with different noise. For other updates the noise is independent.
        """
        if self.secret is None:
            return stream(self.config.seed, round, SERVER, purpose)
        label = f"{purpose}/{round}/{clip!r}".encode()
        return derived_keystream(self.secret, label, wire.encode(reference), *(wire.pack(reply) for reply in replies))
