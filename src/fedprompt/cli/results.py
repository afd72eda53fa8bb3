"""Commands that show the results of runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedprompt.cli.options import AsJson, Data, Plugins, Runs, TrustConfig, Weights, emit, open_runs, run_folders
from fedprompt.cli.run_configs import print_comparison
from fedprompt.errors import ConfigError, RunError, broken

if TYPE_CHECKING:
    from fedprompt.report.sections import Part
    from fedprompt.runs.run import Run

Against = Annotated[
    str | None,
    typer.Option(
        help="A method, or the label of a row: paired differences of all others, with 95 % intervals; see docs/report.md."
    ),
]


def compare(
    runs: Runs,
    format: Annotated[
        Literal["table", "markdown", "latex", "csv", "json"], typer.Option(help="How to print it.")
    ] = "table",
    against: Against = None,
    as_json: AsJson = False,
) -> None:
    """One row per method and setting: mean and standard deviation over seeds."""
    print_comparison(open_runs(runs), "json" if as_json else format, against)


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.html and report.png.")] = Path(
        "runs"
    ),
    figures: Annotated[
        bool, typer.Option("--figures", help="For papers: every picture as PNG and SVG in figures/, and table.tex.")
    ] = False,
    against: Against = None,
    metrics: Annotated[
        float | None,
        typer.Option(
            metavar="SPECIFICITY",
            help="Sensitivity at this specificity instead of 0.9. It predicts the test images again; the three options below "
            "say where they are. Also for run files of earlier versions, which have no such figures.",
        ),
    ] = None,
    uncertainty: Annotated[
        bool,
        typer.Option("--uncertainty", help="Also what uncertainty is worth; it predicts the test images again too."),
    ] = False,
    weights: Weights = None,
    data: Data = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page and a picture; see docs/report.md."""
    from fedprompt.report.html_report import write_report

    if metrics is not None and not 0 <= metrics <= 1:
        raise ConfigError(broken("--metrics", "be in 0..1", metrics))
    where = {"weights": weights, "data": data, "trust_config": trust_config}
    opened = open_runs(runs)
    first = [_uncertainty(opened, where)] if uncertainty else []
    made = write_report(opened, output, figures, against, metrics, first, **where)
    lines = [f"report: {made.html}", f"picture: {made.png}"]
    if made.latex is not None:
        lines += [f"table: {made.latex}", f"figures: {len(made.figures)} files in {output / 'figures'}"]
    written = {"html": str(made.html), "png": str(made.png)}
    more = {"figures": [str(path) for path in made.figures], "latex": str(made.latex)} if figures else {}
    emit({**written, **more}, as_json, "\n".join(lines))


def _uncertainty(runs: list[Run], where: dict[str, Any]) -> Part:
    from fedprompt.inference.uncertainty_rows import of_tasks
    from fedprompt.report.method_grid import arrange
    from fedprompt.report.uncertainty_part import uncertainty_part

    return uncertainty_part(of_tasks(arrange(runs), **where))


def audit(
    runs: Runs,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients to audit, drawn at random; all when absent.")
    ] = None,
    weights: Weights = None,
    data: Data = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """What uploads reveal about training images, as AUC of attacks on them; see docs/audit.md."""
    opened = open_runs(runs)
    from fedprompt.evaluation.leak_audit import audit_run
    from fedprompt.report.leak_table import leak_table

    findings = [audit_run(each, clients, weights, data, trust_config) for each in opened]
    emit(findings, as_json, leak_table(findings))


def verify(
    runs: Runs,
    head: Annotated[
        str | None, typer.Option(help="A head that was noted before: it must be a link of the run's chain.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that run files are what was written, row by row, and print the heads of their chains; see docs/protection.md."""
    found = [verified(folder, head) for folder in run_folders(runs)]
    if head is not None and len(found) != 1:
        raise ConfigError(broken("--head", f"be given with one run, which has it, not {len(found)}", head))
    emit(found, as_json, "\n".join(f"{each['run']}: {each['message']}" for each in found))
    bad = [each["run"] for each in found if not each["whole"]]
    if bad:
        raise RunError(
            f"run files must be what was written, got {len(bad)} of {len(found)} that are not: {', '.join(bad)}"
        )


def verified(folder: Path, head: str | None) -> dict[str, Any]:
    """What is found of one run file, as JSON prints it."""
    from fedprompt.runs.store import NO_DIGESTS, RunReader
    from fedprompt.runs.verify import verify

    try:
        with closing(RunReader(folder)) as reader:
            verdict = verify(reader)
    except RunError as error:
        return {"run": str(folder), "whole": False, "head": None, "first_round": None, "message": str(error)}
    first = verdict.problems[0] if verdict.problems else None
    covered = verdict.heads.get((head or "").lower())
    known = head is None or head.lower() in verdict.heads
    if first is not None:
        where = "from the beginning" if first.round is None else f"from round {first.round} on"
        text = f"damaged {where}: {first.what}"
    elif not verdict.sealed:
        text = f"{NO_DIGESTS} (format {verdict.version}); its structure is in order"
    else:
        text = f"whole, {verdict.rounds} rounds, head {verdict.head}"
    if first is None and head is not None:
        round = "before the first round" if covered is None else f"after round {covered}"
        text += f"; the given head is that {round}" if known else f"; it never had the head {head}"
    return {
        "run": str(folder),
        "whole": first is None and known,
        "version": verdict.version,
        "rounds": verdict.rounds,
        "head": verdict.head,
        "first_round": None if first is None else first.round,
        "problems": [each.what for each in verdict.problems],
        "message": text,
    }


def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders that hold some; else the folder runs.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Else 8050, or a free one where that is taken.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. There is no login.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    server: Annotated[
        Path | None, typer.Option("--server", help="The folder of a federation's server: its sites and runs.")
    ] = None,
) -> None:
    """Serve a live page that lists runs, follows them while they train and compares them; see docs/dashboard.md."""
    from fedprompt.dashboard.serve import serve

    if server is None:
        serve(runs, host, port, open_browser)
        return
    from fedprompt.deploy.federation_page import FederationPage
    from fedprompt.deploy.folders import ServerFolder

    folder = ServerFolder.load(server)
    folder.runs.mkdir(mode=0o700, exist_ok=True)
    serve([folder.runs, *(runs or [])], host, port, open_browser, FederationPage(folder).answer)
