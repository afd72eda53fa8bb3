"""The model card of an exported client: its origin, its metrics and its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprompt.assets import ASSETS, image_credit
from fedprompt.backbones.catalog import NAMED
from fedprompt.config.registries import SOURCES
from fedprompt.errors import DataError, RunError, argument
from fedprompt.inference.trained_client import TrainedClient

NO_LICENCE = "not stated by the run; see where the weights come from"
FEW = 20  # classes that the card names


def facts(client: TrainedClient) -> dict[str, Any]:
    """What the run file contains about the client and its training."""
    run, config = client.opened.run, client.config
    return {
        "client": client.name,
        "method": {"label": config.label, **client.opened.factory.config.method},
        "variant": config.variant,
        "run": {
            "name": run.name,
            "seed": config.seed,
            "round": client.round,
            "rounds": config.federation.rounds,
            "config_hash": config.digest(),
            "versions": run.reader.fact("versions"),
            "private": run.epsilon() is not None,
            "epsilon": _finite(run.epsilon()),
        },
        "data": _data(client),
        "metrics": _metrics(client),
        "private": sorted(client.world.roles.local),
    }


def _finite(number: float | None) -> float | None:
    """JSON has no infinity: clipped updates without noise have an infinite budget."""
    return number if number is not None and math.isfinite(number) else None


def _data(client: TrainedClient) -> dict[str, Any]:
    """The shape of the client's data, not the data."""
    config = client.config
    source = config.data.source
    if source not in SOURCES and not source.startswith("hub:"):
        source = Path(source).name  # not where it lies
    shape: dict[str, Any] = {
        "source": source,
        "credit": image_credit(source),
        "clients": len(client.world.client_names),
    }
    try:
        held = client.opened.run.manifest().clients[client.index]
        shape |= {"train_images": len(held.train), "test_images": len(held.test)}
    except (DataError, RunError):  # sites do not send their lists
        pass
    return shape


def _metrics(client: TrainedClient) -> dict[str, Any] | None:
    """The client's metrics of its last test in the run."""
    run = client.opened.run
    if run.final_test is not None:
        result = run.final_results().get(client.index)
        return None if result is None else _as_metrics(run.final_test.round, result)
    for record in reversed(run.rounds()):
        result = run.evaluations(record.round).get(client.index) if record.summary is not None else None
        if result is not None:
            return _as_metrics(record.round, result)
    return None


def _as_metrics(round: int, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "round": round,
        "test_images": result["samples"],
        "accuracy": result["correct"] / result["samples"],
        "domains": result["domains"],
    }


def licence(backbone: str) -> str:
    """Licence of a backbone's weights, if fedprompt knows it."""
    assets = {"dinov2-small": "dinov2-small", "mini": "dinov2-small", "b16": "clip-b16-image"}
    if backbone in assets:
        return ASSETS[assets[backbone]].licence
    return "none: random weights" if backbone in NAMED else NO_LICENCE


def header(card: Mapping[str, Any]) -> str:
    """What the Hugging Face hub reads of a model card, as YAML."""
    from huggingface_hub import ModelCardData

    known = ModelCardData(
        license="other",
        license_name="see the table below",
        library_name="fedprompt",
        pipeline_tag="image-classification",
        tags=["federated-learning", "prompt-tuning", card["method"]["label"]],
    )
    return f"---\n{known.to_yaml()}\n---\n"


def readme(card: Mapping[str, Any]) -> str:
    """The card as a page."""
    run, backbone, agreement, metrics = card["run"], card["backbone"], card["agreement"], card["metrics"]
    classes = ", ".join(card["classes"][:FEW]) + (
        f" and {len(card['classes']) - FEW} more" if len(card["classes"]) > FEW else ""
    )
    tested = (
        f"{metrics['accuracy']:.1%} of its {metrics['test_images']} test images right in round {metrics['round']} of the run"
        if metrics
        else "the run has no test of this client"
    )
    return f"""{header(card)}
# {card["client"]}, {card["method"]["label"]}

The model of one client of a federation, trained with fedprompt: prompts and a classifier around a frozen backbone. {_exactness(card)}

| | |
|---|---|
| method | {card["method"]["label"]} |
| classes | {len(card["classes"])}: {classes} |
| client's data | {_shape(card["data"])} |
| measured | {tested} |
| this export | agrees with fedprompt on the class of {agreement["same_class"]:.1%} of {agreement["images"]} images ({agreement["on"]}); \
probabilities differ by {agreement["largest_difference"]:.1g} at most |
| run | {run["name"]}, round {run["round"]} of {run["rounds"]}, seed {run["seed"]}, config {run["config_hash"][:16]} |
| backbone | {backbone["name"]} ({backbone["class"]}), digest {str(backbone["digest"])[:16]} |
| versions | {", ".join(f"{name} {version}" for name, version in sorted((run["versions"] or {}).items()))} |
| licence of the backbone | {licence(backbone["name"])} |
| licence of prompts and classifier | decided by the client: they were trained on its images |

## Use
    from load_client import Client
    print(Client(".").predict(["image.png"]))

`load_client.py` is in this folder and needs transformers, safetensors, torch and Pillow, not fedprompt. With fedprompt:
`TrainedClient.from_pretrained(".")`, or `fedprompt predict FOLDER image.png`.
`client.json` says how the tensors of `client.safetensors` go around the backbone{_where(backbone)}.
`parameters.safetensors` holds all tensors the method predicts with, under its own names.

## Meant for
Images like those of this client, and its classes. The classifier answers with one of them for any image.

## Limits
- It was made for one client and measured on that client's images only. It may be worse for others.
- Do not assume that probabilities are calibrated: measure it first.
- Images must be prepared as `client.json` says: {card["image"]["size"]} pixels a side, {card["image"]["resize"]}.

## Privacy
{_privacy(card)}
"""


def _exactness(card: Mapping[str, Any]) -> str:
    if card["exact"]:
        return "It computes what fedprompt computes for this client."
    return (
        "**This is an approximation**, not the client's own model: "
        + "; ".join(card["replaced"])
        + ". The table says how well the two agree."
    )


def _where(backbone: Mapping[str, Any]) -> str:
    if backbone["folder"]:
        return f", which is in `{backbone['folder']}/`"
    named = (
        f"export with `{argument('with_backbone=True', '--with-backbone')}` to have it as a transformers folder"
        if backbone["name"] in NAMED
        else "load it by its name"
    )
    return f", which is not in this folder: {named}"


def _shape(data: Mapping[str, Any]) -> str:
    images = (
        f"{data['train_images']} training and {data['test_images']} test images of " if "train_images" in data else ""
    )
    credit = f" ({data['credit']})" if data["credit"] else ""
    return f"{images}{data['source']}{credit}, one of {data['clients']} clients"


def _privacy(card: Mapping[str, Any]) -> str:
    private = ", ".join(f"`{name}`" for name in card["private"])
    own = (
        f"Tensors that never left this client are inside ({private}): anyone with these files can read them."
        if private
        else "The method keeps no tensors of the client's own, but what it shares was trained on the clients' images."
    )
    epsilon = card["run"]["epsilon"]
    if epsilon is not None:
        spent = f"The run spent a privacy budget of epsilon = {epsilon:.3g} on what was uploaded; it does not cover what stayed local."
    elif card["run"]["private"]:
        spent = "Updates were bounded but not noised: that is no differential privacy."
    else:
        spent = "The run was not differentially private."
    return f"{own} They may reveal something about its training images. {spent}"
