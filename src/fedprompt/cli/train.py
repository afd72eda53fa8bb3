"""Commands that train: one config, or a protocol."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from fedprompt.cli.options import AsJson, ConfigPath, Overrides, Plugins, Quiet, Resume, Seeds, load, seed_numbers
from fedprompt.cli.run_configs import launch, print_estimates, profiled, say, unobserved
from fedprompt.errors import ConfigError, broken
from fedprompt.io.safe_text import safe_text

protocol = typer.Typer(
    help="Series of runs that answer one question; each is a run like any other.", no_args_is_help=True
)


def run(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure where the time of a round goes: tables, and profile.json.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --profile: one round as a trace for chrome://tracing or Perfetto.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what the runs will need, from a few measured steps; train nothing.")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Train: one run per method, seed and sweep value of the config. A stopped run continues with --resume."""
    if estimate:
        print_estimates(load(config, overrides, seed), as_json)
        return
    if trace and not profile:
        raise ConfigError("--trace must come with --profile: it shows a round of it")
    around = partial(profiled, trace=trace, as_json=as_json) if profile else unobserved
    launch(load(config, overrides, seed), resume, quiet, as_json, around)


@protocol.command("new-clients")
def new_clients(
    config: ConfigPath,
    overrides: Overrides = None,
    share: Annotated[float, typer.Option(help="Of the clients that are held out of training.")] = 0.5,
    epochs: Annotated[int, typer.Option(help="In which each of them fits its head before it is evaluated.")] = 5,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Hold some clients out of training, and evaluate only those."""
    from fedprompt.evaluation import protocols

    launch(protocols.new_clients(config, overrides or (), seed_numbers(seed), share, epochs), resume, quiet, as_json)


@protocol.command("base-to-novel")
def base_to_novel(
    config: ConfigPath,
    overrides: Overrides = None,
    share: Annotated[float, typer.Option(help="Of the classes, the last ones, that the federation never sees.")] = 0.5,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Keep some classes from the federation, and test its clients on them at the end."""
    from fedprompt.evaluation import protocols

    launch(protocols.base_to_novel(config, overrides or (), seed_numbers(seed), share), resume, quiet, as_json)


@protocol.command()
def comeback(
    config: ConfigPath,
    overrides: Overrides = None,
    client: Annotated[str, typer.Option(help="Who is away: a name, or a number from 0.")] = "0",
    rounds: Annotated[int, typer.Option(help="How many rounds it misses.")] = 5,
    first: Annotated[int | None, typer.Option(help="The first of them; in the middle of the run when absent.")] = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Let a client miss some rounds and come back, and compare with the same runs without its absence."""
    from fedprompt.evaluation import protocols

    series = protocols.comeback(config, overrides or (), seed_numbers(seed), client, rounds, first)
    done = launch(series.configs, resume, quiet, as_json)
    from fedprompt.report.comeback import comeback_table, save_comeback

    if not as_json:
        typer.echo(safe_text(comeback_table(done, series.client, series.away)))
    say(f"picture: {save_comeback(done, series.client, series.away, series.picture)}")


@protocol.command("cross-domain")
def cross_domain(
    config: ConfigPath,
    overrides: Overrides = None,
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", help="Leave out this domain; may be repeated. Each in turn by default."),
    ] = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Train on all domains but one, and test every client on that one."""
    from fedprompt.evaluation import protocols

    launch(protocols.cross_domain(config, overrides or (), seed_numbers(seed), domain or ()), resume, quiet, as_json)


@protocol.command("cross-dataset")
def cross_dataset(
    config: ConfigPath,
    overrides: Overrides = None,
    to: Annotated[
        str, typer.Option("--to", help="The other set, as in data.source: a folder, a parquet file, ...")
    ] = "",
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Test the clients at the end on another set, whose classes they know by name only."""
    from fedprompt.evaluation import protocols

    if not to:
        raise ConfigError(broken("--to", "name another set", to))
    launch(protocols.cross_dataset(config, to, overrides or (), seed_numbers(seed)), resume, quiet, as_json)


@protocol.command()
def sweep(
    axis: Annotated[
        str,
        typer.Argument(
            metavar="FIELD=VALUES", help="Such as method.predict_draws=1..10, or method.prompt_init=random,zero."
        ),
    ],
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Run a config once per value of one setting, and draw the accuracies against it."""
    from fedprompt.evaluation import protocols

    series = protocols.sweep(axis, config, overrides or (), seed_numbers(seed))
    done = launch(series.configs, resume, quiet, as_json)
    from fedprompt.report.sweep_plot import save_sweep

    say(f"picture: {save_sweep(done, series.field, series.picture)}")


@protocol.command()
def ablation(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """pFedBayesPT as point estimate, as Gaussian and whole, with the settings they have in common."""
    from fedprompt.evaluation import protocols

    launch(protocols.ablation(config, overrides or (), seed_numbers(seed)), resume, quiet, as_json)


@protocol.command()
def heterogeneity(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Clients that hold one of two label subsets each, and clients that hold both."""
    from fedprompt.evaluation import protocols

    launch(protocols.heterogeneity(config, overrides or (), seed_numbers(seed)), resume, quiet, as_json)
