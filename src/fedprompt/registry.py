"""Methods and variants by name: those of this package, and those that other packages offer through entry points.

A third-party package registers a module in its `pyproject.toml`; loading it must run `@register("name")` on its classes:

    [project.entry-points."fedprompt.methods"]
    mine = "my_package.my_method"
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError, create_model

from fedprompt.config import Config, Section, complaints
from fedprompt.errors import ConfigError, FedpromptError

if TYPE_CHECKING:
    from fedprompt.method import Method

GROUP = "fedprompt.methods"
Class = TypeVar("Class", bound="type[Method]")

_methods: dict[str, type[Method]] = {}
_variants: dict[str, type[Method]] = {}


def register(name: str) -> Callable[[Class], Class]:
    """Make a method known under a name: `method: {name: ...}` in a config."""
    return _registrar(_methods, "method", name)


def register_variant(name: str) -> Callable[[Class], Class]:
    """Make a wrapper around any method known: `variant: {name: ...}` in a config."""
    return _registrar(_variants, "variant", name)


def _registrar(table: dict[str, type[Method]], kind: str, name: str) -> Callable[[Class], Class]:
    def add(cls: Class) -> Class:
        held = table.get(name)
        if held is not None and (held.__module__, held.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"{kind} name must be registered once, got {name!r} from {held.__module__} and {cls.__module__}"
            )
        params = getattr(cls, "__dataclass_params__", None)
        if params is None or not params.frozen:
            raise ConfigError(f"{kind} {name!r} must be a frozen dataclass, got {cls.__qualname__}")
        table[name] = cls
        return cls

    return add


@cache
def _scan() -> None:
    package = importlib.import_module("fedprompt.methods")
    for module in pkgutil.walk_packages(package.__path__, "fedprompt.methods."):
        importlib.import_module(module.name)
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except FedpromptError:
            raise
        except Exception as error:
            raise ConfigError(f"entry point {entry.name!r} of group {GROUP!r} cannot be loaded: {error}") from error


def methods() -> dict[str, type[Method]]:
    _scan()
    return dict(sorted(_methods.items()))


def variants() -> dict[str, type[Method]]:
    _scan()
    return dict(sorted(_variants.items()))


def build(method: Mapping[str, Any], variant: Mapping[str, Any] | None = None) -> Method:
    """The method of a config, wrapped in its variant if there is one; every field is checked."""
    built = _build(methods(), "method", method, {})
    if variant is not None:
        built = _build(variants(), "variant", variant, {"inner": built})
    return built


def setting_name(text: str) -> str:
    """The setting a paper's symbol stands for in some method (`v` for `predict_draws`); any other text is itself."""
    return next((cls.symbols[text] for cls in methods().values() if text in cls.symbols), text)


def completed(config: Config) -> Config:
    """The config with every setting of its method and variant spelled out, so that its hash covers defaults too."""
    built = build(config.method, config.variant)
    update = {"method": {"name": config.method["name"], **_settings(getattr(built, "inner", built))}}
    if config.variant is not None:
        update["variant"] = {"name": config.variant["name"], **_settings(built)}
    return config.model_copy(update=update)


def _settings(method: Method) -> dict[str, Any]:
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name != "inner"}


def _build(
    table: Mapping[str, type[Method]], kind: str, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Method:
    settings = dict(settings)
    name = settings.pop("name", None)
    if name not in table:
        raise ConfigError(f"{kind}.name must be one of {', '.join(table)}, got {name!r}")
    cls = table[name]
    for symbol, setting in cls.symbols.items():
        if symbol in settings:
            settings[setting] = settings.pop(symbol)
    known = {field.name for field in dataclasses.fields(cls)} - set(given)
    for unknown in sorted(set(settings) - known):
        raise ConfigError(f"{kind}.{unknown} is not a setting of {name}; it has {', '.join(sorted(known)) or 'none'}")
    try:
        checked = _settings_model(cls, known).model_validate_json(json.dumps(settings))
    except ValidationError as error:
        raise ConfigError(complaints(error, kind)) from error
    return cls(**given, **{name: getattr(checked, name) for name in settings})


def _settings_model(cls: type[Method], fields: set[str]) -> type[Section]:
    """Checks the class's settings by themselves, so that an already built `inner` is not checked again."""
    hints = typing.get_type_hints(cls, include_extras=True)
    definitions: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in fields:
            definitions[field.name] = (
                hints[field.name],
                ... if field.default is dataclasses.MISSING else field.default,
            )
    return create_model(f"{cls.__name__}Settings", __base__=Section, **definitions)


def describe(cls: type[Method]) -> list[dict[str, Any]]:
    """The settings of a method for help and docs: name, type, default and the `#:` comment beside it."""
    comments = _field_comments(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if field.name == "inner":
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        rows.append(
            {"name": field.name, "type": str(field.type), "default": default, "help": comments.get(field.name, "")}
        )
    return rows


def _field_comments(cls: type[Method]) -> dict[str, str]:
    """The `#:` comment of every field, which the formatter may have moved to a line below the field's name."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        field = ""
        for line in source.splitlines():
            begun = re.match(r"    (\w+): ", line)
            field = begun.group(1) if begun else field
            _, mark, comment = line.partition("#: ")
            if mark and field:
                comments[field] = comment
    return comments
