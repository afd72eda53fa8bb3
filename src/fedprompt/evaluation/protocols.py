"""Named series of runs: a protocol only makes the configs.

    new clients     a share of the clients never trains, and only it is evaluated
    base to novel   a share of the classes is withheld from training and tested at the end
    cross-domain    every domain in turn is kept from training, and all clients are tested on it
    cross-dataset   all clients are tested on the classes of another set
    comeback        a client misses some rounds, and the same runs without its absence
    sweep           one setting with several values
    ablation        pFedBayesPT without its distribution, without its mixture, and complete
    heterogeneity   clients whose labels come from one of two subsets, or from both

This module does not import torch until a method's settings are needed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedprompt.config import Config
from fedprompt.config.config_files import MOST_RUNS, file_name, load_alike, renamed, told_apart
from fedprompt.config.strict_yaml import read_yaml
from fedprompt.errors import ConfigError, broken, did_you_mean, same_name

FULL = "pfedbayespt"
ABLATED = ("pfedbayespt_d", "pfedbayespt_g", FULL)
RANGE = re.compile(r"([-+]?\d*)\.\.([-+]?\d*)")
SWEPT = (
    "data",
    "partition",
    "backbone",
    "method",
    "variant",
    "train",
    "federation",
    "guard",
    "aggregation",
    "attack",
    "privacy",
)  # sections with settings to sweep


@dataclass(frozen=True)
class Axis:
    """A setting and the values it takes."""

    field: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Axis:
        """`method.predict_draws=1..10`, `train.lr=0.01,0.1` or `method.prompt_init=[random, zero]`."""
        field, equals, listed = text.partition("=")
        section, dot, name = field.partition(".")
        if not equals:
            raise ConfigError(broken("sweep", "look like field=values", text))
        if section not in SWEPT or not dot or name in ("", "name"):
            rule = f"name a setting inside one of {', '.join(SWEPT)}, such as method.prompt_tokens"
            raise ConfigError(broken("sweep", rule, field))
        return cls(field, values_of(field, listed))

    def spelled_out(self) -> Axis:
        """A method's setting by its name if the paper's symbol was given: `method.v` is `method.predict_draws`."""
        section, _, name = self.field.partition(".")
        if section != "method":
            return self
        from fedprompt.core import registry

        return dataclasses.replace(self, field=f"method.{registry.setting_name(name)}")

    def overrides(self) -> list[str]:
        """Each value as the override that sets it; JSON is YAML."""
        return [f"{self.field}={json.dumps(value, default=str)}" for value in self.values]

    def tags(self) -> list[str]:
        """Each value as a part of a run's name."""
        name = self.field.rpartition(".")[2]
        return [f"{name}{value if isinstance(value, str) else json.dumps(value, default=str)}" for value in self.values]


@dataclass(frozen=True)
class Sweep:
    """The runs along an axis, and the path of their plot."""

    field: str
    configs: list[Config]
    picture: Path


def values_of(field: str, text: str) -> tuple[Any, ...]:
    """A YAML list, with or without its brackets, in which `1..4` means 1, 2, 3, 4."""
    try:
        listed = read_yaml(text if text.lstrip().startswith("[") else f"[{text}]")
    except yaml.YAMLError as error:
        raise ConfigError(broken(f"sweep of {field}", "be a range such as 1..10, or a list of values", text)) from error
    values = [value for item in listed for value in _expanded(field, item)]
    if not values:
        raise ConfigError(broken(f"sweep of {field}", "have at least one value", text))
    if any(values.count(value) > 1 for value in values):
        raise ConfigError(broken(f"sweep of {field}", "have every value once", text))
    return tuple(values)


def _expanded(field: str, item: Any) -> Iterable[Any]:
    ends = RANGE.fullmatch(item) if isinstance(item, str) else None
    if ends is None:
        return [item]
    try:
        first, last = map(int, ends.groups())
    except ValueError as error:
        raise ConfigError(broken(f"sweep of {field}", "have a whole number at both ends of a range", item)) from error
    if first > last:
        raise ConfigError(broken(f"sweep of {field}", "go from the smaller end of a range to the larger", item))
    if last - first >= MOST_RUNS:
        raise ConfigError(broken(f"sweep of {field}", f"have at most {MOST_RUNS} values", item))
    return range(first, last + 1)


def new_clients(
    path: str | Path,
    overrides: Iterable[str] = (),
    seeds: Iterable[int] = (),
    share: float = 0.5,
    epochs: int = 5,
) -> list[Config]:
    """The runs of a config with a share of the clients held out; each of those fits its head before it is evaluated."""
    if not 0 < share < 1:
        raise ConfigError(broken("--share", "be greater than 0 and less than 1", share))
    held_out = [f"federation.held_out={share}", f"federation.newcomer_epochs={epochs}"]
    configs = load_alike(path, [*overrides, *held_out], seeds)
    return told_apart([renamed(config, "new-clients") for config in configs])


def base_to_novel(
    path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = (), share: float = 0.5
) -> list[Config]:
    """The runs of a config with the last share of the classes withheld from training and tested at the end."""
    if not 0 < share < 1:
        raise ConfigError(broken("--share", "be greater than 0 and less than 1", share))
    configs = load_alike(path, [*overrides, f"data.novel={share}"], seeds)
    return told_apart([renamed(config, "base-to-novel") for config in configs])


def cross_domain(
    path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = (), domains: Iterable[str] = ()
) -> list[Config]:
    """The runs of a config with each domain in turn, or each of some, left out of training and tested."""
    overrides, seeds, domains = list(overrides), list(seeds), list(domains)
    configs = load_alike(path, overrides, seeds)
    if not domains:
        from fedprompt.data.sources.open import open_source
        from fedprompt.io.files import cache_directory

        first = configs[0]
        domains = list(open_source(first.data, cache_directory(first.output.cache)).domain_names)
        if len(domains) < 2:
            raise ConfigError(broken("data.source", "have several domains, of which one is left out", domains))
    series = [
        renamed(config, f"unseen-{domain}")
        for domain in domains
        for config in load_alike(path, [*overrides, f"data.unseen_domain={json.dumps(domain)}"], seeds)
    ]
    return told_apart(series)


def cross_dataset(
    path: str | Path, other: str, overrides: Iterable[str] = (), seeds: Iterable[int] = ()
) -> list[Config]:
    """The runs of a config, at the end of which all clients are tested on another set."""
    configs = load_alike(path, [*overrides, f"data.other_set={json.dumps(other)}"], seeds)
    return told_apart([renamed(config, "cross-dataset") for config in configs])


@dataclass(frozen=True)
class Comeback:
    """Runs with and without the absence of a client, and the path of their plot."""

    client: str
    away: tuple[int, int]
    configs: list[Config]
    picture: Path


def comeback(
    path: str | Path,
    overrides: Iterable[str] = (),
    seeds: Iterable[int] = (),
    client: str = "0",
    missed: int = 5,
    first: int | None = None,
) -> Comeback:
    """The runs of an unchanged config, and with one client away for some rounds: from `first` on, or in the middle.

    Every round is evaluated, unless the overrides say otherwise, to follow the client.
    """
    configs = load_alike(path, ["federation.evaluate_every=1", *overrides], seeds)
    rounds = min(config.federation.rounds for config in configs)
    if not 1 <= missed <= rounds - 2:
        rule = f"be at least 1 and leave a round before and after the absence ({rounds} rounds in all)"
        raise ConfigError(broken("--rounds", rule, missed))
    first = 1 + (rounds - missed) // 2 if first is None else first
    if not 1 <= first <= rounds - missed:
        raise ConfigError(broken("--first", f"be at least 1 and leave a round after the absence of {missed}", first))
    name, last = client_called(client, configs), first + missed - 1
    series = []
    for config in configs:
        federation = config.federation.model_copy(update={"away": {**config.federation.away, name: (first, last)}})
        absent = config.model_copy(update={"federation": federation})
        series += [renamed(config, "comeback", "present"), renamed(absent, "comeback", f"away{first}to{last}")]
    picture = Path(configs[0].output.directory) / f"{file_name('comeback', configs[0].name, name)}.png"
    return Comeback(name, (first, last), told_apart(series), picture)


def client_called(text: str, configs: Iterable[Config]) -> str:
    """The name of a client that every config has, given by name or by number from 0."""
    found = {_client_in(text, config) for config in configs}
    if len(found) > 1:
        raise ConfigError(broken("--client", f"be one client of all runs, not {', '.join(sorted(found))}", text))
    return found.pop()


def _client_in(text: str, config: Config) -> str:
    from fedprompt.data.partition.client_names import NumberedNames
    from fedprompt.data.partition.manifest import Manifest

    partition = config.partition
    if partition.scheme == "manifest" and partition.manifest is not None:
        names = Manifest.load(partition.manifest).clients.names
    else:
        names = NumberedNames(partition.clients)
    if (name := same_name(text, names)) is not None:
        return name
    if text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    rule = f"be a client ({names[0]} .. {names[-1]}) or a number below {len(names)}"
    raise ConfigError(broken("--client", rule, text) + did_you_mean(text, names))


def sweep(axis: str, path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = ()) -> Sweep:
    """The runs of a config at every value of an axis."""
    parsed, overrides, seeds = Axis.parse(axis).spelled_out(), list(overrides), list(seeds)
    series = [load_alike(path, [*overrides, override], seeds) for override in parsed.overrides()]
    configs = [renamed(each, tag) for tag, found in zip(parsed.tags(), series, strict=True) for each in found]
    first = series[0][0]
    picture = Path(first.output.directory) / f"{file_name('sweep', first.name, parsed.field)}.png"
    return Sweep(parsed.field, told_apart(configs), picture)


def ablation(path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = ()) -> list[Config]:
    """The three forms of pFedBayesPT on one config, each with those of the config's method settings that it has.

    If the config has several methods, the settings are those of the complete form if it is among them.
    """
    from fedprompt.core import registry

    configs = load_alike(path, overrides, seeds)
    for config in configs:
        registry.build(config.method, config.variant)  # a misspelt setting must not count as one that a form lacks
    known = registry.methods()
    made: dict[str, Config] = {}
    for config in [each for each in configs if each.method["name"] == FULL] or configs:
        for name in ABLATED:
            fields = {field.name for field in dataclasses.fields(known[name])}
            settings = {key: value for key, value in config.method.items() if key in fields}
            each = config.model_copy(update={"method": {"name": name, **settings}})
            made.setdefault(each.digest(), renamed(each, "ablation"))
    return told_apart(list(made.values()))


def heterogeneity(path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = ()) -> list[Config]:
    """The runs of a config on label subsets: every client holds one of them, then every client holds two."""
    separated = [*overrides, "partition.scheme=label_subsets"]
    return sweep("partition.subsets_per_client=1,2", path, separated, seeds).configs
