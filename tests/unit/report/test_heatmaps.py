"""Clients by round and by class, also very many of them."""

import json

import numpy as np
import pytest
from forgery import forged

from fedprompt.data.partition import class_counts
from fedprompt.data.partition.index_lists import IndexLists
from fedprompt.errors import RunError
from fedprompt.report import heatmaps, plot_style
from fedprompt.report.html_report import render
from fedprompt.report.method_grid import arrange
from fedprompt.report.sections import clients_by_round, partitions
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


def with_facts(run, **facts):
    """The same run with other facts."""
    with forged(run.directory) as file:
        for key, value in facts.items():
            file.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))
    return Run(run.directory)


def holding(run, *classes):
    """The same run whose clients train on images of these classes."""
    names = [f"class {number}" for number in range(1 + max(map(max, classes)))]
    packed = IndexLists.of([np.array(each) for each in classes]).packed()
    return with_facts(run, classes=names, class_counts=packed)


def test_counts_in_a_run_file_are_those_of_its_manifest(runs):
    partition = heatmaps.partition_of(runs[0])
    assert partition is not None
    assert partition.matrix.sum(axis=1).tolist() == [len(client.train) for client in runs[0].manifest().clients]
    assert partition.clients == list(runs[0].clients)
    assert (partition.matrix > 0).all()  # the tiny set has every class in every domain


def test_packed_classes_come_back_as_counts(write):
    partition = heatmaps.partition_of(holding(write("a", [[9, 5]]), [0, 2, 2], [1]))
    assert partition is not None
    assert partition.matrix.tolist() == [[1, 0, 2], [0, 1, 0]]
    assert "2 clients, 3 classes, 1 to 3 images each" in partition.caption


def test_a_hundred_thousand_clients_cost_few_bytes(write):
    classes = np.repeat(np.arange(10), 10)
    lists = IndexLists.of_sizes(np.tile(classes, 10_000), np.full(100_000, 10))
    assert len(lists.packed()) < 100_000
    assert class_counts.class_matrix(lists.packed(), 10, np.array([99_999])).tolist() == [[0] * 9 + [10]]


def test_of_very_many_clients_some_are_drawn_as_they_are(write):
    run = holding(write("a", [[5] * 500]), *([client % 3] for client in range(500)))
    partition = heatmaps.partition_of(run)
    assert partition is not None
    assert partition.matrix.shape == (heatmaps.MOST_ROWS, 3)
    assert set(partition.matrix.sum(axis=1)) == {1}  # clients, not means over some
    assert "500 clients, 60 of them drawn" in partition.caption


def test_a_cell_without_images_is_blank(write):
    partition = heatmaps.partition_of(holding(write("a", [[9, 5]]), [0, 0], [1]))
    assert partition is not None
    axes = heatmaps.partition_picture(partition, "x").axes[0]
    assert axes.get_images()[0].get_array().mask.tolist() == [[False, True], [True, False]]
    assert [text.get_text() for text in axes.texts] == ["2", "1"]


def test_a_partition_that_several_methods_met_is_drawn_once(runs):
    part = partitions(arrange(runs))
    assert len(part.pictures) == 1
    assert len(part.more) <= 1  # that of the other seed
    assert not part.texts


def test_a_run_without_counts_is_named(write):
    part = partitions(arrange([write("old", [[9]])]))
    assert not part.pictures
    assert "not in these run files" in part.texts[0]
    assert "old" in part.texts[0]


@pytest.mark.parametrize(
    "counts", ["rubbish", 7, IndexLists.of([np.array([0])]).packed(), IndexLists.of([np.array([9])] * 2).packed()]
)
def test_counts_that_do_not_fit_the_run_are_damage(write, counts):
    run = with_facts(write("a", [[9, 5]]), classes=["x", "y"], class_counts=counts)
    with pytest.raises(RunError, match="class_counts"):
        heatmaps.partition_of(run)


def test_many_clients_are_means_over_neighbouring_ranks(write):
    correct = [number % 11 for number in range(121)]
    found = heatmaps.client_accuracies(write("a", [correct, correct[::-1]]))
    assert found.grouped
    assert found.table.shape == (60, 2)
    np.testing.assert_allclose(found.table[:, 1], np.sort(found.table[:, 1]))
    assert (found.table[0, 1], found.table[-1, 1]) == (0, 100)
    assert found.rows[0] == "1 to 2"
    assert found.rows[-1].endswith(" to 121")


def test_a_client_that_was_away_leaves_no_hole_in_the_mean():
    table = np.array([[50.0, np.nan], [70.0, np.nan]])
    np.testing.assert_allclose(heatmaps._known_mean(table), [60, np.nan])


def test_maps_of_one_task_have_one_scale(write):
    part = clients_by_round(arrange([write("a", [[9, 5]]), write("b", [[2, 1]], method={"name": "head_tune"})]))
    limits = {picture.figure.axes[0].get_images()[0].get_clim() for picture in part.pictures}
    assert limits == {(10, 90)}


def test_other_seeds_are_folded(write):
    part = clients_by_round(arrange([write("a", [[9]]), write("b", [[2]], seed=1)]))
    assert [picture.name for picture in part.pictures + part.more] == ["clients-by-round-a", "clients-by-round-b"]
    assert [picture.name for picture in part.more] == ["clients-by-round-b"]


def test_one_client_and_one_round_make_a_page(write):
    assert "Clients by round" in render([holding(write("a", [[9]]), [0])])


def test_a_run_that_was_not_evaluated_has_no_scale(write):
    assert heatmaps.accuracy_range([heatmaps.client_accuracies(write("a", []))]) is None
    plot_style.png(heatmaps.client_heatmap(write("b", [])), dpi=20)


def test_a_map_of_one_colour_says_so(write):
    part = clients_by_round(arrange([write("a", [[7, 7], [7, 7]]), write("b", [[7, 6]], seed=1)]))
    captions = [picture.caption for picture in (*part.pictures, *part.more)]
    assert [caption.endswith("The map has one colour: every cell is 70.00 %.") for caption in captions] == [True, False]


def test_a_partition_of_one_colour_says_so():
    even = heatmaps.Partition(np.full((2, 3), 4), ["a", "b"], ["x", "y", "z"], np.array([12, 12]))
    assert even.caption.endswith("3 classes, 12 images each. The map has one colour: every cell holds 4 images.")
