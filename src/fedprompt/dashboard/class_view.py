"""Classification metrics of a run's last test, for the page: all images, each domain and each client, and the confusion matrix."""

from __future__ import annotations

from typing import Any

from fedprompt.dashboard.downsampling import clip, plain
from fedprompt.metrics.one_against_rest import SPECIFICITY
from fedprompt.runs.class_figures import class_figures
from fedprompt.runs.run import Run

FIGURES = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "sensitivity")
MOST_CLIENTS = 2000  # of a run: more would be read for too long while a page waits
MOST_ROWS = 100
MOST_CLASSES = 40  # of the confusion matrix
NAME = 120  # characters of a name


def class_view(run: Run) -> dict[str, Any]:
    """Rows as `[of, name, images, figures...]`; none where the run file has none, or the run has very many clients."""
    found = class_figures(run) if len(run.clients) <= MOST_CLIENTS else []
    classes = [clip(str(name), NAME) for name in run.reader.fact("classes") or []]
    rows = [
        [each.of, clip(each.name, NAME), each.figures.images, *(plain(getattr(each.figures, name)) for name in FIGURES)]
        for each in found
    ]
    small = bool(found) and len(classes) <= MOST_CLASSES
    return {
        "specificity": SPECIFICITY,
        "rows": rows[:MOST_ROWS],
        "left_out": max(0, len(rows) - MOST_ROWS),
        "classes": classes if small else [],
        "confusion": found[0].figures.confusion.tolist() if small else [],
    }
