import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from PIL import Image

from fedprompt.errors import RunError
from fedprompt.report.html import render, write_report
from fedprompt.report.page import table
from fedprompt.report.tables import Cell

pytestmark = pytest.mark.unit


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="session")
def html(runs, unfinished):
    return render([*runs, unfinished])


@pytest.fixture(scope="session")
def seen(html):
    return Page(html)


def test_report_writes_a_page_and_a_picture_and_nothing_else(runs, tmp_path):
    page, picture = write_report(runs[:2], tmp_path / "new")
    assert sorted((tmp_path / "new").iterdir()) == [page, picture]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with Image.open(picture) as image:
        assert image.format == "PNG"


def test_page_refers_to_nothing_outside_itself(html, seen):
    links = [
        value or ""
        for _, attributes in seen.elements
        for name, value in attributes.items()
        if name.split(":")[-1] in ("src", "href", "srcset", "action", "data")
    ]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"url\((?!#)|@import", html)
    assert not seen.named("script") + seen.named("link")


def test_page_names_every_method_and_run(seen, runs):
    for run in runs:
        assert run.config.label in seen.text
        assert run.name in seen.text


def test_page_flags_the_unfinished_run(seen):
    assert "fedvpt (1/2 rounds)" in seen.text


def test_page_holds_config_versions_and_backbone_digest_of_a_run(seen, runs):
    assert "evaluate_last: 10" in seen.text
    assert runs[0].reader.fact("backbone") in seen.text
    assert f"torch {runs[0].reader.fact('versions')['torch']}" in seen.text


def test_page_does_not_tell_where_the_run_was_written(html, runs):
    assert str(runs[0].directory.parent) not in html


def test_rounds_table_holds_loss_and_accuracies(seen, runs):
    record = runs[0].rounds()[1]
    assert f"{record.loss:.4f}" in seen.text
    assert f"{record.summary['worst']:.2%}" in seen.text
    assert "train (s)" in seen.text


def test_every_picture_has_a_text_for_those_who_cannot_see_it(seen):
    drawings = seen.named("svg")
    assert len(drawings) == 5 + 5  # comparisons, and a heat map per run
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)


def test_no_id_is_used_twice(seen):
    ids = Counter(attributes["id"] for _, attributes in seen.elements if "id" in attributes)
    assert ids
    assert max(ids.values()) == 1


def test_every_reference_inside_the_page_has_its_target(html, seen):
    ids = {attributes["id"] for _, attributes in seen.elements if "id" in attributes}
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', html)) <= ids


def test_page_says_that_only_held_out_clients_are_evaluated(write):
    names = ["zero", "one", "two", "three"]
    run = write("a", [[9, 5]], clients=names, tested=[1, 3], federation={"rounds": 1, "held_out": 0.5})
    text = Page(render([run])).text
    assert "Only clients held out of training are evaluated: all rows" in text
    assert "4; only the 2 held out of training are evaluated" in text


def test_hostile_names_are_text_and_not_markup(write):
    hostile = "<script>alert('x')</script>\"&"
    name = hostile.replace("/", "_")  # a file name
    run = write(name, [[9, 5]], clients=[hostile, "other"], method={"name": hostile})
    page = Page(render([run]))
    assert not page.named("script")
    assert page.text.count(hostile) >= 3  # method, legend, client
    assert name in page.text


@pytest.mark.parametrize("bold", [False, True])
def test_every_cell_of_a_table_is_escaped(bold):
    cell = Cell("<i>&", bold)
    markup = table('"<i>', ["<i>"], [[cell, cell]])
    assert "<i>" not in markup
    assert markup.count("&lt;i&gt;&amp;") == 2


def test_a_report_of_no_runs_is_an_error(tmp_path):
    with pytest.raises(RunError, match="at least one run"):
        write_report([], tmp_path)
