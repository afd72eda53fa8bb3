"""The JSON schema of a config file, for editors: sections, methods and variants with their own settings, sweeps, scales, published numbers.

It covers names, types and ranges, but not rules about several settings: `fedprompt validate` checks all of them.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from fedprompt.config import PRIVACY_PRESETS, Config, Section
from fedprompt.config.config_files import CASES, PUBLISHED, TUNE, TUNED_SECTIONS
from fedprompt.config.registries import ENGINES
from fedprompt.core.registry import describe
from fedprompt.papers.published_numbers import DOMAINS, FIGURES, NUMBER

if TYPE_CHECKING:
    from fedprompt.core.method import Method

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL: Schema = {"type": "null"}
LINE = 160  # letters of a line of the file
NAMED = ("method", "variant")  # sections whose settings are those of a class


def config_schema(methods: Mapping[str, type[Method]], variants: Mapping[str, type[Method]]) -> Schema:
    """The schema of a YAML file whose methods and variants are these."""
    drawn = Config.model_json_schema()
    sections, definitions = drawn["properties"], drawn["$defs"]
    for section in sections.values():
        if "$ref" in section:
            del section["default"]  # those of its settings, once more
    for kind, classes in {"method": methods, "variant": variants}.items():
        definitions |= named_once(kind, {name: class_schema(name, cls) for name, cls in classes.items()})
        definitions[kind] = any_of({"enum": list(classes)}, *(reference(f"{kind}.{name}") for name in classes))
    sections["method"] = described(sections["method"], reference("method"))
    sections["variant"] = described(sections["variant"], any_of(reference("variant"), NULL))
    presets = {"enum": list(PRIVACY_PRESETS)}
    sections["privacy"] = described(sections["privacy"], any_of(reference("PrivacyConfig"), presets, NULL))
    kinds = {"enum": list(ENGINES.fixed)}
    sections["engine"] = described(sections["engine"], any_of(reference("EngineConfig"), kinds))
    for section, model in (("data", "DataConfig"), ("backbone", "BackboneConfig")):
        sections[section] = described(sections[section], any_of(reference(model), {"type": "string"}))
    settings = dotted(sections, definitions)
    definitions["setting"] = {"type": "object", "additionalProperties": False, **settings}
    definitions["sweep"] = sweep_schema(settings)
    definitions["overlay.sweep"] = overlay_sweep_schema(definitions["sweep"])
    definitions["range"] = range_schema()
    definitions[TUNE] = tune_schema(definitions["overlay.sweep"], methods)
    found: Schema = tidy(
        {
            "$schema": DIALECT,
            "title": "fedprompt config",
            "description": "One experiment, or a series of them. `fedprompt validate FILE` checks all that an editor cannot.",
            "type": "object",
            "additionalProperties": False,
            "properties": {
                **sections,
                "sweep": {
                    "description": "Settings, each with a list of values. One run per combination.",
                    **reference("sweep"),
                },
                "scales": scales_schema(sections, definitions),
                TUNE: reference(TUNE),
                PUBLISHED: published_schema(),
            },
            "$defs": definitions,
        }
    )
    return found


def as_text(schema: Schema) -> str:
    """The schema as a file holds it."""
    return _lines(schema, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    """JSON in which whatever fits into a line has one line."""
    flat = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(indent) + len(flat) <= LINE:
        return flat
    if isinstance(value, list):
        parts, (first, last) = [_lines(each, f"{indent} ") for each in value], "[]"
    else:
        named = [(f"{json.dumps(key, ensure_ascii=False)}: ", each) for key, each in value.items()]
        parts, (first, last) = [name + _lines(each, f"{indent} ") for name, each in named], "{}"
    inner = ",\n".join(f"{indent} {each}" for each in parts)
    return f"{first}\n{inner}\n{indent}{last}"


def reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def any_of(*choices: Schema) -> Schema:
    return {"anyOf": list(choices)}


def described(old: Schema, new: Schema) -> Schema:
    return {"description": old["description"], **new}


def class_schema(name: str, cls: type[Method]) -> Schema:
    """A method or variant as a section: its name and its settings, also under the symbols of its paper."""
    hints = typing.get_type_hints(cls, include_extras=True)
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    fields: dict[str, Any] = {}
    for row in describe(cls):
        default = ... if row["name"] in required else row["default"]
        fields[row["name"]] = (hints[row["name"]], Field(default, description=row["help"] or None))
    drawn = create_model(cls.__name__, __base__=Section, **fields).model_json_schema()
    assert "$defs" not in drawn, f"settings of {name} must be plain values"
    settings = drawn.get("properties", {})
    symbols = {symbol: settings[setting] for symbol, setting in cls.symbols.items()}
    return {
        "title": name,
        "description": (cls.__doc__ or "").split("\n")[0],
        "type": "object",
        "additionalProperties": False,
        "properties": {"name": {"const": name}, **settings, **symbols},
        "required": ["name", *drawn.get("required", [])],
    }


def dotted(sections: Mapping[str, Schema], definitions: Mapping[str, Schema]) -> Schema:
    """All settings as `section.field`, and whole sections, with what each may be."""
    choices: dict[
        str, list[str]
    ] = {}  # where the file says what a setting may be: several places for one that several methods have
    merged: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    for section, schema in sections.items():
        for home in homes(section, schema, definitions):
            for name, field in definitions[home]["properties"].items():
                place, key = f"{home}/properties/{name}", f"{section}.{name}"
                if field not in [merged[other] for other in choices.get(key, [])]:
                    merged[place] = field
                    choices.setdefault(key, []).append(place)
                drawn = definitions.get(field.get("$ref", "").rpartition("/")[2], field)
                if drawn.get("type") == "object":  # one entry of a mapping, such as train.lrs.prompt
                    patterns[f"^{section}\\.{name}\\..+"] = reference(f"{place}/additionalProperties")
    properties = {key: at_one_of(places) for key, places in choices.items()}
    return {"properties": {**sections, **properties}, "patternProperties": patterns}


def homes(section: str, schema: Schema, definitions: Iterable[str]) -> list[str]:
    """The definitions that hold the settings of a section: one, or those of all methods."""
    if section in NAMED:
        return [name for name in definitions if name.startswith(f"{section}.")]
    return [each["$ref"].rpartition("/")[2] for each in [schema, *schema.get("anyOf", [])] if "$ref" in each]


def at_one_of(places: list[str]) -> Schema:
    return reference(places[0]) if len(places) == 1 else any_of(*map(reference, places))


def named_once(kind: str, drawn: Mapping[str, Schema]) -> dict[str, Schema]:
    """Definitions of some classes. Settings that several of them have alike are defined once and referred to."""
    alike: dict[str, list[Schema]] = {}
    found: dict[str, Schema] = {}
    for schema in drawn.values():
        for name, each in schema["properties"].items():
            alike.setdefault(name, []).append(each)
    for name, schema in drawn.items():
        settings: dict[str, Schema] = {}
        for setting, each in schema["properties"].items():
            kinds = [one for number, one in enumerate(alike[setting]) if one not in alike[setting][:number]]
            home = f"{kind}s.{setting}" if each == kinds[0] else f"{kind}s.{setting}.{kinds.index(each) + 1}"
            shared = alike[setting].count(each) > 1
            settings[setting] = reference(home) if shared else each
            if shared:
                found[home] = each
        found[f"{kind}.{name}"] = {**schema, "properties": settings}
    return found


def sweep_schema(settings: Schema) -> Schema:
    """Axes: settings with lists of values."""

    def axis(items: Schema) -> Schema:
        return {"type": "array", "minItems": 1, "items": items}

    axes = {key: axis(reference(f"setting/properties/{key}")) for key in settings["properties"]}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**axes, CASES: axis(reference("setting"))},
        "patternProperties": {key: axis(schema) for key, schema in settings["patternProperties"].items()},
    }


def overlay_sweep_schema(sweep: Schema) -> Schema:
    """Axes of an overlay, in which null removes an axis."""
    return {
        **sweep,
        "properties": {key: any_of(reference(f"sweep/properties/{key}"), NULL) for key in sweep["properties"]},
        "patternProperties": {key: any_of(each, NULL) for key, each in sweep["patternProperties"].items()},
    }


def scales_schema(sections: Mapping[str, Schema], definitions: Mapping[str, Schema]) -> Schema:
    """Overlays by name. What an overlay leaves out is as in the file, so nothing in it is required."""
    overlay = {name: relaxed(schema, definitions) for name, schema in sections.items()}
    unnamed = {"type": "object", "not": {"required": ["name"]}}
    overlay["method"] = described(sections["method"], any_of(reference("method"), unnamed))
    overlay["variant"] = described(sections["variant"], any_of(reference("variant"), unnamed, NULL))
    return {
        "description": "Sizes of the experiment: settings that `scale=NAME` lays over the rest.",
        "type": "object",
        "additionalProperties": {
            "type": "object",
            "additionalProperties": False,
            "properties": {**overlay, "sweep": reference("overlay.sweep")},
        },
    }


def relaxed(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A section of which nothing is required."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [relaxed(each, definitions) for each in schema["anyOf"]]}
    home = schema.get("$ref", "").rpartition("/")[2]
    if "required" not in definitions.get(home, {}):
        return schema
    return {key: value for key, value in definitions[home].items() if key != "required"}


def range_schema() -> Schema:
    ends = {name: {"type": "number", "description": f"The {name}est value that is tried."} for name in ("low", "high")}
    scale = {"type": "boolean", "default": True, "description": "Whether values are drawn on a logarithmic scale."}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(ends),
        "properties": {**ends, "log": scale},
    }


def tune_schema(sweep: Schema, methods: Iterable[str]) -> Schema:
    """What `fedprompt tune` tries: settings with a list of values, null or a range, also below the name of a method."""
    interval = reference("range")
    names = [key for key in sweep["properties"] if key.split(".")[0] in TUNED_SECTIONS]
    patterns = {key: each for key, each in sweep["patternProperties"].items() if key.startswith("^train")}
    return {
        "description": "What `fedprompt tune` tries: settings, each with a list of values, a range, or null for nothing.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{key: any_of(reference(f"overlay.sweep/properties/{key}"), interval) for key in names},
            **dict.fromkeys(methods, reference(TUNE)),
        },
        "patternProperties": {key: any_of(each, interval) for key, each in patterns.items()},
    }


def published_schema() -> Schema:
    figure = any_of(
        {"type": "number", "minimum": 0, "maximum": 100}, {"type": "string", "pattern": f"^{NUMBER.pattern}$"}, NULL
    )
    by_column: Schema = {"type": "array", "items": figure}
    by_domain: Schema = {"type": "array", "items": any_of({"type": "object", "additionalProperties": figure}, NULL)}
    title = {"type": "string", "description": "How the paper calls it."}
    where = {"type": "object", "description": "Settings with the value, or the values, that a run here must have."}
    entry: Schema = {"type": "object", "additionalProperties": False, "required": ["title", "where"]}
    figures = {**dict.fromkeys(FIGURES, by_column), DOMAINS: by_domain}
    return {
        "description": "Numbers of a paper, in per cent, and the runs they belong to; see docs/reproduce.md.",
        "type": "object",
        "additionalProperties": False,
        "required": ["paper"],
        "properties": {
            "paper": {"type": "string"},
            "notes": {"type": "array", "items": {"type": "string"}},
            "columns": {"type": "array", "items": {**entry, "properties": {"title": title, "where": where}}},
            "rows": {"type": "array", "items": {**entry, "properties": {"title": title, "where": where, **figures}}},
        },
    }


def tidy(schema: Any) -> Any:
    """Without the titles pydantic makes of names: editors would show them instead of the names."""
    if isinstance(schema, list):
        return [tidy(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = (
        isinstance(schema.get("title"), str)
        and ("type" in schema or "anyOf" in schema)
        and schema["title"][:1].isupper()
    )
    return {key: tidy(value) for key, value in schema.items() if key != "title" or not made}
