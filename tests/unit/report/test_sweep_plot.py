from itertools import count

import numpy as np
import pytest
from PIL import Image

from fedprompt.report import sweep_plot
from fedprompt.report.plot_style import colour
from fedprompt.runs.families import families

pytestmark = pytest.mark.unit


@pytest.fixture
def at(write):
    """A run of a method at a value of `method.draws`: `at(3, [9, 5])`, with correct answers of 10 by client."""

    numbers = count()

    def make(value, correct, method="fedvpt", seed=0, **changes):
        return write(f"run{next(numbers)}", [correct], method={"name": method, "draws": value}, seed=seed, **changes)

    return make


def lines(axes):
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def ticks(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


def bands(axes):
    """Outlines of the bands that have something in them."""
    return [path.vertices for band in axes.collections for path in band.get_paths() if len(path.vertices)]


def test_average_and_worst_stand_against_the_value_whatever_the_order_of_the_runs(at):
    figure = sweep_plot.sweep_curves([at(5, [9, 7]), at(1, [6, 2]), at(3, [8, 4])], "method.draws")
    average, worst = figure.axes
    assert lines(average) == [([1, 3, 5], pytest.approx([40, 60, 80]))]
    assert lines(worst) == [([1, 3, 5], pytest.approx([20, 40, 70]))]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Average", "Worst Local"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"method.draws"}
    assert {axes.get_ylabel() for axes in figure.axes} == {"Accuracy (%)"}


def test_a_line_per_method_in_the_colours_and_words_of_the_legend(at):
    runs = [at(value, [value], method) for value in (1, 2) for method in ("fedvpt", "local")]
    figure = sweep_plot.sweep_curves(runs, "method.draws")
    assert [line.get_color() for line in figure.axes[0].get_lines()] == [colour(0), colour(1)]
    assert legend(figure) == ["fedvpt", "local"]


def test_families_of_one_method_have_lines_of_their_own(at):
    runs = [at(value, [value], train={"lr": lr}) for value in (1, 2) for lr in (0.1, 0.2)]
    assert legend(sweep_plot.sweep_curves(runs, "method.draws")) == ["fedvpt lr=0.1", "fedvpt lr=0.2"]


def test_a_table_of_the_same_runs_shows_the_swept_value(at):
    runs = [at(value, [value], method) for value in (1, 2) for method in ("fedvpt", "local")]
    assert [group.label for group in families(runs)] == [
        f"{method} draws={value}" for value in (1, 2) for method in ("fedvpt", "local")
    ]


def test_the_band_is_one_standard_deviation_over_seeds(at):
    runs = [at(value, [correct], seed=seed) for value in (1, 2) for seed, correct in enumerate((4, 6))]
    figure = sweep_plot.sweep_curves(runs, "method.draws")
    assert lines(figure.axes[0]) == [([1, 2], pytest.approx([50, 50]))]
    (band,) = bands(figure.axes[0])
    std = np.std([40, 60], ddof=1)
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((50 - std, 50 + std))


def test_one_seed_has_no_band(at):
    assert bands(sweep_plot.sweep_curves([at(1, [4]), at(2, [6])], "method.draws").axes[0]) == []


@pytest.mark.parametrize(
    ("values", "scale", "places"),
    [
        ([1, 2, 10], "linear", [1, 2, 10]),
        ([0.001, 0.01, 0.1], "log", [0.001, 0.01, 0.1]),
        ([-100, 1, 2], "linear", [-100, 1, 2]),
        ([0, 0.001, 1], "even", [0, 1, 2]),
        ([0], "linear", [0]),
        (["random", "zero"], "even", [0, 1]),
        (["zero", "random"], "even", [0, 1]),
        ([1, None], "even", [0, 1]),
        ([True, False], "even", [0, 1]),
        ([[1, 2], [3]], "even", [0, 1]),
    ],
)
def test_values_stand_to_scale_where_they_are_numbers(values, scale, places):
    axis = sweep_plot.Axis(values)
    assert axis.scale == scale
    assert [axis.place(value) for value in values] == places


def test_the_axis_is_logarithmic_only_over_decades(at):
    def scale(*values):
        axes = sweep_plot.sweep_curves([at(value, [5]) for value in values], "method.draws").axes[0]
        return axes.get_xscale(), ticks(axes)

    assert scale(1, 5, 10) == ("linear", ["1", "5", "10"])
    assert scale(0.001, 0.1, 10) == ("log", ["0.001", "0.1", "10"])
    assert scale(0, 0.002, 2) == ("linear", ["0", "0.002", "2"])


def test_words_stand_side_by_side_in_the_order_given(at):
    axes = sweep_plot.sweep_curves([at("zero", [4]), at("random", [6])], "method.draws").axes[0]
    assert lines(axes) == [([0, 1], pytest.approx([40, 60]))]
    assert ticks(axes) == ["zero", "random"]


def test_a_long_sweep_has_ticks_that_can_be_read(at):
    axes = sweep_plot.sweep_curves([at(value, [5]) for value in range(1, 41)], "method.draws").axes[0]
    assert len(ticks(axes)) <= 12
    assert len(lines(axes)[0][0]) == 40


def test_a_setting_may_hold_a_mapping(write):
    runs = [write(f"{rate}", [[5]], train={"lrs": {"head.*": rate}}) for rate in (0.1, 0.2)]
    figure = sweep_plot.sweep_curves(runs, "train.lrs")
    assert ticks(figure.axes[0]) == ['{"head.*": 0.1}', '{"head.*": 0.2}']
    assert legend(figure) == ["fedvpt"]


def test_a_run_that_was_not_evaluated_yet_has_no_point(at, write):
    empty = write("empty", [], method={"name": "fedvpt", "draws": 2})
    figure = sweep_plot.sweep_curves([at(1, [4]), empty], "method.draws")
    assert lines(figure.axes[0]) == [([1], pytest.approx([40])), ([], [])]
    assert legend(figure) == ["fedvpt", "fedvpt (0/1 rounds)"]


def test_the_picture_is_written_and_opens(at, tmp_path):
    path = sweep_plot.save_sweep([at(1, [4]), at(2, [6])], "method.draws", tmp_path / "new" / "sweep.png")
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"
        assert image.width > image.height > 400
    assert [file.name for file in path.parent.iterdir()] == ["sweep.png"]


def test_a_flat_line_is_not_blown_up(at):
    average, worst = sweep_plot.sweep_curves([at(1, [5, 0]), at(2, [5, 0])], "method.draws").axes
    assert average.get_ylim() == pytest.approx((22, 28))
    assert worst.get_ylim() == pytest.approx((0, 6))


def test_a_default_that_is_not_written_down_has_its_place(write):
    """Settings that are younger than run files are absent from them where they have their default."""
    sections = [{"rounds": 1}, {"rounds": 1, "test_classes": "own"}]
    runs = [write(f"run{place}", [[9 - place]], federation=section) for place, section in enumerate(sections)]
    average, _ = sweep_plot.sweep_curves(runs, "federation.test_classes").axes
    assert ticks(average) == ["all", "own"]
    assert lines(average) == [([0, 1], [90.0, 80.0])]
