"""Commands that list what is available and check configs, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedprompt.cli.completion import complete_asset, complete_method_or_variant
from fedprompt.cli.options import AsJson, ConfigPath, Overrides, Plugins, Seeds, emit, emit_rows, load
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError, StorageError, broken, did_you_mean, same_name


def validate(
    config: ConfigPath,
    overrides: Overrides = None,
    seed: Seeds = None,
    deep: Annotated[bool, typer.Option("--deep", help="Open the data too, and divide them among the clients.")] = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Check a config without running it: settings, method and backbone; with --deep also the data."""
    configs = load(config, overrides, seed)
    from fedprompt.experiment.rehearsal import Rehearsal

    rehearsal = Rehearsal(deep)
    found = [rehearsal.check(each) for each in configs]
    full = [each.config for each in found]
    rows = [{"run": each.run_name, "hash": each.digest(), "config": each.model_dump(mode="json")} for each in full]
    emit(rows, as_json, "\n".join(f"ok  {row['hash']}  {row['run']}" for row in rows))
    for note in dict.fromkeys(note for each in found for note in each.notes):
        say(f"note: {note}")


def schema(
    output: Annotated[Path | None, typer.Option(help="Write it to this file instead of standard output.")] = None,
) -> None:
    """The JSON schema of config files, for editors: all settings, methods and variants that there are here."""
    from fedprompt.cli.config_schema import as_text, config_schema
    from fedprompt.core import registry

    text = as_text(config_schema(registry.methods(), registry.variants()))
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"--output: cannot write {str(output)!r}: {error.strerror}") from error


def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show the settings of one.", autocompletion=complete_method_or_variant)
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Methods and variants that are registered, here or by other packages."""
    from fedprompt.core import registry

    tables = {"method": registry.methods(), "variant": registry.variants()}
    known = [*tables["method"], *tables["variant"]]
    wanted = None if name is None else same_name(name, known)
    if name is not None and wanted is None:
        raise ConfigError(broken("method name", f"be one of {', '.join(known)}", name) + did_you_mean(name, known))
    rows: list[dict[str, Any]] = [
        {"kind": kind, "name": key, "about": (cls.__doc__ or "").split("\n")[0], "settings": registry.describe(cls)}
        for kind, table in tables.items()
        for key, cls in table.items()
        if wanted in (None, key)
    ]
    lines = []
    for row in rows:
        lines.append(f"{row['kind']:8} {row['name']:14} {row['about']}")
        if name is not None:
            lines += [f"    {s['name']} = {s['default']!r}    {s['help']}" for s in row["settings"]]
    emit(rows, as_json, "\n".join(lines))


def backbones(as_json: AsJson = False, plugin: Plugins = None) -> None:
    """Backbones that need no download by hand, and how to bring your own."""
    from fedprompt.backbones.catalog import catalog

    emit_rows(catalog(), as_json)


def datasets(as_json: AsJson = False, plugin: Plugins = None) -> None:
    """Image sources that are understood."""
    from fedprompt.data.sources.open import kinds

    emit_rows(kinds(), as_json)


def partition(
    config: ConfigPath,
    overrides: Overrides = None,
    show: Annotated[bool, typer.Option("--show", help="Print the client x class matrix, and draw it.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it to this PNG; --show has a default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the manifest, to inspect, edit and give back.")] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Who holds what: make the partition of a config without training."""
    each = load(config, overrides, None)[0]
    from fedprompt.data.partition.divide import make_manifest
    from fedprompt.data.sources.open import open_source
    from fedprompt.io.files import cache_directory

    source = open_source(each.data, cache_directory(each.output.cache))
    manifest = make_manifest(source, each.data, each.partition, each.seed)
    matrix = manifest.class_matrix(source.labels)
    if save is not None:
        manifest.save(save)
    if show and picture is None:
        picture = Path(each.output.directory) / f"partition-{each.name}.png"  # `NAME-*` are its runs
    if picture is not None:
        manifest.picture(source.labels, picture)
    domains = manifest.domains_that_differ(source.domains)
    rows: list[dict[str, Any]] = [
        {
            "client": client.name,
            "train": len(client.train),
            "test": len(client.test),
            **({"validation": len(client.validation)} if len(client.validation) else {}),
            **({"domains": domains[place]} if domains else {}),
            "classes": {manifest.class_names[c]: int(count) for c, count in enumerate(counts) if count},
        }
        for place, (client, counts) in enumerate(zip(manifest.clients, matrix, strict=True))
    ]
    lines = [f"{len(rows)} clients, checksum {manifest.checksum}"] + ([f"picture: {picture}"] if picture else [])
    if show:
        for row in rows:
            counts = "  ".join(f"{name} {count}" for name, count in row["classes"].items())
            kept = f" validation {row['validation']:5}" if "validation" in row else ""
            held = ", ".join(f"{name} {count}" for name, count in row.get("domains", {}).items())
            counts = f"[{held}]  {counts}" if held else counts
            lines.append(f"{row['client']:16} train {row['train']:5} test {row['test']:5}{kept}  {counts}")
    emit({"checksum": manifest.checksum, "clients": rows}, as_json, "\n".join(lines))


def assets(
    name: Annotated[
        str | None, typer.Argument(help="Fetch this one; `all` for every one.", autocompletion=complete_asset)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The weights and images that fedprompt can fetch: what is in the cache, and how to get the rest."""
    from fedprompt.assets import IMAGE_SETS, image_credit
    from fedprompt.cli.doctor import asset_rows, fetch
    from fedprompt.io.files import cache_directory

    cache = cache_directory()
    if name is not None:
        fetch(name, cache)
    emit_rows(asset_rows(cache), as_json)
    if not as_json:
        emit(None, False, "\n".join(f"{source}: {image_credit(source)}" for source in (*IMAGE_SETS, "embedded")))


def doctor(as_json: AsJson = False) -> None:
    """Versions, cores, memory, assets, and what is missing."""
    from fedprompt.cli.doctor import examine

    findings = examine()
    lines = [f"{key:14} {value}" for key, value in findings.items() if key not in ("assets", "missing")]
    lines += [
        f"asset {row['name']:22} {'present' if row['present'] else 'missing'}, {row['licence']}"
        for row in findings["assets"]
    ]
    lines += [f"missing: {each}" for each in findings["missing"]] or ["nothing is missing"]
    emit(findings, as_json, "\n".join(lines))


def privacy(
    config: ConfigPath,
    overrides: Overrides = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the noise that spends this epsilon; else use the config's own noise.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The delta of epsilon; else the config's own.")] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """The noise multiplier of a config, and epsilon after every round."""
    given = [f"privacy.target_epsilon={target_epsilon}", "privacy.noise=null"] if target_epsilon is not None else []
    given += [f"privacy.delta={delta}"] if delta is not None else []
    configs = load(config, [*(overrides or []), *given], None)
    from fedprompt.client.factory import ExperimentFactory
    from fedprompt.privacy.cost_table import privacy_rows, privacy_text

    rows = [privacy_rows(each, *ExperimentFactory(each).privacy_plans()) for each in configs]
    emit(rows, as_json, "\n".join(privacy_text(row) for row in rows))
