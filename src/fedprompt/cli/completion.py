"""What a shell offers to complete: read from the packaged schema and from folders, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

SCHEMA = Path(__file__).parents[1] / "schema.json"
MOST = 200  # choices that are offered


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)][:MOST]


def _classes(kind: str) -> list[str]:
    return sorted(name.removeprefix(f"{kind}.") for name in _schema()["$defs"] if name.startswith(f"{kind}."))


def complete_method(incomplete: str) -> list[str]:
    """Methods of this package."""
    return _beginning(incomplete, _classes("method"))


def complete_method_or_variant(incomplete: str) -> list[str]:
    """What `fedprompt methods` shows."""
    return _beginning(incomplete, [*_classes("method"), *_classes("variant")])


def complete_backbone(incomplete: str) -> list[str]:
    """Named backbones of this package."""
    from fedprompt.config.registries import BACKBONES

    return _beginning(incomplete, BACKBONES.fixed)


def complete_scheme(incomplete: str) -> list[str]:
    """Ways to divide images."""
    from fedprompt.config.registries import PARTITIONS

    return _beginning(incomplete, [name for name in PARTITIONS.fixed if name not in PARTITIONS.words])


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """`train.lr=` of `train.l`, and values where a setting has a list of them."""
    key, equals, value = _split(context.params.get("overrides") or (), incomplete)
    settings = _schema()["$defs"]["setting"]["properties"]
    if not equals:
        return _beginning(key, [f"{name}=" for name in settings])
    values = _beginning(value, _values(settings.get(key, {})))
    return [f"{key}={each}" for each in values] if "=" in incomplete[1:] else values


def _split(before: Sequence[str], incomplete: str) -> tuple[str, str, str]:
    """Key, `=` and beginning of a value. Bash takes `=` for a word of its own, and then only the value is completed."""
    words = [*before, incomplete]
    for back in (1, 2):
        if len(words) > back and words[-back] == "=":
            return words[-back - 1], "=", "" if back == 1 else incomplete
    return incomplete.partition("=")


def _values(schema: dict[str, Any]) -> list[str]:
    """The words that a schema allows."""
    if "$ref" in schema:
        at: Any = _schema()
        for step in schema["$ref"].removeprefix("#/").split("/"):
            at = at[step.replace("~1", "/").replace("~0", "~")]
        return _values(at)
    words = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    words += ["true", "false"] if schema.get("type") == "boolean" else []
    return list(
        dict.fromkeys([*map(str, words), *(word for each in schema.get("anyOf", []) for word in _values(each))])
    )


def complete_run(incomplete: str) -> list[str]:
    """Run directories below what was typed, and folders."""
    base = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    try:
        folders = sorted(path for path in base.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []
    return _beginning(
        incomplete.removeprefix("./"), [str(path) if (path / "run.db").exists() else f"{path}/" for path in folders]
    )


def complete_client(incomplete: str) -> list[str]:
    """Clients of the run that was typed: click does not know it before the option has its value."""
    from fedprompt.errors import FedpromptError
    from fedprompt.runs.run import Run

    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    run = next((word for word in typed.split() if (Path(word) / "run.db").exists()), None)
    try:
        return [] if run is None else _beginning(incomplete, Run(run).clients)
    except (FedpromptError, OSError):
        return []


def complete_config(incomplete: str) -> list[str]:
    """Configs of the package."""
    from fedprompt.config.shipped_configs import names

    return _beginning(incomplete, names())


def complete_asset(incomplete: str) -> list[str]:
    """Weights and images that can be fetched."""
    from fedprompt.assets import ASSETS

    return _beginning(incomplete, [*ASSETS, "digits", "all"])
