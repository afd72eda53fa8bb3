"""DP-FPL: its factors, its gradient, the size of its noise, and that this is no guarantee."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import local_tensors, shared_tensors
from text_methods import run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.client.step import step_loss
from fedprompt.core import registry
from fedprompt.core.method import Batch
from fedprompt.errors import ConfigError
from fedprompt.methods.dp_fpl import DPFPL, factors
from fedprompt.modules.gradient_rules import clipped_and_noisy, low_rank_and_noisy
from fedprompt.random_streams import stream

pytestmark = pytest.mark.unit


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def through(gradient: Tensor, left: Tensor, right: Tensor, noise: tuple[Tensor, Tensor], bound: float) -> Tensor:
    leaf = torch.zeros_like(gradient, requires_grad=True)
    (found,) = torch.autograd.grad((low_rank_and_noisy(leaf, left, right, *noise, bound) * gradient).sum(), leaf)
    return found


def none(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(left), torch.zeros_like(right)


def test_factors_are_orthonormal_and_find_a_matrix_of_low_rank() -> None:
    matrix = drawn(5, 2) @ drawn(2, 9, seed=1)
    left, right = factors(matrix, drawn(9, 2, seed=2))
    torch.testing.assert_close(left.T @ left, torch.eye(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(right @ right.T, torch.eye(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(left @ left.T @ matrix, matrix, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(matrix @ right.T @ right, matrix, atol=1e-4, rtol=1e-4)


def test_at_full_rank_the_gradient_is_exact() -> None:
    gradient = drawn(4, 9)
    left, right = factors(drawn(4, 9, seed=1), drawn(9, 4, seed=2))
    torch.testing.assert_close(
        through(gradient, left, right, none(left, right), math.inf), gradient, atol=1e-5, rtol=1e-4
    )


def test_at_low_rank_it_is_the_part_in_the_tangent_space() -> None:
    gradient = drawn(6, 9)
    left, right = factors(drawn(6, 9, seed=1), drawn(9, 2, seed=2))
    found = through(gradient, left, right, none(left, right), math.inf)
    outside = (torch.eye(6) - left @ left.T) @ gradient @ (torch.eye(9) - right.T @ right)
    torch.testing.assert_close(found, gradient - outside, atol=1e-5, rtol=1e-4)


def test_cuts_and_noise_are_those_of_the_factors() -> None:
    gradient = 10 * drawn(6, 9)
    left, right = factors(drawn(6, 9, seed=1), drawn(9, 2, seed=2))
    noise = drawn(6, 2, seed=3), drawn(2, 9, seed=4)
    of_left, of_right = gradient @ right.T, left.T @ gradient
    of_left, of_right = of_left / of_left.norm() + noise[0], of_right / of_right.norm() + noise[1]
    expected = of_left @ right + left @ of_right - left @ left.T @ of_left @ right
    torch.testing.assert_close(through(gradient, left, right, noise, 1.0), expected, atol=1e-4, rtol=1e-4)


def test_the_size_of_the_noise_by_hand(settings: Any) -> None:
    """C = 10, T = 100 rounds, delta = 1e-5, epsilon = 0.4, 8 images: 10 sqrt(100 * 11.5129) / (0.4 * 8) = 106.03."""
    method = DPFPL(epsilon=0.4)
    _, world = runtime_of(settings, method, federation={"rounds": 100})
    size = method.deviation(world, Batch(torch.zeros(8, dtype=torch.long)))
    assert float(size) == pytest.approx(106.03, rel=1e-4)
    padded = Batch(torch.zeros(8, dtype=torch.long), weights=torch.tensor([1.0] * 4 + [0.0] * 4))
    assert float(method.deviation(world, padded)) == pytest.approx(2 * 106.03, rel=1e-4)


def gradients(runtime: Any, method: DPFPL, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    params, images = working_parameters(runtime), runtime.bank.images(0, "train")
    leaves = {name: params[name].clone().requires_grad_() for name in ("context", "local_context")}
    loss = step_loss(method, runtime.world, {**params, **leaves}, images, torch.arange(6), noise)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_without_noise_and_at_full_rank_both_contexts_get_the_gradient_of_their_sum(settings: Any) -> None:
    method = DPFPL(context_tokens=3, rank=3)
    runtime, world = runtime_of(settings, method)
    noise = method.noise(world, 6, True, stream(0, 1, 0, "noise"))
    assert set(noise) == {"omega"}
    found = gradients(runtime, method, noise)
    torch.testing.assert_close(found["local_context"], found["context"], atol=1e-4, rtol=1e-4)


def test_the_noise_of_all_clients_together_is_the_servers(settings: Any) -> None:
    """The mean of K clients' noise deviates by s / K, which the paper's server adds to the mean gradient."""
    method = DPFPL(context_tokens=3, epsilon=0.4, bound=1e-6)  # next to nothing is left of the gradient
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    batch = Batch(torch.zeros(6, dtype=torch.long))
    size, clients = float(method.deviation(world, batch)), len(world.participants)
    means = []
    for step in range(400):
        every = []
        for client in range(clients):
            noise = method.noise(world, 6, True, stream(0, step, client, "noise"))
            leaf = params["context"].clone().requires_grad_()
            tokens = method.prompts(world, {**params, "context": leaf}, batch, noise).text["context"].tokens
            every.append(torch.autograd.grad((tokens * 0).sum(), leaf)[0])
        means.append(torch.stack(every).mean(0))
    assert float(torch.stack(means).std()) == pytest.approx(size / clients, rel=0.05)


def test_one_image_can_change_a_cut_gradient_by_more_than_the_paper_assumes() -> None:
    """The attack on the claim: of B = 4 gradients one is replaced; the cut mean moves by 2 C, eight times C / B."""
    bound, batch = 1.0, 4
    calm = torch.zeros(batch, 2)

    def released(rows: Tensor) -> Tensor:
        leaf = torch.zeros(2, requires_grad=True)
        tensor = clipped_and_noisy(leaf, torch.zeros(2), bound)
        (found,) = torch.autograd.grad((tensor * rows.mean(0)).sum(), leaf)
        return found

    first, second = calm.clone(), calm.clone()
    first[0], second[0] = torch.tensor([100.0, 0.0]), torch.tensor([-100.0, 0.0])
    moved = float((released(first) - released(second)).norm())
    assert moved == pytest.approx(2 * bound)
    assert moved > bound / batch


def test_the_local_context_stays_and_a_new_client_predicts_with_the_global_one(settings: Any) -> None:
    method = DPFPL(context_tokens=3)
    done = run_on_clip(settings, method, "private", federation={"rounds": 1, "fraction": 0.25})
    assert set(shared_tensors(done)) == {"context"}
    trained = done.rounds()[-1].cohort[0]
    assert float(local_tensors(done, trained)["trained"]) == 1
    runtime, world = runtime_of(settings, method)
    new = next(client for client in range(4) if client != trained)
    who = runtime._client(new, 1)
    params = method.personalise(world, who, shared_tensors(done), runtime._new(who))
    assert float(params["local_context"].abs().max()) == 0


def test_noise_changes_what_is_learned(settings: Any) -> None:
    found = {
        epsilon: shared_tensors(run_on_clip(settings, DPFPL(context_tokens=3, epsilon=epsilon), f"with-{number}"))
        for number, epsilon in enumerate((None, 0.4))
    }
    assert float((found[None]["context"] - found[0.4]["context"]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rank": 99}, r"method.rank must be at most the \d+ words of the context, got 99"),
        ({"class_specific": True}, "method.class_specific must be false"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"bound": 0.0}, "bound"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "dp_fpl", **given}))
