"""What the page is told: the right numbers, only what is new, and never too much."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dashboard_support import begin, commit, listed, write
from forgery import forged

from fedprompt.config import parse
from fedprompt.dashboard.run_list import Catalogue
from fedprompt.dashboard.views import HEAT_CLIENTS, HEAT_ROUNDS, MOST_COMPARED, Missing, Unusable, Views
from fedprompt.metrics.accuracy import ClientResult, summarise
from fedprompt.report import comparison_table
from fedprompt.runs.run import Run
from fedprompt.runs.store import Event, RoundRecord, RunStore
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit


def id_of(views: Views, name: str = "run") -> str:
    return str(listed(views)[name]["id"])


def test_a_line_of_the_list_tells_how_a_run_stands(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[2, 4], [5, 8]], rounds=4, seed=7, method={"name": "fedvpt"}, data={"source": "tiny"})
    entry = listed(views)["run"]
    told = {key: entry[key] for key in ("method", "seed", "data", "rounds", "of", "folder", "reason", "left")}
    expected = {"method": "fedvpt", "seed": 7, "data": "tiny", "rounds": 2, "of": 4, "folder": str(tmp_path)}
    assert told == {**expected, "reason": None, "left": None}
    assert (entry["average"], entry["worst"]) == (pytest.approx(0.65), 0.5)


def test_runs_are_found_in_folders_inside_folders_but_not_inside_runs_or_hidden_ones(
    tmp_path: Path, views: Views
) -> None:
    write(tmp_path / "sweep" / "a" / "deep", [[5]])
    write(tmp_path / "top", [[5]])
    write(tmp_path / "top" / "inside", [[5]])
    write(tmp_path / ".hidden" / "run", [[5]])
    assert set(listed(views)) == {"deep", "top"}


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "secret", [[5]])
    inside = tmp_path / "inside"
    write(inside / "own", [[5]])
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "file").mkdir()
    (inside / "file" / FILE).symlink_to(tmp_path / "outside" / "secret" / FILE)
    assert set(listed(Views(Catalogue([inside])))) == {"own"}


def test_a_run_folder_or_its_file_can_be_given_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "run", [[5]])
    by_folder, by_file = (listed(Views(Catalogue([given])))["run"]["id"] for given in (path, path / FILE))
    assert by_folder == by_file == id_of(Views(Catalogue([tmp_path])))


def test_only_what_changed_is_told_again(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "still", [[5]])
    store = begin(tmp_path / "moving", rounds=9)
    first = views.runs({})
    asked = {"after": str(first["stamp"]), "session": first["session"]}
    assert views.runs(asked)["changed"] == []
    commit(store, 1, [5])
    second = views.runs(asked)
    assert [entry["name"] for entry in second["changed"]] == ["moving"]
    assert len(second["present"]) == 2
    assert len(views.runs({**asked, "session": "of an earlier server"})["changed"]) == 2
    store.close()


def test_a_deleted_run_is_no_longer_present(tmp_path: Path, views: Views) -> None:
    path = write(tmp_path / "run", [[5]])
    id = id_of(views)
    shutil.rmtree(path)
    assert views.runs({})["present"] == []
    with pytest.raises(Missing):
        views.run({"id": id})


@pytest.mark.parametrize("breakage", ["cut", "overwritten", "empty", "other schema", "folder of bytes"])
def test_a_broken_run_says_why_and_leaves_the_others_alone(breakage: str, tmp_path: Path, views: Views) -> None:
    write(tmp_path / "good", [[5]])
    file = write(tmp_path / "run", [[5], [6], [7]]) / FILE
    listed(views)
    content = file.read_bytes()
    if breakage == "other schema":
        file.unlink()
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE facts (key TEXT)")
        connection.close()
    else:
        ruined = {"cut": content[: len(content) // 2], "overwritten": os.urandom(len(content)), "empty": b""}
        file.write_bytes(ruined.get(breakage, bytes(4096)))
    found = listed(views)
    assert found["good"]["status"] == "finished"
    assert found["run"]["status"] == "damaged"
    assert found["run"]["reason"]
    assert views.run({"id": found["run"]["id"]})["entry"]["reason"]
    file.write_bytes(content)
    assert listed(views)["run"]["status"] == "finished"


def test_a_config_of_another_version_is_a_reason(tmp_path: Path, views: Views) -> None:
    path = write(tmp_path / "run", [[5]])
    with forged(path) as connection:
        connection.execute("""UPDATE facts SET value = '{"colour": 3}' WHERE key = 'config'""")
    assert "colour" in listed(views)["run"]["reason"]


def test_another_run_under_the_same_name_replaces_what_was_known(tmp_path: Path, views: Views) -> None:
    path = write(tmp_path / "run", [[1], [2], [3]])
    id = id_of(views)
    first = views.run({"id": id})
    shutil.rmtree(path)
    write(tmp_path / "run", [[9], [9]])
    second = views.run({"id": id, "after": "3", "version": first["version"]})
    assert second["version"] != first["version"]
    assert [point[:2] for point in second["curves"]["accuracy"]["points"]] == [[1, 0.9], [2, 0.9]]


def test_the_final_average_and_the_mean_of_the_last_rounds_are_figures_of_their_own(
    tmp_path: Path, views: Views
) -> None:
    store = begin(tmp_path / "run", rounds=9)
    for round, correct in enumerate((9, 8, 6, 4), start=1):
        commit(store, round, [correct])
    figures = views.run({"id": id_of(views)})["figures"]
    assert (figures["average"], figures["mean"], figures["mean_of"]) == (0.4, pytest.approx(0.6), 3)


def test_a_run_on_validation_images_is_finished_by_its_final_test_whose_figures_are_the_final_ones(
    tmp_path: Path, views: Views
) -> None:
    """It may end before its last round; the results of every client are no news."""
    data, federation = {"validation": 0.2}, {"rounds": 9, "evaluate_on": "validation", "patience": 1}
    store = RunStore.create(
        tmp_path / "run",
        {
            "config": parse({"data": data, "federation": federation}).model_dump(mode="json"),
            "clients": {"numbered": 2},
            "backbone": "weights",
            "versions": {},
        },
    )
    store.commit(RoundRecord(0, [], None, 0, 0, None), b"", b"", {}, {})
    commit(store, 1, [9, 7])
    commit(store, 2, [6, 6])
    before = views.run({"id": id_of(views)})
    assert (before["entry"]["average"], before["entry"]["images"], before["tested"]) == (0.6, "validation", None)
    assert before["entry"]["status"] != "finished"
    tested = [ClientResult(10, correct, 1, 1, 0, [[10, 5, correct]]) for correct in (5, 3)]
    results = [Event(client, "tested", json.dumps(each.to_json())) for client, each in enumerate(tested)]
    store.notes(1, [*results, Event(None, "final_test", json.dumps({"round": 1, "summary": summarise(tested)}))])
    store.close()
    after = views.run({"id": id_of(views)})
    entry = {name: after["entry"][name] for name in ("status", "average", "worst", "images")}
    assert entry == {"status": "finished", "average": pytest.approx(0.4), "worst": 0.3, "images": "test"}
    assert after["tested"] == [1, pytest.approx(0.4), 0.3]
    assert (after["rounds_on"], after["figures"]["average"], after["events"]["latest"]) == ("validation", 0.6, [])
    (curve,) = views.compare({"ids": id_of(views)})["curves"]
    assert curve["label"].endswith(", validation images")


def test_figures_of_a_run_are_its_own(tmp_path: Path, views: Views) -> None:
    events = [Event(1, "refused", json.dumps({"rule": "norm", "value": "too long"})), Event(None, "label_check", "hm")]
    store = begin(tmp_path / "run", rounds=3)
    commit(store, 1, [4, 8], *events, loss=1.5)
    commit(store, 2, [2, 4], Event(None, "privacy", json.dumps({"epsilon": 2.5})), loss=1.0)
    answer = views.run({"id": id_of(views)})
    figures = answer["figures"]
    assert (figures["average"], figures["worst"], figures["best"]) == (pytest.approx(0.3), 0.2, pytest.approx(0.6))
    assert (figures["best_round"], figures["loss"], figures["cohort"], figures["epsilon"]) == (1, 1.0, 2, 2.5)
    assert (figures["bytes_down"], figures["bytes_up"]) == (100 + 2 * 80, 50 + 2 * 40)
    assert figures["refused"] == {"norm": 1}
    assert answer["phases"] == {"train": 3.0, "evaluate": 1.0}
    assert answer["domains"] == {"ink": pytest.approx(0.3)}
    assert answer["events"]["counts"] == {"refused": 1, "label_check": 1, "privacy": 1}
    assert [event["kind"] for event in answer["events"]["latest"]] == ["label_check", "refused"]
    assert answer["curves"]["epsilon"]["points"] == [[2, 2.5]]
    assert answer["entry"]["left"] == (pytest.approx(2.0) if answer["entry"]["status"] == "running" else None)
    store.close()


def test_points_after_a_round_join_those_before(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run", rounds=9)
    commit(store, 1, [4], loss=1.0)
    id = id_of(views)
    first = views.run({"id": id})
    commit(store, 2, [5], loss=0.5)
    second = views.run({"id": id, "after": "1", "version": first["version"]})
    assert second["curves"]["accuracy"] == {"behind": 1, "points": [[2, 0.5, 0.5]]}
    assert [point[:2] for point in second["curves"]["loss"]["points"]] == [[2, 0.5]]
    store.close()


def test_a_long_run_is_sent_in_few_points(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run", rounds=3000)
    for round in range(1, 2001):
        commit(store, round)
    id = id_of(views)
    answer = views.run({"id": id})
    points = answer["curves"]["loss"]["points"]
    assert len(points) <= 601
    assert (points[0][0], points[-1][0], answer["figures"]["round"]) == (0, 2000, 2000)
    commit(store, 2001, [5])
    new = views.run({"id": id, "after": "2000", "version": answer["version"]})["curves"]["loss"]
    assert (new["behind"], [point[0] for point in new["points"]]) == (2000, [2001])
    store.close()


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run")
    commit(store, 1, loss=math.inf)
    assert views.run({"id": id_of(views)})["curves"]["loss"]["points"][1][:2] == [1, None]
    store.close()


def test_clients_are_ranked_and_their_accuracies_shown_by_round(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[1, 2, 3], [6, 5, 4]])
    answer = views.clients({"id": id_of(views)})
    assert answer["clients"] == ["client_2", "client_1", "client_0"]
    assert answer["accuracy"] == [[0.3, 0.4], [0.2, 0.5], [0.1, 0.6]]
    assert (answer["count"], answer["rounds"], answer["quantiles"]) == (3, [1, 2], [0.4, 0.5, 0.6])


def test_of_many_clients_and_rounds_a_few_are_shown(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[client % 11 for client in range(HEAT_CLIENTS + 20)]] * (HEAT_ROUNDS + 20))
    answer = views.clients({"id": id_of(views)})
    assert (len(answer["clients"]), len(answer["rounds"]), answer["count"]) == (
        HEAT_CLIENTS,
        HEAT_ROUNDS,
        HEAT_CLIENTS + 20,
    )
    assert (answer["rounds"][0], answer["rounds"][-1]) == (1, HEAT_ROUNDS + 20)
    assert len(answer["quantiles"]) == HEAT_CLIENTS + 20
    assert (answer["accuracy"][0][-1], answer["accuracy"][-1][-1]) == (0.0, 1.0)


def test_a_result_with_a_nan_in_it_is_no_damage(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run")
    commit(store, 1, [5, 7])
    store.close()
    with forged(tmp_path / "run") as file:
        file.execute("""UPDATE evaluations SET result = replace(result, '"nll": 1', '"nll": NaN') WHERE client = 0""")
    assert views.clients({"id": id_of(views)})["quantiles"] == [0.5, 0.7]


def test_an_impossible_result_is_damage(tmp_path: Path, views: Views) -> None:
    store = begin(tmp_path / "run")
    commit(store, 1, [5])
    store.close()
    with forged(tmp_path / "run") as file:
        file.execute("""UPDATE evaluations SET result = '{"samples": 3, "correct": 5}'""")
    with pytest.raises(Exception, match="client 0 in round 1 must be counts"):
        views.clients({"id": id_of(views)})


def test_settings_are_those_of_the_run(tmp_path: Path, views: Views) -> None:
    path = write(tmp_path / "run", [[5, 5]], seed=3)
    answer = views.settings({"id": id_of(views)})
    assert answer["config"]["seed"] == 3
    assert answer["versions"] == {"fedprompt": "0"}
    assert (answer["facts"]["clients"], answer["facts"]["config hash"]) == (2, Run(path).config.digest())


def test_a_comparison_is_the_table_that_the_command_prints(tmp_path: Path, views: Views) -> None:
    for name, seed, correct in (("a", 0, [[4, 6]]), ("b", 1, [[8, 8]])):
        write(tmp_path / name, correct, seed=seed)
    write(tmp_path / "c", [[9, 9]], method={"name": "head_tune"})
    ids = {name: entry["id"] for name, entry in listed(views).items()}
    answer = views.compare({"ids": ",".join(ids.values())})
    rows = comparison_table.comparison([Run(tmp_path / name) for name in ids])
    shown = comparison_table.columns(rows)
    assert answer["header"] == comparison_table.header(shown)
    assert answer["cells"] == [
        [[cell.text, cell.bold] for cell in line] for line in comparison_table.cells(rows, shown)
    ]
    assert answer["notes"] == comparison_table.notes(rows)
    both = answer["curves"][0]
    assert both["seeds"] == [0, 1]
    assert both["points"] == [[1, pytest.approx(0.65), 0.5, 0.8, pytest.approx(0.6), 270.0]]  # 150 in round 0, 120 in 1


def test_a_comparison_leaves_out_what_is_broken_and_counts_what_is_gone(tmp_path: Path, views: Views) -> None:
    for name in ("good", "broken", "half broken", "gone"):
        write(tmp_path / name, [[5]])
    ids = [entry["id"] for entry in listed(views).values()]
    (tmp_path / "broken" / FILE).write_bytes(b"no database at all" * 100)
    with closing(sqlite3.connect(tmp_path / "half broken" / FILE)) as file, file:
        file.execute("INSERT OR REPLACE INTO facts VALUES ('manifest', 'no JSON')")
    shutil.rmtree(tmp_path / "gone")
    answer = views.compare({"ids": ",".join(ids)})
    assert [curve["names"] for curve in answer["curves"]] == [["good"]]
    assert sorted(left["name"] for left in answer["left_out"]) == ["broken", "half broken"]
    assert answer["missing"] == 1


def test_a_comparison_of_nothing_and_of_too_much(views: Views) -> None:
    assert views.compare({"ids": ""})["curves"] == []
    with pytest.raises(Unusable, match=f"at most {MOST_COMPARED}"):
        views.compare({"ids": ",".join(map(str, range(MOST_COMPARED + 1)))})


@pytest.mark.parametrize("id", ["", "../run", "/etc/passwd", "..%2f..", "0" * 16, "run", "x" * 3000, "\x00"])
def test_no_id_leads_to_anything_but_a_run_that_was_found(id: str, tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[5]])
    for question in (views.run, views.clients, views.settings):
        with pytest.raises(Missing):
            question({"id": id})


def test_names_that_are_no_text_can_be_sent(tmp_path: Path, views: Views) -> None:
    os.rename(write(tmp_path / "run", [[5]]), os.fsencode(tmp_path) + b"/bad\xff<b>name")
    (entry,) = views.runs({})["changed"]
    assert entry["name"] == "bad?<b>name"
    json.dumps(views.run({"id": entry["id"]})).encode()


def test_reading_a_run_that_nobody_writes_leaves_nothing_beside_it(tmp_path: Path, views: Views) -> None:
    path = write(tmp_path / "run", [[5]])
    before = sorted(os.listdir(path))
    id = id_of(views)
    for question in (views.run, views.clients, views.settings):
        question({"id": id})
    views.compare({"ids": id})
    assert sorted(os.listdir(path)) == before


def test_answers_hold_only_what_json_can(tmp_path: Path, views: Views) -> None:
    write(tmp_path / "run", [[5]])
    id = id_of(views)
    answers: list[Any] = [views.runs({}), views.compare({"ids": id})]
    answers += [question({"id": id}) for question in (views.run, views.clients, views.settings)]
    json.dumps(answers, allow_nan=False)
