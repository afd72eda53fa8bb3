"""The search space of a config: learning rates by group of tensors, what its method adds, and what the section `tune` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedprompt.config import Config, TrainConfig, parse
from fedprompt.config.config_files import TUNED_SECTIONS
from fedprompt.core import registry
from fedprompt.core.method import Method, World
from fedprompt.core.recipe import group_of, learning_rate, matching
from fedprompt.core.search_space import Choice, FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken

FACTOR = 100.0  # the range of a rate: from the one of the config divided by this to the one multiplied by it
RATES = "train.lrs."


def search_space(config: Config, method: Method, world: World, section: Mapping[str, Any]) -> SearchSpace:
    """What is searched for a complete config. Entries of `section` replace those below, and null removes them."""
    space: dict[str, FloatRange | Choice] = {**_rates(config.train, method, world), **_declared(method)}
    for setting, value in section.items():
        given = given_range(setting, value)
        if given is None:
            space = {key: each for key, each in space.items() if key != setting and not key.startswith(f"{setting}.")}
        elif has_setting(config, method, world, setting):
            space[setting] = given
    for setting, each in space.items():
        for value in (each.low, each.high) if isinstance(each, FloatRange) else each.values:
            changed = applied(config, {setting: value})
            registry.build(changed.method, changed.variant)  # both raise where the config cannot have it
    return space


def _declared(method: Method) -> dict[str, FloatRange | Choice]:
    inner = getattr(method, "inner", None)
    return {**(inner.search_space if inner is not None else {}), **method.search_space}


def _rates(train: TrainConfig, method: Method, world: World) -> dict[str, FloatRange]:
    """A range for the learning rate of every group of trained tensors, around the rate it has in the config."""
    rates = _by_group(train, method, world)
    return {f"{RATES}{group}": FloatRange(rate / FACTOR, rate * FACTOR) for group, rate in rates.items() if rate > 0}


def _by_group(train: TrainConfig, method: Method, world: World) -> dict[str, float]:
    """The learning rate of every group of trained tensors, by the pattern of its names."""
    found: dict[str, float] = {}
    for name in trained(method, world, train):
        group = group_of(name).rpartition(".")[2]  # copies that a variant makes have the rates of the originals
        inside = name.split(group, 1)[1].startswith(".")
        found.setdefault(f"{group}{'.*' if inside else ''}", learning_rate(train, name, world.roles.initial))
    return found


def with_plain_rates(config: Config, method: Method, world: World) -> Config:
    """The config with a number for every relative learning rate: trials change numbers."""
    if not any(isinstance(rate, str) for rate in config.train.lrs.values()):
        return config
    plain = {pattern: rate for pattern, rate in config.train.lrs.items() if not isinstance(rate, str)}
    found = {group: rate for group, rate in _by_group(config.train, method, world).items() if group not in plain}
    return config.model_copy(update={"train": config.train.model_copy(update={"lrs": {**found, **plain}})})


def trained(method: Method, world: World, train: TrainConfig) -> list[str]:
    """Names of the tensors that a client trains, in a round or before an evaluation."""
    stages = (*method.stages(world, train), *method.adaptation(world, train))
    return list(dict.fromkeys(name for stage in stages for name in stage.trainable if stage.epochs))


def has_setting(config: Config, method: Method, world: World, setting: str) -> bool:
    """Whether a config has a setting: one of its method, or a rate of a tensor that it trains."""
    section, _, name = setting.partition(".")
    if setting.startswith(RATES):
        return any(matching({setting.removeprefix(RATES): 1.0}, each) for each in trained(method, world, config.train))
    if section == "method":
        return name in config.method
    if section in ("variant", "privacy"):
        return name in (getattr(config, section) or {}) if section == "variant" else config.privacy is not None
    return True


def given_range(setting: str, value: Any) -> FloatRange | Choice | None:
    """An entry of the section `tune`: a list of values, or a mapping with low and high."""
    field = f"tune.{setting}"
    if setting.split(".")[0] not in TUNED_SECTIONS:
        raise ConfigError(broken(field, f"be a setting of {', '.join(TUNED_SECTIONS)}", setting))
    if value is None:
        return None
    try:
        if isinstance(value, list):
            return Choice(tuple(value))
        if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
            low, high, log = value["low"], value["high"], value.get("log", True)
            if all(type(each) in (int, float) for each in (low, high)) and isinstance(log, bool):
                return FloatRange(float(low), float(high), log)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    raise ConfigError(broken(field, "be a list of values, a mapping with low, high and perhaps log, or null", value))


def read_section(raw: object) -> dict[str, Any]:
    """The section `tune` of a config file: settings with what may be tried for them."""
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ConfigError(broken("tune", "map settings to lists of values or to ranges", raw))
    for setting, value in raw.items():
        given_range(setting, value)
    return raw


def applied(config: Config, chosen: Mapping[str, Any]) -> Config:
    """The config with these values. Rates come before other patterns: the first one that matches counts."""
    values = config.model_dump(mode="json")
    rates = {key.removeprefix(RATES): value for key, value in chosen.items() if key.startswith(RATES)}
    if rates:
        values["train"]["lrs"] = {**rates, **{k: v for k, v in values["train"]["lrs"].items() if k not in rates}}
    for setting, value in chosen.items():
        if not setting.startswith(RATES):
            section, _, name = setting.partition(".")
            if not name or "." in name or not isinstance(values.get(section), dict):
                raise ConfigError(
                    broken(f"tune.{setting}", "be section.setting of a section that the config has", setting)
                )
            values[section][name] = value
    return parse(values)


def start_of(config: Config, space: SearchSpace) -> dict[str, Any]:
    """The values that the config has now, as far as they can be tried."""
    found: dict[str, Any] = {}
    for setting, each in space.items():
        section, _, name = setting.partition(".")
        if setting.startswith(RATES):
            of_group = setting.removeprefix(RATES).replace("*", "x")
            value: Any = learning_rate(config.train, of_group, {})
        else:
            values = config.model_dump(mode="json").get(section)
            value = values.get(name) if isinstance(values, dict) else None
        if each.holds(value):
            found[setting] = value
    return found
