"""From configs to finished runs on a terminal: progress, an optional profile, and the results."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from fedprompt.errors import FedpromptError
from fedprompt.io.safe_text import safe_text


def unobserved(directory: Path) -> AbstractContextManager[None]:
    """The context of a run without a profile."""
    return nullcontext()


def launch(
    configs: list[Any],
    resume: bool,
    quiet: bool,
    as_json: bool,
    around: Callable[[Path], AbstractContextManager[None]] = unobserved,
) -> list[Any]:
    """Run some configs, with progress and a comparison at the end.

    Each run is inside the context `around` its directory.
    """
    with _no_collection():
        from fedprompt.experiment import Experiment

        # all of them now: a mistake in the last one shows before the first one starts
        experiments = [Experiment(each) for each in configs]
    done = []
    for experiment in experiments:
        observer = None if quiet or as_json else _progress()
        try:
            with around(experiment.config.run_directory):
                done.append(experiment.run(resume=resume, observer=observer))
        except KeyboardInterrupt:
            say(f"stopped; every finished round is in {experiment.config.run_directory}. Continue with --resume.")
            raise
        finally:
            if observer is not None:
                observer.stop()
    print_comparison(done, "json" if as_json else "table")
    for each in done if quiet or as_json else []:  # the progress display has shown the others
        labels = [detail for _, _, kind, detail in each.reader.events() if kind == "label_check"]
        for text in (*labels, *each.warnings()):
            say(f"WARNING: {each.name}: {text}")
    if not as_json:
        for each in done:
            say(f"run file: {each.directory / 'run.db'}")
    return done


def print_estimates(configs: list[Any], as_json: bool) -> None:
    """What some runs would need, before any of them."""
    from fedprompt.experiment import Experiment

    found = [(experiment.config, experiment.estimate()) for experiment in map(Experiment, configs)]
    if as_json:
        named = [{"name": config.run_name, "total": each.total, **asdict(each)} for config, each in found]
        typer.echo(json.dumps(named, indent=2))
        return
    for config, each in found:
        typer.echo(safe_text(f"{config.run_name}: {each.sentence()}"))


@contextmanager
def profiled(directory: Path, trace: bool, as_json: bool) -> Iterator[None]:
    """Profile a run, also one that is stopped, and write the profile beside its run file."""
    from rich.console import Console

    from fedprompt.experiment import profile_tables
    from fedprompt.experiment.profiling import Profile

    found = Profile(directory / profile_tables.TRACE if trace else None)

    def report() -> None:
        if found.rounds:
            path = profile_tables.save(found, directory)
            for table in () if as_json else profile_tables.tables(found):
                Console().print(table)
            say(f"profile: {path}")

    try:
        with found:
            yield
    except BaseException:
        try:
            report()
        except (OSError, FedpromptError) as error:  # the error that stopped the run matters more
            say(f"profile: not written: {error}")
        raise
    report()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Imports make many long-lived objects; the garbage collector need not scan them again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def print_comparison(runs: list[Any], format: str, against: str | None = None) -> None:
    from fedprompt.report import table_formats
    from fedprompt.report.tasks import by_task

    tasks = by_task(runs, against)
    if format == "json":
        typer.echo(json.dumps(table_formats.json_rows(tasks), indent=2))
    elif format == "csv":
        typer.echo(table_formats.csv(tasks), nl=False)
    elif format == "markdown":
        typer.echo(table_formats.markdown(tasks))
    elif format == "latex":
        from fedprompt.report.latex_table import latex

        typer.echo(latex(runs, against), nl=False)
    else:
        from rich.console import Console

        console = Console()
        for table in table_formats.rich_tables(tasks, console.width):
            console.print(table, end="\n\n")


def _progress() -> Any:
    from rich.console import Console

    from fedprompt.experiment.progress import LiveProgress

    return LiveProgress(Console(stderr=True))


def say(text: str) -> None:
    print(safe_text(text), file=sys.stderr)
