"""Methods and variants by name: those of this package, and those that other packages offer through entry points.

A third-party package registers a module in its `pyproject.toml`; loading it must run `@register("name")` on its classes:

    [project.entry-points."fedprompt.methods"]
    mine = "my_package.my_method"
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from fedprompt.config import Config, Section, plugin_options
from fedprompt.core.recipe import resolve
from fedprompt.errors import ConfigError, broken
from fedprompt.extensions import Registry

if TYPE_CHECKING:
    from fedprompt.core.method import Method

Class = TypeVar("Class", bound="type[Method]")


def _check_class(name: str, cls: Any) -> None:
    params = getattr(cls, "__dataclass_params__", None)
    if params is None or not params.frozen:
        raise ConfigError(f"method or variant {name!r} must be a frozen dataclass, got {cls.__qualname__}")


METHODS: Registry[type[Method]] = Registry("method.name", "fedprompt.methods", "fedprompt.methods", check=_check_class)
VARIANTS: Registry[type[Method]] = Registry(
    "variant.name", "fedprompt.methods", "fedprompt.methods.variants", check=_check_class
)


def register(name: str, formerly: str | None = None) -> Callable[[Class], Class]:
    """Make a method known under a name: `method: {name: ...}` in a config. An earlier name still works."""
    return METHODS.registrar(name, formerly)


def register_variant(name: str) -> Callable[[Class], Class]:
    """Make a wrapper around any method known: `variant: {name: ...}` in a config."""
    return VARIANTS.registrar(name)


def methods() -> dict[str, type[Method]]:
    return METHODS.table()


def variants() -> dict[str, type[Method]]:
    return VARIANTS.table()


def build(method: Mapping[str, Any], variant: Mapping[str, Any] | None = None) -> Method:
    """The method of a config, in its variant if there is one; every field is checked."""
    built = _build(METHODS, "method", method, {})
    if variant is not None:
        built = _build(VARIANTS, "variant", variant, {"inner": built})
    return built


def setting_name(text: str) -> str:
    """The setting that a paper's symbol means in some method (`V` for `predict_draws`); any other text is returned unchanged."""
    return next((cls.symbols[text] for cls in methods().values() if text in cls.symbols), text)


def completed(config: Config) -> Config:
    """The config with every setting of its method and variant spelled out, and every `auto` resolved."""
    built = build(config.method, config.variant)
    current = METHODS.current(config.method["name"])
    update: dict[str, Any] = {"method": {"name": current, **_settings(getattr(built, "inner", built))}}
    if config.variant is not None:
        update["variant"] = {"name": VARIANTS.current(config.variant["name"]), **_settings(built)}
    update["train"] = resolve(config.train, built.recipe)
    update["federation"] = config.federation.model_copy(update={"evaluate_last": config.federation.last_rounds})
    return config.model_copy(update=update)


def _settings(method: Method) -> dict[str, Any]:
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name != "inner"}


def _build(
    registry: Registry[type[Method]], kind: str, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Method:
    settings = dict(settings)
    name = settings.pop("name", None)
    cls = registry.get(name)
    for symbol, setting in cls.symbols.items():
        if symbol in settings:
            settings[setting] = settings.pop(symbol)
    for setting in sorted(set(cls.retired) & set(settings)):
        raise ConfigError(broken(f"{kind}.{setting}", cls.retired[setting], settings[setting]))
    model = _settings_model(cls, frozenset(given))  # type: ignore[arg-type]  # a class is hashable
    return cls(**given, **plugin_options.checked(kind, name, model, settings))


@lru_cache(maxsize=256)
def _settings_model(cls: type[Method], given: frozenset[str]) -> type[Section]:
    """Only the settings of the class itself, so that a method in `inner` is not checked again."""
    hints = typing.get_type_hints(cls, include_extras=True)
    definitions = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(cls)
        if field.name not in given
    }
    return plugin_options.settings_model(definitions)


def describe(cls: type[Method]) -> list[dict[str, Any]]:
    """The settings of a method for help and docs: name, type, default and the docstring below the field."""
    texts = field_docstrings(cls)
    rows = []
    for field in dataclasses.fields(cls):
        if field.name == "inner":
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        rows.append(
            {"name": field.name, "type": str(field.type), "default": default, "help": texts.get(field.name, "")}
        )
    return rows


def field_docstrings(cls: type) -> dict[str, str]:
    """The string below every field of a class and its bases."""
    return {name: text for base in reversed(cls.__mro__[:-1]) for name, text in _own_docstrings(base).items()}


@cache
def _own_docstrings(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    texts: dict[str, str] = {}
    for field, below in itertools.pairwise(typing.cast(ast.ClassDef, tree.body[0]).body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[field.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return texts
