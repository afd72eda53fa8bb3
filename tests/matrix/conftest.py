"""Which of many cases `make test` has time for.

Every method and variant goes through every test of this folder in `make test-all`. The tests below take a second or more for
each of them: of those, `make test` runs about a third of the cases, `make test-slow` the others. The names of the test and of the
case decide, and nothing else: a new method, another order or a selection moves no other case. Tests fall into three groups,
and so do cases; a case runs in the tests of one group. So each method is in some.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

FOLDER = Path(__file__).parent
SHARE = 3
LONG = {
    "test_a_cohort_as_one_batch_equals_one_client_at_a_time",
    "test_every_variant_wraps_every_kind_of_method_and_resumes_to_the_same_bits",
    "test_the_order_of_clients_changes_nothing",
    "test_a_robust_rule_takes_a_wild_client_better_than_the_mean",
    "test_an_interrupted_run_ends_as_an_undisturbed_one",
    "test_newcomers_are_evaluated_and_leave_no_trace",
    "test_a_client_that_was_not_picked_keeps_its_bytes",
    "test_a_run_is_the_same_bits_twice",
    "test_noise_reaches_everything_a_method_uploads",
    "test_a_secure_sum_changes_nothing_but_what_the_server_sees",
    "test_a_client_predicts_what_its_evaluation_counted",
    "test_labelled_images_make_a_newcomer_what_a_held_out_client_was",
    "test_a_new_client_is_no_client_of_the_run",
    "test_training_images_are_opened_only_for_methods_that_look_at_them_again",
    "test_the_documented_code_gives_fedprompts_own_logits",
    "test_every_method_is_explained_by_the_numbers_of_its_prediction",
}


def is_left_for_later(test: str, case: str) -> bool:
    return (crc32(test.encode()) + crc32(case.encode())) % SHARE != 0


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of the whole session, and a test elsewhere may have one of these names
        name = getattr(item, "originalname", "")
        if item.path.parent == FOLDER and name in LONG and is_left_for_later(name, item.callspec.id):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
