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
NAMED = ("method", "variant")  # sections whose settings are those of a class


def config_schema(methods: Mapping[str, type[Method]], variants: Mapping[str, type[Method]]) -> Schema:
    """The schema of a YAML file whose methods and variants are these."""
    drawn = Config.model_json_schema()
    sections, definitions = drawn["properties"], drawn["$defs"]
    for section in sections.values():
        if "$ref" in section:
            del section["default"]  # those of its settings, once more
    for kind, classes in {"method": methods, "variant": variants}.items():
        definitions |= {f"{kind}.{name}": class_schema(name, cls) for name, cls in classes.items()}
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
    definitions["sweep"] = sweep_schema(settings, nullable=False)
    definitions["overlay.sweep"] = sweep_schema(settings, nullable=True)
    definitions[TUNE] = tune_schema(settings, methods)
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
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


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
                if field.get("type") == "object":  # one entry of a mapping, such as train.lrs.prompt
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


def sweep_schema(settings: Schema, nullable: bool) -> Schema:
    """Axes: settings with lists of values. In an overlay, null removes an axis."""

    def axis(items: Schema) -> Schema:
        values = {"type": "array", "minItems": 1, "items": items}
        return any_of(values, NULL) if nullable else values

    axes = {key: axis(reference(f"setting/properties/{key}")) for key in settings["properties"]}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**axes, CASES: axis(reference("setting"))},
        "patternProperties": {key: axis(schema) for key, schema in settings["patternProperties"].items()},
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


def tune_schema(settings: Schema, methods: Iterable[str]) -> Schema:
    """What `fedprompt tune` tries: settings with lists of values or ranges, also below the name of a method."""
    number = {"type": "number"}
    interval = {
        "type": "object",
        "additionalProperties": False,
        "required": ["low", "high"],
        "properties": {"low": number, "high": number, "log": {"type": "boolean", "default": True}},
    }

    def entry(items: Schema) -> Schema:
        return any_of({"type": "array", "minItems": 1, "items": items}, interval, NULL)

    names = [key for key in settings["properties"] if key.split(".")[0] in TUNED_SECTIONS]
    patterns = {key: each for key, each in settings["patternProperties"].items() if key.startswith("^train")}
    return {
        "description": "What `fedprompt tune` tries: settings, each with a list of values, a range, or null for nothing.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{key: entry(reference(f"setting/properties/{key}")) for key in names},
            **dict.fromkeys(methods, reference(TUNE)),
        },
        "patternProperties": {key: entry(each) for key, each in patterns.items()},
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
