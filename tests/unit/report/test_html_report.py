import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from forgery import forged
from PIL import Image

from fedprompt.errors import RunError
from fedprompt.report.comparison_table import Cell, comparison, winners
from fedprompt.report.html_elements import breakable, table
from fedprompt.report.html_report import render, write_report
from fedprompt.report.run_details import settings_section, versions
from fedprompt.report.table_formats import json_rows
from fedprompt.report.tasks import Task
from fedprompt.runs.store import RunStore

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
    made = write_report(runs[:2], tmp_path / "new")
    assert sorted((tmp_path / "new").iterdir()) == [made.html, made.png]
    assert made.html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with Image.open(made.png) as image:
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
    assert "evaluate_last: 1" in seen.text
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
    assert len(drawings) >= 5 + 5  # one of each kind, and a heat map per run
    assert all(drawing["role"] == "img" and drawing["aria-label"] for drawing in drawings)


def test_contents_lead_to_every_section_in_their_order(html, seen):
    names = [
        "results",
        "fairness",
        "clients-by-round",
        "domains",
        "classification-metrics",
        "calibration",
        "communication",
    ]
    names += ["time-by-phase", "partition", "settings-and-versions", "runs"]
    links = [link["href"] for link in seen.named("a")]
    assert links == ["#main", *(f"#{name}" for name in names)]
    assert [heading["id"] for heading in seen.named("h2")] == names


def test_wide_tables_are_regions_that_the_keyboard_reaches(seen):
    boxes = [element for element in seen.named("div") if element.get("class") == "scroll"]
    assert len(boxes) == len(seen.named("table"))
    assert all(box["tabindex"] == "0" and box["role"] == "region" and box["aria-label"] for box in boxes)


def test_page_tells_the_best_of_a_fair_comparison(write):
    best = write("a", [[9, 5]])
    other = write("b", [[4, 4]], method={"name": "head_tune"})
    assert "Best Average: fedvpt, 70.00. Best Worst Local: fedvpt, 50.00." in Page(render([best, other])).text
    longer = write("c", [[4, 4], [4, 4]], method={"name": "head_tune"})
    assert "Best Average" not in Page(render([best, longer])).text


def test_page_tells_whose_images_they_are_once_and_nothing_of_unknown_ones(write):
    fruit = [write(f"fruit{number}", [[7, 5]], data={"source": "groceries"}) for number in (0, 1)]
    assert Page(render(fruit)).text.count("Images: Grocery Store Dataset") == 1
    assert "Images:" not in Page(render([write("own", [[7, 5]], data={"source": "tiny"})])).text


def test_settings_are_told_once_where_runs_agree_and_by_method_where_not(write):
    runs = [write("a", [[9]], train={"lr": 0.25}), write("b", [[9]], train={"lr": 0.5})]
    markup = settings_section(runs).replace("<wbr>", "")
    assert markup.count("batch_size: 32") == 1
    assert "lr: 0." not in markup
    assert re.findall(r"<td>(train.lr=.*?)</td>", markup) == ["train.lr=0.25", "train.lr=0.5"]


def test_a_setting_that_a_method_does_not_have_is_not_told_of_it(write):
    runs = [write("a", [[9]], method={"name": "x", "draws": 3}), write("b", [[9]], method={"name": "y"})]
    markup = settings_section(runs)
    assert re.findall(r"<td>(.*?)</td>", markup) == ["method.draws=3  method.name=x", "method.name=y"]


def test_versions_are_told_apart_where_they_differ(write):
    one, other = write("a", [[9]]), write("b", [[8]], seed=1)
    assert Page(versions([one, other])).text.split() == ["fedprompt", "0"]


def test_a_curve_of_two_points_is_not_drawn(write, tmp_path):
    widths = []
    for rounds in (2, 3):
        made = write_report([write(f"a{rounds}", [[9, 5]] * rounds)], tmp_path / f"{rounds}")
        assert ('id="learning-curves"' in made.html.read_text()) == (rounds == 3)
        with Image.open(made.png) as overview:
            widths.append(overview.width)
    assert widths[1] > 1.5 * widths[0]  # there is a panel for it


def test_events_of_a_run_are_listed(write):
    run = write("a", [[9]])
    store = RunStore(run.directory)
    store.note(1, 0, "untested", "<b>away</b>")
    store.close()
    page = Page(render([run]))
    assert "untested" in page.text
    assert "<b>away</b>" in page.text


def test_figures_are_written_as_png_and_svg_with_the_table(write, tmp_path):
    made = write_report([write("a", [[9, 5]])], tmp_path / "out", figures=True)
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert names == {path.name for path in made.figures}
    kinds = ["fairness", "clients-by-round-a", "calibration", "communication", "time-by-phase"]
    assert names == {f"{kind}.{ending}" for kind in kinds for ending in ("png", "svg")}
    drawing = (tmp_path / "out" / "figures" / "fairness.svg").read_text()
    assert "var(--" not in drawing  # stands alone
    assert made.latex is not None
    assert made.latex.read_text().startswith("% needs")


def test_runs_of_the_same_name_have_pictures_of_their_own(write, tmp_path):
    twins = [write(f"{folder}/a", [[5, 4]], seed=seed) for seed, folder in enumerate(("here", "there"))]
    made = write_report(twins, tmp_path / "out", figures=True)
    names = [path.name for path in made.figures]
    assert len(set(names)) == len(names)
    assert {"clients-by-round-a.png", "clients-by-round-a-2.png"} <= set(names)
    assert all(path.is_file() for path in made.figures)


def test_nan_figures_are_shown_and_win_nothing(write):
    bad, good = write("a", [[9]]), write("b", [[8]], method={"name": "head_tune"})
    with forged(bad.directory) as file:
        (text,) = file.execute("SELECT summary FROM rounds WHERE round = 1").fetchone()
        file.execute("UPDATE rounds SET summary = ?", (text.replace('"average": 0.9', '"average": NaN'),))
    rows = comparison([bad, good])
    assert winners(rows, "average") == set()
    assert json.loads(json.dumps(json_rows([Task("", tuple(rows))]), allow_nan=False))[0]["average"]["mean"] is None
    assert "nan" in Page(render([bad, good])).text


def test_a_run_without_any_evaluation_makes_a_page(write):
    assert "0/1, unfinished" in Page(render([write("a", [])])).text


def test_clients_with_different_bins_are_an_error_that_names_the_run(write):
    run = write("a", [[9, 5]])
    with forged(run.directory) as file:
        (text,) = file.execute("SELECT result FROM evaluations WHERE client = 0").fetchone()
        changed = json.dumps({**json.loads(text), "bins": [[5, 1, 1], [5, 1, 1]]})
        file.execute("UPDATE evaluations SET result = ? WHERE client = 0", (changed,))
    with pytest.raises(RunError, match="run: a: every client must have"):
        render([run])


def test_a_damaged_run_leaves_no_half_of_a_report(write, tmp_path):
    good, bad = write("a", [[9]]), write("b", [[8]], seed=1)
    with forged(bad.directory) as file:
        file.execute("UPDATE evaluations SET result = '[]'")
    with pytest.raises(RunError, match="damaged"):
        write_report([good, bad], tmp_path / "out", figures=True)
    assert not (tmp_path / "out").exists()


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


def test_long_names_may_break_between_words_and_nowhere_inside_markup():
    assert breakable("train.lr=0.1 a_b") == "train.<wbr>lr=0.1 a_<wbr>b"
    assert breakable("&lt;x&gt;") == "&lt;x&gt;"


def test_a_report_of_no_runs_is_an_error(tmp_path):
    with pytest.raises(RunError, match="at least one run"):
        write_report([], tmp_path)
