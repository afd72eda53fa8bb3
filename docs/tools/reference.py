"""The text of docs/reference.md: every public name of fedprompt, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

import fedprompt
from fedprompt.core.registry import field_docstrings

SECTIONS = {
    "Run and use": (
        *("Experiment", "Config", "Run", "load_run", "compare", "plot", "TrainedClient", "Observer", "errors"),
    ),
    "Write a method": (
        *("Method", "World", "Roles", "Statistic", "Batch", "Prompts", "TokenPrompt", "TextContext", "Seen", "Stage"),
        *("Client", "Progress", "Server", "Upload", "Combine", "Mixture", "WithHead", "WithText", "WithLocal"),
        *("Tensors", "Stream"),
    ),
    "Add names": (
        *("register", "register_variant", "register_aggregator", "register_source", "register_partition"),
        *("register_backbone", "register_engine", "register_tracker"),
    ),
    "What plugins build on": (
        "Source",
        "Supply",
        "load_backbone",
        "Engine",
        "InProcess",
        "LocalUpdate",
        "Tracker",
        "Tracked",
    ),
}
HEAD = """# Reference

Every name that `from fedprompt import ...` offers; all else may change without notice. What they are for:
[adding a method](adding_a_method.md), [extending fedprompt](extending.md), [architecture](architecture.md).

This page is made from the code by `python docs/tools/generate.py`.
"""


@cache
def reference_page() -> str:
    """The whole page as it should be now."""
    blocks = [HEAD.strip()]
    for title, names in SECTIONS.items():
        blocks += [f"## {title}", " · ".join(f"[{name}](#{name.lower()})" for name in names)]
        for name in names:
            blocks += [f"### {name}", *described(name, getattr(fedprompt, name))]
    return "\n\n".join(blocks) + "\n"


def described(name: str, thing: Any) -> Iterator[str]:
    """The paragraphs about one name."""
    if inspect.ismodule(thing):
        yield from of_module(thing)
    elif inspect.isfunction(thing):
        yield f"`{name}{signature(thing)}`"
        yield prose(thing)
    elif inspect.isclass(thing):
        yield from of_class(thing)
    else:
        yield f"`{name} = {alias(name)}`"


def of_module(module: Any) -> Iterator[str]:
    """Functions and errors of a module."""
    yield prose(module)
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    rows = [f"| `{each.__name__}` | {each.exit_code} | {cell(doc(each))} |" for each in own if inspect.isclass(each)]
    yield "\n".join(["| error | exit code | when |", "|---|---:|---|", *rows])
    members = [f"- `{each.__name__}{signature(each)}`: {prose(each)}" for each in own if inspect.isfunction(each)]
    yield "\n".join(members)


def of_class(cls: type) -> Iterator[str]:
    """What a class is, its fields, and the functions it has of its own."""
    bases = [base.__name__ for base in cls.__bases__ if base.__module__.startswith("fedprompt.")]
    public = [f"[{base}](#{base.lower()})" if base in fedprompt.__all__ else f"`{base}`" for base in bases]
    yield prose(cls) + (f" A kind of {', '.join(public)}." if public else "")
    if cls is fedprompt.Method:
        yield prose(sys.modules[cls.__module__])
    fields = own_fields(cls)
    if fields:
        texts = {**comments(cls), **field_docstrings(cls)}
        rows = [
            f"| `{each}` | {code(kind)} | {code(value)} | {cell(texts.get(each, ''))} |" for each, kind, value in fields
        ]
        yield "\n".join(["| field | type | default | what it is |", "|---|---|---|---|", *rows])
    members = list(own_members(cls))
    if members:
        yield "\n".join(members)


def own_fields(cls: type) -> list[tuple[str, str, str]]:
    """Name, type and default of the fields that a class declares itself."""
    hints = {name: str(hint) for name, hint in vars(cls).get("__annotations__", {}).items()}
    if dataclasses.is_dataclass(cls):
        given = {each.name: default(each) for each in dataclasses.fields(cls)}
    elif issubclass(cls, BaseModel):
        given = {name: shown(each.default) for name, each in cls.model_fields.items()}
    else:
        given = dict.fromkeys(hints, "")
    return [(name, hint, given[name]) for name, hint in hints.items() if name in given and not name.startswith("_")]


def comments(cls: type) -> dict[str, str]:
    """What stands behind the fields of a class: shapes of tensors, mostly."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE)
    return dict(found)


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return shown(field.default)
    return "" if field.default_factory is dataclasses.MISSING else "made for each"


def shown(value: Any) -> str:
    """A default as it would be written; objects by the name of their class."""
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    text = repr(value)
    return "..." if " at 0x" in text or text == "PydanticUndefined" else text


def own_members(cls: type) -> Iterator[str]:
    """One line for each public function and property that a class defines itself."""
    fields = vars(cls).get("__annotations__", {})
    for name, member in vars(cls).items():
        if (name.startswith("_") and name != "__call__") or name in fields:
            continue
        if isinstance(member, property) or type(member).__name__ == "cached_property":
            function = member.fget if isinstance(member, property) else member.func
            returned = inspect.signature(function).return_annotation
            yield f"- `{name}: {written(returned)}`{about(function)}"
        elif isinstance(member, classmethod | staticmethod):
            yield f"- `{cls.__name__}.{name}{signature(member.__func__)}`{about(member)}"
        elif inspect.isfunction(member):
            yield f"- `{name}{signature(member)}`{about(member)}"


def about(member: Any) -> str:
    text = doc(member)
    return f": {escaped(' '.join(text.split()))}" if text else ""


def signature(function: Any) -> str:
    """Parameters and result as they stand in the code, without `self`."""
    found = inspect.signature(function)
    parts: list[str] = []
    for place, each in enumerate(found.parameters.values()):
        if place == 0 and each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        text = each.name if each.annotation is each.empty else f"{each.name}: {written(each.annotation)}"
        parts.append(text if each.default is each.empty else f"{text} = {shown(each.default)}")
    returned = "" if found.return_annotation is found.empty else f" -> {written(found.return_annotation)}"
    return f"({', '.join(parts)}){returned}"


def written(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def alias(name: str) -> str:
    """What a name that stands for a type is set to."""
    module = sys.modules[f"fedprompt.{fedprompt._HOMES[name]}"]
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value)
    raise SystemExit(f"{name} must be set in {module.__name__}")


def doc(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def prose(thing: Any) -> str:
    """A docstring as Markdown; it must be there."""
    text = doc(thing)
    if not text:
        raise SystemExit(f"{thing.__name__} must have a docstring")
    return escaped(text)


def escaped(text: str) -> str:
    """With signs that Markdown would take for its own made plain, outside of `code` and of indented blocks."""
    lines = [line if line.startswith("    ") else _plain(line) for line in text.splitlines()]
    return "\n".join(lines)


def _plain(line: str) -> str:
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[\]])", r"\\\1", part) for part in pieces)


def cell(text: str) -> str:
    return escaped(" ".join(text.split())).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""
