"""The command line: parses, calls, prints. Slow imports are inside the commands that need them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperArgument

from fedprompt import __version__
from fedprompt.cli import (
    federate,
    info,
    models,
    posterior_picture,
    reproduce,
    results,
    shipped,
    site_node,
    starter,
    train,
    tune,
    uncertainty_table,
)
from fedprompt.errors import FedpromptError, command_line
from fedprompt.io.safe_text import safe_line, safe_text

INTERRUPTED = 130


def _keep_help_of_arguments() -> None:
    """Click 8.5 drops the help that Typer 0.20 gives an argument, and Flower allows no newer Typer."""
    make = TyperArgument.__init__

    def make_with_help(self: TyperArgument, *, help: str | None = None, **others: Any) -> None:
        make(self, help=help, **others)
        self.help = help

    TyperArgument.__init__ = make_with_help  # type: ignore[method-assign]


_keep_help_of_arguments()

app = typer.Typer(
    help="Personalised federated prompt tuning of frozen vision transformers.",
    epilog="First steps: `fedprompt demo`, or `fedprompt init PATH` for images of your own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does, and saying it once is enough
)
START, TRAIN, RESULTS = "Start", "Train", "Results"
MODELS, LISTS, SITES = "Use trained models", "Look up", "Federations of sites"

for panel, commands in {
    START: (starter.init, starter.demo, info.doctor, info.assets),
    TRAIN: (info.validate, info.partition, info.privacy, train.run, tune.tune, reproduce.reproduce),
    RESULTS: (
        results.compare,
        results.report,
        results.dashboard,
        results.audit,
        uncertainty_table.uncertainty,
        results.verify,
    ),
    MODELS: (models.predict, models.explain, posterior_picture.posterior, models.export),
    LISTS: (info.methods, info.backbones, info.datasets, shipped.configs, info.schema),
    SITES: (federate.server,),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.add_typer(train.protocol, name="protocol", rich_help_panel=TRAIN)
app.add_typer(federate.federate, name="federate", rich_help_panel=SITES)
app.add_typer(site_node.node, name="node", rich_help_panel=SITES)


def main() -> None:
    """The entry point: user errors become one message and a documented exit code."""
    try:
        app()
    except FedpromptError as error:
        print(safe_text(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(safe_line(f"fedprompt {__version__}"))
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.with_resource(command_line())
