"""`engine.cache_dtype: bfloat16`: half the room, three digits, and the same bits wherever features come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import experiment, run, shared_tensors, worst_difference

from fedprompt.features.feature_rows import MEMORY
from fedprompt.features.image_bank import ImageBank

pytestmark = pytest.mark.unit

BFLOAT = {"cache_dtype": "bfloat16"}
NAMES = ("cls", "patches", "block_inputs:2")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    MEMORY.clear()
    yield
    MEMORY.clear()


def bank_of(settings: Any, engine: dict[str, Any]) -> ImageBank:
    made = experiment(settings(engine=engine))
    return made.factory.bank(*made.factory.prepare()[:3])


def features(settings: Any, engine: dict[str, Any]) -> dict[str, torch.Tensor]:
    MEMORY.clear()
    bank = bank_of(settings, engine)
    images = torch.from_numpy(bank.tables._held)
    return {name: bank.features(name, images) for name in NAMES} | {"tokens": bank.tokens(images, 1)}


def test_stored_features_are_those_of_float32_rounded_to_bfloat16(settings: Any) -> None:
    exact, rounded = features(settings, {}), features(settings, BFLOAT)
    for name, tensor in exact.items():
        assert rounded[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(rounded[name], tensor.bfloat16().float())
        assert not torch.equal(rounded[name], tensor)


def test_they_have_the_same_bits_wherever_they_are_kept(settings: Any) -> None:
    first = features(settings, BFLOAT)
    for room in ({"disk_gib": 0}, {"memory_gib": 0}, {"memory_gib": 0, "disk_gib": 0}, {}):
        for name, tensor in features(settings, {**BFLOAT, **room}).items():
            assert torch.equal(tensor, first[name]), (name, room)


def test_their_files_have_half_the_size_and_are_never_taken_for_others(settings: Any) -> None:
    folder = Path(settings()["output"]["cache"], "features")

    def bytes_of_new_files(engine: dict[str, Any]) -> int:
        before = set(folder.glob("*.rows"))
        features(settings, engine)
        return sum(path.stat().st_size for path in set(folder.glob("*.rows")) - before)

    whole, half = bytes_of_new_files({}), bytes_of_new_files(BFLOAT)
    assert 0 < half < 0.6 * whole
    assert bytes_of_new_files(BFLOAT) == 0


def test_they_hold_twice_as_many_images_in_the_same_memory(settings: Any) -> None:
    def kept(engine: dict[str, Any]) -> int:
        MEMORY.clear()
        bank = bank_of(settings, engine)
        bank.features("cls", torch.from_numpy(bank.tables._held))
        return sum(table.nbytes for table in MEMORY._tables.values())

    assert kept({}) == 2 * kept(BFLOAT)


def test_what_training_makes_of_them_is_near_and_the_identity_of_a_run_is_the_same(settings: Any) -> None:
    runs = []
    for name, engine in (("exact", {}), ("rounded", BFLOAT)):
        MEMORY.clear()
        runs.append(run(settings(name=name, method={"name": "head_tune"}, engine=engine)))
    difference = worst_difference(*(shared_tensors(each) for each in runs))
    largest = max(float(tensor.abs().max()) for tensor in shared_tensors(runs[0]).values())
    assert 0 < difference < 0.02 * largest
