"""Draw which room imports which: docs/pictures/rooms.png, in the order of the contract in pyproject.toml.

python docs/tools/rooms.py
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import grimp
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/pictures/rooms.png"


def layers() -> list[list[str]]:
    """The rooms, highest layer first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    return [[name.strip().removeprefix("fedprompt.") for name in layer.split("|")] for layer in contract["layers"]]


def imports() -> Counter[tuple[str, str]]:
    """How many modules of one room import how many of another."""
    graph = grimp.build_graph("fedprompt", exclude_type_checking_imports=True)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            pair = room(module), room(other)
            if pair[0] != pair[1]:
                found[pair] += 1
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def draw() -> None:
    places = {
        name: ((column + 0.5) / len(names), -row)
        for row, names in enumerate(layers())
        for column, name in enumerate(names)
    }
    figure, axes = plt.subplots(figsize=(9, 11), dpi=110)
    for (user, used), count in imports().items():
        if user in places and used in places:
            upward = places[used][1] >= places[user][1]
            arrow = {
                "arrowstyle": "-|>",
                "color": "#c0392b" if upward else "#4a6fa5",
                "alpha": 1.0 if upward else 0.35,
                "linewidth": 0.6 + 0.25 * count**0.5,
                "connectionstyle": "arc3,rad=0.08",
                "shrinkA": 14,
                "shrinkB": 14,
            }
            axes.annotate("", xy=places[used], xytext=places[user], arrowprops=arrow)
    for name, (x, y) in places.items():
        axes.text(
            x,
            y,
            name,
            ha="center",
            va="center",
            fontsize=12,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#333333"},
        )
    axes.set(xlim=(0, 1), ylim=(-len(layers()) + 0.4, 0.6))
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight")


if __name__ == "__main__":
    draw()
