"""The command that searches settings on validation images."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedprompt.cli.options import AsJson, ConfigPath, Overrides, Plugins, Quiet
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError
from fedprompt.io.safe_text import safe_line


def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(help="Trials of every study; one of them has the config's own values.")] = 20,
    jobs: Annotated[int, typer.Option(help="Processes that share the trials of a study, one thread each.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue studies that were stopped.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Search learning rates and other settings on validation images: one study for each method of the config."""
    from fedprompt.config import config_files

    section = config_files.read(config).get(config_files.TUNE)
    configs = config_files.load(config, overrides or ())
    alike = config_files.load_alike(config, overrides or ())
    if len({each.seed for each in configs}) > 1:
        raise ConfigError("seed must be one number to tune, got several: give seed=0")
    from fedprompt.tuning.space import read_section

    section = read_section(section)
    from fedprompt.tuning.run_studies import studies_directory, tune
    from fedprompt.tuning.study_page import HEAD, given_rows, unequal

    directory = studies_directory(alike[0])
    outcomes, page = tune(
        configs, section, directory, trials, jobs, resume, (lambda text: None) if quiet or as_json else say
    )
    if as_json:
        rows = [{**each.tuned.model_dump(mode="json"), "config": str(each.path)} for each in outcomes]
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    caption = "\n".join(["per cent of validation images; no test image was read", *unequal(outcomes)])
    table = Table(caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for position, title in enumerate(HEAD):
        least = max(map(len, title.split()))  # titles break between words, and the names of studies give way
        table.add_column(title, justify="right" if position else "left", overflow="fold", min_width=least)
    for row in given_rows(outcomes):
        table.add_row(*map(safe_line, row))
    Console().print(table)
    for each in outcomes:
        say(f"best config: {each.path}")
    say(f"page: {page}")
