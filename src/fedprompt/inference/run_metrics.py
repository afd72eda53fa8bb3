"""Balanced accuracy, macro-F1, AUROC and sensitivity of a run's clients on their test images.

A run file has counts of right answers only. So this predicts the test images again, where they are: it needs the images,
and nothing is written or sent. The images of a run over sites are at the sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fedprompt.client.local_evaluation import among_classes_of
from fedprompt.errors import ConfigError, RunError, broken
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.metrics.one_against_rest import Figures
from fedprompt.runs.frames import require_pandas
from fedprompt.runs.run import Run

if TYPE_CHECKING:
    from pandas import DataFrame


def run_metrics(run: Run, specificity: float = 0.9, **options: Any) -> DataFrame:
    """One row for each client, each domain, and all images together; the confusion matrices are in `attrs["confusion"]`."""
    if not 0 <= specificity <= 1:
        raise ConfigError(broken("specificity", "be in 0..1", specificity))
    if run.config.engine.kind == "flower":
        raise RunError(f"run {run.name!r} has its test images at its sites: measure there, with the client's model")
    pandas, opened = require_pandas(), LoadedRun.open(run, **options)
    tested = list(predicted(opened))
    names = [name for name, labels, _, _ in tested for _ in labels]
    labels, probabilities, domains = (np.concatenate([each[part] for each in tested]) for part in (1, 2, 3))
    groups = {("client", name): np.array(names) == name for name in dict.fromkeys(names)}
    groups |= {("domain", str(name)): domains == name for name in dict.fromkeys(domains)}
    groups |= {("all", "pooled"): np.ones(len(labels), dtype=bool)}
    figures = {key: Figures.of(labels[here], probabilities[here], specificity) for key, here in groups.items()}
    rows = [{"of": kind, "name": name, **found.to_dict()} for (kind, name), found in figures.items()]
    frame: DataFrame = pandas.DataFrame(rows).set_index(["of", "name"])
    classes = list(opened.world.class_names)
    frame.attrs["confusion"] = {
        key: pandas.DataFrame(found.confusion, index=classes, columns=classes) for key, found in figures.items()
    }
    return frame


def predicted(opened: LoadedRun) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, labels, probabilities and domains of the test images of every client that the run has tested."""
    run = opened.run
    tested = run.final_results() or run.evaluations(opened.round) or dict.fromkeys(range(len(run.clients)))
    domain_names = run.reader.fact("domains") or []
    bank = opened.bank()
    for number in sorted(tested):
        client = TrainedClient.open(opened, number)
        images = bank.images(number, "test")
        found = client.predict(images.store.pixels(images.indices)).probabilities
        if run.config.federation.test_classes == "own":
            found = among_classes_of(bank.images(number, "train").labels, found)
        domains = np.array([domain_names[each] if domain_names else str(each) for each in images.domains])
        yield client.name, images.labels.cpu().numpy(), found.numpy(), domains
