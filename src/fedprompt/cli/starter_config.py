"""The text of a first config: settings with a comment that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedprompt
from fedprompt.io.safe_text import safe_line

SCHEMA = Path(fedprompt.__file__).with_name("schema.json")
FOR_LATER = {
    "data": ["resize: crop                # keep the centre instead of squeezing an image into a square"],
    "train": ["lr: auto                   # the optimiser and the rates that each method recommends"],
    "federation": ["fraction: 0.5              # half of the clients in each round"],
}


def config_text(
    head: list[str],
    settings: Mapping[str, Mapping[str, Any]],
    why: Mapping[str, str],
    methods: list[tuple[dict[str, Any], str]],
) -> str:
    """A YAML file: `why` has the comments by setting (`partition.scheme`) and by section, `methods` settings and reasons."""
    lines = [f"# yaml-language-server: $schema={SCHEMA}", *(f"# {safe_line(line)}" for line in head), ""]
    for section, values in settings.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            lines.append(_setting(f"  {name}: {_yaml(value)}", why.get(f"{section}.{name}", "")))
        lines += [f"  # {line}" for line in FOR_LATER.get(section, [])]
    if len(methods) == 1:
        lines.append(_setting(f"method: {_method(methods[0][0])}", methods[0][1]))
    else:
        lines += ["sweep:", "  method:"]
        lines += [_setting(f"    - {_method(method)}", reason) for method, reason in methods]
    return "\n".join(lines) + "\n"


def _method(settings: dict[str, Any]) -> str:
    """The name alone where there is nothing else to say."""
    if len(settings) == 1:
        return str(settings["name"])
    return "{" + ", ".join(f"{name}: {_yaml(value)}" for name, value in settings.items()) + "}"


def _setting(text: str, reason: str) -> str:
    """A line, with its reason behind it or, where the line gets long, above it."""
    if not reason:
        return text
    reason = safe_line(reason)
    indent = text[: len(text) - len(text.lstrip())]
    together = f"{text:<30} # {reason}"
    return together if len(together) <= 120 else f"{indent}# {reason}\n{text}"


def _yaml(value: Any) -> str:
    """A value on one line. JSON is YAML; plain words need no quotes."""
    plain = isinstance(value, str) and _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT
    return str(value) if plain else json.dumps(value)


_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
