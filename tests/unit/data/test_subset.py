"""Parts of a source: which images stay, what they are called, and what identity the part has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedprompt.config import DataConfig, PartitionConfig
from fedprompt.data.partition.divide import make_manifest
from fedprompt.data.sources.base import Source
from fedprompt.data.sources.open import open_source
from fedprompt.data.sources.subset import Selection, few_per_domain, select
from fedprompt.data.sources.synthetic import CLASSES, TinySource
from fedprompt.errors import DataError

pytestmark = pytest.mark.unit
WHOLE = TinySource()


def chosen(**settings: object) -> Source:
    return select(TinySource(), DataConfig(source="tiny", **settings))


def same_pixels(part: Source, index: int, whole: Source, other: int) -> bool:
    return np.array_equal(np.asarray(part.image(index)), np.asarray(whole.image(other)))


def cell_counts(source: Source, split: str) -> list[list[int]]:
    """Images of every domain and class in one split."""
    here = source.splits == split
    counts = np.zeros((len(source.domain_names), len(source.class_names)), dtype=int)
    np.add.at(counts, (source.domains[here], source.labels[here]), 1)
    return counts.tolist()


def test_without_settings_the_source_itself_is_returned():
    source = TinySource()
    assert select(source, DataConfig(source="tiny")) is source


def test_classes_are_numbered_in_the_order_that_was_asked_for():
    part = chosen(classes=["cross", "disc"])
    assert part.class_names == ("cross", "disc")
    was = np.flatnonzero(np.isin(WHOLE.labels, [3, 0]))
    assert [part.class_names[label] for label in part.labels] == [CLASSES[label] for label in WHOLE.labels[was]]
    assert part.domains.tolist() == WHOLE.domains[was].tolist()
    assert part.splits.tolist() == WHOLE.splits[was].tolist()
    assert part.ranks.tolist() == WHOLE.ranks[was].tolist()
    for index in (0, 20, len(part) - 1):
        assert same_pixels(part, index, WHOLE, was[index])


def test_an_unknown_class_names_field_rule_and_value():
    with pytest.raises(DataError) as caught:
        chosen(classes=["disc", "cube"])
    assert str(caught.value) == (
        "data.classes must hold classes of 'tiny' (disc, square, triangle, cross, bars), got 'cube'"
    )


def test_a_class_that_is_named_twice_is_refused():
    with pytest.raises(DataError, match=r"data\.classes must hold every class once, got 'disc'"):
        chosen(classes=["disc", "cross", "disc"])


def test_per_domain_counts_training_and_test_images_in_their_proportion():
    part = chosen(per_domain=30)  # 5 classes, two thirds of the images train
    assert cell_counts(part, "train") == [[4] * 5] * 4
    assert cell_counts(part, "test") == [[2] * 5] * 4


def test_per_domain_keeps_the_lowest_ranks():
    part = chosen(per_domain=30)
    assert part.ranks[part.splits == "train"].max() == 3
    assert part.ranks[part.splits == "test"].max() == 1


def test_per_domain_above_the_supply_keeps_everything():
    assert len(chosen(per_domain=10_000)) == len(WHOLE)


def test_classes_are_chosen_before_the_images_of_a_domain_are_counted():
    part = chosen(classes=["square", "bars"], per_domain=12)
    assert np.bincount(part.domains).tolist() == [12] * 4
    assert np.bincount(part.labels).tolist() == [24, 24]


class Uneven(Source):
    """Class sizes that differ, without split and ranks; nobody looks at its images."""

    def __init__(self, sizes: list[int]) -> None:
        self.name, self.fingerprint = "uneven", "0" * 64
        self.class_names, self.domain_names = tuple(f"class{label}" for label in range(len(sizes))), ("all",)
        self.labels = np.arange(len(sizes)).repeat(sizes)
        self.domains, self.splits = np.zeros(len(self.labels), dtype=np.int64), None

    def image(self, index: int) -> Image.Image:
        raise NotImplementedError


@given(st.lists(st.integers(1, 18), min_size=1, max_size=5), st.integers(1, 100), st.integers(0, 3))
def test_per_domain_is_as_even_over_classes_as_the_data_allow(sizes, limit, seed):
    source = Uneven(sizes)
    kept = few_per_domain(source, np.arange(len(source)), limit, seed)
    counts = np.bincount(source.labels[kept], minlength=len(sizes))
    assert counts.sum() == min(limit, sum(sizes))
    assert len(set(kept.tolist())) == len(kept)
    for count, size in zip(counts, sizes, strict=True):
        assert count == size or count >= counts.max() - 1  # a class that is behind the others has no more images


def test_per_domain_without_ranks_follows_the_split_seed():
    source = Uneven([18, 18])
    first, again, other = (
        select(source, DataConfig(source="tiny", per_domain=10, split_seed=seed)).fingerprint for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_validation_images_take_no_place_of_others():
    source = TinySource()
    source.splits = np.where(source.ranks >= 10, "val", source.splits)
    part = select(source, DataConfig(source="tiny", per_domain=40))
    assert np.bincount(part.domains).tolist() == [40] * 4
    assert "val" not in part.splits


def test_a_domain_without_images_of_the_classes_stays_empty():
    source = TinySource()
    source.domains = np.where(source.labels == 0, 0, source.domains)
    part = select(source, DataConfig(source="tiny", classes=["disc"], per_domain=7))
    assert np.bincount(part.domains, minlength=4).tolist() == [7, 0, 0, 0]


def test_the_identity_follows_the_source_the_images_and_the_classes():
    indices = np.arange(10)
    identity = Selection(TinySource(), indices, CLASSES).fingerprint
    other = TinySource()
    other.fingerprint = "0" * 64
    assert identity == Selection(TinySource(), indices, CLASSES).fingerprint
    assert (
        len(
            {
                identity,
                TinySource().fingerprint,
                Selection(other, indices, CLASSES).fingerprint,
                Selection(TinySource(), indices + 1, CLASSES).fingerprint,
                Selection(TinySource(), indices, CLASSES[::-1]).fingerprint,
            }
        )
        == 5
    )


def test_a_manifest_of_a_part_says_what_was_chosen_and_fits_only_that_part(cache: Path):
    data = DataConfig(source="tiny", classes=["bars", "disc"], per_domain=24)
    source = open_source(data, cache)
    manifest = make_manifest(source, data, PartitionConfig(clients=4), seed=0)
    manifest.check(source)
    raw = json.loads(manifest.to_json())
    assert raw["classes"] == ["bars", "disc"]
    assert (raw["scheme"]["data"]["classes"], raw["scheme"]["data"]["per_domain"]) == (["bars", "disc"], 24)
    assert manifest.class_matrix(source.labels).tolist() == [[8, 8]] * 4
    with pytest.raises(DataError, match=r"manifest\.source\.fingerprint must be that of data\.source 'tiny'"):
        manifest.check(TinySource())
