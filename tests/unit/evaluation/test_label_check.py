"""The look at the labels with which every run on a dual encoder begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as some
from support import StopAfter, Stopped, content, experiment, run, seeded
from torch import Tensor

from fedprompt.core.method import World
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.evaluation import label_check
from fedprompt.evaluation.label_check import check_labels, derangement, evenly, figures, sentence, spaced, warning
from fedprompt.experiment import run_file
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.loop import Observer
from fedprompt.methods.promptfl import PromptFL

pytestmark = pytest.mark.unit

METHOD = {"name": "promptfl", "context_tokens": 2}


@pytest.fixture
def dual(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        return settings(**{"backbone": {"name": "tiny-clip"}, "method": METHOD, **changes})

    return make


def separable(classes: int, each: int, noise: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """Images around the texts of their classes."""
    generator = torch.Generator().manual_seed(0)
    text = F.normalize(torch.randn(classes, 64, generator=generator), dim=-1)
    labels = torch.arange(classes).repeat_interleave(each)
    images = F.normalize(text[labels] + noise * torch.randn(len(labels), 64, generator=generator), dim=-1)
    return images, labels, text


@given(some.integers(2, 60), some.integers(0, 10**6))
def test_a_derangement_is_a_permutation_that_moves_everyone(count: int, seed: int) -> None:
    moved = derangement(count, seeded(seed))
    assert sorted(moved.tolist()) == list(range(count))
    assert all(place != position for position, place in enumerate(moved.tolist()))


@given(some.lists(some.integers(1, 40), min_size=1, max_size=30), some.integers(1, 300))
def test_images_are_taken_evenly_from_the_clients(sizes: list[int], limit: int) -> None:
    counts = evenly(sizes, limit)
    assert sum(counts) == min(limit, sum(sizes))
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))
    open_ones = [count for count, size in zip(counts, sizes, strict=True) if count < size]
    assert not open_ones or max(counts) - min(open_ones) <= 1


@given(some.integers(1, 200), some.data())
def test_spaced_positions_differ_and_exist(size: int, data: Any) -> None:
    count = data.draw(some.integers(0, size))
    positions = spaced(size, count).tolist()
    assert len(set(positions)) == count
    assert all(0 <= position < size for position in positions)


def test_the_figures_are_those_of_a_naive_count() -> None:
    images, labels, text = separable(6, 20, noise=0.5)
    found = figures(images, labels, text, seed=3)
    called = [max(range(6), key=lambda c: float(image @ text[c])) for image in images]
    right = sum(name == label for name, label in zip(called, labels.tolist(), strict=True)) / 120
    assert 0.3 < right < 1
    assert found["right"] == pytest.approx(right)
    assert found["blind"] == pytest.approx(sum(20 / 120 * called.count(c) / 120 for c in range(6)))
    assert found["chance"] == pytest.approx(1 / 6)
    # class c has the name of s(c): an image is right by mistake when it is called s(its label)
    generator = label_check.stream(3, 0, label_check.SERVER, "label_check")
    moved = [derangement(6, generator).tolist() for _ in range(label_check.PERMUTATIONS)]
    mistaken = [sum(called[i] == s[label] for i, label in enumerate(labels.tolist())) / 120 for s in moved]
    assert found["permuted"] == pytest.approx(sum(mistaken) / len(mistaken))


def test_separable_images_pass_by_a_wide_margin_and_permuted_names_do_not_name_them() -> None:
    images, labels, text = separable(8, 10)
    found = figures(images, labels, text, seed=0)
    assert (found["right"], found["permuted"], found["clear"]) == (1.0, 0.0, True)
    assert warning(found) is None
    assert sentence(found) == (
        "label check: zero-shot 100.0 %, with permuted names 0.0 %, chance 12.5 % (80 test images, 8 classes)"
    )


def test_mixed_up_labels_are_told() -> None:
    images, labels, text = separable(8, 10)
    found = figures(images, (labels + 1) % 8, text, seed=0)
    assert not found["clear"]
    assert "labels or class names may be mixed up" in str(warning(found))


def test_saying_the_same_of_every_image_is_no_knowledge_however_common_the_class() -> None:
    """Eight in ten images are of class 0, and all are called so: far above chance, and worth nothing."""
    labels = torch.tensor([0] * 80 + [1] * 10 + [2] * 10)
    text = torch.eye(3, 4)
    found = figures(text[torch.zeros(100, dtype=torch.long)], labels, text, seed=0)
    assert found["right"] == 0.8
    assert found["blind"] == pytest.approx(0.8)
    assert not found["clear"]


def test_the_threshold_is_three_standard_errors_above_guessing() -> None:
    images, labels, text = separable(4, 25)
    found = figures(images, labels, text, seed=0)
    assert found["threshold"] == pytest.approx(0.25 + 3 * (0.25 * 0.75 / 100) ** 0.5)


def federation(values: Mapping[str, Any]) -> tuple[World, ImageBank]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    return world, ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )


def told_by(world: World, said: Tensor) -> World:
    """The world with a text tower that says these features of the classes."""
    return replace(world, language=replace(world.text, encode=lambda contexts, position: said.unsqueeze(0)))


def test_the_path_from_images_to_labels_is_the_one_the_federation_uses(dual: Any) -> None:
    """Class means of the very images stand for a text tower that knows them; the wrong order of names must not pass."""
    world, bank = federation(dual(data={"test_per_cell": 6}))
    parts = [bank.images(client, "test") for client in range(world.clients)]
    images = torch.cat([part.features("image", torch.arange(len(part))) for part in parts])
    labels = torch.cat([part.labels for part in parts])
    centred = images - images.mean(0)
    means = torch.stack([centred[labels == label].mean(0) for label in range(world.classes)])
    found = check_labels(told_by(world, F.normalize(means, dim=-1)), bank, seed=0)
    assert found is not None
    assert found["images"] == len(labels) == 120
    assert found["clear"], found
    wrong = check_labels(told_by(world, F.normalize(means, dim=-1).roll(1, 0)), bank, seed=0)
    assert wrong is not None
    assert not wrong["clear"], wrong


def test_no_more_images_are_looked_at_than_the_limit(dual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_check, "IMAGES", 10)
    found = check_labels(*federation(dual()), seed=0)
    assert found is not None
    assert found["images"] == 10


def test_classes_that_have_numbers_for_names_are_told(dual: Any) -> None:
    """A parquet file without the JSON beside it: a text tower that reads "a photo of a 3" knows nothing."""
    world, bank = federation(dual())
    named = check_labels(world, bank, seed=0)
    assert named is not None
    assert "numbers for names" not in str(warning(named))
    found = check_labels(replace(world, class_names=tuple(map(str, range(world.classes)))), bank, seed=0)
    assert found is not None
    assert "numbers for names" in str(warning(found))
    assert "JSON" in str(warning(found))
    assert warning({**found, "clear": True}) is None


def test_one_class_has_no_other_to_be_confused_with(dual: Any) -> None:
    world, bank = federation(dual(data={"classes": ["disc"]}))
    assert check_labels(world, bank, seed=0) is None


class Listening(Observer):
    def __init__(self) -> None:
        self.checks: list[Mapping[str, Any]] = []

    def checked(self, check: Mapping[str, Any]) -> None:
        self.checks.append(check)


def test_a_run_begins_with_the_check_and_keeps_it(dual: Any) -> None:
    observer = Listening()
    done = run(dual(), observer=observer)
    check = done.reader.fact("label_check")
    assert check["images"] == 40
    assert observer.checks == [check]
    assert not check["clear"]  # a random backbone knows nothing, and may run all the same
    assert done.finished
    assert [(round, kind, detail) for round, _, kind, detail in done.reader.events()] == [
        (0, "label_check", warning(check))
    ]


def test_the_check_is_deterministic_and_not_repeated_on_resume(dual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped):
        run(dual(name="broken"), observer=StopAfter(1))
    whole = run(dual(name="whole"))

    def never(*_: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(run_file, "check_labels", never)
    observer = Listening()
    resumed = run(dual(name="broken"), observer=observer, resume=True)
    assert content(resumed) == content(whole)
    assert observer.checks == [whole.reader.fact("label_check")]


def test_methods_that_read_no_class_names_are_not_checked(settings: Any) -> None:
    done = run(settings())
    assert done.reader.fact("label_check") is None
    assert done.reader.events() == []


def test_the_check_changes_no_result(dual: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = run(dual(name="checked"), PromptFL(context_tokens=2))
    monkeypatch.setattr(run_file, "check_labels", lambda *_: None)
    plain = run(dual(name="plain"), PromptFL(context_tokens=2))
    assert checked.reader.server_state() == plain.reader.server_state()
    assert checked.reader.evaluations(2) == plain.reader.evaluations(2)
