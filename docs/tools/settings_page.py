"""The tables of docs/settings.md: every setting of every section, from the models that check them."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from value_words import escaped, values, written

from fedprompt.config import Config

OWN = "name, or map with `name` and its settings"  # of a method, which has them on its page


def sections(model: type[BaseModel] = Config) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of a config by name."""
    for name, hint in typing.get_type_hints(model).items():
        for choice in [hint, *typing.get_args(hint)]:
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield name, choice


def rows(model: type[BaseModel]) -> Iterator[str]:
    """A row for each setting of a section that is no section itself."""
    hints, inner = typing.get_type_hints(model, include_extras=True), dict(sections(model))
    for name, field in model.model_fields.items():
        if name in inner:
            continue
        default = "required" if field.default is PydanticUndefined else f"`{default_of(field.default)}`"
        what = " ".join((field.description or "").split())
        kind = OWN if name in ("method", "variant") else values(hints[name])
        yield f"| `{name}` | {kind} | {default} | {escaped(what)} |"


def default_of(value: Any) -> str:
    return written(list(value) if isinstance(value, tuple) else value)


def tables() -> str:
    """All tables, the settings outside of sections first."""
    blocks = ["## Of the experiment", table(Config)]
    for name, model in sections():
        optional = "" if Config.model_fields[name].default is not None else " It is absent by default."
        blocks += [f"## {name}", f"{(model.__doc__ or '').split(chr(10))[0]}{optional}", table(model)]
    return "\n\n".join(blocks)


def table(model: type[BaseModel]) -> str:
    return "\n".join(["| setting | type and range | default | what it is |", "|---|---|---|---|", *rows(model)])
