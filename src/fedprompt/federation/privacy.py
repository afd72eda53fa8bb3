"""Client-level differential privacy of what is uploaded: bounds, noise, and a bound that follows the updates.

A release is what one client sends at one occasion. Its tensors fall into G groups: the shared tensors, as their
difference to what the client received, are one vector; every statistic is one of its own. Group g is shortened to
L2 norm S_g at most and gets Gaussian noise of standard deviation

    sigma_g = z * sqrt(G) * S_g,   so that   sum_g S_g^2 / sigma_g^2 = 1 / z^2:

all groups together are one Gaussian mechanism of multiplier z, for a client that takes part or sends zeros instead.
What that amounts to over a run is reckoned in `federation.accounting`.

Everything is computed in double precision on the CPU and comes back in the dtype and on the device it had. The noise is
only as secret as the generator it was drawn from: one that is seeded by a published config hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedprompt.config import PrivacyConfig
from fedprompt.errors import ConfigError, ContractError, broken
from fedprompt.roles import Roles, Statistic, Tensors

CLIP = "privacy.clip"  #: the download that tells a client the bound of the round, where it moves
WITHIN = "privacy.within"  #: the statistic that tells whether an update was within it


@dataclass(frozen=True)
class Group:
    """Tensors that are shortened together, by name, and the longest they may be; None for any length."""

    shapes: Mapping[str, tuple[int, ...]]
    bound: float | None


def groups(roles: Roles, when: str, settings: PrivacyConfig, clip: float | None = None) -> tuple[Group, ...]:
    """The groups of an upload, the shared tensors first. `clip` is their bound where it has moved from `settings.clip`.

    Shared tensors whose gradients were noised at every step need nothing more, so with `noise_at: step` only statistics are left.
    """
    found = []
    if when == "round" and settings.noise_at != "step" and roles.shared:
        shapes = {name: tuple(roles.shared[name].shape) for name in sorted(roles.shared)}
        found.append(Group(shapes, settings.clip if clip is None else clip))
    for name, statistic in sorted(roles.statistics(when).items()):
        found.append(Group({name: statistic.shape}, bound_of(name, settings)))
    return tuple(found)


def bound_of(statistic: str, settings: PrivacyConfig) -> float | None:
    """The longest a statistic may be."""
    bounds = (bound for pattern, bound in settings.clips.items() if fnmatchcase(statistic, pattern))
    return next(bounds, settings.clip)


def as_sent(roles: Roles, settings: PrivacyConfig | None) -> Roles:
    """The declared tensors, and the bit that goes with an update where the bound follows a quantile."""
    if settings is None or settings.quantile is None:
        return roles
    return replace(roles, stat={**roles.stat, WITHIN: Statistic(())})


def update_of(upload: Tensors, received: Tensors) -> Tensors:
    """How far each tensor of an upload is from what the client received; from zero where it received none, as with statistics."""
    for name in sorted(set(upload) & set(received)):
        if upload[name].shape != received[name].shape:
            raise ContractError(
                broken(
                    f"upload {name!r}",
                    f"have the shape it came with, {tuple(received[name].shape)}",
                    tuple(upload[name].shape),
                )
            )
    return {
        name: _exact(tensor) - _exact(received[name]) if name in received else _exact(tensor)
        for name, tensor in upload.items()
    }


def bounded(upload: Tensors, received: Tensors, parts: Sequence[Group]) -> tuple[Tensors, tuple[float, ...]]:
    """The upload with every group no longer than its bound, and the norms the groups had before.

    A group within its bound is passed on as it is, bit for bit. One beyond is scaled by S / norm and rounded towards what
    was received, so that no rounding can lift it over the bound. NaN stays NaN: finding that is the guard's task.
    """
    updates = update_of(upload, received)
    kept, norms = dict(upload), []
    for part in parts:
        norm = _norm([updates[name] for name in part.shapes])
        norms.append(norm)
        if part.bound is None or not norm > part.bound:
            continue
        for name in part.shapes:
            centre = _exact(received[name]) if name in received else torch.zeros_like(updates[name])
            kept[name] = _moved(centre, updates[name] * (part.bound / norm), upload[name])
    return kept, tuple(norms)


def noised(upload: Tensors, parts: Sequence[Group], noise: float, generator: torch.Generator) -> Tensors:
    """The bounded upload of one client with noise on every group."""
    result = dict(upload)
    for name, std in _deviations(parts, noise).items():
        result[name] = _like(upload[name], _exact(upload[name]) + std * _draw(upload[name].shape, generator))
    return result


def noised_sum(
    uploads: Sequence[Tensors],
    reference: Tensors,
    parts: Sequence[Group],
    expected: float,
    noise: float,
    generator: torch.Generator,
    counts: Sequence[float] | None = None,
) -> Tensors:
    """One upload for a whole cohort of bounded ones, with noise on the sum:

        shared:     reference + (sum_i (x_i - reference) + N(0, sigma^2)) / expected
        statistic:  sum_i x_i + N(0, sigma^2)

    Every client counts once, and the divisor is the expected size of a cohort, since the true one depends on who is in it.
    A cohort that happens to be empty gives noise alone. `counts` says of how many clients an upload is the mean (of its
    shared tensors) and the sum (of its statistics), where a secure sum has come before.
    """
    if not expected > 0:
        raise ConfigError(broken("expected cohort", "be positive", expected))
    counts = [1.0] * len(uploads) if counts is None else counts
    updates = [update_of(upload, reference) for upload in uploads]
    deviations, result = _deviations(parts, noise), {}
    for name, shape in ((name, shape) for part in parts for name, shape in part.shapes.items()):
        total = torch.zeros(shape, dtype=torch.float64)
        for update, count in zip(updates, counts, strict=True):
            total += update[name] * (count if name in reference else 1.0)
        if name in deviations:
            total += deviations[name] * _draw(shape, generator)
        if name in reference:
            total = _exact(reference[name]) + total / expected
        like = reference.get(name, uploads[0][name] if uploads else torch.zeros(()))
        result[name] = _like(like, total)
    return result


def noised_gradients(gradients: Tensors, clip: float | None, noise: float, generator: torch.Generator) -> Tensors:
    """The gradients of one step, shortened together to norm `clip` at most, with noise of standard deviation noise * clip."""
    parts = [Group({name: tuple(gradients[name].shape) for name in sorted(gradients)}, clip)]
    return noised(bounded(gradients, {}, parts)[0], parts, noise, generator)


def next_clip(clip: float, share_within: float, quantile: float, rate: float) -> float:
    """The bound of the next round: a geometric step towards the quantile of the updates' norms (Andrew et al. 2021)

    S <- S * exp(-rate * (share of the updates that were within S - quantile))
    """
    return clip * math.exp(-rate * (share_within - quantile))


def noised_share(
    within: float, participants: float, expected: float, bit_noise: float, generator: torch.Generator
) -> float:
    """The share of updates that were within the bound, from one bit b of each participant: (sum (b - 1/2) + noise) / expected + 1/2.

    The shift by a half makes the sensitivity of the sum a half. `bit_noise` is the standard deviation of the noise.
    """
    noise = bit_noise * float(_draw((), generator)) if bit_noise else 0.0
    return (within - participants / 2 + noise) / expected + 0.5


def bit_noise_for(noise: float, expected: float) -> float:
    """A noise on the sum of bits that costs the updates little: a twentieth of the cohort, but not less than the multiplier
    itself, with which the updates get noise that is 15 % larger. None where updates get none."""
    return max(expected / 20, noise) if noise else 0.0


def update_noise(noise: float, bit_noise: float) -> float:
    """The multiplier z_u of the updates with which updates and bits together are one mechanism of multiplier z:

    1 / z_u^2 + 1 / (2 sigma_b)^2 = 1 / z^2
    """
    if not noise:
        return 0.0
    if not 2 * bit_noise > noise:
        raise ConfigError(broken("privacy.noise", f"be less than twice the noise {bit_noise} on the bits", noise))
    return (noise**-2 - (2 * bit_noise) ** -2) ** -0.5


def _deviations(parts: Sequence[Group], noise: float) -> dict[str, float]:
    """The standard deviation of the noise on each tensor; nothing where there is to be none."""
    if not noise:
        return {}
    found = {}
    for part in parts:
        if part.bound is None:
            raise ConfigError(
                broken("privacy.clip", "be a number where there is noise, which is measured against it", None)
            )
        found.update(dict.fromkeys(part.shapes, noise * math.sqrt(len(parts)) * part.bound))
    return found


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def _moved(centre: Tensor, update: Tensor, like: Tensor) -> Tensor:
    """Centre + update in the dtype of `like`, where every entry is rounded towards the centre."""
    moved = (centre + update).to(like.dtype)
    if like.dtype.is_floating_point:
        too_far = (moved.to(torch.float64) - centre).abs() > update.abs()
        moved = torch.where(too_far, torch.nextafter(moved, centre.to(like.dtype)), moved)
    return moved.to(like.device)


def _draw(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _like(like: Tensor, value: Tensor) -> Tensor:
    return value.to(like.dtype).to(like.device)
