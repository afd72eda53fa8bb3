"""What is wrong with the settings of a config, in sentences, and in what two configs differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def complaints(error: ValidationError, section: str) -> str:
    """The problems of a nested section (a method's own fields), one a line."""
    problems = error.errors()
    lines = [_complaint(problem, section) for problem in problems if problem["loc"][-1:] != (AUTO_MEMBER,)]
    return "\n".join(dict.fromkeys(lines))


AUTO_MEMBER = "literal['auto']"  # what pydantic calls one side of `... | Auto`
OTHER_MEMBERS = re.compile(r"\.(constrained-)?(float|int)$|\.literal\[.*\]$")  # and the other


def _complaint(problem: Any, section: str = "") -> str:
    field = ".".join([section, *map(str, problem["loc"])]).strip(".")
    field = OTHER_MEMBERS.sub("", field)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{field} is not a known setting"
    if problem["type"] == "missing":
        return f"{field} must be given"
    rule = re.sub(r"^(Value error, |\w+ should )", "", problem["msg"])
    value = problem["input"]
    if problem["type"] in ("bool_type", "bool_parsing"):
        rule = "be true or false, without quotes"
    return f"{field} must {rule}, got {value!r}"


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
