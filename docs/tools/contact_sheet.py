"""Draws `docs/pictures/NAME.jpg`: training photographs of every class of a set, a row for each.

python docs/tools/contact_sheet.py groceries xrays
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fedprompt.config import DataConfig
from fedprompt.data.sources.open import open_source
from fedprompt.io.files import cache_directory

PICTURES = Path(__file__).parents[1] / "pictures"
SIDE, PER_CLASS, MARGIN, GAP = 84, 6, 132, 4


def sheet(name: str) -> Image.Image:
    """Classes in two columns; of each class, training photographs at even distances in the set."""
    source = open_source(DataConfig(source=name), cache_directory())
    assert source.splits is not None
    classes = source.class_names
    rows, width = -(-len(classes) // 2), MARGIN + PER_CLASS * SIDE + GAP
    page = Image.new("RGB", (2 * width, rows * (SIDE + GAP)), "white")
    draw = ImageDraw.Draw(page)
    for label, title in enumerate(classes):
        left, top = label // rows * width, label % rows * (SIDE + GAP)
        draw.text((left + 6, top + SIDE // 2 - 6), title, fill="black")
        found = np.flatnonzero((source.labels == label) & (source.splits == "train"))
        for place, index in enumerate(found[np.linspace(0, len(found) - 1, PER_CLASS).astype(int)]):
            photo = source.image(int(index)).resize((SIDE, SIDE))
            page.paste(photo, (left + MARGIN + place * SIDE, top))
    return page


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sheet(name).save(PICTURES / f"{name}.jpg", quality=85)
