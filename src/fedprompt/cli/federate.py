"""The part of the command line that is about federations of sites: parses, calls, prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedprompt.cli.options import LogFormat, Metrics, Plugins, check_log_format
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError, broken, did_you_mean

federate = typer.Typer(no_args_is_help=True, help="Set up, run and watch a federation across machines, on Flower.")

Server = Annotated[Path, typer.Option("--server", help="The folder `server` that `federate init` made.")]


def server(
    folder: Annotated[Path, typer.Argument(help="The folder `server` that `federate init` made.")],
    bind: Annotated[
        str | None, typer.Option("--bind", help="HOST:PORT to listen on; all addresses of this machine when absent.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys: on loopback only, for a folder made so.")
    ] = False,
    metrics: Metrics = None,
    log_format: LogFormat = "text",
    plugin: Plugins = None,
) -> None:
    """Serve a federation until it is stopped: Flower's SuperLink, with a gate before what is not for other machines."""
    from fedprompt.deploy.addresses import Address
    from fedprompt.deploy.folders import ServerFolder
    from fedprompt.deploy.operator_listener import check_metrics_address
    from fedprompt.deploy.run_server import start

    place = None if bind is None else Address.parse("--bind", bind)
    scraped, form = check_metrics_address(metrics), check_log_format(log_format)
    start(ServerFolder.load(folder), place, insecure, scraped, form)


@federate.command()
def init(
    directory: Annotated[Path, typer.Argument(help="A new folder for all of it.")],
    address: Annotated[str, typer.Option("--address", help="HOST:PORT by which the sites reach the server.")],
    site: Annotated[list[str], typer.Option("--site", help="A site's name; once for every site.")],
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: loopback only.")] = False,
) -> None:
    """Make certificates, keys and config files: one folder for the server, and one for each site."""
    from fedprompt.deploy.addresses import Address
    from fedprompt.deploy.folders import init as make

    folder = make(directory, Address.parse("--address", address), site, secure=not insecure)
    flag = " --insecure" if insecure else ""
    say(f"on the server:   fedprompt server {folder.path}{flag}")
    for name in site:
        say(f"at {name}:   fedprompt node --site {folder.path.parent / 'sites' / name} --data PATH{flag}")


@federate.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML file.")],
    server: Server,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last finished round.")] = False,
    plugin: Plugins = None,
) -> None:
    """Train over the sites of a server, and follow it until it ends. Stopping this command stops the run, not the sites."""
    from fedprompt.config import config_files
    from fedprompt.deploy import submit
    from fedprompt.deploy.folders import ServerFolder

    folder = ServerFolder.load(server)
    for each in config_files.load(config, overrides or []):
        values = each.model_dump(mode="json")
        values["engine"]["kind"] = "flower"
        known = sorted(folder.public_keys()) if folder.secure else []
        strangers = [name for name in values["engine"]["sites"] if folder.secure and name not in known]
        if strangers and not resume:
            rule = f"be among those let in ({', '.join(known)})"
            raise ConfigError(broken("engine.sites", rule, strangers) + did_you_mean(strangers[0], known))
        values["engine"]["sites"] = values["engine"]["sites"] or known
        submitted = submit.submit(folder, json.dumps(values), resume)
        try:
            ended = submit.follow(folder, submitted.run_id)
        except KeyboardInterrupt:
            submit.stop(folder, submitted.run_id)
            say("stopped; every finished round is kept. Continue with --resume.")
            raise
        ended.check()
        say(f"run file: {folder.runs / each.run_name / 'run.db'}")


@federate.command()
def status(
    server: Server, as_json: Annotated[bool, typer.Option("--json", help="For programs instead of people.")] = False
) -> None:
    """Who is connected, and what was run."""
    from fedprompt.deploy.folders import ServerFolder
    from fedprompt.deploy.status import standing, tables

    found = standing(ServerFolder.load(server))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console

    for table in tables(found):
        Console().print(table)


@federate.command()
def admit(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    public_key: Annotated[Path, typer.Argument(help="Its public key (ssh-keygen -t ecdsa -b 384).")],
    server: Server,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write the folder for the site, without its private key.")
    ] = None,
) -> None:
    """Let a site in that made its own key; a private key need never travel."""
    from fedprompt.deploy.folders import ServerFolder, SiteFolder
    from fedprompt.deploy.membership import admit as let_in

    folder = ServerFolder.load(server)
    if output is not None and output.exists():
        raise ConfigError(broken("--output", "be a folder that does not exist yet", str(output)))
    line = let_in(folder, name, public_key)
    if output is not None:
        SiteFolder.create(output, name, folder, line)
        say(f"{output} goes to {name}, which puts its private key there as `key` (chmod 600)")
    say(f"{name} is admitted")


@federate.command()
def expel(name: Annotated[str, typer.Argument(help="The site's name.")], server: Server) -> None:
    """Remove a site; what it has sent so far stays in the runs it took part in."""
    from fedprompt.deploy.folders import ServerFolder
    from fedprompt.deploy.membership import expel as keep_out

    keep_out(ServerFolder.load(server), name)
    say(f"{name} is kept out")


@federate.command()
def renew(server: Server) -> None:
    """A new certificate for the server, for another 825 days; sites need no change. Restart the server afterwards."""
    from fedprompt.deploy import expiry
    from fedprompt.deploy.certificates import renew_server
    from fedprompt.deploy.folders import ServerFolder

    folder = ServerFolder.load(server)
    folder.check_keyed()
    expiry.check([expiry.of_authority(folder)])
    say(f"good until {renew_server(folder.path, folder.address.host):%Y-%m-%d}")


@federate.command()
def check(
    config: Annotated[Path, typer.Argument(help="A YAML file.")],
    site: Annotated[Path, typer.Option("--site", help="The folder of a site, with its policy.yaml.")],
    data: Annotated[str, typer.Option("--data", help="The site's own images.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
) -> None:
    """At a site: would a run of this config be refused, and why? The same as `fedprompt node --check --config CONFIG`."""
    from fedprompt.cli.site_node import checked
    from fedprompt.deploy.folders import SiteFolder

    folder = SiteFolder.load(site)
    checked(folder, data, folder.path / "state", config, overrides or [])


@federate.command()
def split(
    config: Annotated[
        Path, typer.Argument(help="A YAML file with data and a partition, the same for all its methods.")
    ],
    output: Annotated[Path, typer.Option("--output", help="A new folder for one parquet file per client.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
    plugin: Plugins = None,
) -> None:
    """Give every client of a partition a separate file, to try a federation on one machine."""
    from fedprompt.config import config_files
    from fedprompt.data.partition.divide import make_manifest
    from fedprompt.data.partition.export_clients import export_clients
    from fedprompt.data.sources.open import open_source
    from fedprompt.io.files import cache_directory

    settings, *others = config_files.load(config, overrides or [])
    divided = [(each.data, each.partition, each.seed) for each in (settings, *others)]
    if any(each != divided[0] for each in divided):
        raise ConfigError(
            f"{str(config)!r} must divide one set of images in one way, got several of data, partition or seed"
        )
    source = open_source(settings.data, cache_directory(settings.output.cache))
    manifest = make_manifest(source, settings.data, settings.partition, settings.seed)
    for path in export_clients(source, manifest, output):
        say(str(path))
