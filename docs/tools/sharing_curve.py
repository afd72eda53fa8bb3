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
    "local": "every shop alone",
    "head_tune": "one model for all",
    "fedvpt_deep": "shared prompts, head tuned in the shop",
}
PANELS = {"average": "Average of six shops", "worst": "Worst shop"}

Points = dict[float, list[float]]  # accuracies of the seeds, by photographs of a shop


def points(runs: list[Run], key: str) -> dict[str, Points]:
    """The last accuracy of every run, by method and by mean number of training images of a client."""
    found: dict[str, Points] = {method: defaultdict(list) for method in TITLES}
    for run in runs:
        shop = round(float(np.mean([len(client.train) for client in run.manifest().clients])), 1)
        summary = next(record.summary for record in reversed(run.rounds()) if record.summary is not None)
        found[run.config.method["name"]][shop].append(100 * summary[key])
    return found


def draw(axes: Axes, curves: dict[str, Points]) -> None:
    for number, (method, curve) in enumerate(curves.items()):
        places = sorted(curve)
        mean = np.array([np.mean(curve[place]) for place in places])
        std = np.array([np.std(curve[place], ddof=1) if len(curve[place]) > 1 else np.nan for place in places])
        axes.plot(places, mean, markersize=5, **dress(number, 1) | {"label": TITLES[method]})
        draw_band(axes, number, np.array(places), mean, std)
        print(method, *(f"{place}: {m:.1f} ± {s:.1f}" for place, m, s in zip(places, mean, std, strict=True)), sep="  ")
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:.0f}" for place in places], minor=False)
    axes.minorticks_off()


if __name__ == "__main__":
    runs = [Run(path) for path in sys.argv[1:]]
    with plot_style():
        figure = new_figure(10.4, 4.2)
        for position, (key, title) in enumerate(PANELS.items(), start=1):
            axes = figure.add_subplot(1, len(PANELS), position)
            draw(axes, points(runs, key))
            axes.set(title=title, xlabel="Photographs that a shop trains on (mean)", ylabel="Accuracy (%)")
            if position == 1:
                axes.legend(loc="lower right")
    PICTURE.write_bytes(png(figure))
