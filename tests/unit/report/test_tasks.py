"""Runs by task, and what tasks are called."""

import pytest

from fedprompt.report.comparison_table import cells, columns, notes
from fedprompt.report.task_names import in_words, telling
from fedprompt.report.tasks import by_task

pytestmark = pytest.mark.unit


def test_as_few_settings_as_possible_tell_columns_apart():
    settings = [
        {"data.source": "a", "data.classes": None, "partition.clients": 4, "partition.alpha": 0.1},
        {"data.source": "b", "data.classes": ["x"], "partition.clients": 4, "partition.alpha": 0.2},
        {"data.source": "b", "data.classes": ["x"], "partition.clients": 4, "partition.alpha": 0.3},
    ]
    assert telling(settings) == ["partition.alpha"]
    assert telling(settings[:2]) == ["data.source"]
    assert telling(settings[:1]) == []


def test_runs_on_other_data_partitions_weights_or_evaluations_are_tables_of_their_own(write):
    tasks = by_task(
        [
            write("a", [[9]]),
            write("b", [[8]], data={"source": "/data/pacs.parquet"}),
            write("c", [[7]], partition={"scheme": "dirichlet"}),
            write("d", [[6]], federation={"rounds": 1, "evaluate_at": "global"}),
            write("e", [[5]], method={"name": "local"}),
        ]
    )
    assert [[row.label for row in task.rows] for task in tasks] == [
        ["fedvpt", "local"],
        ["fedvpt"],
        ["fedvpt"],
        ["fedvpt"],
    ]
    assert len({task.title for task in tasks}) == 4
    assert tasks[1].title.startswith("pacs")


def test_one_task_needs_no_heading(write):
    (task,) = by_task([write("a", [[9]]), write("b", [[5]], method={"name": "local"})])
    assert task.title == ""


def test_a_digest_is_folded_into_words(write):
    tasks = by_task([write("a", [[9]]), write("b", [[5]], digest="0123456789ab")])
    assert [task.title for task in tasks] == ["first weights", "other weights (2)"]
    assert [row.label for task in tasks for row in task.rows] == ["fedvpt", "fedvpt"]


def test_settings_that_a_scheme_does_not_read_are_not_in_its_heading():
    tasks = [
        {"partition.scheme": scheme, "partition.domains_per_client": domains, "partition.alpha": alpha}
        for scheme, domains, alpha in (("domains", 1, 0.3), ("domains", 2, 0.3), ("dirichlet", 1, 0.5))
    ]
    assert in_words(tasks) == [
        "partition domains, domains per client 1",
        "partition domains, domains per client 2",
        "partition dirichlet",
    ]


def test_words_say_where_nothing_is_set_and_name_data_without_their_place():
    tasks = [{"data.source": "/data/pacs.parquet", "attack.kind": None}, {"data.source": "b", "attack.kind": "noise"}]
    assert in_words(tasks) == ["pacs", "b"]
    assert in_words([{"attack.kind": None}, {"attack.kind": "noise"}]) == ["no attack kind", "attack kind noise"]


def test_bold_is_the_best_of_those_with_the_same_head(write):
    runs = [
        write(name, [[right]], method={"name": name, "head": head})
        for name, head, right in (("a", "local", 9), ("b", "local", 8), ("c", "shared", 7), ("d", "shared", 5))
    ]
    rows = by_task(runs)[0].rows
    assert [line[1].bold for line in cells(rows, columns(rows))] == [True, False, True, False]
    assert "Heads differ, and bold is the best of each kind of head: local (a, b) | shared (c, d)" in notes(rows)


def test_a_variant_that_keeps_the_head_at_the_client_has_a_local_head(write):
    shared = {"name": "fedvpt", "head": "shared"}
    runs = [write("a", [[9]], method=shared), write("b", [[8]], method=shared, variant={"name": "fedper"})]
    assert [row.head for row in by_task(runs)[0].rows] == ["shared", "local"]


def test_a_figure_within_the_spread_of_the_best_has_a_mark(write):
    runs = [
        write(f"{name}{seed}", [[right]], method={"name": name}, seed=seed)
        for name, rights in (("a", (9, 7)), ("b", (7, 8)), ("c", (4, 5)))
        for seed, right in enumerate(rights)
    ]
    rows = by_task(runs)[0].rows
    assert [line[1].text for line in cells(rows, columns(rows))] == ["80.00 ± 14.14", "75.00 ± 7.07 ≈", "45.00 ± 7.07"]
    assert notes(rows) == ["≈ is behind the bold one by less than the larger of both standard deviations"]


def test_an_answer_among_a_clients_own_classes_is_another_task(write):
    own = {"rounds": 1, "test_classes": "own"}
    tasks = by_task([write("a", [[9]]), write("b", [[10]], federation=own)], against="fedvpt")
    assert [[row.label for row in task.rows] for task in tasks] == [["fedvpt"], ["fedvpt"]]
    assert [task.title for task in tasks] == ["test classes all", "test classes own"]
    assert all(task.pairs == () for task in tasks)


def test_an_unseen_domain_a_long_tail_and_another_set_are_tasks_of_their_own(write):
    shifts = [{}, {"unseen_domain": "outline"}, {"unseen_domain": "noise"}, {"imbalance": 10.0}, {"other_set": "tiny"}]
    tasks = by_task([write(f"a{place}", [[9]], data=shift) for place, shift in enumerate(shifts)])
    assert len(tasks) == len({task.title for task in tasks}) == len(shifts)
