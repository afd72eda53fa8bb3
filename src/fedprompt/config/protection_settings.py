"""Settings that protect a federation: guard, aggregation rules, simulated attacks, differential privacy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedprompt.config.registries import AGGREGATORS, In
from fedprompt.config.setting_types import Bound, Extensible, NotNegative, Positive, Rate, Section, Share


class GuardConfig(Section):
    """What an update must be like before it is aggregated, and what happens to a round that loses too many."""

    quorum: Share = 0.5
    """Share of the updates of a round that must be accepted for the round to count."""
    repeats: NotNegative = 1
    """Number of times a round below the quorum is repeated, each time with clients drawn anew."""
    norm: Bound | None = None
    """Largest L2 norm of an update over all shared tensors. Longer ones are refused. No bound when absent."""
    norm_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest L2 norm of an update as a multiple of the median over the round. No bound when absent."""
    weight_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 20.0
    """Largest weight of a client, as a multiple of the round's median number of images. Null for no bound."""
    max_samples: Positive = 10_000_000
    """Largest number of images a client may claim. An update that claims more is refused."""
    max_bytes: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    """Largest size of a message in bytes. When absent, the size of the declared tensors and some room."""


class AggregationConfig(Extensible):
    """How the shared tensors of a cohort become one set. Every rule but the mean counts each client once."""

    rule: Annotated[str, In(AGGREGATORS)] = "mean"
    """How updates become one: the weighted mean, or a rule that withstands some malicious clients."""
    malicious: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Share of the clients of a round that may be malicious: what `trimmed_mean` cuts off at either end."""
    radius: Bound = 1.0
    """With `clipped_mean`, the largest distance of an update from the shared tensors. Longer ones are shortened to it."""
    options: dict[str, Any] = {}
    """Settings of a `rule` that is not of this package."""


class AttackConfig(Section):
    """Clients that do not play by the rules, to see what a defence is worth. Only honest clients are evaluated."""

    kind: Literal["nan", "scale", "sign_flip", "label_flip", "forged_weight", "free_rider"]
    """What malicious clients do. See docs/protection.md."""
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of the training clients that are malicious."""
    strength: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Factor on the update (10 for `scale`, 1 for `sign_flip` when absent) or on the claimed images (1000)."""


class PrivacyConfig(Section):
    """Client-level differential privacy of what is uploaded."""

    noise_at: Literal["client", "server", "step"] = "client"
    """What noise is added to: every client's update, their sum at the server, or every training step's gradient."""
    clip: Bound | None = 1.0
    """Largest norm of an update, or of a gradient with `step`; longer ones are shortened to it. Null for no bound."""
    clips: dict[str, Bound] = {}
    """Bounds of uploaded statistics by name pattern. Those that no pattern matches have `clip`."""
    noise: Rate | None = None
    """Standard deviation of the noise, as a multiple of the bound. Give this or `target_epsilon`."""
    target_epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Epsilon that all rounds together may spend. The noise is computed from it. Give this or `noise`."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Probability with which the guarantee of epsilon may fail."""
    max_epsilon: Bound | None = None
    """End the run before the round that would spend more than this epsilon. No limit when absent."""
    quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Let the bound follow this quantile of the norms of updates. Needs `noise_at: server`. Fixed when absent."""
    quantile_rate: Bound = 0.2
    """Rate at which the bound follows the quantile."""

    @model_validator(mode="after")
    def _consistent(self) -> PrivacyConfig:
        if (self.noise is None) == (self.target_epsilon is None):
            raise ValueError("have either noise or target_epsilon")
        if self.clip is None and self.noise != 0:
            raise ValueError("have a clip unless noise is 0: noise is measured against it")
        if self.quantile is not None and (self.noise_at != "server" or self.clip is None):
            raise ValueError("have noise_at: server and a clip to start from where the clip follows a quantile")
        return self


PRIVACY_PRESETS: dict[str, dict[str, Any]] = {
    f"pfedmoap-{epsilon}": {"noise_at": "client", "target_epsilon": float(epsilon), "delta": 0.05}
    for epsilon in (25, 50)
}  # Table 6 of pFedMoAP; its paper tells neither the bound nor how rounds add up
