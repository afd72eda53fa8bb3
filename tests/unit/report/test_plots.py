import numpy as np
import pytest
from PIL import Image

from fedprompt.report import heatmaps, plot_style, plots
from fedprompt.report.method_grid import arrange
from fedprompt.runs.families import families

pytestmark = pytest.mark.unit

PICTURES = (
    plots.learning_curves,
    plots.client_spread,
    plots.domain_bars,
    plots.bytes_against_accuracy,
    plots.calibration,
)


def lines(figure):
    return [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]


def test_curves_are_the_mean_over_seeds_in_per_cent(write):
    figure = plots.learning_curves([write("a", [[9, 5], [8, 6]]), write("b", [[7, 3], [6, 2]], seed=1)])
    average, worst = lines(figure)
    np.testing.assert_allclose(average.get_ydata(), [60, 55])
    np.testing.assert_allclose(worst.get_ydata(), [40, 40])
    assert (average.get_linestyle(), worst.get_linestyle()) == ("-", "--")


def test_rounds_are_whole_even_where_there_is_only_one(write):
    axes = plots.learning_curves([write("a", [[9, 5]])]).axes[0]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_clients_are_sorted_from_the_worst_to_the_best_of_the_last_round(write):
    (line,) = lines(plots.client_spread([write("a", [[1, 1, 1], [9, 2, 5]])]))
    np.testing.assert_allclose(line.get_ydata(), [20, 50, 90])


def test_domain_bars_have_the_height_of_the_accuracy(runs):
    figure = plots.domain_bars(runs[:1])
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights, [100 * share for share in runs[0].summary()["domains"].values()])


def test_bytes_stand_against_the_average(write):
    (point, *_) = lines(plots.bytes_against_accuracy([write("a", [[9, 5]])]))
    assert point.get_xdata()[0] == 80 + 40 + 2000
    assert point.get_ydata()[0] == pytest.approx(70)


def test_calibration_pools_the_bins_of_all_clients_and_seeds(write):
    runs = [write("a", [[9, 5]]), write("b", [[8, 4]], seed=1)]
    np.testing.assert_allclose(plots.pooled_bins(runs), [[40, 20, 26]])
    _, curve = lines(plots.calibration(runs))
    assert (curve.get_xdata()[0], curve.get_ydata()[0]) == (50, 65)


def test_heat_map_shows_clients_by_evaluated_round(write):
    figure = heatmaps.client_heatmap(write("a", [[9, 5], [8, 6]]))
    np.testing.assert_allclose(figure.axes[0].get_images()[0].get_array(), [[90, 80], [50, 60]])


def test_heat_map_leaves_out_clients_that_are_not_tested(write):
    run = write("a", [[9, 5], [8, 6]], clients=["zero", "one", "two", "three"], tested=[1, 3])
    axes = heatmaps.client_heatmap(run).axes[0]
    np.testing.assert_allclose(axes.get_images()[0].get_array(), [[90, 80], [50, 60]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "three"]


def test_heat_map_of_a_run_that_was_not_evaluated_yet_is_empty(write):
    plot_style.png(heatmaps.client_heatmap(write("a", [])), dpi=20)


def test_overview_is_a_png_that_opens(runs, tmp_path):
    path = plots.save_overview(arrange(runs), tmp_path / "overview.png")
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"
        assert image.width > image.height > 400
    assert [file.name for file in tmp_path.iterdir()] == ["overview.png"]


def test_overview_has_a_line_of_panels_for_every_task(write, tmp_path):
    runs = [write(f"m{m}", [[9, 5]], partition={"domains_per_client": m}) for m in (1, 2)]
    heights = []
    for some in (runs[:1], runs):
        with Image.open(plots.save_overview(arrange(some), tmp_path / "overview.png")) as image:
            heights.append(image.height)
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.1)


def test_legend_flags_unfinished_runs(runs, unfinished):
    figure = plots.learning_curves([*runs, unfinished])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        group.title for group in families([*runs, unfinished])
    ]
    assert "fedvpt (1/2 rounds)" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("draw", PICTURES)
def test_a_run_that_was_not_evaluated_yet_gives_an_empty_picture(draw, write):
    plot_style.png(draw([write("a", [])]), dpi=20)


def test_a_client_name_that_looks_like_mathematics_is_plain_text(write):
    assert "$\\frac{$" in plot_style.svg(heatmaps.client_heatmap(write("a", [[9]], clients=["$\\frac{$"])), "x")


def test_colours_and_markers_do_not_repeat_together_for_forty_methods():
    assert len({(plot_style.colour(number), plot_style.marker(number)) for number in range(40)}) == 40


def test_equal_runs_give_equal_svg(runs):
    assert plot_style.svg(plots.learning_curves(runs), "x") == plot_style.svg(plots.learning_curves(runs), "x")


def test_where_nothing_is_sent_the_only_tick_is_zero_bytes(write):
    runs = [write("a", [[9]]), write("b", [[8]], seed=1)]
    figure = plots.bytes_against_accuracy(runs)
    plots.scale_bytes(figure.axes[0], [0.0, 0.0])
    axis = figure.axes[0].xaxis
    assert [axis.get_major_formatter()(tick) for tick in axis.get_majorticklocs()] == ["0 B"]
