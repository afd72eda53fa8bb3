"""One method against another: seeds, clients and images in pairs."""

import csv
import io

import numpy as np
import pytest

from fedprompt.errors import ConfigError, RunError
from fedprompt.report import paired_differences, paired_table
from fedprompt.report.html_report import render
from fedprompt.report.table_formats import csv as as_csv
from fedprompt.report.table_formats import json_rows, markdown, rich_tables
from fedprompt.report.tasks import by_task

pytestmark = pytest.mark.unit

LOCAL = {"name": "local"}


def pair(runs, against="local"):
    (task,) = by_task(runs, against)
    return task.pairs[0]


def names(seed, count):
    return [f"seed{seed}-{number}" for number in range(count)]


def seeds(write, ours, theirs, hits=True):
    """Runs of fedvpt and local with correct answers of 10 by client, other clients in every seed."""
    found = []
    for method, rights in (({"name": "fedvpt"}, ours), (LOCAL, theirs)):
        for seed, right in enumerate(rights):
            clients = names(seed, len(right))
            run = write(f"{method['name']}{seed}", [right], clients=clients, hits=hits, method=method, seed=seed)
            found.append(run)
    return found


def test_the_difference_is_that_of_the_averages_and_the_interval_holds_it(write):
    found = pair(seeds(write, [[9, 8, 7, 9], [9, 6, 8, 9]], [[7, 7, 5, 6], [6, 6, 5, 8]]))
    assert found.estimate == pytest.approx(((8.25 - 6.25) + (8 - 6.25)) / 20)
    assert found.interval is not None
    assert 0 < found.interval.low < found.estimate < found.interval.high
    assert (found.verdict, found.drawn, found.clients) == ("ahead", "clients", 8)


def test_images_are_counted_in_pairs(write):
    found = pair(seeds(write, [[9, 4, 7, 9, 5]], [[7, 7, 7, 6, 5]]))
    assert (found.gained, found.lost) == (2 + 3, 3)


def test_the_other_way_round_it_is_behind(write):
    runs = seeds(write, [[9, 8, 7, 9], [9, 6, 8, 9]], [[7, 7, 5, 6], [6, 6, 5, 8]])
    forth, back = pair(runs), pair(runs, "fedvpt")
    assert (back.verdict, back.estimate) == ("behind", pytest.approx(-forth.estimate))
    assert (back.gained, back.lost) == (forth.lost, forth.gained)


def test_seeds_are_compared_by_the_exact_sign_test(write):
    found = pair(seeds(write, [[9], [9], [9], [5]], [[5], [5], [5], [5]]))
    assert (found.ahead, found.behind, found.seeds, found.p) == (3, 0, 4, 0.25)


def test_a_seed_that_only_one_has_counts_for_nobody(write):
    runs = seeds(write, [[9, 9, 9, 8, 8], [1, 1, 1, 1, 1]], [[5, 5, 6, 5, 5]])
    assert (pair(runs).seeds, pair(runs).estimate) == (1, pytest.approx(0.34))


def test_without_bits_pairs_are_clients_and_a_note_says_so(write):
    runs = seeds(write, [[9, 8, 7, 9], [9, 6, 8, 9]], [[7, 7, 5, 6], [6, 6, 5, 8]], hits=False)
    (task,) = by_task(runs, "local")
    assert (task.pairs[0].gained, task.pairs[0].verdict) == (None, "ahead")
    assert any(note.startswith("Paired by client and not by image") for note in paired_table.notes(task))


def test_with_too_few_clients_images_are_drawn(write):
    runs = seeds(write, [[9, 8]], [[3, 2]])
    (task,) = by_task(runs, "local")
    assert (task.pairs[0].drawn, task.pairs[0].verdict) == ("images", "ahead")
    assert any("nothing is said of other clients: all rows" in note for note in paired_table.notes(task))


def test_with_too_few_clients_and_no_bits_nothing_is_said(write):
    found = pair(seeds(write, [[9, 8]], [[3, 2]], hits=False))
    assert (found.interval, found.verdict) == (None, "too few")


def test_the_same_clients_in_several_seeds_are_one_client(write):
    """Their differences are averaged first: three seeds on four clients are four units, not twelve."""
    runs = [
        write(f"{method}{seed}", [[right, right, right, right]], method={"name": method}, seed=seed)
        for method, right in (("fedvpt", 9), ("local", 5))
        for seed in range(3)
    ]
    assert pair(runs).verdict == "too few"
    assert pair(runs).clients == 12


def test_clients_of_real_runs_are_known_by_their_test_images(runs):
    (task,) = by_task(runs, "head_tune")
    found = task.pairs[0]
    assert (found.label, found.seeds, found.left_out) == ("fedvpt", 2, 0)
    assert found.gained is not None
    assert found.lost is not None
    images = sum(result["samples"] for result in runs[0].evaluations(2).values())
    difference = np.mean(
        [one.summary()["average"] - other.summary()["average"] for one, other in zip(runs[:2], runs[2:], strict=True)]
    )
    assert found.estimate == pytest.approx(difference)
    assert found.gained + found.lost <= 2 * images


def test_means_of_the_last_rounds_are_compared_as_the_table_shows_them(write):
    federation = {"rounds": 2, "evaluate_last": 2}
    runs = [
        write("a", [[9, 9, 9, 9, 9], [7, 7, 7, 7, 7]], federation=federation, hits=True),
        write("b", [[5, 5, 5, 5, 5], [6, 6, 6, 6, 6]], federation=federation, method=LOCAL, hits=True),
    ]
    assert pair(runs).estimate == pytest.approx(0.8 - 0.55)
    assert pair(runs).gained == 5 * 4


def test_a_row_is_named_by_its_label_or_its_method_in_any_case(write):
    runs = seeds(write, [[9]], [[3]])
    assert pair(runs, "LOCAL").against == "local"
    with pytest.raises(ConfigError, match="--against must be one of fedvpt, local, got 'nobody'"):
        by_task(runs, "nobody")
    two = [*runs, write("x", [[5]], method=LOCAL, train={"lr": 0.5})]
    with pytest.raises(ConfigError, match=r"--against must name one row, such as 'local lr=auto' or 'local lr=0\.5'"):
        by_task(two, "local")
    (task,) = by_task(two, "local lr=0.5")
    assert task.pairs == ()
    why = "local lr=0.5 has no row there, or shares no seed and client with the others"
    assert paired_table.notes(task) == [f"Nothing to compare: {why}"]


def test_hits_that_do_not_fit_are_damage(write, monkeypatch):
    run = write("a", [[9]], hits=True)
    found = run.evaluations(1)
    monkeypatch.setattr(run, "evaluations", lambda round: {0: {**found[0], "hits": "/////w=="}})
    with pytest.raises(RunError, match="damaged: the hits of an evaluation must be one bit for each of 10 images"):
        paired_differences.rights(run)


def test_every_format_has_the_differences(write):
    runs = seeds(write, [[9, 8, 7, 9], [9, 6, 8, 9]], [[7, 7, 5, 6], [6, 6, 5, 8]])
    tasks = by_task(runs, "local")
    assert "| fedvpt | **ahead** | +18.75 |" in markdown(tasks)
    first, second = json_rows(tasks)
    assert (first["against"]["verdict"], second["against"]) == ("ahead", None)
    assert next(csv.DictReader(io.StringIO(as_csv(tasks))))["verdict"] == "ahead"
    assert len(rich_tables(tasks)) == 2
    page = render(runs, "local")
    assert '<h2 id="against-local">' in page
    assert "<strong>ahead</strong>" in page
    assert "Against" not in render(runs)
