"""Every method of the ViT family on sentences: the same files, words in place of patches."""

from __future__ import annotations

from typing import Any

import pytest
from every_method import CASES
from remote_run import assert_same_as_in_process, run_remotely
from support import assert_near, experiment, local_tensors, shared_tensors

pytestmark = pytest.mark.matrix

OF_PIXELS = ("pfedpt+pixels",)
ON_SENTENCES = {name: method for name, method in CASES.items() if not method.uses_text and name not in OF_PIXELS}
SENTENCES = {
    "data": {"source": "tiny-text", "train_per_cell": 2, "test_per_cell": 1},
    "backbone": {"name": "tiny-bert", "max_tokens": 20},
    "partition": {"scheme": "dirichlet", "alpha": 1.0, "clients": 4, "min_train": 3},
    "train": {"lr": 0.02, "batch_size": 4, "momentum": 0.0},
    "federation": {"rounds": 2, "evaluation_batch": 3},
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", ON_SENTENCES)
def test_sentences_as_one_batch_equal_one_client_at_a_time(case: str, settings: Any) -> None:
    alone, together = (
        experiment(settings(name=f"by-{cohort}", engine={"cohort": cohort}, **SENTENCES), ON_SENTENCES[case]).run()
        for cohort in (1, 3)
    )
    assert_near(shared_tensors(alone), shared_tensors(together))
    for client in range(4):
        assert_near(local_tensors(alone, client), local_tensors(together, client))
    assert alone.summary()["average"] == together.summary()["average"]


def test_sites_with_sentences_give_what_one_machine_gives(settings: Any) -> None:
    here = experiment(settings(name="here", **SENTENCES)).run()
    assert_same_as_in_process(run_remotely(settings(name="sites", **SENTENCES)), here)
