"""What a notebook shows of runs."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebook_shell import displayed, notebook
from PIL import Image
from remote_run import tiny_settings
from support import run as trained

import fedprompt
from fedprompt.errors import RunError
from fedprompt.experiment import Experiment
from fedprompt.federation.observer import Observer
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two seeds, one of them with markup in its name."""
    folder = tmp_path_factory.mktemp("notebook")
    return [trained(tiny_settings(folder, name, seed=seed)) for seed, name in enumerate(("first", "second"))]


class TestFrames:
    def test_rounds_have_the_figures_of_the_run_file(self, runs: list[Run]) -> None:
        rounds = runs[0].to_pandas().rounds
        assert list(rounds.index) == [0, 1, 2]
        assert rounds["average"][2] == runs[0].history()[-1]["average"]
        assert rounds["loss"][1] == runs[0].rounds()[1].loss
        assert np.isnan(rounds["average"][0])

    def test_clients_have_a_row_for_each_evaluation(self, runs: list[Run]) -> None:
        clients = runs[0].to_pandas().clients
        assert len(clients) == 4 * 2
        last = clients[clients["round"] == 2].set_index("client")["accuracy"]
        assert last.to_dict() == runs[0].client_accuracies()

    def test_events_have_their_columns_where_there_are_none(self, runs: list[Run]) -> None:
        assert list(runs[0].to_pandas().events.columns) == ["round", "client", "kind", "detail"]

    def test_a_comparison_has_mean_and_sample_deviation_over_seeds(self, runs: list[Run]) -> None:
        frame = fedprompt.compare([runs[0], str(runs[1].directory)])
        averages = [run.history()[-1]["average"] for run in runs]
        assert frame.loc["fedvpt", "seeds"] == 2
        assert frame.loc["fedvpt", "final_average"] == pytest.approx(np.mean(averages))
        assert frame.loc["fedvpt", "final_average_std"] == pytest.approx(np.std(averages, ddof=1))

    def test_without_pandas_the_error_says_what_to_install(
        self, runs: list[Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pandas", None)
        with pytest.raises(fedprompt.errors.ConfigError, match="needs the package pandas: pip install pandas"):
            runs[0].to_pandas()


class TestRunInANotebook:
    def test_is_a_table_and_a_curve_without_a_script(self, runs: list[Run]) -> None:
        shown = runs[0]._repr_html_()
        average = runs[0].summary()["average"]
        assert f"<tr><th>Average</th><td>{100 * average:.2f}</td></tr>" in shown
        (drawing,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', shown)
        assert b"</svg>" in base64.b64decode(drawing)
        assert "<script" not in shown

    def test_escapes_the_names_of_a_run(self, runs: list[Run], tmp_path: Path) -> None:
        place = tmp_path / "<script>alert(1)<"
        place.mkdir()
        (place / "run.db").write_bytes((runs[0].directory / "run.db").read_bytes())
        with_markup = fedprompt.load_run(place)
        assert "&lt;script&gt;alert(1)&lt;" in with_markup._repr_html_()
        assert "<script" not in with_markup._repr_html_()

    def test_a_picture_shows_itself(self, runs: list[Run]) -> None:
        assert runs[0].plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
        assert fedprompt.plot(runs).axes[0].get_title(loc="left") == "Average (solid) and Worst Local (dashed)"

    def test_a_client_predicts_one_picture_or_several(self, runs: list[Run], tmp_path: Path) -> None:
        client = runs[0].client("client_0")
        pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "one.png")
        one = client.predict(pixels)
        several = client.predict([str(tmp_path / "one.png"), pixels])
        assert client.predict(str(tmp_path / "one.png")).labels == one.labels == several.labels[:1]
        assert several.probabilities.shape == (2, len(client.class_names))
        assert one.labels == [client.class_names[int(one.probabilities[0].argmax())]]

    def test_an_array_that_is_no_picture_is_refused(self, runs: list[Run]) -> None:
        with pytest.raises(fedprompt.errors.DataError, match=r"picture must be uint8 of shape \(height, width, 3\)"):
            runs[0].client(0).predict(np.zeros((4, 4)))


class Interrupt(Observer):
    """Someone presses the stop button after a round."""

    def __init__(self, after: int) -> None:
        self.after, self.said = after, list[str]()

    def cohort(self, round: int, clients: Any) -> None:
        if round > self.after:
            raise KeyboardInterrupt

    def noted(self, sentence: str) -> None:
        self.said.append(sentence)


class TestAnInterrupt:
    def test_gives_the_finished_rounds_where_someone_types(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
        experiment, observer = Experiment(tiny_settings(tmp_path, "stopped")), Interrupt(after=1)
        early = experiment.run(observer=observer)
        assert [record.round for record in early.rounds()] == [0, 1]
        assert observer.said[-1].startswith("interrupted")
        assert experiment.run(resume=True, observer=Observer()).finished

    def test_ends_a_script(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            Experiment(tiny_settings(tmp_path, "stopped")).run(observer=Interrupt(after=1))


class TestWords:
    def test_errors_name_the_arguments_of_python(self, runs: list[Run]) -> None:
        with pytest.raises(RunError, match="exists already; continue it with resume=True"):
            Experiment(runs[0].config).run()

    def test_on_the_command_line_they_name_its_options(self) -> None:
        with fedprompt.errors.command_line():
            assert fedprompt.errors.argument("resume=True", "--resume") == "--resume"
        assert fedprompt.errors.argument("resume=True", "--resume") == "resume=True"


def test_progress_in_a_notebook_is_one_output_that_is_replaced(tmp_path: Path) -> None:
    with notebook() as shell:
        shell.user_ns["settings"] = tiny_settings(tmp_path, "watched")
        assert shell.run_cell("__import__('fedprompt').Experiment(settings).run();").success
        panels = [each for each in shell.display_pub.outputs if each.get("transient")]
        said = "".join(displayed(shell))
    assert len({each["transient"]["display_id"] for each in panels}) == 1
    assert not panels[0]["update"]
    assert panels[-1]["data"]["text/html"] == ""
    assert "done: Average" in said
