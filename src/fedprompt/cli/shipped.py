"""The command that lists the configs of the package and copies them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprompt.cli.completion import complete_config
from fedprompt.cli.options import AsJson, emit_rows
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError, broken


def configs(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Such as configs/clip.yaml; all are listed when absent.", autocompletion=complete_config),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", metavar="FOLDER", help="Write the named ones into this folder, to edit them."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the configs of the package, and copy them. Every command takes their names where it takes a file."""
    from fedprompt.config import shipped_configs

    known = {name: shipped_configs.shipped(name) for name in names or shipped_configs.names()}
    if copy is None:
        emit_rows([{"name": name, "what": shipped_configs.headline(path)} for name, path in known.items()], as_json)
        return
    if not names:
        raise ConfigError("names must be given with --copy, such as configs/clip.yaml; `fedprompt configs` lists all")
    targets = {name: copy / path.name for name, path in known.items()}
    if len(set(targets.values())) < len(targets):
        raise ConfigError(broken("names", "be of files with different names", ", ".join(known)))
    for target in targets.values():
        if target.exists() and not force:
            raise ConfigError(broken("--copy", "find no file of that name, or --force be given", str(target)))
    for name, target in targets.items():
        shipped_configs.copy_to(known[name], target)
        say(f"wrote {target}")
    emit_rows([{"name": name, "file": str(target)} for name, target in targets.items()], as_json)
