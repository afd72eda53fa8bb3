"""Results of clients, read once."""

import numpy as np
import pytest

from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.report.evaluated_rounds import last_results, results_of
from fedprompt.runs.store import RoundRecord, RunStore

pytestmark = pytest.mark.unit


def test_a_round_holds_clients_accuracies_and_the_sum_of_their_bins(write):
    found = results_of(write("a", [[9, 5]], clients=["zero", "one", "two", "three"], tested=[3, 1]), 1)
    assert found.clients.tolist() == [1, 3]
    np.testing.assert_allclose(found.accuracies, [0.5, 0.9])
    np.testing.assert_allclose(found.bins, [[20, 10, 14]])


def test_a_round_is_read_once(write):
    run = write("a", [[9, 5]])
    assert results_of(run, 1) is results_of(run, 1)


def test_a_round_that_was_committed_meanwhile_is_the_last_one(write):
    run = write("a", [[9]], federation={"rounds": 2})
    before = last_results(run)
    store = RunStore(run.directory)
    result = ClientResult(10, 4, 1, 1, 0, [[10, 5, 4]])
    store.commit(RoundRecord(2, [0], 0.5, 1, 1, summarise([result])), b"", b"", {}, {0: result.to_json()})
    store.close()
    after = last_results(run)
    assert before is not None
    assert after is not None
    assert (before.accuracies.tolist(), after.accuracies.tolist()) == ([0.9], [0.4])


def test_before_the_first_evaluation_there_is_nothing(write):
    assert last_results(write("a", [])) is None
