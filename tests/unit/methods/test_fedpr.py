"""FedPR: what its projector must be, what it does to a federation, and where it is FedVPT-D."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import local_tensors, run, seeded, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core import registry
from fedprompt.core.method import Client, World
from fedprompt.errors import ConfigError
from fedprompt.methods import fedpr
from fedprompt.methods.fedpr import FedPR

pytestmark = pytest.mark.unit


def world_of(width: int, blocks: int = 2) -> World:
    return World(width, blocks, 17, 4, ("a", "b"), ("k", "l"))


def client_in(round: int) -> Client:
    return Client(0, "k", round, 4, torch.tensor([2, 2]), lambda params: 0.0, lambda purpose: seeded())


def random_prompt(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def begun(method: FedPR, prompt: Tensor, round: int = 2) -> dict[str, Tensor]:
    return method.begin(world_of(prompt.shape[-1]), client_in(round), {"prompt": prompt}, {})


def projector(method: FedPR, prompt: Tensor) -> Tensor:
    """The matrix of each block that steps are multiplied with: what becomes of the steps e_1 .. e_d."""
    depth, _, width = prompt.shape
    unit = torch.eye(width, dtype=prompt.dtype).expand(depth, -1, -1)
    before = {**begun(method, prompt), "prompt": torch.zeros_like(unit)}
    return method.after_step(world_of(width), {"prompt": unit}, before, 0)["prompt"]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "share", "dropped"),
    [(3, 40, 0.8, 8), (16, 40, 0.8, 8), (5, 33, 0.5, 16), (4, 32, 0.9, 3), (4, 20, 1.0, 0)],
)
def test_the_projector_is_symmetric_idempotent_up_to_its_scale_and_of_the_declared_rank(
    tokens: int, width: int, share: float, dropped: int, normalise: bool
) -> None:
    found = projector(FedPR(kept_share=share, normalise_projector=normalise), random_prompt(2, tokens, width))
    scale = (width - dropped) ** -0.5 if normalise else 1.0
    plain = found / scale
    torch.testing.assert_close(found, found.mT, atol=1e-6, rtol=0)
    torch.testing.assert_close(plain @ plain, plain, atol=1e-5, rtol=0)
    assert torch.linalg.matrix_rank(plain, atol=1e-3).tolist() == [width - dropped] * 2
    norm = 1.0 if normalise else (width - dropped) ** 0.5
    torch.testing.assert_close(found.norm(dim=(1, 2)), torch.full((2,), norm), atol=1e-5, rtol=1e-5)


def test_prompt_and_updates_are_orthogonal_where_enough_directions_are_dropped() -> None:
    prompt = random_prompt(3, 8, 40)
    found = projector(FedPR(normalise_projector=False), prompt)
    assert float((prompt @ found).norm() / prompt.norm()) < 2e-6
    step = random_prompt(3, 8, 40, seed=1)
    before = begun(FedPR(), prompt)
    update = FedPR().after_step(world_of(40), {"prompt": prompt + step}, before, 0)["prompt"] - prompt
    assert float(update.norm()) > 1
    assert float((update @ prompt.mT).abs().max()) < 1e-5


@pytest.mark.parametrize(("share", "dropped", "expected"), [(0.8, 8, 0.48), (0.825, 7, 0.54)])
def test_a_prompt_of_more_tokens_than_dropped_directions_leaves_a_rest(
    share: float, dropped: int, expected: float
) -> None:
    """16 tokens in 40 dimensions leave what their trailing singular values hold, about half."""
    rests = []
    for seed in range(20):
        prompt = random_prompt(1, 16, 40, seed=seed)
        found = projector(FedPR(kept_share=share, normalise_projector=False), prompt)
        rests.append(float((prompt @ found).norm() / prompt.norm()))
        values = torch.linalg.svdvals(prompt)[0]
        assert rests[-1] == pytest.approx(float(values[dropped:].norm() / values.norm()), abs=1e-5)
    assert np.mean(rests) == pytest.approx(expected, abs=0.02)


def test_the_projector_is_that_of_the_gram_matrix_by_the_book() -> None:
    """Where the dropped directions belong to different singular values the projector is unique: numpy's on P^T P must give it."""
    prompt = random_prompt(2, 16, 40)
    found = projector(FedPR(normalise_projector=True), prompt).numpy()
    for block in range(2):
        rows = prompt[block].numpy().astype(np.float64)
        kept = np.linalg.svd(rows.T @ rows)[2].T[:, 8:]
        expected = kept @ kept.T
        np.testing.assert_allclose(found[block], expected / np.linalg.norm(expected), atol=1e-6)


def test_a_prompt_along_one_axis_may_not_move_along_it() -> None:
    prompt = torch.zeros(1, 1, 5)
    prompt[0, 0, 2] = 3.0
    found = projector(FedPR(normalise_projector=False), prompt)  # one of five directions is dropped
    torch.testing.assert_close(found[0], torch.diag(torch.tensor([1.0, 1, 0, 1, 1])), atol=1e-6, rtol=0)


def test_by_default_a_step_along_kept_directions_is_as_long_as_in_the_first_round() -> None:
    found = projector(FedPR(), random_prompt(2, 3, 40))
    torch.testing.assert_close(found @ found, found, atol=1e-5, rtol=0)
    assert found.diagonal(dim1=1, dim2=2).sum(1).tolist() == pytest.approx([32.0, 32.0], abs=1e-3)


def test_every_block_is_projected_by_its_own_prompt() -> None:
    prompt = random_prompt(2, 3, 40)
    both = projector(FedPR(), prompt)
    assert float((both[0] - both[1]).abs().max()) > 0.01
    torch.testing.assert_close(both[1:], projector(FedPR(), prompt[1:]))


def test_keeping_every_direction_is_a_multiple_of_the_identity() -> None:
    prompt = random_prompt(2, 3, 36)
    eye = torch.eye(36).expand(2, -1, -1)
    torch.testing.assert_close(projector(FedPR(kept_share=1.0, normalise_projector=True), prompt), eye / 6)
    torch.testing.assert_close(projector(FedPR(kept_share=1.0, normalise_projector=False), prompt), eye)


@pytest.mark.parametrize(
    ("width", "share", "dropped"), [(40, 0.8, 8), (768, 0.8, 153), (32, 0.8, 6), (10, 0.9, 1), (7, 1.0, 0)]
)
def test_the_number_of_dropped_directions_does_not_hang_on_a_float(width: int, share: float, dropped: int) -> None:
    assert FedPR(kept_share=share).dropped(width) == dropped


@pytest.mark.parametrize("tokens", [3, 0])
def test_a_zero_prompt_and_no_prompt_have_a_projector_too(tokens: int) -> None:
    found = projector(FedPR(normalise_projector=False), torch.zeros(2, tokens, 40))
    torch.testing.assert_close(found @ found, found)
    assert torch.linalg.matrix_rank(found).tolist() == [32, 32]


def test_the_step_of_the_head_is_left_alone_and_a_stage_without_prompts_too() -> None:
    before = {**begun(FedPR(), random_prompt(1, 3, 40)), "head.bias": torch.zeros(2)}
    stepped = {"prompt": before["prompt"] + 1, "head.bias": torch.ones(2)}
    found = FedPR().after_step(world_of(40), stepped, before, 0)
    assert torch.equal(found["head.bias"], torch.ones(2))
    assert not torch.equal(found["prompt"], stepped["prompt"])
    assert FedPR().after_step(world_of(40), {"head.bias": torch.ones(2)}, before, 0).keys() == {"head.bias"}


def test_projected_steps_of_many_clients_at_once_are_those_of_each() -> None:
    method, world = FedPR(), world_of(40)
    prompts = random_prompt(3, 2, 5, 40)
    steps = random_prompt(3, 2, 5, 40, seed=1)
    befores = [begun(method, prompt) for prompt in prompts]
    alone = [
        method.after_step(world, {"prompt": before["prompt"] + step}, before, 0)["prompt"]
        for before, step in zip(befores, steps, strict=True)
    ]
    stacked = {name: torch.stack([before[name] for before in befores]) for name in befores[0]}
    together = torch.func.vmap(
        lambda before, step: method.after_step(world, {"prompt": before["prompt"] + step}, before, 0)
    )
    torch.testing.assert_close(together(stacked, steps)["prompt"], torch.stack(alone))


def test_predicting_needs_no_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedpr, "leading_directions", lambda *_: pytest.fail("decomposed"))
    prompt = random_prompt(1, 3, 40)
    params = FedPR().personalise(world_of(40), client_in(2), {"prompt": prompt}, {"head.bias": torch.zeros(2)})
    assert set(params) == {"prompt", "head.bias"}
    assert torch.equal(params["prompt"], prompt)


@pytest.mark.parametrize(("method", "depth"), [("fedvpt_deep", None), ("fedvpt", 1)])
def test_the_first_round_is_that_of_fedvpt_bit_for_bit_and_the_second_is_not(
    settings: Any, method: str, depth: int | None
) -> None:
    for rounds, equal in ((1, True), (2, False)):
        federation = {"rounds": rounds}
        projected = run(settings(name=f"a{rounds}", method={"name": "fedpr", "depth": depth}, federation=federation))
        plain = run(settings(name=f"b{rounds}", method={"name": method}, federation=federation))
        assert (worst_difference(shared_tensors(projected), shared_tensors(plain)) == 0.0) is equal
        assert (worst_difference(local_tensors(projected, 1), local_tensors(plain, 1)) == 0.0) is equal
        assert (projected.client_accuracies() == plain.client_accuracies()) or not equal


@pytest.mark.parametrize(("method", "stays_out"), [("fedpr", True), ("fedvpt_deep", False)])
def test_the_second_round_moves_the_prompt_only_where_the_first_left_nothing(
    settings: Any, method: str, stays_out: bool
) -> None:
    """With momentum and weight decay, over clients: three tokens, six of 32 directions dropped."""
    values = {"name": method, "prompt_tokens": 3}
    train = {"lr": 0.2, "weight_decay": 1e-2, "epochs": 2}
    first, second = (
        shared_tensors(run(settings(name=f"r{rounds}", method=values, train=train, federation={"rounds": rounds})))
        for rounds in (1, 2)
    )
    change = second["prompt"] - first["prompt"]
    assert float(change.norm()) > 1e-3
    overlap = float((change @ first["prompt"].mT).norm() / (change.norm() * first["prompt"].norm()))
    assert (overlap < 1e-5) is stays_out


def test_normalising_scales_a_first_projected_step_by_the_root_of_what_is_kept() -> None:
    prompt, step = random_prompt(1, 3, 40), random_prompt(1, 3, 40, seed=1)
    changes = []
    for method in (FedPR(normalise_projector=True), FedPR()):
        stepped = {"prompt": prompt + step}
        changes.append(method.after_step(world_of(40), stepped, begun(method, prompt), 0)["prompt"] - prompt)
    torch.testing.assert_close(changes[0] * 32**0.5, changes[1], atol=1e-5, rtol=1e-5)


def test_a_prompt_that_never_moved_from_zero_is_federated_without_harm(settings: Any) -> None:
    values = {"name": "fedpr", "prompt_tokens": 2, "prompt_init": "zero"}
    still = run(settings(name="a", method=values, train={"lr": 0.1, "lrs": {"prompt": 0.0}}))
    assert torch.equal(shared_tensors(still)["prompt"], torch.zeros(3, 2, 32))
    moved = run(settings(name="b", method=values, train={"lr": 0.1}))
    assert 0 < float(shared_tensors(moved)["prompt"].abs().max()) < float("inf")


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=rf"method\.kept_share must be .*, got {share}"):
        registry.build({"name": "fedpr", "kept_share": share})


def test_a_share_that_keeps_no_direction_is_refused() -> None:
    world = world_of(40)
    message = r"method\.kept_share must keep one of 40 directions at least, got 1e-12"
    with pytest.raises(ConfigError, match=message):
        FedPR(kept_share=1e-12).check(world, TrainConfig())
    FedPR(kept_share=1 / 40).check(world, TrainConfig())
    with pytest.raises(ConfigError, match=r"method\.depth must be at most the 2 blocks"):
        FedPR(depth=3).check(world, TrainConfig())
