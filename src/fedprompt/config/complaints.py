"""What is wrong with the settings of a config, in sentences, and in what two configs differ."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from fedprompt.errors import did_you_mean


class UnknownName(ValueError):
    """A setting names something that is not among the known names."""

    def __init__(self, rule: str, names: Iterable[str]) -> None:
        super().__init__(rule)
        self.names = tuple(names)


def complaints(error: ValidationError, section: str, model: type[BaseModel] | None = None) -> str:
    """The problems of a model, or of a nested section (a method's own fields), one a line.

    With the `model`, unknown settings come with the ones that are probably meant.
    """
    problems = error.errors()
    lines = [_complaint(problem, section, model) for problem in problems if problem["loc"][-1:] != (AUTO_MEMBER,)]
    return "\n".join(dict.fromkeys(lines))


AUTO_MEMBER = "literal['auto']"  # what pydantic calls one side of `... | Auto`
OTHER_MEMBERS = re.compile(r"\.(constrained-)?(float|int)$|\.literal\[.*\]$")  # and the other


def _complaint(problem: Any, section: str, model: type[BaseModel] | None) -> str:
    field = ".".join([section, *map(str, problem["loc"])]).strip(".")
    field = OTHER_MEMBERS.sub("", field)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field} is not a known setting{_meant(problem['loc'], model)}"
    if problem["type"] == "missing":
        return f"{field} must be given"
    rule = re.sub(r"^(Value error, |\w+ should )", "", problem["msg"])
    value = problem["input"]
    if problem["type"] in ("bool_type", "bool_parsing"):
        rule = "be true or false, without quotes"
    context = problem.get("ctx", {})
    names = getattr(context.get("error"), "names", ())
    if problem["type"] == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
    return f"{field} must {rule}, got {value!r}{did_you_mean(value, names) if isinstance(value, str) else ''}"


def _meant(place: Sequence[Any], model: type[BaseModel] | None) -> str:
    """The settings beside an unknown one that are like it, or one of its name in another section."""
    if model is None:
        return ""
    near, (*steps, unknown) = model, map(str, place)
    for step in steps:
        inner = _section(near, step)
        if inner is None:
            return ""
        near = inner
    hint = did_you_mean(".".join([*steps, unknown]), [".".join([*steps, name]) for name in near.model_fields])
    elsewhere = [f"{name}.{unknown}" for name in model.model_fields if _has(_section(model, name), unknown)]
    return hint or (f"; did you mean {elsewhere[0]!r}?" if elsewhere else "")


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model of a setting that is a section."""
    kind = model.model_fields[name].annotation if name in model.model_fields else None
    choices = (kind, *typing.get_args(kind))
    return next((each for each in choices if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _has(section: type[BaseModel] | None, name: str) -> bool:
    return section is not None and name in section.model_fields


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The lines `field: old -> new` in which two config mappings differ."""
    lines = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += difference(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
