"""`federation.test_classes: own`: test images are classified among the classes that a client has trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import experiment, run

from fedprompt.client.client_states import ClientStates
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.run_metrics import predicted
from fedprompt.inference.uncertainty import answers
from fedprompt.runs.novel_figures import stored_figures
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

DISJOINT = {"scheme": "disjoint", "clients": 2}


def figures(done: Run, name: str) -> list[float]:
    results = done.reader.evaluations(2)
    return [results[client][name] for client in sorted(results)]


@pytest.mark.parametrize("cohort", [1, 2])
def test_only_the_clients_own_classes_are_named(settings: Any, cohort: int) -> None:
    shared = {"partition": DISJOINT, "engine": {"cohort": cohort}}
    among_all = run(settings(name="all", **shared))
    among_own = run(settings(name="own", federation={"test_classes": "own"}, **shared))
    for own, everyone in zip(figures(among_own, "nll"), figures(among_all, "nll"), strict=True):
        assert own < everyone  # the right class is an own one, and others get no probability
    for own, everyone in zip(figures(among_own, "correct"), figures(among_all, "correct"), strict=True):
        assert own >= everyone


def test_probabilities_of_own_classes_keep_their_ratios_and_sum_to_one(settings: Any) -> None:
    made = experiment(settings(partition=DISJOINT, federation={"test_classes": "own"}))
    prepared = made.factory.prepare()
    bank = made.factory.bank(prepared.source, prepared.manifest, prepared.backbone)
    runtime = made.factory.client_runtime(prepared.source, prepared.world, bank, ClientStates(lambda client: None))
    given = torch.rand(3, 4, 5).softmax(-1)
    for client in range(2):
        own = sorted(bank.images(client, "train").labels.unique().tolist())
        found = runtime.testing._among_own(client, given)
        others = [c for c in range(5) if c not in own]
        assert not found[..., others].any()
        torch.testing.assert_close(found.sum(-1), torch.ones(3, 4))
        torch.testing.assert_close(found[..., own], given[..., own] / given[..., own].sum(-1, keepdim=True))


def test_the_common_test_of_class_names_stays_among_all_of_them(settings: Any, tmp_path: Path) -> None:
    """Its images are the same for all clients; they must not say which classes there are."""
    names = {"backbone": {"name": "tiny-clip"}, "method": "promptfl", "data": {"novel": 0.4}}
    whole = experiment(settings(name="whole", partition={"scheme": "iid", "clients": 2}, **names)).factory.prepare()
    first = [each[whole.source.labels[each] == 0] for each in whole.manifest.clients.test]
    clients = replace(whole.manifest.clients, test=IndexLists.of(first))
    replace(whole.manifest, clients=clients).save(tmp_path / "first.json")
    partition = {"scheme": "manifest", "manifest": str(tmp_path / "first.json")}
    found = [
        stored_figures(
            run(
                settings(name=kind, partition=partition, federation={"rounds": 1, "test_classes": kind}, **names)
            ).reader
        )
        for kind in ("all", "own")
    ]
    assert found[0] is not None
    assert found[0]["base"] < 1
    assert found[1] is not None
    assert found[1]["base"] == found[0]["base"]


def test_figures_that_are_computed_again_are_those_of_the_run(settings: Any) -> None:
    shared = {"method": {"name": "head_tune", "head": "shared"}}
    done = run(settings(name="own", partition=DISJOINT, federation={"rounds": 2, "test_classes": "own"}, **shared))
    wanted = sum(figures(done, "correct"))
    found = answers(done, trust_config=True)
    assert (found.draws.mean(0).argmax(-1) == found.labels).sum() == wanted
    opened = LoadedRun.open(done, trust_config=True)
    again = [(each[1], each[2]) for each in predicted(opened)]
    opened.close()
    assert sum(int((draws.argmax(-1) == labels).sum()) for labels, draws in again) == wanted
