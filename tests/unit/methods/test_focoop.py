"""FOCoOp: the worst features, the robust loss, calibration at the server, and its limits PromptFL and CoOp."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import local_tensors, run, shared_tensors
from text_methods import gradient, noise_like, on_clip, run_on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.errors import ConfigError
from fedprompt.methods.coop import CoOp
from fedprompt.methods.focoop import WORDS, FOCoOp, calibrate, upper, within_reach
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules.optimal_transport import unbalanced_plan

pytestmark = pytest.mark.unit

PLAIN = {"outside": 0, "ascent_steps": 0, "temperature": None}


def seen_by(settings: Any, method: FOCoOp, images: int = 4) -> tuple[Any, Any, Any, Any]:
    runtime, world = runtime_of(settings, method)
    params = {n: t + noise_like(t, 2) if t.dim() > 1 else t for n, t in working_parameters(runtime).items()}
    own, positions = runtime.bank.images(0, "train"), torch.arange(images)
    batch = make_batch(method, own, positions, training=True)
    return world, params, batch, forward(method, world, params, own, positions, batch, {})


def test_the_two_contexts_are_mixed_as_words(settings: Any) -> None:
    world, params, _, seen = seen_by(settings, FOCoOp(context_tokens=3, global_share=0.3, outside=4))
    mixed = 0.3 * params["context"] + 0.7 * params["local_context"]
    expected = world.text.encode(mixed.unsqueeze(0), "end")[0]
    torch.testing.assert_close(seen.text["own"], expected, atol=1e-5, rtol=1e-5)
    for number, word in enumerate(WORDS[:4]):
        one = world.text.with_names((word,)).encode(params["outside"][number].unsqueeze(0), "end")[0]
        torch.testing.assert_close(seen.text["outside"][number], one[0], atol=1e-5, rtol=1e-5)


def test_without_ascent_the_loss_is_the_papers(settings: Any) -> None:
    method = FOCoOp(context_tokens=2, outside=3, ascent_steps=0, outside_weight=0.7, temperature=0.6)
    world, params, batch, seen = seen_by(settings, method)
    text = torch.cat([seen.text["own"], seen.text["outside"]])
    scores = world.text.scale * seen.image @ text.T
    outside = scores[:, world.classes :]
    each = F.cross_entropy(scores, batch.labels, reduction="none")
    each = each - 0.7 * outside.log_softmax(-1).mean(-1)
    expected = 0.6 * (each / 0.6).exp().mean().log()
    logits = method.logits(world, params, seen, batch, {})
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, {}), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, scores[:, : world.classes], atol=1e-4, rtol=1e-4)
    plain = replace(method, temperature=None).loss(world, params, logits, seen, batch, {})
    torch.testing.assert_close(plain, each.mean(), atol=1e-4, rtol=1e-4)


def test_the_worst_features_are_found_by_the_gradient_of_the_penalised_mean(settings: Any) -> None:
    method = FOCoOp(context_tokens=2, outside=3, ascent_steps=3, ascent_size=0.05, ascent_penalty=0.4)
    world, _, batch, seen = seen_by(settings, method)
    text, classes = method.features(seen).detach(), world.classes
    found = method.worst(world, seen.image, text, batch)
    moved = torch.zeros_like(text)
    for inside in (True, False):
        rows = slice(0, classes) if inside else slice(classes, None)
        for _ in range(3):
            step = moved[rows].clone().requires_grad_()
            there = torch.cat([step, moved[classes:]]) if inside else torch.cat([moved[:classes], step])
            scores = world.text.scale * seen.image.detach() @ (text + there).T
            value = F.cross_entropy(scores, batch.labels)
            if not inside:
                value = value - method.outside_weight * scores[:, classes:].log_softmax(-1).mean()
            lengths = step.norm(dim=-1) if bool(step.abs().max() > 0) else 0 * step.sum(-1)
            (slope,) = torch.autograd.grad(value - 0.4 * lengths.mean(), step)
            moved[rows] = step.detach() + 0.05 * slope / slope.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found, moved, atol=1e-5, rtol=1e-4)
    before = F.cross_entropy(world.text.scale * seen.image @ text.T, batch.labels)
    after = F.cross_entropy(world.text.scale * seen.image @ (text + found).T, batch.labels)
    assert float(after) > float(before)


def test_the_ascent_raises_the_loss_and_every_context_learns(settings: Any) -> None:
    method = FOCoOp(context_tokens=2, outside=3)
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime)
    for name in ("context", "local_context", "outside"):
        assert float(gradient(runtime, method, params, name).abs().max()) > 0
    world, params, batch, seen = seen_by(settings, method)
    logits = method.logits(world, params, seen, batch, {})
    still = replace(method, ascent_steps=0)
    assert method.loss(world, params, logits, seen, batch, {}) > still.loss(world, params, logits, seen, batch, {})


def test_hard_images_count_more_at_a_low_temperature(settings: Any) -> None:
    method = FOCoOp(context_tokens=2, outside=2, ascent_steps=0, temperature=1e-3)
    world, params, batch, seen = seen_by(settings, method)
    logits = method.logits(world, params, seen, batch, {})
    scores = world.text.scale * seen.image @ method.features(seen).T
    hardest = method.by_image(scores, batch.labels, world.classes).max()
    assert float(method.loss(world, params, logits, seen, batch, {})) == pytest.approx(float(hardest), abs=0.01)


def test_the_unbalanced_plan_meets_its_conditions() -> None:
    """Where mass is left, costs + relaxation * log of both excesses is 0; nowhere it is negative."""
    costs = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    plan = unbalanced_plan(costs, 0.1, iterations=20000)
    excess = (plan.sum(1, keepdim=True) * 5).log() + (plan.sum(0, keepdim=True) * 3).log()
    slack = costs + 0.1 * excess
    assert float(slack.min()) > -1e-3
    assert float((plan * slack).abs().max()) < 1e-5


def test_two_means_of_numbers_by_hand() -> None:
    assert upper(torch.tensor([0.1, 5.0, 0.2, 4.0])).tolist() == [False, True, False, True]
    assert not upper(torch.full((4,), 0.3)).any()
    assert not upper(torch.tensor([1.0])).any()


def test_calibration_moves_the_global_context_to_near_ones_and_keeps_the_farthest() -> None:
    """With one near context all of its mass is its own: the mean is itself."""
    context = torch.zeros(1, 2)
    outside = torch.tensor([[[0.0, 1.0]], [[0.0, 9.0]], [[10.0, 0.0]], [[0.0, -11.0]]])
    moved, kept = calibrate(context, outside, 2, 0.5)
    torch.testing.assert_close(moved, torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(kept, outside[[2, 3]])
    _, again = calibrate(context, outside, 4, 0.5)
    torch.testing.assert_close(again, outside[[1, 2, 3, 1]])
    still, equal = calibrate(context, outside[:1].repeat(3, 1, 1), 2, 0.5)
    torch.testing.assert_close(still, context)
    assert len(equal) == 2


def test_what_is_kept_does_not_depend_on_how_uploads_were_rounded() -> None:
    """Contexts far from 0 and near each other, with masses that differ in the fifth digit: the same ones, at the same places."""
    stream = torch.Generator().manual_seed(4)
    context = torch.ones(1, 64)
    directions = F.normalize(torch.randn(40, 1, 64, generator=stream, dtype=torch.double), dim=-1)
    costs = torch.linspace(0.1, 1.0, 20, dtype=torch.double).repeat_interleave(2)
    costs[1::2] += 5e-6  # the mass is proportional to exp(-cost / 0.1)
    outside = (context + directions * costs.sqrt().view(-1, 1, 1))[torch.randperm(40, generator=stream)]
    _, expected = calibrate(context, outside.float(), 15, 0.5)
    for _ in range(20):
        noise = 1e-7 * torch.randn(outside.shape, generator=stream, dtype=torch.double)
        _, kept = calibrate(context, (outside + noise).float(), 15, 0.5)
        torch.testing.assert_close(kept, expected, atol=1e-6, rtol=0)


def test_a_wild_upload_is_left_out_of_the_calibration_if_the_rule_left_it_out() -> None:
    uploads = [torch.full((1, 1, 1), value) for value in (0.9, 1.0, 1.3, 500.0)]
    assert within_reach(uploads, torch.full((1, 1, 1), 1.1)) == uploads[:3]
    assert within_reach(uploads, torch.stack(uploads).mean(0)) == uploads
    assert within_reach(uploads[:1] * 2, uploads[0]) == uploads[:1] * 2


def test_alone_and_plain_it_is_promptfl(settings: Any) -> None:
    same = {"train": {"lr": 0.01}}
    found = run(on_clip(settings, "one", **same), FOCoOp(context_tokens=3, global_share=1.0, **PLAIN))  # type: ignore[arg-type]
    plain = run(on_clip(settings, "plain", **same), PromptFL(context_tokens=3))
    torch.testing.assert_close(shared_tensors(found)["context"], shared_tensors(plain)["context"], atol=1e-6, rtol=1e-5)
    assert found.client_accuracies() == plain.client_accuracies()


def test_without_the_global_context_it_trains_as_coop(settings: Any) -> None:
    same = {"train": {"lr": 0.01}, "federation": {"rounds": 1}}
    method = FOCoOp(context_words="a photo of a", global_share=0.0, **PLAIN)  # type: ignore[arg-type]
    found = run(on_clip(settings, "own", **same), method)
    alone = run(on_clip(settings, "coop", **same), CoOp(context_words="a photo of a"))
    for client in range(4):
        expected = local_tensors(alone, client)["context"]
        torch.testing.assert_close(local_tensors(found, client)["local_context"], expected, atol=1e-6, rtol=1e-5)


def test_the_server_sends_outside_contexts_that_clients_made(settings: Any) -> None:
    done = run_on_clip(settings, FOCoOp(context_tokens=2, outside=3), "outside")
    assert set(shared_tensors(done)) == {"context", "outside"}
    assert shared_tensors(done)["outside"].shape == (3, 2, 32)
    assert not FOCoOp().sums_suffice
    assert FOCoOp(outside=0).sums_suffice


def test_words_that_name_a_class_are_left_out(settings: Any) -> None:
    _, world = runtime_of(settings, FOCoOp(context_tokens=2))
    other = replace(world, class_names=("River", "snow"))
    assert FOCoOp(outside=3).words(other) == ("cloud", "mountain", "beach")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"outside_words": ["a"], "outside": 2}, "method.outside_words must have at least 2 words that name no class, got 1"),
        ({"global_share": 1.5}, "global_share"),
        ({"temperature": 0.0}, "temperature"),
        ({"ascent_size": 0.0}, "ascent_size"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "focoop", **given}))
