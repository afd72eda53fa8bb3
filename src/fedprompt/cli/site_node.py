"""`fedprompt node`: what a site's own people type. Parses, calls, prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from fedprompt.cli.options import LogFormat, Metrics, Plugins, check_log_format
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError, broken
from fedprompt.io.safe_text import safe_line, safe_text

if TYPE_CHECKING:
    from fedprompt.deploy.folders import SiteFolder

node = typer.Typer(invoke_without_command=True)

State = Annotated[
    Path | None, typer.Option("--state", help="Where private prompts and caches are kept; SITE/state when absent.")
]
Folder = Annotated[Path, typer.Argument(help="The folder that `federate init` made for the site.")]


@node.callback()
def start(
    context: typer.Context,
    data: Annotated[
        str | None, typer.Option("--data", help="The site's own images: a folder, a parquet file, ...")
    ] = None,
    site: Annotated[Path | None, typer.Option("--site", help="The folder that `federate init` made for it.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="The site's name; that of the folder when absent.")] = None,
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT of the server, with --insecure.")] = None,
    state: State = None,
    format: Annotated[str, typer.Option("--format", help="Of the images, as `data.format` has it.")] = "auto",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; as the run says when absent.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Path of the backbone on this machine, if it differs.")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Begin like a new site if the state of a run is lost.")] = False,
    least_noise: Annotated[
        float, typer.Option("--least-noise", min=0.0, help="Take part only if this much noise is added here.")
    ] = 0.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: on loopback only.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check this site, print the problems, and end.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="With --check: would a run of this config be refused, and why?")
    ] = None,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
    plugin: Plugins = None,
) -> None:
    """Take part in a federation with images of one's own, until it is stopped: Flower's SuperNode. Images never leave."""
    if context.invoked_subcommand is not None:
        return
    from fedprompt.deploy.addresses import Address
    from fedprompt.deploy.folders import SiteFolder
    from fedprompt.deploy.operator_listener import check_metrics_address
    from fedprompt.deploy.run_node import Connection
    from fedprompt.deploy.run_node import start as take_part
    from fedprompt.engines.remote.site_policy import load_policy

    if data is None:
        raise ConfigError("--data must be given: the images of this site")
    if config is not None and not check:
        raise ConfigError("--config must be left out without --check: the server says what is run")
    if site is not None:
        folder = SiteFolder.load(site)
        if name not in (None, folder.name) or server not in (None, str(folder.address)):
            raise ConfigError("--name and --server must be those of --site, or be left out")
        if insecure == folder.secure:
            raise ConfigError(f"--insecure must be {'left out' if folder.secure else 'given'} for {site}")
        connection, state, home = Connection.of(folder), state or folder.path / "state", folder.path
        if check:
            checked(folder, data, state.absolute(), config, (), format, device, weights, least_noise)
            return
    elif not insecure:
        raise ConfigError("--site must be given: it holds the key and the certificate that make the connection secure")
    elif check:
        raise ConfigError("--site must be given with --check: it is what is checked")
    elif name is None or server is None or state is None:
        raise ConfigError("--name, --server and --state must be given where there is no --site")
    else:
        connection, home = Connection.insecure(name, Address.parse("--server", server)), state
    policy, scraped, form = load_policy(home), check_metrics_address(metrics), check_log_format(log_format)
    own = (format, device, weights, anew, least_noise, policy)
    take_part(connection, data, state.absolute(), *own, metrics=scraped, log_format=form)


@node.command()
def waiting(folder: Folder, state: State = None) -> None:
    """The runs that wait for a person's yes, with the settings they would have (`approve: true` in policy.yaml)."""
    from fedprompt.engines.remote.run_records import waiting_runs

    found = waiting_runs(_state(folder, state))
    if not found:
        say("no run waits")
    for run, settings in found.items():
        typer.echo(safe_line(f"run {run}"))
        typer.echo(safe_text(yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)))


@node.command()
def approve(
    folder: Folder,
    run: Annotated[str, typer.Argument(help="The number of the run, as `fedprompt node waiting` shows it.")],
    state: State = None,
) -> None:
    """Approve a run with the settings that were shown; other settings under that number need another approval."""
    from fedprompt.engines.remote.run_records import approve as approve_run

    approve_run(_state(folder, state), run)
    say(f"{run} may run here; the node need not be restarted")


def checked(
    folder: SiteFolder,
    data: str,
    state: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    format: str = "auto",
    device: str | None = None,
    weights: str | None = None,
    least_noise: float = 0.0,
) -> None:
    """Print one line per check; a ConfigError if one of them failed."""
    from fedprompt.config import config_files
    from fedprompt.deploy.check_site import check_site

    configs = config_files.load(config, overrides) if config is not None else []
    failed = 0
    for each in check_site(folder, data, state, configs, format, device, weights, least_noise):
        failed += not each.fine
        typer.echo(safe_line(f"{'ok' if each.fine else 'NO':3} {each.what}: {each.text}"))
    if failed:
        raise ConfigError(broken("site", "pass every check", f"{failed} that failed"))


def _state(folder: Path, state: Path | None) -> Path:
    return (state or folder / "state").absolute()
