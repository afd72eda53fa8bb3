"""The command line: parses, calls, prints. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedprompt import __version__
from fedprompt.errors import ConfigError, FedpromptError
from fedprompt.launching import launch, print_comparison, profiled, say, unobserved

INTERRUPTED = 130

app = typer.Typer(
    help="Personalised federated prompt tuning of frozen vision transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

protocol = typer.Typer(
    help="Series of runs that answer one question; each is a run like any other.", no_args_is_help=True
)
app.add_typer(protocol, name="protocol")

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file, such as configs/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as train.lr=0.1 method=head_tune.")
]
Seeds = Annotated[list[str] | None, typer.Option("--seed", help="Seeds to run: --seed 0 --seed 1, or --seed 0,1,2.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue runs that were stopped; finished ones are kept.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Runs = Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")]


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


@app.command()
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
) -> None:
    """Train: one run per method, seed and sweep value of the config. Stop it whenever you like and --resume."""
    if trace and not profile:
        raise ConfigError("--trace must come with --profile: it shows a round of it")
    around = partial(profiled, trace=trace, as_json=as_json) if profile else unobserved
    launch(_load(config, overrides, seed), resume, quiet, as_json, around)


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
) -> None:
    """Hold some clients out of training, and evaluate only those."""
    from fedprompt.evaluation import protocols

    launch(protocols.new_clients(config, overrides or (), _seeds(seed), share, epochs), resume, quiet, as_json)


@protocol.command("base-to-novel")
def base_to_novel(
    config: ConfigPath,
    overrides: Overrides = None,
    share: Annotated[float, typer.Option(help="Of the classes, the last ones, that the federation never sees.")] = 0.5,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Keep some classes from the federation, and test its clients on them at the end."""
    from fedprompt.evaluation import protocols

    launch(protocols.base_to_novel(config, overrides or (), _seeds(seed), share), resume, quiet, as_json)


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
) -> None:
    """Let a client miss some rounds and come back, and compare with the same runs without its absence."""
    from fedprompt.evaluation import protocols

    series = protocols.comeback(config, overrides or (), _seeds(seed), client, rounds, first)
    done = launch(series.configs, resume, quiet, as_json)
    from fedprompt.report.comeback import comeback_table, save_comeback

    if not as_json:
        typer.echo(comeback_table(done, series.client, series.away))
    say(f"picture: {save_comeback(done, series.client, series.away, series.picture)}")


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
) -> None:
    """Run a config once per value of one setting, and draw the accuracies against it."""
    from fedprompt.evaluation import protocols

    series = protocols.sweep(axis, config, overrides or (), _seeds(seed))
    done = launch(series.configs, resume, quiet, as_json)
    from fedprompt.report.sweeps import save_sweep

    say(f"picture: {save_sweep(done, series.field, series.picture)}")


@protocol.command()
def ablation(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """pFedBayesPT as point estimate, as Gaussian and whole, with the settings they have in common."""
    from fedprompt.evaluation import protocols

    launch(protocols.ablation(config, overrides or (), _seeds(seed)), resume, quiet, as_json)


@protocol.command()
def heterogeneity(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    seed: Seeds = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Clients that hold one of two label subsets each, and clients that hold both."""
    from fedprompt.evaluation import protocols

    launch(protocols.heterogeneity(config, overrides or (), _seeds(seed)), resume, quiet, as_json)


@app.command()
def compare(
    runs: Runs,
    format: Annotated[Literal["table", "markdown", "csv", "json"], typer.Option(help="How to print it.")] = "table",
    as_json: AsJson = False,
) -> None:
    """One row per method and setting: mean and standard deviation over seeds."""
    print_comparison(_open_runs(runs), "json" if as_json else format)


@app.command()
def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.html and report.png.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page and a picture."""
    from fedprompt.report.html import write_report

    page, picture = write_report(_open_runs(runs), output)
    _emit({"html": str(page), "png": str(picture)}, as_json, f"report: {page}\npicture: {picture}")


@app.command()
def validate(config: ConfigPath, overrides: Overrides = None, seed: Seeds = None, as_json: AsJson = False) -> None:
    """Check a config without running it."""
    configs = _load(config, overrides, seed)
    from fedprompt import registry

    full = [registry.completed(each) for each in configs]
    rows = [{"run": each.run_name, "hash": each.digest(), "config": each.model_dump(mode="json")} for each in full]
    _emit(rows, as_json, "\n".join(f"ok  {row['hash']}  {row['run']}" for row in rows))


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show the settings of one.")] = None, as_json: AsJson = False
) -> None:
    """Methods and variants that are registered, here or by other packages."""
    from fedprompt import registry

    tables = {"method": registry.methods(), "variant": registry.variants()}
    rows: list[dict[str, Any]] = [
        {"kind": kind, "name": key, "about": (cls.__doc__ or "").split("\n")[0], "settings": registry.describe(cls)}
        for kind, table in tables.items()
        for key, cls in table.items()
        if name in (None, key)
    ]
    if not rows:
        known = ", ".join([*tables["method"], *tables["variant"]])
        raise ConfigError(f"method name must be one of {known}, got {name!r}")
    lines = []
    for row in rows:
        lines.append(f"{row['kind']:8} {row['name']:14} {row['about']}")
        if name is not None:
            lines += [f"    {s['name']} = {s['default']!r}    {s['help']}" for s in row["settings"]]
    _emit(rows, as_json, "\n".join(lines))


@app.command()
def backbones(as_json: AsJson = False) -> None:
    """Backbones that need no download by hand, and how to bring your own."""
    from fedprompt.backbones.catalog import catalog

    _emit_rows(catalog(), as_json)


@app.command()
def datasets(as_json: AsJson = False) -> None:
    """Image sources that are understood."""
    from fedprompt.data.sources import kinds

    _emit_rows(kinds(), as_json)


@app.command()
def partition(
    config: ConfigPath,
    overrides: Overrides = None,
    show: Annotated[bool, typer.Option("--show", help="Print the client x class matrix, and draw it.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw it to this PNG; --show has a default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the manifest, to inspect, edit and give back.")] = None,
    as_json: AsJson = False,
) -> None:
    """Who holds what: make the partition of a config without training."""
    each = _load(config, overrides, None)[0]
    from fedprompt.assets import cache_directory
    from fedprompt.data.partition import make_manifest
    from fedprompt.data.sources import open_source

    source = open_source(each.data, cache_directory(each.output.cache))
    manifest = make_manifest(source, each.data, each.partition, each.seed)
    matrix = manifest.class_matrix(source.labels)
    if save is not None:
        manifest.save(save)
    if show and picture is None:
        picture = Path(each.output.directory) / f"{each.name}-partition.png"
    if picture is not None:
        manifest.picture(source.labels, picture)
    rows: list[dict[str, Any]] = [
        {
            "client": client.name,
            "train": len(client.train),
            "test": len(client.test),
            "classes": {manifest.class_names[c]: int(count) for c, count in enumerate(counts) if count},
        }
        for client, counts in zip(manifest.clients, matrix, strict=True)
    ]
    lines = [f"{len(rows)} clients, checksum {manifest.checksum}"] + ([f"picture: {picture}"] if picture else [])
    if show:
        for row in rows:
            counts = "  ".join(f"{name} {count}" for name, count in row["classes"].items())
            lines.append(f"{row['client']:16} train {row['train']:5} test {row['test']:5}  {counts}")
    _emit({"checksum": manifest.checksum, "clients": rows}, as_json, "\n".join(lines))


@app.command()
def assets(
    name: Annotated[str | None, typer.Argument(help="Fetch this one; `all` for every one.")] = None,
    as_json: AsJson = False,
) -> None:
    """The weights and images of the embedded default: what is in the cache, and how to get the rest."""
    from fedprompt.assets import cache_directory
    from fedprompt.doctor import asset_rows, fetch

    cache = cache_directory()
    if name is not None:
        fetch(name, cache)
    _emit_rows(asset_rows(cache), as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, cores, memory, assets, and what is missing."""
    from fedprompt.doctor import examine

    findings = examine()
    lines = [f"{key:14} {value}" for key, value in findings.items() if key not in ("assets", "missing")]
    lines += [f"asset {row['name']:22} {'present' if row['present'] else 'missing'}" for row in findings["assets"]]
    lines += [f"missing: {each}" for each in findings["missing"]] or ["nothing is missing"]
    _emit(findings, as_json, "\n".join(lines))


@app.command()
def audit(
    runs: Runs,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Audit so many clients, drawn at random; else all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What uploads give away of training images, as AUC of attacks on them; see docs/audit.md."""
    opened = _open_runs(runs)
    from fedprompt.evaluation.leaks import audit_run
    from fedprompt.report.leaks import leak_table

    findings = [audit_run(each, clients) for each in opened]
    _emit(findings, as_json, leak_table(findings))


@app.command()
def privacy(
    config: ConfigPath,
    overrides: Overrides = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the noise that spends this epsilon; else reckon with the config's own.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="The delta it is said at; else the config's own.")] = None,
    as_json: AsJson = False,
) -> None:
    """The noise multiplier of a config, and epsilon after every round."""
    given = [f"privacy.target_epsilon={target_epsilon}", "privacy.noise=null"] if target_epsilon is not None else []
    given += [f"privacy.delta={delta}"] if delta is not None else []
    configs = _load(config, [*(overrides or []), *given], None)
    from fedprompt.experiment import Experiment
    from fedprompt.report.privacy import privacy_rows, privacy_text

    rows = [privacy_rows(each, *Experiment(each).privacy_plans()) for each in configs]
    _emit(rows, as_json, "\n".join(privacy_text(row) for row in rows))


def _load(config: Path, overrides: list[str] | None, seeds: list[str] | None) -> list[Any]:
    from fedprompt import config_files

    return config_files.load(config, overrides or (), _seeds(seeds))


def _seeds(texts: list[str] | None) -> list[int]:
    numbers = []
    for text in ",".join(texts or []).split(",") if texts else []:
        if not text.strip().isdecimal():
            raise ConfigError(f"--seed must be a whole number of at least 0, got {text!r}")
        numbers.append(int(text))
    return numbers


def _open_runs(paths: list[Path]) -> list[Any]:
    """Runs in the order given; a folder stands for the runs inside it."""
    from fedprompt.errors import RunError
    from fedprompt.federation.store import FILE
    from fedprompt.run import Run

    found = []
    for path in paths:
        inside = (
            [path]
            if (path / FILE).exists() or path.suffix == ".db"
            else sorted(each.parent for each in path.glob(f"*/{FILE}"))
        )
        if not inside:
            raise RunError(f"run: {str(path)!r} must be a run directory or hold some, but there is no {FILE}")
        found += [Run(each) for each in inside]
    return found


def _emit(data: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(data, indent=2, default=str) if as_json else text)


def _emit_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """A plain table whose columns are the keys of the first row."""
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.ljust(width) for key, width in widths.items()).rstrip()]
    lines += ["  ".join(str(row[key]).ljust(width) for key, width in widths.items()).rstrip() for row in rows]
    _emit(rows, as_json, "\n".join(lines))


if __name__ == "__main__":
    main()
