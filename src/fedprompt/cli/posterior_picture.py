"""The command that draws the posterior of pFedBayesPT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedprompt.cli.models import Device, OneRun, open_run
from fedprompt.cli.options import AsJson, Data, Plugins, TrustConfig, Weights, emit
from fedprompt.errors import ConfigError, broken

ENDINGS = (".png", ".svg")


def posterior(
    run: OneRun,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .png or .svg file.")] = Path("posterior.png"),
    images: Annotated[int, typer.Option(min=1, help="At most this many test images, evenly from all clients.")] = 400,
    draws: Annotated[int, typer.Option(min=1, help="Masks per image.")] = 10,
    block: Annotated[int | None, typer.Option(help="Whose prompts the components are of; else the last block.")] = None,
    as_json: AsJson = False,
    weights: Weights = None,
    data: Data = None,
    device: Device = None,
    trust_config: TrustConfig = False,
    plugin: Plugins = None,
) -> None:
    """Draw where a run's instance prompts lie, by domain and class, how much masks move them, and which blocks listen."""
    from fedprompt.inference.posterior import posterior as measure
    from fedprompt.io.files import write_atomically
    from fedprompt.report.plot_style import png, svg_file
    from fedprompt.report.posterior_plot import posterior_picture

    if output.suffix not in ENDINGS:
        raise ConfigError(broken("--output", f"end with {' or '.join(ENDINGS)}", str(output)))
    opened = open_run(run, weights, device, data, trust_config)
    try:
        found = measure(opened, images, draws)
        title = f"{opened.run.name}: {len(found.labels)} test images"
    finally:
        opened.close()
    shown = found.blocks[-1] if block is None else block
    if shown not in found.blocks:
        raise ConfigError(
            broken("--block", f"be one with instance prompts ({', '.join(map(str, found.blocks))})", shown)
        )
    points, shares = found.components(shown)
    several = len(set(found.domains.tolist())) > 1
    first = ("domain", found.domains, found.domain_names) if several else ("client", found.clients, found.client_names)
    groups = {first[0]: (first[1], first[2]), "class": (found.labels, found.class_names)}
    picture = posterior_picture(title, points, shares.tolist(), groups, found.blocks, found.spreads, found.attention)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, png(picture, 200) if output.suffix == ".png" else svg_file(picture))
    emit(
        {"picture": str(output), "components_of_block": shown, **found.to_json()},
        as_json,
        _words(found.to_json(), output),
    )


def _words(numbers: dict[str, object], output: Path) -> str:
    spread, attention = numbers["spread"], numbers["attention"]
    assert isinstance(spread, dict)
    assert isinstance(attention, list)
    lines = []
    for place, number in enumerate(numbers["blocks"] if isinstance(numbers["blocks"], list) else []):
        parts = [f"{name} {values[place]:.3f}" for name, values in spread.items()]
        lines.append(f"block {number}: spread over {', '.join(parts)}; attention of CLS {100 * attention[place]:.1f} %")
    return "\n".join([*lines, f"picture: {output}"])
