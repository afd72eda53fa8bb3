"""The command line: parses, calls, prints. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedprompt import __version__
from fedprompt.cli import about, evidence, reproducing, sites, training, using
from fedprompt.errors import FedpromptError

INTERRUPTED = 130

app = typer.Typer(
    help="Personalised federated prompt tuning of frozen vision transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(training.run)
app.add_typer(training.protocol, name="protocol")
app.command()(reproducing.reproduce)
app.command()(evidence.compare)
app.command()(evidence.report)
app.command()(evidence.audit)
app.command()(evidence.dashboard)
app.command()(using.predict)
app.command()(using.explain)
app.command()(using.export)
app.command()(about.validate)
app.command()(about.partition)
app.command()(about.privacy)
app.command()(about.methods)
app.command()(about.backbones)
app.command()(about.datasets)
app.command()(about.assets)
app.command()(about.doctor)
app.add_typer(sites.federate, name="federate")
app.command()(sites.server)
app.command()(sites.node)


def main() -> None:
    """The entry point: user errors become one message and a documented exit code."""
    try:
        app()
    except FedpromptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedprompt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
