"""Random streams depend on what they are for and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from fedprompt.streams import SERVER, WORDS, sealed, stream

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


def test_a_sealed_stream_follows_from_all_of_its_key() -> None:
    """Torch makes 32 bits of a seed; a key that differs in any bit must give other noise."""
    draws = torch.randn(1000, generator=sealed(b"key"))
    assert torch.equal(draws, torch.randn(1000, generator=sealed(b"key")))
    for other in (b"kez", b"key\0", b"", b"k" * 64):
        assert not torch.isclose(draws, torch.randn(1000, generator=sealed(other))).all()
    state = sealed(b"key").get_state()[WORDS].numpy().view("<u8")
    assert len(set(state.tolist())) > 600, "the whole state is filled"
    assert state.max() < 2**32


def test_a_sealed_stream_draws_like_any_other() -> None:
    draws = torch.randn(200_000, generator=sealed(b"moments"), dtype=torch.float64)
    assert abs(float(draws.mean())) < 0.01
    assert abs(float(draws.std()) - 1) < 0.01
    assert abs(float((draws**4).mean()) - 3) < 0.06
