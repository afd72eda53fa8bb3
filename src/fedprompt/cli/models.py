"""Commands that use the models of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedprompt.cli.completion import complete_client, complete_run
from fedprompt.cli.options import AsJson, Data, Plugins, TrustConfig, Weights, emit, tell_age
from fedprompt.errors import ConfigError, broken
from fedprompt.io.safe_text import safe_line

if TYPE_CHECKING:
    from fedprompt.inference.exported_client import ExportedClient
    from fedprompt.inference.loaded_run import LoadedRun
    from fedprompt.inference.trained_client import TrainedClient

OneRun = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)]
OfClient = Annotated[
    str | None,
    typer.Option(
        "--client", "-c", help="Whose model: a client's name, or its number from 0.", autocompletion=complete_client
    ),
]
State = Annotated[
    Path | None, typer.Option(help="The directory of a site's node, for a client that keeps its own tensors there.")
]
Device = Annotated[str | None, typer.Option(help="Where to compute, such as cpu or cuda; else as in the run.")]


def predict(
    run: OneRun,
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Image files, folders of them, and CSV or parquet files of images or texts."),
    ] = None,
    client: OfClient = None,
    adapt: Annotated[
        Path | None,
        typer.Option(help="Fit a client that never trained to these labelled images: class/image, or parquet."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=0, help="Epochs of --adapt; else federation.newcomer_epochs of the run.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the adapted client in this folder.")] = None,
    adapted: Annotated[Path | None, typer.Option(help="Predict as the client that --save kept in this folder.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Only the rows of this split of parquet files: train, val or test.")
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Number of classes to print for every image or text, the most likely first.")
    ] = 5,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV to standard output.")] = False,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead, a .csv or a .json.")
    ] = None,
    state: State = None,
    weights: Weights = None,
    data: Data = None,
    device: Device = None,
    trust_config: TrustConfig = False,
    plugin: Plugins = None,
) -> None:
    """Classify images or texts with the model of one client of a run, of a new one, or of an exported folder."""
    if not images and save is None:
        raise ConfigError(broken("IMAGE", "be at least one file or folder", []))
    _check_split(split, images or [])
    if sum([as_csv, as_json, output is not None]) > 1:
        raise ConfigError("--csv, --json and --output must not be given together: the suffix of --output decides")
    from fedprompt.inference.exported_client import is_export
    from fedprompt.inference.prediction_writer import format_of

    written_as = "csv" if as_csv else "json" if as_json else "table" if output is None else format_of(output)
    if is_export(run):
        _answer(_exported(run, client, weights), images or [], split, top, written_as, output)
        return
    _check_whose(client, adapt, adapted, save, epochs, state)
    opened = open_run(run, weights, device, data, trust_config)
    try:
        trained = _whose(opened, client, adapt, adapted, epochs, state)
        if save is not None:
            from fedprompt.inference.adapt import save as keep

            typer.echo(safe_line(f"adapted client: {keep(trained, save)}"), err=as_csv or as_json)
        if images:
            _answer(trained, images, split, top, written_as, output)
    finally:
        opened.close()


def _exported(folder: Path, client: str | None, weights: Path | None) -> ExportedClient:
    from fedprompt.inference.exported_client import ExportedClient

    found = ExportedClient.open(folder, weights)
    if client is not None and client != found.name:
        raise ConfigError(broken("--client", f"be absent, or {found.name!r}, which was exported", client))
    return found


def open_run(run: Path, weights: Path | None, device: str | None, data: Path | None, trust_config: bool) -> LoadedRun:
    """A run to be used, with as many threads as it was trained with."""
    import torch

    from fedprompt.inference.loaded_run import LoadedRun

    opened = LoadedRun.open(run, weights, device, data=data, trust_config=trust_config)
    tell_age(opened.run)
    if opened.config.output.threads:
        torch.set_num_threads(opened.config.output.threads)
    return opened


def _check_whose(
    client: str | None,
    adapt: Path | None,
    adapted: Path | None,
    save: Path | None,
    epochs: int | None,
    state: Path | None,
) -> None:
    """Raise unless the options name one client."""
    if client is None and adapt is None and adapted is None:
        raise ConfigError("--client must name a client of the run, unless --adapt or --adapted is given")
    if adapted is not None and (client is not None or adapt is not None):
        raise ConfigError("--adapted must be given without --client and --adapt: it is a client itself")
    for option, value in (("--save", save), ("--epochs", epochs)):
        if value is not None and adapt is None:
            raise ConfigError(broken(option, "be given with --adapt", str(value)))
    if state is not None and client is None:
        raise ConfigError(broken("--state", "be given with --client", str(state)))


def _whose(
    opened: LoadedRun,
    client: str | None,
    labelled: Path | None,
    adapted: Path | None,
    epochs: int | None,
    state: Path | None,
) -> TrainedClient:
    from fedprompt.inference.adapt import adapt, load
    from fedprompt.inference.trained_client import TrainedClient

    if adapted is not None:
        return load(opened, adapted)
    if labelled is not None:
        return adapt(opened, labelled, client, epochs, state)
    assert client is not None
    return TrainedClient.open(opened, client, state=state)


def _check_split(split: str | None, images: list[Path]) -> None:
    from fedprompt.data.sources.base import SPLITS

    if split is None:
        return
    if split not in SPLITS:
        raise ConfigError(broken("--split", f"be one of {', '.join(SPLITS)}", split))
    for path in images:
        if path.suffix != ".parquet":
            raise ConfigError(
                broken("--split", "be given with parquet files only, which say it of every row", str(path))
            )


def _answer(
    trained: TrainedClient | ExportedClient,
    images: list[Path],
    split: str | None,
    top: int,
    written_as: str,
    output: Path | None,
) -> None:
    """Print or write the predictions; unreadable images end the command with their own error."""
    from fedprompt.inference.input_images import items
    from fedprompt.inference.predict import Row, Tally, predictions
    from fedprompt.inference.prediction_writer import csv_lines, json_lines, table_lines, write_lines

    tally = Tally(frozenset(trained.class_names), trained.item)
    top = min(top, len(trained.class_names))

    def counted(rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            tally.add(row)
            if row.error is not None and (written_as != "table" or output is not None):
                print(safe_line(row.error), file=sys.stderr)
            yield row

    pictures = items(images, trained.class_names, trained.cache, split)
    rows = counted(predictions(trained, pictures, top))
    lines: Any = {
        "csv": lambda: csv_lines(rows, top, trained.item),
        "json": lambda: json_lines(rows, trained, tally),
        "table": lambda: table_lines(rows, trained.class_names, top),
    }[written_as]()
    if output is not None:
        write_lines(output, lines)
        typer.echo(safe_line(f"predictions: {output}"))
    else:
        for line in lines:
            typer.echo(line)
    typer.echo(tally.sentence(), err=output is None and written_as != "table")
    complaint = tally.complaint()
    if complaint is not None:
        raise complaint


def explain(
    run: OneRun,
    image: Annotated[Path, typer.Argument(help="An image file.")],
    client: OfClient = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png, .svg or .html file, or a folder.")
    ] = None,
    block: Annotated[str, typer.Option(help="Whose attention: a block from 0, last, or rollout over all.")] = "last",
    label: Annotated[
        str | None, typer.Option(help="The right class; else the folder of the image, if it has the name of a class.")
    ] = None,
    as_json: AsJson = False,
    state: State = None,
    weights: Weights = None,
    data: Data = None,
    device: Device = None,
    trust_config: TrustConfig = False,
    plugin: Plugins = None,
) -> None:
    """Draw what a client's prompts change in an image: attention, classes, and what was mixed."""
    from fedprompt.inference.explain import explain
    from fedprompt.inference.explanation_page import require_ending, write

    path = output or Path(f"explain-{image.stem}.png")
    if path.is_dir() or not path.suffix:
        path = path / f"explain-{image.stem}.png"
    require_ending(path)
    trained = _one_client(run, client, state, weights, device, data, trust_config)
    try:
        found = explain(trained, image, block, label)
    finally:
        trained.opened.close()
    write(found, path)
    emit({"picture": str(path), **found.to_json()}, as_json, f"{found.answer}\npicture: {path}")


def export(
    run: OneRun,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder that does not exist yet.")],
    client: OfClient = None,
    with_backbone: Annotated[
        bool, typer.Option("--with-backbone", help="Write the frozen backbone too, as a transformers folder.")
    ] = False,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Write a constant model where there is no exact one.")
    ] = False,
    as_json: AsJson = False,
    state: State = None,
    weights: Weights = None,
    data: Data = None,
    device: Device = None,
    trust_config: TrustConfig = False,
    plugin: Plugins = None,
) -> None:
    """Write a client's prompts, classifier and model card for use without fedprompt."""
    trained = _one_client(run, client, state, weights, device, data, trust_config)
    from fedprompt.inference.export import export

    try:
        record = export(trained, output, with_backbone, approximate)
    finally:
        trained.opened.close()
    agreement = record["agreement"]
    summary = (
        f"{'exact' if record['exact'] else 'approximate: ' + '; '.join(record['replaced'])}\n"
        f"agrees with fedprompt on {agreement['same_class']:.1%} of {agreement['images']} images ({agreement['on']})"
    )
    emit({"folder": str(output), **record}, as_json, f"exported: {output}\n{summary}")


def _one_client(
    run: Path,
    client: str | None,
    state: Path | None,
    weights: Path | None,
    device: str | None,
    data: Path | None,
    trust_config: bool,
) -> TrainedClient:
    """A client that took part in a run."""
    if client is None:
        raise ConfigError("--client must name a client of the run, got none")
    from fedprompt.inference.trained_client import TrainedClient

    opened = open_run(run, weights, device, data, trust_config)
    try:
        return TrainedClient.open(opened, client, state=state)
    except BaseException:
        opened.close()
        raise
