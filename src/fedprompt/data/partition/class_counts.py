"""Training images by client and class in a run file: few bytes for a hundred thousand clients.

Each client is a sorted list with one class number for every image, packed like the lists of images themselves:
neighbours differ by 0 or 1, which compresses to almost nothing.
"""

from __future__ import annotations

import numpy as np

from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.data.partition.manifest import Manifest

FACT = "class_counts"  # its name in a run file; runs over sites and earlier runs have none


def packed(manifest: Manifest, labels: np.ndarray) -> str:
    """The classes of every client's training images as text."""
    train = manifest.clients.train
    classes = labels[train.values]
    order = np.lexsort((classes, train.owners))  # the owners are sorted already: only the classes within each move
    return IndexLists(classes[order], train.offsets).packed()


def class_matrix(text: str, classes: int, chosen: np.ndarray | None = None) -> np.ndarray:
    """Images by client and class, (clients, classes), of the chosen clients only; a ValueError for any other text."""
    lists = IndexLists.unpacked(text)
    if len(lists.values) and not 0 <= lists.values.min() <= lists.values.max() < classes:
        raise ValueError(f"must hold classes in 0..{classes - 1}")
    wanted = np.arange(len(lists)) if chosen is None else chosen
    return np.array([np.bincount(lists[int(client)], minlength=classes) for client in wanted]).reshape(-1, classes)


def sizes(text: str) -> np.ndarray:
    """Training images of every client."""
    return IndexLists.unpacked(text).sizes
