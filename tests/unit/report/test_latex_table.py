"""The table for papers: structure, numbers, escaping."""

import re

import pytest

from fedprompt.report.latex_table import SPECIAL, escaped, latex

pytestmark = pytest.mark.unit


def body(text):
    """The cells between the rules, line by line."""
    lines = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert all(line.endswith(r" \\") for line in lines)
    return [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in lines]


def check_structure(text):
    """What LaTeX itself would refuse: environments and braces that do not close, rows that are too long, bare specials."""
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    bare = re.sub(r"\\[\\&%$#_{}]", "", code)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert "#" not in bare
    assert "%" not in bare
    assert not re.search(r"_", re.sub(r"\\label\{[^}]*\}", "", bare))
    (layout,) = re.findall(r"\\begin\{tabular\}\{(l+r+)\}", text)
    assert all(len(row) == len(layout) for row in body(text))


def test_the_table_holds_mean_and_deviation_with_the_best_in_bold(write):
    runs = [write("a", [[9, 5]]), write("b", [[7, 3]], seed=1), write("c", [[4, 4]], method={"name": "head_tune"})]
    text = latex(runs)
    check_structure(text)
    assert body(text)[0][:3] == ["fedvpt", r"\textbf{60.00 $\pm$ 14.14}", r"\textbf{40.00 $\pm$ 14.14}"]
    assert body(text)[1][:3] == [r"head\_tune", "40.00", r"\textbf{40.00}"]


def test_a_grid_has_a_heading_over_every_pair_of_columns(write):
    runs = [
        write(f"{method}{alpha}", [[5, 5]], method={"name": method}, partition={"alpha": alpha})
        for method in ("a_b", "c")
        for alpha in (0.1, 0.5)
    ]
    text = latex(runs)
    check_structure(text)
    assert r" & \multicolumn{2}{c}{alpha 0.1} & \multicolumn{2}{c}{alpha 0.5} \\" in text
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in text
    assert [row[0] for row in body(text)] == [r"a\_b", "c"]


def test_hostile_names_stay_text(write):
    name = '\\input{x}\n%$&#_{}~^<>|"[1]'
    text = latex([write("a", [[9]], method={"name": name}), write("b", [[9]], method={"name": "[other]"})])
    check_structure(text)
    assert "\\input{" not in text
    assert body(text)[1][0] == "{}[other]"


def test_a_note_cannot_break_out_of_its_comment(write):
    name = "x\n\\input{y}"
    text = latex([write("a", [[9]], method={"name": name}, federation={"rounds": 3}), write("b", [[8]])])
    assert "Unfinished" in text
    assert not any(line.startswith("\\input") for line in text.splitlines())
    check_structure(text)


@pytest.mark.parametrize("mark", [*SPECIAL])
def test_every_special_mark_is_escaped(mark):
    assert escaped(mark) != mark


def test_control_characters_become_spaces():
    assert escaped("a\x00\tb\u2028c") == "a b c"


def test_runs_without_evaluations_have_dashes(write):
    text = latex([write("a", []), write("b", [], method={"name": "head_tune"})])
    check_structure(text)
    assert body(text)[0][1] == "--"
