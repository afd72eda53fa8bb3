"""Shared by several commands: arguments and options, reading them, and printing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedprompt.cli.completion import complete_override, complete_run
from fedprompt.errors import ConfigError, broken
from fedprompt.io.safe_text import safe_line, safe_text


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    from fedprompt.extensions import add_plugins

    add_plugins(paths or [])
    return paths


ConfigPath = Annotated[
    Path, typer.Argument(help="A YAML file, or one that `fedprompt configs` lists, such as configs/demo.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to change, such as train.lr=0.1 method=head_tune.",
        autocompletion=complete_override,
    ),
]
Seeds = Annotated[list[str] | None, typer.Option("--seed", help="Seeds to run: --seed 0 --seed 1, or --seed 0,1,2.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue runs that were stopped; finished ones are kept.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Weights = Annotated[
    Path | None, typer.Option(help="Where the weights of the backbone are now, if not where the run says.")
]
Data = Annotated[Path | None, typer.Option(help="Where the images of the run are now, if not where the run says.")]
TrustConfig = Annotated[
    bool,
    typer.Option(
        "--trust-config", help="Use paths, hub ids and the cache that the run file names: only if it is your own."
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        callback=_load_plugins,
        help="A Python file with methods, rules, ... of your own; it is run. Once for each file.",
    ),
]
Metrics = Annotated[
    str | None, typer.Option("--metrics", help="PORT of this machine for /metrics and /ready; off when absent.")
]
LogFormat = Annotated[str, typer.Option("--log-format", help="text, or json: one object for each line of the log.")]
Runs = Annotated[
    list[Path], typer.Argument(help="Run directories, or folders that hold some.", autocompletion=complete_run)
]


def check_log_format(name: str) -> Any:
    """The name, if it is a form of the log."""
    if name not in ("text", "json"):
        raise ConfigError(broken("--log-format", "be text or json", name))
    return name


def load(config: Path, overrides: list[str] | None, seeds: list[str] | None) -> list[Any]:
    from fedprompt.config import config_files

    return config_files.load(config, overrides or (), seed_numbers(seeds))


def seed_numbers(texts: list[str] | None) -> list[int]:
    numbers = []
    for text in ",".join(texts or []).split(",") if texts else []:
        if not text.strip().isdecimal():
            raise ConfigError(f"--seed must be a whole number of at least 0, got {text!r}")
        numbers.append(int(text))
    return numbers


def open_runs(paths: list[Path]) -> list[Any]:
    """Runs in the order given; a folder means all runs inside it."""
    from fedprompt.runs.run import Run

    found = [Run(each) for each in run_folders(paths)]
    for run in found:
        tell_age(run)
    return found


def run_folders(paths: list[Path]) -> list[Path]:
    """Run directories, or run files, in the order given; a folder means all runs inside it."""
    from fedprompt.errors import RunError
    from fedprompt.runs.tables import FILE

    found = []
    for path in paths:
        inside = (
            [path]
            if (path / FILE).exists() or path.suffix == ".db"
            else sorted(each.parent for each in path.glob(f"*/{FILE}"))
        )
        if not inside:
            raise RunError(f"run: {str(path)!r} must be a run directory or hold some, but there is no {FILE}")
        found += inside
    return found


def tell_age(run: Any) -> None:
    """Say of a run file without digests that changes to it cannot be detected."""
    from fedprompt.runs.store import NO_DIGESTS

    if not run.reader.sealed:
        typer.echo(safe_line(f"note: {run.name}: {NO_DIGESTS}"), err=True)


def emit(data: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(data, indent=2, default=str) if as_json else safe_text(text))


def emit_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """A plain table whose columns are the keys of the first row."""
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.ljust(width) for key, width in widths.items()).rstrip()]
    lines += ["  ".join(str(row[key]).ljust(width) for key, width in widths.items()).rstrip() for row in rows]
    emit(rows, as_json, "\n".join(lines))
