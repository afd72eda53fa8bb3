"""The posterior over test images: spreads by hand, components against the covariance, attention against diagnostics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from remote_run import tiny_settings
from support import run
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.errors import ConfigError
from fedprompt.inference.loaded_run import LoadedRun
from fedprompt.inference.posterior import Posterior, posterior
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

BAYES = {"name": "pfedbayespt", "prompt_tokens": 2, "instance_tokens": 2, "predict_draws": 3, "diagnose": True}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tiny_settings(tmp_path_factory.mktemp("posterior"), "drawn", method=BAYES))


def given(means: np.ndarray, std: np.ndarray | None = None) -> Posterior:
    images, blocks = means.shape[1:3]
    nothing = np.zeros(images, dtype=int)
    names = ("a",)
    return Posterior(
        tuple(range(8, 8 + blocks)),
        means,
        std,
        np.ones((images, blocks)),
        nothing,
        nothing,
        nothing,
        names,
        names,
        names,
    )


def test_spreads_are_those_counted_by_hand() -> None:
    first, second = [[3.0, 0.0], [1.0, 0.0]], [[0.0, 3.0], [0.0, 1.0]]  # two masks of two images
    means = np.array([first, second]).transpose(1, 0, 2)[:, :, None, :]  # (K, n, L, d)
    found = given(means, np.array([[0.5], [0.5]])).spreads
    length = np.sqrt((9 + 1 + 9 + 1) / 8)
    assert found["masks"][0] == pytest.approx(
        np.sqrt(4 / 8) / length
    )  # each is 1 from its centre, in one of two channels
    assert found["images"][0] == pytest.approx(np.sqrt(1.0) / length)  # centres (2, 0) and (0, 2) around (1, 1)
    assert found["sigma"][0] == pytest.approx(0.5 / length)


def test_one_mask_has_no_spread_and_a_method_without_noise_no_sigma() -> None:
    found = given(np.random.default_rng(0).normal(size=(1, 6, 2, 4))).spreads
    assert found["masks"].tolist() == [0, 0]
    assert set(found) == {"masks", "images"}


def test_components_are_those_of_the_covariance() -> None:
    means = np.random.default_rng(0).normal(size=(3, 20, 2, 5)) * np.array([5, 3, 1, 1, 1])
    points, shares = given(means).components(9)
    rows = means.mean(0)[:, 1]
    values = np.sort(np.linalg.eigvalsh(np.cov(rows.T)))[::-1]
    assert points.var(axis=0, ddof=1) == pytest.approx(values[:2])
    assert shares == pytest.approx(values[:2] / values.sum())


def test_attention_and_sigma_are_those_that_the_run_measured(drawn: Run) -> None:
    opened = LoadedRun.open(drawn.directory)
    found = posterior(opened, most=10_000, draws=3)
    opened.close()
    said = [result["diagnostics"] for result in drawn.evaluations(2).values()]
    images = [result["samples"] for result in drawn.evaluations(2).values()]
    assert len(found.labels) == sum(images)
    attention = np.average([each["instance.attention"] for each in said], weights=images)
    assert found.attention.mean() == pytest.approx(attention, rel=0.05)  # the run has another draw of the masks
    std = np.average([each["posterior.std"] for each in said], weights=images)
    assert found.std is not None
    assert found.std.mean() == pytest.approx(std, rel=0.05)
    assert found.spreads["masks"].min() > 0
    assert found.means.shape[:2] == (3, len(found.labels))


def test_other_methods_have_no_posterior(finished: Run) -> None:
    opened = LoadedRun.open(finished.directory)
    with pytest.raises(ConfigError, match=r"method\.name must be pfedbayespt"):
        posterior(opened)
    opened.close()


def test_the_command_draws_a_picture_and_says_the_numbers(drawn: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "posterior.svg"
    arguments = ["posterior", str(drawn.directory), "--output", str(path), "--images", "8", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["images"] <= 8
    assert {"masks", "images", "sigma"} == set(said["spread"])
    assert path.read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--output", "posterior.jpg"], "--output must end with .png or .svg"),
        (["--block", "99"], "--block must be one"),
    ],
)
def test_a_mistake_is_told(drawn: Run, more: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["posterior", str(drawn.directory), *more])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
