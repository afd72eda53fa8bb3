"""The command that runs a paper's table and prints our numbers next to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprompt.cli.options import AsJson, Overrides, Plugins, Quiet, Seeds, emit_rows, seed_numbers
from fedprompt.cli.run_configs import say
from fedprompt.errors import ConfigError, FedpromptError, StorageError
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from fedprompt.config import Config
    from fedprompt.papers.collect import Outcome, Request

CHECKOUT = Path("benchmarks/accuracy")  # where results go in a checkout of the project


def reproduce(
    experiment: Annotated[
        str | None, typer.Argument(help="Such as pfedbayespt/table1, or a YAML file; --list lists them.")
    ] = None,
    overrides: Overrides = None,
    scale: Annotated[
        str | None,
        typer.Option(help="A smaller size that the config offers, such as small; the paper's own when absent."),
    ] = None,
    seed: Seeds = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this method of the grid alone; stored cells of the others stay. Can be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of result files; benchmarks/accuracy in a checkout.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write the page of all results in the folder, and run nothing.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes that share the runs, one thread each: one for every core.")
    ] = 1,
    left: Annotated[
        bool, typer.Option("--left", help="Say which runs are finished and how long the rest may take.")
    ] = False,
    what_holds: Annotated[
        Path | None,
        typer.Option(
            help="Write the page that says which orders of the papers hold in these results, and run nothing."
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables there are.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Run the whole grid of a paper's table, print our numbers next to the paper's, and store them. It can be stopped and run again."""
    from fedprompt.papers import paper_configs
    from fedprompt.papers.collect import Request

    if listed:
        emit_rows([_row(each) for each in paper_configs.experiments()], as_json)
    elif page is not None or what_holds is not None:
        _write_pages(page, what_holds, output or CHECKOUT)
    elif experiment is None:
        raise ConfigError(
            "experiment must be given, such as pfedbayespt/table1; `fedprompt reproduce --list` lists all"
        )
    else:
        found = paper_configs.find(experiment)
        request = Request(found, scale, tuple(overrides or []), tuple(seed_numbers(seed)), tuple(only or []))
        if left:
            _show_left(request, jobs, as_json)
        else:
            _reproduce(request, jobs, output, quiet, as_json)


def _row(experiment: Any) -> dict[str, Any]:
    from fedprompt.config import config_files

    raw = config_files.read(experiment.path)
    known = bool((raw.get(config_files.PUBLISHED) or {}).get("rows"))
    return {
        "name": experiment.name,
        "scales": ",".join(raw.get("scales", {})) or "-",
        "published": "yes" if known else "not known",
        "what": experiment.title,
    }


def _write_pages(page: Path | None, holds: Path | None, folder: Path) -> None:
    from fedprompt.errors import RunError
    from fedprompt.io.files import write_atomically
    from fedprompt.papers import results_page, what_holds

    found = results_page.load_all(folder)
    if not found:
        raise RunError(f"result: {str(folder)!r} must hold result files, but there is none")
    for path, write in ((page, results_page.page), (holds, what_holds.page)):
        if path is not None:
            write_atomically(path, write(found).encode())
            say(f"page: {path}")


def _show_left(request: Request, jobs: int, as_json: bool) -> None:
    from fedprompt.papers.grid import Progress, clock

    progress = Progress(request.configs()).look()
    rows = [
        {"method": label, "finished": done, "of": all_, "seconds each": "-" if mean is None else clock(mean)}
        for label, (done, all_, mean) in progress.by_method().items()
    ]
    emit_rows(rows, as_json)
    say(progress.sentence(jobs))


def _reproduce(request: Request, jobs: int, output: Path | None, quiet: bool, as_json: bool) -> None:
    from fedprompt.config import config_files
    from fedprompt.papers import collect, published_numbers, result_file
    from fedprompt.papers.grid import run_together

    experiment = request.experiment
    numbers = published_numbers.read(config_files.read(experiment.path).get(config_files.PUBLISHED))
    configs = request.configs()  # all of them now: a mistake in the last one shows before the first one starts
    folder = output or (CHECKOUT if CHECKOUT.is_dir() else Path(configs[0].output.directory) / "results")
    path = folder / f"{request.name()}.json"
    before = result_file.load(path) if path.exists() else None
    if before is not None:
        gone = {cell.family for cell in before.cells if cell.runs} - {config.family() for config in request.grid()}
        if gone and not request.only:
            say(f"will replace {len(gone)} stored cells of other settings; name= gives an experiment a separate file")
    if jobs > 1:
        _refuse_other_runs(configs)
        run_together(request, jobs, (lambda text: None) if quiet or as_json else say)
    outcomes, codes = _run(configs, request, quiet or as_json)
    result = collect.assemble(request, numbers, outcomes, before)
    result_file.save(result, path)
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
    else:
        _show(result)
    say(f"result file: {path}")
    if codes:
        say(f"failed: {len(codes)} of {len(configs)} runs; the same command tries them again")
        raise typer.Exit(codes[0])


def _run(configs: list[Config], request: Request, quiet: bool) -> tuple[list[Outcome], list[int]]:
    """The results of all runs of the grid, and the exit codes of those that failed."""
    from rich.console import Console

    from fedprompt.experiment import Experiment
    from fedprompt.experiment.progress import LiveProgress
    from fedprompt.papers import collect
    from fedprompt.papers.grid import Progress

    experiments = [Experiment(config) for config in configs]
    _refuse_other_runs(configs)
    console, checksums = Console(stderr=True), dict[str, str | None]()
    outcomes, codes = [], []
    progress = Progress(configs).look()
    kept = len(progress.seconds)
    for number, (config, made) in enumerate(zip(configs, experiments, strict=True), start=1):
        observer = None
        try:
            if not collect.is_finished(config):
                if not quiet:
                    line = f"run {number} of {len(configs)} · {progress.look().sentence()} · {config.run_name}"
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
                    observer = LiveProgress(console)
                made.run(resume=True, observer=observer).close()
            outcomes.append(collect.recorded(config, checksums))
        except KeyboardInterrupt:
            say(f"stopped at run {number} of {len(configs)}; every finished round is kept. The same command goes on.")
            raise
        except StorageError:  # the next runs would use the same disk
            raise
        except FedpromptError as error:
            say(f"FAILED: {config.run_name}: {error}")
            outcomes.append(collect.failed(config, error))
            codes.append(error.exit_code)
        finally:
            if observer is not None:
                observer.stop()
    if not quiet:
        console.print(f"{request.name()}: {len(configs)} runs, {kept} of them were there, {len(codes)} failed")
    return outcomes, codes


def _refuse_other_runs(configs: list[Config]) -> None:
    """Before the first one starts: a run in the way is a mistake in the command, not a failed cell."""
    from fedprompt.experiment import Experiment
    from fedprompt.experiment.run_file import refuse_another_run

    for config in configs:
        refuse_another_run(Experiment(config).config, resume=True)


def _show(result: Any) -> None:
    from rich.console import Console

    from fedprompt.papers.results_page import order_table, reproduction_notes, rich_table, tables
    from fedprompt.papers.row_order import ranked, sentence

    console = Console()
    console.print(f"\n{safe_line(result.title)}", style="bold", highlight=False, markup=False)
    for paragraph in result.about:
        console.print(safe_line(paragraph), highlight=False, markup=False)
    for table in tables(result):
        console.print(rich_table(table))
    pairs = ranked(result)
    if pairs:
        console.print(rich_table(order_table(pairs, every=True)))
        console.print(safe_line(sentence(pairs)), highlight=False, markup=False)
    for note in reproduction_notes(result):
        console.print(f"- {safe_line(note)}", highlight=False, markup=False)
