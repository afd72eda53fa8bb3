"""Types, ranges and defaults of settings in few words, for tables."""

from __future__ import annotations

import json
import typing
from typing import Any

from fedprompt.config.registries import In

BEYOND = 2**31  # bounds against overflow tell a reader nothing


def written(value: Any) -> str:
    """A default as it would stand in YAML."""
    return json.dumps(value) if not isinstance(value, str) or not value else value


def values(hint: Any) -> str:
    """What a type allows, in few words: choices by name, numbers by their range."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        for extra in arguments[1:]:
            if isinstance(extra, In):
                return ", ".join(f"`{name}`" for name in extra.registry.fixed) + ", or one you register"
        bounds = [bound for extra in arguments[1:] for bound in limits(extra)]
        return ", ".join([values(arguments[0]), *bounds])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (tuple, list):
        many = f"{len(arguments)} × " if origin is tuple and arguments[-1] is not ... and len(arguments) > 1 else ""
        return f"list of {many}{values(arguments[0])}"
    if origin is dict:
        return f"map of {values(arguments[0])} to {values(arguments[1])}"
    if arguments:  # a union
        return " or ".join(dict.fromkeys(values(each) for each in arguments))
    names: dict[Any, str] = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def limits(extra: Any) -> list[str]:
    """The bounds that a pydantic `Field` sets on a number, a text or a list."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}
    found = [extra, *getattr(extra, "metadata", ())]
    bounds = [
        f"{sign} {getattr(each, name):g}"
        for each in found
        for name, sign in signs.items()
        if hasattr(each, name) and getattr(each, name) < BEYOND
    ]
    patterns = [each.pattern for each in found if getattr(each, "pattern", None)]
    return bounds + ["like `" + pattern.replace("|", "\\|") + "`" for pattern in patterns]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
