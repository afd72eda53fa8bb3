"""Rows about pictures: in their order, batch by batch, whatever is among them; and how they are written."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ConfigError, DataError, StorageError
from fedprompt.inference.input_images import Item
from fedprompt.inference.predict import Row, Tally, predictions
from fedprompt.inference.prediction_writer import csv_lines, format_of, json_lines, table_lines, write_lines
from fedprompt.inference.trained_client import TrainedClient

pytestmark = pytest.mark.unit


SOURCE = TinySource()


def picture(place: int, label: str | None = None) -> Item:
    return Item(f"{place}.png", lambda: SOURCE.image(place), label)


def damaged() -> Image.Image:
    raise DataError("image must be readable: bad.png: it is cut off")


BAD = Item("bad.png", damaged)


def test_texts_are_called_texts() -> None:
    row = Row("new.csv:0", "good", (("good", 0.9), ("bad", 0.1)), 0.3, item="text")
    assert row.to_json()["text"] == "new.csv:0"
    assert "image" not in row.to_json()
    assert next(iter(table_lines([row], ["good", "bad"], 1))).split()[0] == "text"
    assert next(iter(csv_lines([row], 1, "text"))).startswith("text,label,")
    tally = Tally(frozenset({"good"}), "text")
    tally.add(row)
    assert tally.sentence() == "1 text, accuracy 100.0 % (1 of 1 with a label)"
    assert tally.to_json()["texts"] == 1


def test_a_row_has_the_most_likely_classes_of_what_the_client_says(client: TrainedClient) -> None:
    (row,) = predictions(client, [picture(3, "disc")], top=2)
    shares = client.probabilities([SOURCE.image(3)])[0]
    best = int(shares.argmax())
    assert row.top[0] == (client.class_names[best], pytest.approx(float(shares[best])))
    assert [share for _, share in row.top] == sorted(shares.tolist(), reverse=True)[:2]
    assert row.entropy == pytest.approx(-sum(share * math.log(share) for share in shares.tolist()))
    assert (row.name, row.label, row.mutual_information, row.error) == ("3.png", "disc", None, None)


def test_a_bad_picture_takes_nothing_from_the_others(client: TrainedClient) -> None:
    with_bad = list(predictions(client, [BAD, picture(0), BAD, picture(1)]))
    assert [row.name for row in with_bad] == ["bad.png", "0.png", "bad.png", "1.png"]
    assert [row.error for row in with_bad] == [str(_error()), None, str(_error()), None]
    assert [with_bad[1], with_bad[3]] == list(predictions(client, [picture(0), picture(1)]))


def _error() -> DataError:
    try:
        damaged()
    except DataError as error:
        return error
    raise AssertionError


def test_pictures_are_read_a_batch_at_a_time(client: TrainedClient) -> None:
    asked: list[int] = []

    def many() -> Iterator[Item]:
        for place in range(10**9):
            asked.append(place)
            yield picture(place % 10)

    rows = predictions(client, many())
    next(rows)
    assert len(asked) == client.batch_size == 64


def test_only_labels_that_are_classes_of_the_run_count() -> None:
    tally = Tally(frozenset({"cat", "dog"}))
    for label in ("cat", "dog", "fish", None):
        tally.add(Row("a.png", label, (("cat", 0.9),), 0.1))
    tally.add(Row("b.png", "cat", error="broken"))
    assert tally.to_json() == {"images": 5, "unreadable": 1, "labelled": 2, "correct": 1, "accuracy": 0.5}
    assert tally.sentence() == "5 images, 1 unreadable, accuracy 50.0 % (1 of 2 with a label)"
    assert "1 of 5 were not (b.png); the others are done" in str(tally.complaint())
    assert Tally(frozenset()).complaint() is None


def test_top_is_at_least_one(client: TrainedClient) -> None:
    with pytest.raises(ConfigError, match=r"top must be at least 1, got 0"):
        next(predictions(client, [picture(0)], top=0))


# -- writing ----------------------------------------------------------------------------------------------------------

ROWS = [
    Row("a.png", "cat", (("cat", 0.75), ("dog", 0.25)), 0.5623, 0.125),
    Row('odd, "name".png', None, (("dog", 0.5), ("cat", 0.5)), 0.6931, 0.0),
    Row("bad.png", error="image must be readable"),
]


def test_csv_can_be_read_again() -> None:
    rows = list(csv.DictReader(io.StringIO("\n".join(csv_lines(ROWS, 2)))))
    assert rows[0] == {
        "image": "a.png",
        "label": "cat",
        "class_1": "cat",
        "probability_1": "0.75",
        "class_2": "dog",
        "probability_2": "0.25",
        "entropy": "0.5623",
        "mutual_information": "0.125",
        "error": "",
    }
    assert rows[1]["image"] == 'odd, "name".png'
    assert (rows[2]["class_1"], rows[2]["error"]) == ("", "image must be readable")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_json_is_one_object_with_a_line_for_every_picture(count: int, client: TrainedClient) -> None:
    tally = Tally(frozenset({"cat"}))

    def counted() -> Iterator[Row]:
        for row in ROWS[:count]:
            tally.add(row)
            yield row

    lines = list(json_lines(counted(), client, tally))
    found = json.loads("\n".join(lines))
    assert len(lines) == count + 2
    assert found["predictions"] == [row.to_json() for row in ROWS[:count]]
    assert found["summary"]["images"] == count
    assert (found["client"], found["round"], found["classes"]) == ("client_0", 2, list(client.class_names))


def test_a_table_tells_who_is_right() -> None:
    head, first, second, third = table_lines(ROWS, ["cat", "dog"], 2)
    assert head.split() == ["image", "1.", "2.", "entropy", "mutual", "information", "label"]
    assert first.split() == ["a.png", "cat", "75.0", "%", "dog", "25.0", "%", "0.562", "0.1250", "cat"]
    assert third.split("  ")[-1] == "image must be readable"
    said = list(
        table_lines([Row("a", label, (("cat", 1.0),), 0.0) for label in ("cat", "dog", "zebra")], ["cat", "dog"], 1)
    )
    assert [line.rpartition("  ")[2] for line in said[1:]] == ["cat", "dog (wrong)", "zebra (no class of the run)"]
    assert second.startswith('odd, "name".png')


def test_names_cannot_steer_a_terminal() -> None:
    lines = "\n".join(table_lines([Row("\x1b[31m.png", "\x07", (("\x1b]0;x", 1.0),), 0.0)], ["\x1b]0;x"], 1))
    assert not {"\x1b", "\x07"} & set(lines)


@pytest.mark.parametrize(("name", "kind"), [("a.csv", "csv"), ("a.JSON", "json")])
def test_the_suffix_says_how_a_file_is_written(name: str, kind: str) -> None:
    assert format_of(Path(name)) == kind


def test_another_suffix_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--output must end in \.csv or \.json, got 'a\.txt'"):
        format_of(Path("a.txt"))


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield "first"
        raise DataError("second")

    with pytest.raises(DataError):
        write_lines(tmp_path / "a.csv", broken())
    assert list(tmp_path.iterdir()) == []
    write_lines(tmp_path / "deep" / "a.csv", ["first"])
    assert (tmp_path / "deep" / "a.csv").read_text() == "first\n"
    with pytest.raises(StorageError, match="cannot write"):
        write_lines(tmp_path / "deep" / "a.csv" / "b.csv", ["first"])
