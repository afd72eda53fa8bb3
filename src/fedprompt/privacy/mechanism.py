"""Client-level differential privacy of uploads: clipping, noise, and a bound that adapts to the updates.

A release is one upload of one client. Its tensors form G groups: the shared tensors, as their difference to what the
client received, are one group; every statistic is a separate group. Group g is clipped to L2 norm S_g and gets Gaussian
noise of standard deviation

    sigma_g = z * sqrt(G) * S_g,   so that   sum_g S_g^2 / sigma_g^2 = 1 / z^2:

all groups together are one Gaussian mechanism of multiplier z, for a client that takes part or sends zeros instead.
The total over a run is computed in `privacy.accounting`.

The noise is discrete. With a grid of S_g / R (R = 2^40 steps, fewer for a multiplier above 64) the numbers v of group g become
whole numbers, round(v R / S_g), get discrete Gaussian noise as whole numbers, and are multiplied by S_g / R again. The
upload is a function of the noised whole numbers and of values that the server already has: floating point rounds before
or after the noise, never together with it.

Rounding changes each of the d numbers of a group by at most half a step, and floating point by less than 2^-11 steps more. So a
vector of norm at most S_g (1 + 10^-12) has norm at most R + sqrt(d) + 2 steps afterwards, and so has the contribution of one
client to a sum. The noise is relative to that,

    sigma in steps = ceil(z * sqrt(G) * (R + sqrt(d) + 2)),

which keeps the multiplier valid and increases the noise by a share of sqrt(d) / R: 1.4e-10 for 25 thousand numbers.
(If a secure sum comes before noise at the server, its fixed-point error of 2^-33 is not in these figures.)

Everything else is computed in double precision on the CPU and returned in its original dtype and device. The noise is
only as secret as the source of its bits: a stream seeded by a published config hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from fedprompt.config import PrivacyConfig
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, ContractError, broken
from fedprompt.privacy.discrete_gaussian import Words, discrete_gaussian
from fedprompt.tensors import Tensors

CLIP = "privacy.clip"  # the download with the bound of the round, if it adapts
WITHIN = "privacy.within"  # the statistic that is 1 if an update was within the bound
FINEST = 40  # log2 of the steps of a bound
LARGEST = 46  # log2 of the noise in steps, approximately, above which there are fewer steps
MOST_BOUNDS = 2.0**20  # limit for the norm of a sum in bounds, so that whole numbers cannot overflow


@dataclass(frozen=True)
class Group:
    """Names of tensors that are clipped together, and their bound; None for no bound."""

    shapes: Mapping[str, tuple[int, ...]]
    bound: float | None


def groups(roles: Roles, when: str, settings: PrivacyConfig, clip: float | None = None) -> tuple[Group, ...]:
    """The groups of an upload, the shared tensors first. `clip` replaces `settings.clip` if the bound adapts.

    With `noise_at: step` the gradients of shared tensors were already noised, so only statistics are left.
    """
    found = []
    if when == "round" and settings.noise_at != "step" and roles.shared:
        shapes = {name: tuple(roles.shared[name].shape) for name in sorted(roles.shared)}
        found.append(Group(shapes, settings.clip if clip is None else clip))
    for name, statistic in sorted(roles.statistics(when).items()):
        found.append(Group({name: statistic.shape}, bound_of(name, settings)))
    return tuple(found)


def bound_of(statistic: str, settings: PrivacyConfig) -> float | None:
    """The bound of a statistic."""
    bounds = (bound for pattern, bound in settings.clips.items() if fnmatchcase(statistic, pattern))
    return next(bounds, settings.clip)


def as_sent(roles: Roles, settings: PrivacyConfig | None) -> Roles:
    """The declared tensors, and the bit that is sent with an update if the bound follows a quantile."""
    if settings is None or settings.quantile is None:
        return roles
    return replace(roles, stat={**roles.stat, WITHIN: Statistic(())})


def update_of(upload: Tensors, received: Tensors) -> Tensors:
    """The difference of each tensor of an upload to the received one; to zero if none was received, as for statistics."""
    for name in sorted(set(upload) & set(received)):
        if upload[name].shape != received[name].shape:
            raise ContractError(
                broken(
                    f"upload {name!r}",
                    f"have the shape that was sent, {tuple(received[name].shape)}",
                    tuple(upload[name].shape),
                )
            )
    return {
        name: _exact(tensor) - _exact(received[name]) if name in received else _exact(tensor)
        for name, tensor in upload.items()
    }


def bounded(upload: Tensors, received: Tensors, parts: Sequence[Group]) -> tuple[Tensors, tuple[float, ...]]:
    """The upload with every group clipped to its bound, and the norms before clipping.

    A group within its bound stays bit-identical. A longer one is scaled by S / norm and rounded towards the received
    tensors, so that rounding cannot lift it over the bound. NaN stays NaN: the guard detects it.
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


def noised(upload: Tensors, received: Tensors, parts: Sequence[Group], noise: float, source: Words) -> Tensors:
    """The bounded upload of one client with noise on every group. A group that is not finite becomes NaN completely: the
    position of the NaN is not revealed, and the guard refuses it."""
    if not noise:
        return dict(upload)
    updates, result = update_of(upload, received), dict(upload)
    for part in parts:
        sums = {name: [updates[name]] for name in part.shapes}
        for name, update in _noised_sums(sums, part, noise * math.sqrt(len(parts)), source).items():
            result[name] = _like(upload[name], update.add_(received[name].cpu()) if name in received else update)
    return result


def noised_sum(
    uploads: Sequence[Tensors],
    reference: Tensors,
    parts: Sequence[Group],
    expected: float,
    noise: float,
    source: Words,
    counts: Sequence[float] | None = None,
) -> Tensors:
    """One upload for a whole cohort of bounded ones, with noise on the sum:

        shared:     reference + (sum_i (x_i - reference) + N(0, sigma^2)) / expected
        statistic:  sum_i x_i + N(0, sigma^2)

    Every client counts once, and the divisor is the expected size of a cohort, since the true size depends on its members.
    An empty cohort gives noise alone. After a secure sum, `counts` is the number of clients in an upload: it is their
    mean (shared tensors) and their sum (statistics).
    """
    if not expected > 0:
        raise ConfigError(broken("expected cohort", "be positive", expected))
    counts = [1.0] * len(uploads) if counts is None else counts
    updates = [update_of(upload, reference) for upload in uploads]
    result = {}
    for part in parts:
        sums = {
            name: [
                update[name] * (count if name in reference else 1.0)
                for update, count in zip(updates, counts, strict=True)
            ]
            for name in part.shapes
        }
        for name, update in _noised_sums(sums, part, noise * math.sqrt(len(parts)), source).items():
            total = _exact(reference[name]) + update / expected if name in reference else update
            like = reference.get(name, uploads[0][name] if uploads else torch.zeros(()))
            result[name] = _like(like, total)
    return result


def noised_gradients(gradients: Tensors, clip: float | None, noise: float, source: Words) -> Tensors:
    """The gradients of one step, clipped together to norm `clip`, with noise of standard deviation noise * clip."""
    parts = [Group({name: tuple(gradients[name].shape) for name in sorted(gradients)}, clip)]
    return noised(bounded(gradients, {}, parts)[0], {}, parts, noise, source)


def next_clip(clip: float, share_within: float, quantile: float, rate: float) -> float:
    """The bound of the next round: a geometric step towards the quantile of the updates' norms (Andrew et al. 2021)

    S <- S * exp(-rate * (share of the updates that were within S - quantile))
    """
    return clip * math.exp(-rate * (share_within - quantile))


def noised_share(within: float, participants: float, expected: float, bit_noise: float, source: Words) -> float:
    """The share of updates that were within the bound, from one bit b of each participant: (sum (b - 1/2) + noise) / expected + 1/2.

    The shift by a half makes the sensitivity of the sum a half. `bit_noise` is the standard deviation of the noise.
    """
    total = within - participants / 2
    if bit_noise:
        steps = _steps(bit_noise)  # of 1; a half is a whole number of steps, so nothing is rounded
        total = (round(total * steps) + int(discrete_gaussian(1, math.ceil(bit_noise * steps), source)[0])) / steps
    return total / expected + 0.5


def bit_noise_for(noise: float, expected: float) -> float:
    """The noise on the sum of bits: a twentieth of the cohort, which costs the updates little, but not less than the
    multiplier itself, which makes the noise of the updates 15 % larger. None if updates get no noise."""
    return max(expected / 20, noise) if noise else 0.0


def update_noise(noise: float, bit_noise: float) -> float:
    """The multiplier z_u of the updates with which updates and bits together are one mechanism of multiplier z:

    1 / z_u^2 + 1 / (2 sigma_b)^2 = 1 / z^2
    """
    if not noise:
        return 0.0
    if not 2 * bit_noise > noise:
        raise ConfigError(broken("privacy.noise", f"be less than twice the noise {bit_noise} on the bits", noise))
    return float((noise**-2 - (2 * bit_noise) ** -2) ** -0.5)


def _noised_sums(
    numbers: Mapping[str, Sequence[Tensor]], part: Group, multiplier: float, source: Words
) -> dict[str, Tensor]:
    """The sums of the tensors of one group, in double precision, with noise of `multiplier` times the group's bound."""
    shapes = part.shapes
    if not multiplier:
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return {name: sum(numbers[name], zeros[name]) for name in shapes}
    if part.bound is None:
        raise ConfigError(broken("privacy.clip", "be a number if there is noise, which is relative to it", None))
    steps = _steps(multiplier)
    grid, size = part.bound / steps, sum(math.prod(shape) for shape in shapes.values())
    sigma = math.ceil(multiplier * (steps + math.sqrt(size) + 2))
    lengths = [torch.linalg.vector_norm(each, math.inf) for own in numbers.values() for each in own if each.numel()]
    largest = float(torch.stack(lengths).max()) if lengths else 0.0
    if not math.isfinite(largest):
        return {name: torch.full(shape, math.nan, dtype=torch.float64) for name, shape in shapes.items()}
    if largest * len(lengths) > part.bound * MOST_BOUNDS:
        raise ContractError(f"update must be bounded to {part.bound:g} before it is noised")  # its size is a secret
    drawn, begin, found = discrete_gaussian(size, sigma, source), 0, {}
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        for each in numbers[name]:
            scaled = each.numpy().ravel() / grid
            drawn[begin:end] += np.rint(scaled, out=scaled).astype(np.int64)
        found[name], begin = torch.from_numpy(drawn[begin:end] * grid).reshape(shape), end
    return found


def _steps(multiplier: float) -> float:
    """The number of steps of a bound: a power of two."""
    return 2.0 ** min(FINEST, LARGEST - math.frexp(multiplier)[1])


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def _moved(centre: Tensor, update: Tensor, like: Tensor) -> Tensor:
    """Centre + update in the dtype of `like`, where every entry is rounded towards the centre."""
    moved = (centre + update).to(like.dtype)
    if like.dtype.is_floating_point:
        too_far = (moved.to(torch.float64) - centre).abs() > update.abs()
        moved = torch.where(too_far, torch.nextafter(moved, centre.to(like.dtype)), moved)
    return moved.to(like.device)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _like(like: Tensor, value: Tensor) -> Tensor:
    return value.to(like.dtype).to(like.device)
