"""Bounds hold to the last bit, noise has the size it should have, and without either nothing changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import seeded

from fedprompt.config import PrivacyConfig
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, ContractError
from fedprompt.privacy import mechanism
from fedprompt.privacy.discrete_gaussian import discrete_gaussian
from fedprompt.privacy.mechanism import Group
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (seeded(seed).normal(*shape, dtype=torch.float64) * scale).to(dtype)


def group(tensors: Tensors, bound: float | None) -> Group:
    return Group({name: tuple(tensor.shape) for name, tensor in tensors.items()}, bound)


def norm(upload: Tensors, received: Tensors, names: Any) -> float:
    """The naive way: one number after the other, exactly summed."""
    squares = []
    for name in names:
        zeros = torch.zeros_like(upload[name])
        pairs = zip(upload[name].flatten().tolist(), received.get(name, zeros).flatten().tolist(), strict=True)
        squares += [(a - b) ** 2 for a, b in pairs]
    return math.sqrt(math.fsum(squares))


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def roles() -> Roles:
    return Roles(
        shared={"prompt": torch.zeros(3, 4), "head": torch.zeros(5)},
        local={"own": torch.zeros(2)},
        stat={
            "start.sums": Statistic((2, 3), "start"),
            "round.sums": Statistic((2, 3)),
            "choices": Statistic((4,)),
        },
    )


def test_groups_are_the_shared_tensors_together_and_each_statistic_alone(roles: Roles) -> None:
    settings = PrivacyConfig(noise=1.0, clip=2.0, clips={"*.sums": 7.0, "round.*": 9.0})
    shared = Group({"head": (5,), "prompt": (3, 4)}, 2.0)
    statistics = (Group({"choices": (4,)}, 2.0), Group({"round.sums": (2, 3)}, 7.0))
    assert mechanism.groups(roles, "round", settings) == (shared, *statistics)
    assert mechanism.groups(roles, "start", settings) == (Group({"start.sums": (2, 3)}, 7.0),)
    moved = mechanism.groups(roles, "round", settings, clip=0.5)
    assert [part.bound for part in moved] == [0.5, 2.0, 7.0]
    stepwise = settings.model_copy(update={"noise_at": "step"})
    assert mechanism.groups(roles, "round", stepwise) == statistics


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 10_000),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e2),
    st.floats(1e-3, 1e2),
)
def test_no_group_is_longer_than_its_bound(
    dtype: torch.dtype, seed: int, around: float, length: float, bound: float
) -> None:
    """Also where the received values are large and a step of the dtype is longer than the whole bound."""
    received = {name: normal(seed + i, 7, scale=around, dtype=dtype) for i, name in enumerate("ab")}
    upload = {
        name: (tensor.double() + normal(seed + 5, 7, scale=length)).to(dtype) for name, tensor in received.items()
    }
    upload["stat"] = normal(seed + 6, 3, 2, scale=length, dtype=dtype)
    parts = (group(received, bound), Group({"stat": (3, 2)}, bound / 2))
    kept, norms = mechanism.bounded(upload, received, parts)
    for part, before in zip(parts, norms, strict=True):
        assert part.bound is not None
        assert before == pytest.approx(norm(upload, received, part.shapes), rel=1e-9)
        assert norm(kept, received, part.shapes) <= part.bound * (1 + 1e-12)
        for name in part.shapes:
            assert kept[name].dtype == dtype
            if before <= part.bound:
                assert kept[name] is upload[name]
    if dtype in (torch.float32, torch.float64) and norms[0] > bound > 1e-3 * around:
        assert norm(kept, received, "ab") == pytest.approx(bound, rel=1e-2)


def test_a_shortened_update_keeps_its_direction() -> None:
    received = {"a": normal(0, 50), "b": normal(1, 4, 5)}
    upload = {name: tensor + normal(2, *tensor.shape) for name, tensor in received.items()}
    kept, (before,) = mechanism.bounded(upload, received, [group(received, 1.5)])
    for name in upload:
        assert torch.allclose(kept[name] - received[name], (upload[name] - received[name]) * 1.5 / before, atol=1e-6)


def test_integers_are_shortened_too() -> None:
    kept, _ = mechanism.bounded({"counts": torch.tensor([30, -40])}, {}, [Group({"counts": (2,)}, 10.0)])
    assert kept["counts"].tolist() in ([6, -8], [5, -7], [6, -7], [5, -8])
    assert math.hypot(*kept["counts"].tolist()) <= 10


def test_what_is_not_finite_stays_so_for_the_guard_to_find() -> None:
    for bad in (math.nan, math.inf):
        upload = {"a": torch.tensor([1.0, bad])}
        kept, (before,) = mechanism.bounded(upload, {"a": torch.zeros(2)}, [group(upload, 1.0)])
        assert not math.isfinite(before)
        assert not torch.isfinite(kept["a"]).all()


def test_without_bound_and_noise_everything_is_as_it_was(roles: Roles) -> None:
    received = {name: normal(1, *tensor.shape) for name, tensor in roles.shared.items()}
    upload = {name: tensor + 100 for name, tensor in received.items()}
    upload |= {"round.sums": normal(2, 2, 3), "choices": normal(3, 4)}
    parts = mechanism.groups(roles, "round", PrivacyConfig(clip=None, noise=0.0))
    kept, _ = mechanism.bounded(upload, received, parts)
    assert equal(mechanism.noised(kept, received, parts, 0.0, seeded()), upload)
    assert equal(mechanism.noised_gradients(upload, None, 0.0, seeded()), upload)
    whole = mechanism.noised_sum([upload, upload], received, parts, 2, 0.0, seeded())
    for name, tensor in upload.items():
        assert torch.allclose(whole[name], tensor if name in received else 2 * tensor, atol=1e-6)


def test_noise_has_the_declared_size_in_every_group() -> None:
    size, bounds, noise = 40_000, (1.0, 3.0, 0.2), 0.8
    names = ("shared", "one", "two")
    upload = {name: normal(i, size, dtype=torch.float64) for i, name in enumerate(names)}
    parts = [Group({name: (size,)}, bound) for name, bound in zip(names, bounds, strict=True)]
    sent = mechanism.noised(upload, {}, parts, noise, seeded(7))
    deviations = {name: float((sent[name] - upload[name]).std()) for name in names}
    for name, bound in zip(names, bounds, strict=True):
        assert deviations[name] == pytest.approx(noise * math.sqrt(3) * bound, rel=0.05)
        assert abs(float((sent[name] - upload[name]).mean())) < 5 * deviations[name] / math.sqrt(size)
    loss = sum((bound / deviations[name]) ** 2 for name, bound in zip(names, bounds, strict=True))
    assert loss == pytest.approx(1 / noise**2, rel=0.05)  # all groups together: one mechanism of multiplier z
    together = torch.stack([sent[name] - upload[name] for name in names])
    assert torch.corrcoef(together).fill_diagonal_(0).abs().max() < 0.03


def test_noise_is_the_generators_and_follows_names_not_their_order() -> None:
    upload = {"b": torch.zeros(5), "a": torch.zeros(4)}
    roles = Roles(shared=upload)
    turned = Roles(shared=dict(reversed(upload.items())))
    settings = PrivacyConfig(noise=1.0)
    sent = mechanism.noised(upload, {}, mechanism.groups(roles, "round", settings), 1.0, seeded(3))
    again = mechanism.noised(upload, {}, mechanism.groups(turned, "round", settings), 1.0, seeded(3))
    other = mechanism.noised(upload, {}, mechanism.groups(roles, "round", settings), 1.0, seeded(4))
    assert equal(sent, again)
    assert not torch.equal(sent["a"], other["a"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_shortened_together_and_noised(dtype: torch.dtype) -> None:
    gradients = {"a": normal(0, 20_000, scale=3, dtype=dtype), "b": normal(1, 20_000, scale=3, dtype=dtype)}
    kept = mechanism.noised_gradients(gradients, 2.0, 0.0, seeded())
    assert 1.9 < norm(kept, {}, "ab") <= 2.0 * (1 + 1e-12)
    sent = mechanism.noised_gradients(gradients, 2.0, 0.5, seeded())
    added = torch.cat([sent[name].double() - kept[name].double() for name in "ab"])
    assert float(added.std()) == pytest.approx(0.5 * 2.0, rel=0.05)
    assert all(sent[name].dtype == dtype for name in "ab")


def test_noise_on_the_sum_is_divided_by_the_expected_cohort() -> None:
    size, noise, expected = 40_000, 0.7, 4.0
    reference = {"shared": normal(0, size)}
    uploads = [{"shared": reference["shared"] + i, "stat": torch.full((size,), float(i))} for i in range(3)]
    parts = [Group({"shared": (size,)}, 2.0), Group({"stat": (size,)}, 5.0)]
    whole = mechanism.noised_sum(uploads, reference, parts, expected, noise, seeded())
    moved = (whole["shared"] - reference["shared"]).double()
    assert float(moved.mean()) == pytest.approx((0 + 1 + 2) / expected, abs=0.02)
    assert float(moved.std()) == pytest.approx(noise * math.sqrt(2) * 2.0 / expected, rel=0.05)
    assert float(whole["stat"].mean()) == pytest.approx(0 + 1 + 2, abs=0.15)
    assert float(whole["stat"].std()) == pytest.approx(noise * math.sqrt(2) * 5.0, rel=0.05)
    mean = {"shared": reference["shared"] + 1, "stat": torch.full((size,), 3.0)}  # what a secure sum of the three gives
    secure = mechanism.noised_sum([mean], reference, parts, expected, noise, seeded(), counts=[3])
    assert all(torch.allclose(secure[name], whole[name], atol=1e-5) for name in whole)


def test_a_cohort_that_happens_to_be_empty_gives_noise() -> None:
    reference = {"shared": torch.ones(3, dtype=torch.float64)}
    parts = [Group({"shared": (3,)}, 1.0), Group({"stat": (2, 2)}, 1.0)]
    whole = mechanism.noised_sum([], reference, parts, 2.0, 1.0, seeded())
    assert whole["shared"].dtype == torch.float64
    assert whole["stat"].shape == (2, 2)
    assert (whole["shared"] != 1).all()
    assert equal(mechanism.noised_sum([], reference, parts[:1], 2.0, 0.0, seeded()), reference)


def test_one_client_more_or_less_moves_the_sum_by_its_bound_at_most() -> None:
    reference = {"a": normal(0, 30), "b": normal(1, 6)}
    parts = [group(reference, 0.5)]
    sent = [{name: tensor + normal(i, *tensor.shape) for name, tensor in reference.items()} for i in range(2, 7)]
    uploads = [mechanism.bounded(upload, reference, parts)[0] for upload in sent]
    whole, less = (mechanism.noised_sum(some, reference, parts, 1, 1.0, seeded(9)) for some in (uploads, uploads[1:]))
    assert norm(whole, less, "ab") == pytest.approx(0.5, rel=1e-4)


def test_the_bound_finds_the_quantile_of_the_norms() -> None:
    """Norms are lognormal, the start is off by a factor of a hundred either way, and the bits are noisy."""
    draws, cohort, quantile = seeded(1), 100, 0.7
    true = math.exp(0.5 * math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * quantile - 1))))
    for start in (0.01, 100.0):
        clip, path = start, []
        for _ in range(200):
            norms = torch.exp(0.5 * draws.normal(cohort))
            share = mechanism.noised_share(float((norms <= clip).sum()), cohort, cohort, cohort / 20, draws)
            clip = mechanism.next_clip(clip, share, quantile, 0.2)
            path.append(clip)
        assert sum(path[-50:]) / 50 == pytest.approx(true, rel=0.1)
    assert mechanism.next_clip(2.0, 0.4, 0.4, 0.2) == 2.0


def test_the_share_of_bits_is_exact_without_noise_and_right_on_average_with_it() -> None:
    assert mechanism.noised_share(3, 4, 4, 0.0, seeded()) == 0.75
    draws = seeded(2)
    shares = torch.tensor([mechanism.noised_share(30, 40, 40, 2.0, draws) for _ in range(4000)])
    assert float(shares.mean()) == pytest.approx(0.75, abs=0.005)
    assert float(shares.std()) == pytest.approx(2.0 / 40, rel=0.05)


@given(st.floats(0.01, 100), st.floats(1, 1000))
def test_updates_and_bits_together_spend_what_the_multiplier_says(noise: float, expected: float) -> None:
    bits = mechanism.bit_noise_for(noise, expected)
    updates = mechanism.update_noise(noise, bits)
    assert 1 / updates**2 + (0.5 / bits) ** 2 == pytest.approx(1 / noise**2)
    assert noise <= updates <= 1.16 * noise
    assert bits >= expected / 20
    assert (mechanism.update_noise(0.0, 0.0), mechanism.bit_noise_for(0.0, expected)) == (0.0, 0.0)


def test_what_cannot_be() -> None:
    with pytest.raises(
        ConfigError, match=r"privacy\.noise must be less than twice the noise 0\.5 on the bits, got 1\.0"
    ):
        mechanism.update_noise(1.0, 0.5)
    upload = {"a": torch.zeros(2)}
    with pytest.raises(ConfigError, match=r"privacy\.clip must be a number if there is noise"):
        mechanism.noised(upload, {}, [group(upload, None)], 1.0, seeded())
    with pytest.raises(ContractError, match=r"upload 'a' must have the shape that was sent, \(3,\), got \(2,\)"):
        mechanism.update_of(upload, {"a": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"expected cohort must be positive, got 0"):
        mechanism.noised_sum([upload], upload, [group(upload, 1.0)], 0, 1.0, seeded())


class Silent:
    """Bits with which the sampler draws zero every time."""

    def words(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint64)


@given(st.integers(1, 3000), st.floats(1e-6, 1e6), st.floats(0.01, 1e4), st.integers(0, 10_000))
def test_rounding_makes_no_update_longer_than_the_noise_is_measured_for(
    size: int, bound: float, noise: float, seed: int
) -> None:
    """The whole numbers of a bounded update, seen by drawing no noise, against R + sqrt(d) + 2 steps; and sigma against that."""
    parts = [Group({"a": (size,)}, bound)]
    kept, _ = mechanism.bounded({"a": normal(seed, size, scale=2 * bound, dtype=torch.float64)}, {}, parts)
    measured: list[float] = []

    def watched(count: int, sigma: float, source: Any) -> np.ndarray:
        measured.append(sigma)
        return discrete_gaussian(count, sigma, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "discrete_gaussian", watched)
        sent = mechanism.noised(kept, {}, parts, noise, Silent())["a"]
    steps = mechanism._steps(noise)
    whole = (sent / (bound / steps)).round()
    assert torch.equal(whole * (bound / steps), sent), "what leaves is on the grid"
    length = math.sqrt(math.fsum(float(each) ** 2 for each in whole))
    assert length <= steps + math.sqrt(size) + 2
    assert measured[0] >= noise * length
    assert measured[0] <= noise * steps * (1 + 1e-3) + 1


def test_noise_is_drawn_on_the_grid_for_any_multiplier() -> None:
    for noise in (1e-6, 1e-3, 1.0, 63.0, 65.0, 1e3, 1e6):
        part = Group({"a": (20_000,)}, 0.3)
        sent = mechanism.noised({"a": torch.zeros(20_000, dtype=torch.float64)}, {}, [part], noise, seeded())["a"]
        assert float(sent.std()) == pytest.approx(noise * 0.3, rel=0.03)
        steps = sent / (0.3 / mechanism._steps(noise))
        assert (steps - steps.round()).abs().max() < 0.05
        assert 2.0**20 <= mechanism._steps(noise) <= 2.0**40


def test_a_group_with_one_number_that_is_not_finite_is_nowhere_told() -> None:
    """Else a client whose update went astray would send the rest of it unbounded."""
    for bad in (math.nan, math.inf):
        received = {"a": torch.zeros(3), "b": torch.zeros(2)}
        upload = {"a": torch.tensor([1.0, bad, 2.0]), "b": torch.full((2,), 100.0), "stat": torch.ones(2)}
        parts = [group(received, 1.0), Group({"stat": (2,)}, 2.0)]
        kept, _ = mechanism.bounded(upload, received, parts)
        sent = mechanism.noised(kept, received, parts, 1.0, seeded())
        assert sent["a"].isnan().all()
        assert sent["b"].isnan().all()
        assert sent["stat"].isfinite().all()


def test_what_was_never_bounded_is_not_noised() -> None:
    """Its size is a secret: an error may be sent to the server."""
    with pytest.raises(ContractError, match=r"^update must be bounded to 1 before it is noised$"):
        mechanism.noised({"a": torch.full((2,), 1e9)}, {}, [Group({"a": (2,)}, 1.0)], 1.0, seeded())
