"""Which protections fit together, and which methods they fit: refused before the first image is decoded."""

from __future__ import annotations

from fedprompt.config import Config
from fedprompt.errors import ConfigError, broken
from fedprompt.method import Method
from fedprompt.roles import Roles


def check_protections(config: Config, method: Method, roles: Roles) -> None:
    """Raise where a protection would be an empty promise, or would make nonsense of a method."""
    if config.federation.secure_sum:
        _check_sums("federation.secure_sum", "false", "true", config, method)
        for field, value in (("norm", config.guard.norm), ("norm_factor", config.guard.norm_factor)):
            if value is not None:
                rule = "be null where a secure sum hides single updates"
                raise ConfigError(broken(f"guard.{field}", rule, value))
    if config.privacy is None:
        return
    if config.privacy.noise_at == "server":
        _check_sums("privacy.noise_at", "client", "server", config, method)
    choices = [name for name, statistic in roles.stat.items() if statistic.choice]
    if choices:
        rule = f"be absent for method {config.label!r}, whose statistic {choices[0]!r} is a choice that noise makes nonsense of"
        raise ConfigError(broken("privacy", rule, config.privacy.noise_at))
    if config.privacy.noise_at == "step" and (roles.stat or type(method).finish is not Method.finish):
        rule = f"be client or server for method {config.label!r}, which sends more than what its steps trained"
        raise ConfigError(broken("privacy.noise_at", rule, "step"))


def _check_sums(field: str, instead: str, value: str, config: Config, method: Method) -> None:
    """Raise unless the server can do with sums."""
    if not method.sums_suffice:
        rule = f"be {instead} for method {config.label!r}, whose server looks at single updates"
        raise ConfigError(broken(field, rule, value))
    if config.aggregation.rule != "mean":
        raise ConfigError(broken("aggregation.rule", f"be mean with {field}: {value}", config.aggregation.rule))
