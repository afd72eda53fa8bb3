"""Draws `docs/pictures/shops.jpg`: photographs of three shops of the demo, and what each method makes of them.

python docs/tools/shops_picture.py runs/demo-local-seed0 runs/demo-...-seed0

The photographs are chosen by their place in each shop's test set, before any prediction is made: at even distances.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fedprompt import Run
from fedprompt.data.sources.open import open_source
from fedprompt.io.files import cache_directory

SHOPS, PHOTOS = 3, 4
PICTURE = Path(__file__).parents[1] / "pictures" / "shops.jpg"
TITLES = {
    "local": "alone",
    "head_tune": "one model",
    "pfedbayespt": "pFedBayesPT",
    "pep_fedpt": "PEP-FedPT",
    "pfedmoap": "pFedMoAP",
}
RIGHT, WRONG = "#1a7f37", "#b3261e"


def chosen(run: Run) -> list[list[int]]:
    """The numbers of the test photographs of the first shops."""
    clients = run.manifest().clients
    found = []
    for number in range(SHOPS):
        test = np.asarray(clients[number].test)
        found.append(test[np.linspace(0, len(test) - 1, PHOTOS).astype(int)].tolist())
    return found


def stock(run: Run, labels: np.ndarray, names: tuple[str, ...], shop: int) -> str:
    """What a shop has most photographs of."""
    held = Counter(labels[np.asarray(run.manifest().clients[shop].train)].tolist())
    return ", ".join(names[label] for label, _ in held.most_common(3))


def draw(runs: list[Run]) -> None:
    source = open_source(runs[0].config.data, cache_directory())
    numbers = chosen(runs[0])
    names = tuple(source.class_names)
    answers = [
        [run.client(shop).predict([source.image(each) for each in numbers[shop]]).labels for shop in range(SHOPS)]
        for run in runs
    ]
    figure, axes = plt.subplots(SHOPS, PHOTOS, figsize=(10.4, 11.6))
    for shop in range(SHOPS):
        for place, axis in enumerate(axes[shop]):
            number = numbers[shop][place]
            truth = names[source.labels[number]]
            axis.imshow(source.image(number).resize((224, 224)))
            axis.set_axis_off()
            axis.set_title(truth, fontsize=9.5, fontweight="bold", pad=4)
            for line, run in enumerate(runs):
                answer = answers[line][shop][place]
                title = TITLES.get(run.config.method["name"], run.config.label)
                mark, colour = ("✓", RIGHT) if answer == truth else ("✗", WRONG)
                axis.text(
                    0, -0.075 - 0.095 * line, f"{mark} {title}: {answer}",
                    transform=axis.transAxes, fontsize=7.6, color=colour, va="center",
                )  # fmt: skip
        axes[shop][0].text(
            0, 1.14, f"Shop {shop + 1}: mostly {stock(runs[0], source.labels, names, shop)}",
            transform=axes[shop][0].transAxes, fontsize=10.5, va="bottom",
        )  # fmt: skip
    figure.subplots_adjust(left=0.02, right=0.98, top=0.945, bottom=0.085, wspace=0.12, hspace=0.68)
    figure.savefig(PICTURE, dpi=110, pil_kwargs={"quality": 85})


if __name__ == "__main__":
    draw([Run(folder) for folder in sys.argv[1:]])
