"""From a YAML file to the configs it describes: overlays of a scale, `key=value` overrides, sweeps and the names of their runs.

Free of torch, like `fedprompt.config`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fedprompt.config.protection_settings import PRIVACY_PRESETS
from fedprompt.config.settings import SHORTHANDS, Config, as_section, parse
from fedprompt.config.shipped_configs import located, names
from fedprompt.config.strict_yaml import MOST_BYTES, MOST_LEVELS, read_yaml
from fedprompt.errors import ConfigError, broken, did_you_mean
from fedprompt.io.bounded_read import read_text

SCALE = "scale="  # the override that chooses an overlay
PUBLISHED = "published"  # numbers of a paper: for `fedprompt reproduce`, not part of an experiment
TUNE = "tune"  # what `fedprompt tune` tries: not part of an experiment
TUNED_SECTIONS = (
    "train",
    "method",
    "variant",
    "aggregation",
    "privacy",
)  # others decide on the task or the measurement
KEEPING = ("data", "backbone")  # sections whose other settings stay when a text is given for them
CASES = "cases"  # the axis of a sweep whose choices set several settings each
MOST_RUNS = 10_000  # of one sweep
MOST_LETTERS = 150  # that what differs adds to the name of a run; folders have names of at most 255
MOST_TEXT = 64 * 2**20  # bytes of settings, written out for every run of a sweep


def load(path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = ()) -> list[Config]:
    """Read a YAML file, lay the overlay of `scale=...` over it, apply the other `key=value` overrides, and expand its
    `sweep` and the seeds into one config per run.
    """
    return told_apart(load_alike(path, overrides, seeds))


def load_alike(path: str | Path, overrides: Iterable[str] = (), seeds: Iterable[int] = ()) -> list[Config]:
    """What `load` gives before names tell the runs apart: all are called as the file says."""
    raw = read(path)
    raw.setdefault("name", Path(path).stem)
    overrides = list(overrides)
    scales = [override.removeprefix(SCALE) for override in overrides if override.startswith(SCALE)]
    overrides = [override for override in overrides if not override.startswith(SCALE)]
    raw = at_scale(raw, scales[-1] if scales else None)
    runs = expand(without_axes(raw, [_meant(override.partition("=")[0]) for override in overrides]), seeds)
    return [parse(apply_overrides(values, overrides)) for values in runs]


def _meant(key: str) -> str:
    """`data=PATH` is about `data.source` alone."""
    return f"{key}.{SHORTHANDS[key]}" if key in KEEPING else key


def read(path: str | Path) -> dict[str, Any]:
    """The sections of a YAML file, or of a config of the package, as they stand."""
    try:
        raw = read_yaml(read_text(located(path), MOST_BYTES)) or {}
    except OSError as error:
        beside = [str(each) for each in Path(path).parent.glob("*.y*ml")]
        hint = did_you_mean(path, [*beside, *names()]) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"config: cannot read {str(path)!r}: {error.strerror}{hint}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config: {str(path)!r} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config: {str(path)!r} must hold a mapping of sections, got {type(raw).__name__}")
    return raw


def at_scale(values: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """The settings with the overlay `scales.<scale>` laid over them; without a scale, as they stand.

    An axis of the overlay's `sweep` replaces that axis, and null removes it. Any other setting of the overlay is not
    swept any more. The name tells the scale.
    """
    base = dict(values)
    for section in (PUBLISHED, TUNE):
        base.pop(section, None)
    scales = base.pop("scales", None) or {}
    if not isinstance(scales, dict) or not all(isinstance(overlay, dict) for overlay in scales.values()):
        raise ConfigError(broken("scales", "map names to sections of settings", scales))
    if scale is None:
        return base
    if scale not in scales:
        rule = f"be one of the config's scales ({', '.join(map(str, scales)) or 'none'})"
        raise ConfigError(broken("scale", rule, scale) + did_you_mean(scale, map(str, scales)))
    overlay = {"name": f"{base['name']}-{scale}", **scales[scale]}
    settings = dict(_flatten({key: value for key, value in overlay.items() if key != "sweep"}))
    merged = _merged(without_axes(base, settings), overlay)
    if isinstance(merged.get("sweep"), dict):
        merged["sweep"] = {axis: choices for axis, choices in merged["sweep"].items() if choices is not None}
    return merged


def _merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; any other value of the overlay takes the place of the one below."""
    result = dict(base)
    for key, value in overlay.items():
        below = as_section(key, result.get(key))
        value = as_section(key, value) if key in KEEPING else value
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(below, value)
        else:
            result[key] = deepcopy(value)
    return result


def without_axes(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A setting given by hand is not swept any more, and cases that then say the same are one."""
    kept = dict(values)
    if isinstance(kept.get("sweep"), dict):
        given = [key.split(".") for key in keys]

        def is_open(axis: str) -> bool:
            return not any(axis.split(".")[: len(key)] == key for key in given)

        kept["sweep"] = {axis: choices for axis, choices in kept["sweep"].items() if is_open(axis)}
        if _are_cases(kept["sweep"].get(CASES)):
            cases = [{key: value for key, value in case.items() if is_open(key)} for case in kept["sweep"][CASES]]
            kept["sweep"][CASES] = [case for number, case in enumerate(cases) if case not in cases[:number]]
    return kept


def _are_cases(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(case, dict) for case in value)


def told_apart(configs: list[Config]) -> list[Config]:
    """Runs of one sweep that would share a directory get names that say what differs between them."""
    result = list(configs)
    flat = [dict(_flatten(config.model_dump(mode="json"))) for config in configs]
    for name in {config.run_name for config in configs}:
        alike = [number for number, config in enumerate(configs) if config.run_name == name]
        keys = sorted({key for number in alike for key in flat[number]})
        values = {key: [json.dumps(flat[number][key]) for number in alike if key in flat[number]] for key in keys}
        varied = [key for key in keys if len(set(values[key])) > 1]
        distinct = {json.dumps([flat[number].get(key) for key in varied]) for number in alike}
        if len(distinct) < len(alike):  # what differs is whether a section is there at all
            varied = [key for key in keys if len(set(values[key])) > 1 or len(values[key]) < len(alike)]
        if len(alike) > 1 and not varied:
            raise ConfigError(f"sweep must not hold the same run twice, got {name!r} {len(alike)} times")
        for number in alike if len(alike) > 1 else []:
            parts = [f"{_last_name(key)}{flat[number][key]}" for key in varied if flat[number].get(key) is not None]
            if sum(map(len, parts)) > MOST_LETTERS:
                parts = [
                    part if len(part) <= 40 else f"{part[:24]}-{hashlib.sha256(part.encode()).hexdigest()[:8]}"
                    for part in parts
                ]
            result[number] = renamed(configs[number], *parts)
    return result


def _last_name(key: str) -> str:
    """`lr` of `train.lr`, and `head` of `train.lrs.head.*`."""
    return key.removesuffix(".*").split(".")[-1]


def renamed(config: Config, *parts: str) -> Config:
    """The same config with more to its name."""
    return config.model_copy(update={"name": file_name(config.name, *parts)})


def file_name(*parts: str) -> str:
    """The parts with dashes between them, and nothing a file system would stumble over."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join(parts))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`train.lr=0.1` sets one value; the right side is YAML, so lists and nulls work too."""
    result = deepcopy(dict(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override must look like key=value, got {override!r}")
        try:
            value = read_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {key} must be YAML, got {text!r}") from error
        _set(result, key.split("."), value, key)
    return result


def _set(values: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    if len(path) > MOST_LEVELS:
        raise ConfigError(f"override must have at most {MOST_LEVELS} names with dots between them, got {len(path)}")
    if key in KEEPING and isinstance(value, str):
        path = [key, SHORTHANDS[key]]
    for step in path[:-1]:
        values[step] = {} if values.get(step) is None else as_section(step, values[step])
        if step == "privacy" and isinstance(values[step], str) and values[step] in PRIVACY_PRESETS:
            values[step] = dict(PRIVACY_PRESETS[values[step]])
        values = values[step]
        if not isinstance(values, dict):
            raise ConfigError(f"override {key} must name a setting inside a section, but {step!r} is a plain value")
    values[path[-1]] = value


def expand(values: Mapping[str, Any], seeds: Iterable[int] = ()) -> list[dict[str, Any]]:
    """One mapping per run: for every seed, the product of the lists under `sweep`.

    Seeds come first: neighbours then have the same images and share what is computed of them. The axis `cases` lists mappings of settings
    that belong together, such as a method and its learning rate.
    """
    base = deepcopy(dict(values))
    axes = base.pop("sweep", None) or {}
    if not isinstance(axes, dict) or not all(isinstance(choices, list) and choices for choices in axes.values()):
        raise ConfigError(f"sweep must map settings to lists of values, got {axes!r}")
    if CASES in axes and not _are_cases(axes[CASES]):
        raise ConfigError(broken(f"sweep.{CASES}", "be a list of mappings of settings to values", axes[CASES]))
    seeds = list(seeds)
    if seeds:
        axes = {"seed": seeds, **{axis: choices for axis, choices in axes.items() if axis != "seed"}}
    count = math.prod(len(choices) for choices in axes.values())
    if count > MOST_RUNS:
        raise ConfigError(f"sweep must describe at most {MOST_RUNS} runs, got more")
    if count * len(json.dumps(base, default=str)) > MOST_TEXT:
        raise ConfigError(f"sweep must come to at most {MOST_TEXT} bytes of settings in all its runs, got more")
    runs = []
    for choice in itertools.product(*axes.values()):
        run = deepcopy(base)
        for key, value in zip(axes, choice, strict=True):
            together = value if key == CASES else {key: value}
            for setting, chosen in together.items():
                _set(run, setting.split("."), deepcopy(chosen), f"sweep.{setting}")
        runs.append(run)
    return runs
