"""Which protections can be combined with each other and with which methods; checked before any image is decoded."""

from __future__ import annotations

from fedprompt.config import Config, PrivacyConfig
from fedprompt.core.client_sampling import cohort_size
from fedprompt.core.method import Method, World
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.privacy.mechanism import bound_of

SMALLEST_SUM = 3  # of two clients each knows the other's part


def check_protections(config: Config, method: Method, world: World) -> None:
    """Raise if a protection would have no effect, or would make a method useless."""
    if config.federation.secure_sum:
        size = cohort_size(config.federation.fraction, len(world.participants))
        if config.federation.sampling == "poisson":
            rule = "be fixed for a secure sum, which a small cohort cannot make"
            raise ConfigError(broken("federation.sampling", rule, "poisson"))
        if size < SMALLEST_SUM:
            raise ConfigError(broken("federation.fraction", f"give cohorts of {SMALLEST_SUM} for a secure sum", size))
        _check_sums("federation.secure_sum", "false", "true", config, method)
        for field, value in (("norm", config.guard.norm), ("norm_factor", config.guard.norm_factor)):
            if value is not None:
                rule = "be null where a secure sum hides single updates"
                raise ConfigError(broken(f"guard.{field}", rule, value))
    if config.privacy is not None:
        _check_privacy(config, config.privacy, method, world.roles)


def _check_privacy(config: Config, privacy: PrivacyConfig, method: Method, roles: Roles) -> None:
    if privacy.noise_at == "server":
        _check_sums("privacy.noise_at", "client", "server", config, method)
        if config.guard.norm_factor is not None:
            rule = "be null with noise at the server: one client would change which others count"
            raise ConfigError(broken("guard.norm_factor", rule, config.guard.norm_factor))
        if config.federation.away and config.federation.sampling == "fixed":
            rule = "be poisson where clients are away and sampling is to hide who was drawn"
            raise ConfigError(broken("federation.sampling", rule, "fixed"))
    if privacy.quantile is not None and not roles.shared:
        raise ConfigError(
            broken("privacy.quantile", f"be null for method {config.label!r}, which shares nothing", privacy.quantile)
        )
    for name, statistic in roles.stat.items():
        count = statistic.count
        bound = None if count is None else bound_of(count, privacy)
        if bound is not None and bound <= statistic.minimum:
            rule = (
                f"have a bound above {statistic.minimum} for {count!r}, without which all rows of {name!r} are withheld"
            )
            raise ConfigError(broken("privacy.clips", rule, bound))
    choices = [name for name, statistic in roles.stat.items() if statistic.choice]
    if choices:
        rule = f"be absent for method {config.label!r}, whose statistic {choices[0]!r} is a choice and has no meaning with noise"
        raise ConfigError(broken("privacy", rule, privacy.noise_at))
    if privacy.noise_at == "step" and (roles.stat or type(method).finish is not Method.finish):
        rule = f"be client or server for method {config.label!r}, which may send more than what its steps trained"
        raise ConfigError(broken("privacy.noise_at", rule, "step"))
    if privacy.noise_at == "step" and config.train.clip_norm is not None:
        rule = "be null with noise at every step: it would scale what is sent by what is private"
        raise ConfigError(broken("train.clip_norm", rule, config.train.clip_norm))


def _check_sums(field: str, instead: str, value: str, config: Config, method: Method) -> None:
    """Raise unless the server needs only sums."""
    if not method.sums_suffice:
        rule = f"be {instead} for method {config.label!r}, whose server looks at single updates"
        raise ConfigError(broken(field, rule, value))
    if config.aggregation.rule != "mean":
        raise ConfigError(broken("aggregation.rule", f"be mean with {field}: {value}", config.aggregation.rule))
