"""Draws `docs/pictures/sharing_curve.png`: accuracy on validation photographs against the photographs of a shop.

fedprompt run configs/sharing.yaml --seed 0,1,2 --resume
python docs/tools/sharing_curve.py runs/sharing-*
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedprompt.report.plot_style import new_figure, plot_style, png
from fedprompt.report.plots import draw_band, dress
from fedprompt.runs.run import Run

PICTURE = Path(__file__).parents[1] / "pictures" / "sharing_curve.png"
TITLES = {
    "local": "alone: a head of its own",
    "shared": "one model for all: an averaged head",
    "shared_then_finetune": "personal: the averaged head, tuned in the shop",
}
PANELS = {"average": "Average of six shops", "worst": "Worst shop"}

Points = dict[float, list[tuple[float, float]]]  # photographs of a shop and accuracy, by the share that validates


def points(runs: list[Run], key: str) -> dict[str, Points]:
    """The last accuracy of every run and its mean number of training images of a client, by head; one entry for each seed."""
    found: dict[str, Points] = {head: defaultdict(list) for head in TITLES}
    for run in runs:
        photos = float(np.mean([len(client.train) for client in run.manifest().clients]))
        summary = next(record.summary for record in reversed(run.rounds()) if record.summary is not None)
        found[run.config.method["head"]][run.config.data.validation].append((photos, 100 * summary[key]))
    return found


def draw(axes: Axes, curves: dict[str, Points]) -> None:
    for number, (head, curve) in enumerate(curves.items()):
        shares = sorted(curve, reverse=True)
        places, mean = np.array([np.mean(curve[share], axis=0) for share in shares]).T
        several = all(len(curve[share]) > 1 for share in shares)
        std = np.array([np.std(curve[share], axis=0, ddof=1)[1] if several else np.nan for share in shares])
        axes.plot(places, mean, markersize=5, **dress(number, 1) | {"label": TITLES[head]})
        draw_band(axes, number, places, mean, std)
        print(head, *(f"{p:.0f}: {m:.1f} ± {s:.1f}" for p, m, s in zip(places, mean, std, strict=True)), sep="  ")
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:.0f}" for place in places], minor=False)
    axes.minorticks_off()


if __name__ == "__main__":
    runs = [Run(path) for path in sys.argv[1:]]
    with plot_style():
        figure = new_figure(10.4, 4.4)
        for position, (key, title) in enumerate(PANELS.items(), start=1):
            axes = figure.add_subplot(1, len(PANELS), position)
            draw(axes, points(runs, key))
            axes.set(title=title, xlabel="Photographs that a shop trains on (mean)", ylabel="Accuracy (%)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=len(TITLES))
    PICTURE.write_bytes(png(figure))
