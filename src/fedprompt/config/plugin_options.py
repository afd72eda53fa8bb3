"""Settings of the thing a config names: fields of a method's dataclass, keyword arguments of a rule. Free of torch."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import ValidationError, create_model

from fedprompt.config.complaints import complaints
from fedprompt.config.setting_types import Section
from fedprompt.errors import ConfigError, did_you_mean

Definitions = Mapping[str, tuple[Any, Any]]  # name of a setting -> its type, and its default or `...`


def settings_model(definitions: Definitions) -> type[Section]:
    """The model that checks these settings."""
    fields: dict[str, Any] = dict(definitions)
    return create_model("Settings", __base__=Section, **fields)


def checked(section: str, owner: str, model: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, of the types that were declared; every complaint names its field, rule and value."""
    for unknown in sorted(set(given) - set(model.model_fields)):
        has = ", ".join(sorted(model.model_fields)) or "none"
        hint = did_you_mean(unknown, model.model_fields)
        raise ConfigError(f"{section}.{unknown} is not a setting of {owner}; it has {has}{hint}")
    try:
        made = model.model_validate_json(json.dumps(given))
    except ValidationError as error:
        raise ConfigError(complaints(error, section)) from error
    return {name: getattr(made, name) for name in given}


def arguments(section: Any, title: str, owner: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword arguments of the function that a section names.

    A keyword-only parameter with the name of a setting of the section gets its value. All others are the function's own
    settings, which a config gives under `options`.
    """
    shared, own = _parameters(function, frozenset(type(section).model_fields) - {"options"})
    given = {name: getattr(section, name) for name in shared}
    return {**given, **checked(f"{title}.options", owner, own, section.options)}


@lru_cache(maxsize=256)  # pydantic takes milliseconds for a model
def _parameters(function: Callable[..., Any], settings: frozenset[str]) -> tuple[tuple[str, ...], type[Section]]:
    """Keyword-only parameters that are settings of the section, and a model of all others."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    own = [each for each in parameters if each.name not in settings]
    hints = typing.get_type_hints(function, include_extras=True) if own else {}
    definitions = {
        each.name: (hints.get(each.name, Any), ... if each.default is each.empty else each.default) for each in own
    }
    return tuple(each.name for each in parameters if each.name in settings), settings_model(definitions)
