"""The command line: parses, calls, prints. Slow imports are inside the commands that need them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedprompt import __version__
from fedprompt.cli import federate, info, models, reproduce, results, site_node, train, tune
from fedprompt.errors import FedpromptError, command_line
from fedprompt.io.safe_text import safe_line, safe_text

INTERRUPTED = 130

app = typer.Typer(
    help="Personalised federated prompt tuning of frozen vision transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train.run)
app.add_typer(train.protocol, name="protocol")
app.command()(tune.tune)
app.command()(reproduce.reproduce)
app.command()(results.compare)
app.command()(results.report)
app.command()(results.audit)
app.command()(results.verify)
app.command()(results.dashboard)
app.command()(models.predict)
app.command()(models.explain)
app.command()(models.export)
app.command()(info.validate)
app.command()(info.schema)
app.command()(info.partition)
app.command()(info.privacy)
app.command()(info.methods)
app.command()(info.backbones)
app.command()(info.datasets)
app.command()(info.assets)
app.command()(info.doctor)
app.add_typer(federate.federate, name="federate")
app.command()(federate.server)
app.add_typer(site_node.node, name="node")


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
