"""Random streams depend on what they are for and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedprompt.streams import SERVER, stream

pytestmark = pytest.mark.unit


def draw(*key: object) -> float:
    return torch.rand(1, generator=stream(*key), dtype=torch.float64).item()  # type: ignore[arg-type]


def test_the_same_key_gives_the_same_numbers() -> None:
    assert draw(0, 1, 2, "noise") == draw(0, 1, 2, "noise")


def test_every_part_of_the_key_counts() -> None:
    keys = itertools.product((0, 1), (0, 1, 10), (SERVER, 0, 1, 10), ("noise", "batches"))
    drawn = [draw(*key) for key in keys]
    assert len(set(drawn)) == len(drawn)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    draw(0, 0, 0, "x")
    assert torch.equal(before, torch.get_rng_state())


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert torch.randint(1000, (4,), generator=stream(0, 1, 2, "golden")).tolist() == [56, 839, 48, 534]
