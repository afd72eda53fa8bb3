"""Figures of a clinic against closed forms, naive counts and, where it is installed, scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedprompt.metrics.one_against_rest import Figures, auroc, sensitivity

pytestmark = pytest.mark.unit

LABELS = np.array([0, 0, 0, 0, 1, 1, 2, 2])
PREDICTED = np.array([0, 0, 0, 1, 1, 0, 2, 2])


@pytest.fixture
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of 90 images; rounded, so that scores tie."""
    generator = np.random.default_rng(0)
    labels, scores = generator.integers(0, 4, 90), generator.random((90, 4))
    scores[np.arange(90), labels] += 0.4
    return labels, np.round(scores / scores.sum(1, keepdims=True), 1)


def test_recall_and_f1_are_means_over_classes() -> None:
    found = Figures.of(LABELS, np.eye(3)[PREDICTED])
    assert found.confusion.tolist() == [[3, 1, 0], [1, 1, 0], [0, 0, 2]]
    assert found.accuracy == 6 / 8
    assert found.balanced_accuracy == pytest.approx((3 / 4 + 1 / 2 + 1) / 3)
    assert found.macro_f1 == pytest.approx((6 / 8 + 2 / 4 + 1) / 3)


def test_a_class_without_images_is_left_out() -> None:
    found = Figures.of(np.array([0, 0, 1, 1]), np.eye(3)[[0, 0, 1, 0]])
    assert found.balanced_accuracy == pytest.approx((1 + 1 / 2) / 2)
    assert found.macro_f1 == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_auroc_is_the_share_of_pairs_in_the_right_order_ties_counted_half(
    drawn: tuple[np.ndarray, np.ndarray],
) -> None:
    labels, probabilities = drawn
    expected = []
    for number in range(4):
        inside, outside = probabilities[labels == number, number], probabilities[labels != number, number]
        expected.append(np.mean([(a > b) + (a == b) / 2 for a in inside for b in outside]))
    assert Figures.of(labels, probabilities).auroc == pytest.approx(np.mean(expected))


def test_sensitivity_is_the_best_that_the_specificity_allows() -> None:
    positive = np.array([True] * 4 + [False] * 10)
    scores = np.array([0.9, 0.8, 0.5, 0.1, 0.85, 0.4, *[0.2] * 8])
    assert sensitivity(positive, scores, 1.0) == 1 / 4  # above 0.85
    assert sensitivity(positive, scores, 0.9) == 3 / 4  # one of ten wrong
    assert sensitivity(positive, scores, 0.0) == 1.0


def test_equal_scores_tell_nothing_apart() -> None:
    assert auroc(np.array([True, False, False]), np.ones(3)) == 0.5


def test_one_class_alone_has_no_curve() -> None:
    found = Figures.of(np.zeros(3, dtype=int), np.eye(2)[[0, 0, 1]])
    assert math.isnan(found.auroc)
    assert math.isnan(found.sensitivity)


def test_all_are_those_of_scikit_learn(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    labels, probabilities = drawn
    found, predicted = Figures.of(labels, probabilities, 0.8), probabilities.argmax(1)
    assert (found.confusion == sklearn.confusion_matrix(labels, predicted)).all()
    assert found.balanced_accuracy == pytest.approx(sklearn.balanced_accuracy_score(labels, predicted))
    assert found.macro_f1 == pytest.approx(sklearn.f1_score(labels, predicted, average="macro"))
    areas, best = [], []
    for number in range(4):
        false, true, _ = sklearn.roc_curve(labels == number, probabilities[:, number], drop_intermediate=False)
        areas.append(sklearn.roc_auc_score(labels == number, probabilities[:, number]))
        best.append(true[false <= 0.2 + 1e-12].max())
    assert found.auroc == pytest.approx(np.mean(areas))
    assert found.sensitivity == pytest.approx(np.mean(best))
