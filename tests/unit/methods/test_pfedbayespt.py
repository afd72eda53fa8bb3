"""pFedBayesPT and its two ablations: counts, reductions, predictions, policies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experiment, local_tensors, run, seeded, shared_tensors
from torch import Tensor

from fedprompt.backbones.random_weights import random_vit
from fedprompt.backbones.vit import READS
from fedprompt.client.step import inserted
from fedprompt.config import parse
from fedprompt.core import registry
from fedprompt.core.method import Batch, Client, Method, Seen, World
from fedprompt.errors import ConfigError
from fedprompt.inference.attention_maps import Watch
from fedprompt.methods.fedvpt import FedVPTDeep
from fedprompt.methods.pfedbayespt import PFedBayesPT, PFedBayesPTD, PFedBayesPTG
from fedprompt.runs.run import as_it_was
from fedprompt.tensors import Tensors

WORLD = World(768, 12, 197, 16, tuple(map(str, range(10))), ("a", "b"))
VIT = random_vit()


def small_world() -> World:
    shape = VIT.shape
    return World(shape.width, shape.depth, shape.tokens, shape.patch, ("x", "y", "z"), ("a", "b"))


def client(round: int = 1) -> Client:
    return Client(0, "a", round, 5, torch.tensor([5, 0, 0]), lambda params: 0.0, lambda purpose: seeded())


def ready(method: Method, round: int = 1) -> tuple[World, Tensors]:
    """Working parameters with a head that lets gradients through."""
    world = small_world()
    roles = method.init(world, seeded())
    params = method.begin(replace(world, roles=roles), client(round), roles.shared, roles.local)
    generator = torch.Generator().manual_seed(1)
    head = {name: 0.1 * torch.randn(params[name].shape, generator=generator) for name in ("head.weight", "head.bias")}
    return replace(world, roles=roles), {**params, **head}


def images(size: int = 4) -> Tensor:
    side = VIT.shape.image_size
    return torch.randn(size, 3, side, side, generator=torch.Generator().manual_seed(2))


def step(
    method: Method, world: World, params: Tensors, noise: Tensors | None = None, training: bool = True
) -> tuple[Seen, Batch, Tensors]:
    tokens = VIT.embed(images())
    inputs = torch.stack(VIT.block_inputs(tokens), 1)
    features = {need: inputs[:, : int(need.partition(":")[2] or len(VIT.weights))] for need in method.needs}
    batch = Batch(torch.tensor([0, 1, 2, 0]), features, training=training)
    if noise is None:
        noise = method.noise(world, 4, training, seeded(3))
    given = method.prompts(world, params, batch, noise)
    seen = Seen(**VIT.run(tokens.repeat(given.repeat, 1, 1), inserted(given.tokens), method.reads), extra=given.extra)
    return seen, batch, noise


def loss_of(method: Method, world: World, params: Tensors, noise: Tensors | None = None) -> Tensor:
    seen, batch, noise = step(method, world, params, noise)
    return method.loss(world, params, method.logits(world, params, seen, batch, noise), seen, batch, noise)


def predicted(method: Method, world: World, params: Tensors, noise: Tensors | None = None) -> Tensor:
    seen, batch, noise = step(method, world, params, noise, training=False)
    return method.predict(world, params, seen, batch, noise)


@pytest.mark.parametrize(("hidden", "count"), [(0, 23_184), (64, 324_120)])
def test_encoder_parameters_for_vit_b16(hidden: int, count: int) -> None:
    start = {"mean_init": "default"} if hidden else {}
    method = PFedBayesPT(parametrisation="literal", encoder_hidden=hidden, **start)  # type: ignore[arg-type]
    roles = method.init(WORLD, seeded())
    assert sum(tensor.numel() for name, tensor in roles.shared.items() if name.startswith("encoder.")) == count
    assert roles.shared["prompt"].shape == (12, 10, 768)


def test_depths_and_tokens_of_the_two_prompts_are_independent() -> None:
    method = PFedBayesPT(prompt_tokens=4, depth=3, instance_tokens=2, instance_depth=1, draws=2, extra_samples=3)
    world, params = ready(method)
    _, batch, noise = step(method, world, params)
    everyones, own = method.prompts(world, params, batch, noise).tokens
    assert (everyones.tokens.shape, everyones.blocks) == ((3, 4, 32), (0, 1, 2))
    assert (own.tokens.shape, own.blocks) == ((2 * 4, 1, 2, 32), (0,))
    assert noise["masks"].shape == (5, 4, 1, VIT.shape.tokens)
    assert noise["epsilon"].shape == (2, 4, 1, 2, 32)
    assert method.needs == ("block_inputs:1",)


def test_one_draw_and_no_further_samples_is_the_single_sample_elbo() -> None:
    method = PFedBayesPT(extra_samples=0, kl_weight=0.7, prior_scale=0.5)
    world, params = ready(method)
    seen, batch, noise = step(method, world, params)
    logits = method.logits(world, params, seen, batch, noise)
    mean, logvar, epsilon = seen.extra["mean"][0], seen.extra["logvar"][0], noise["epsilon"][0]
    prompt = mean + (0.5 * logvar).exp() * epsilon
    posterior = torch.distributions.Normal(mean, (0.5 * logvar).exp()).log_prob(prompt).sum((1, 2, 3))
    prior = torch.distributions.Normal(0.0, 0.5).log_prob(prompt).sum((1, 2, 3))
    beta = 0.7 / (3 * 1 * 32)
    expected = (F.cross_entropy(logits, batch.labels, reduction="none") - beta * (prior - posterior)).mean()
    torch.testing.assert_close(method.loss(world, params, logits, seen, batch, noise), expected, atol=1e-5, rtol=1e-5)


def test_without_masks_further_samples_change_nothing() -> None:
    few, many = (PFedBayesPT(keep_probability=1.0, extra_samples=samples) for samples in (0, 3))
    world, params = ready(few)
    noise = few.noise(world, 4, True, seeded(3))
    more = {**noise, "masks": torch.ones(4, *noise["masks"].shape[1:])}
    torch.testing.assert_close(loss_of(few, world, params, noise), loss_of(many, world, params, more))


def test_the_gaussian_variant_is_the_expectation_of_the_full_one_without_masks_and_samples() -> None:
    gaussian = PFedBayesPTG(
        kl_weight=2.0, initial_std=1e-6
    )  # next to no noise in the likelihood, so that only the divergence is averaged
    full = PFedBayesPT(kl_weight=2.0, initial_std=1e-6, keep_probability=1.0, extra_samples=0)
    world, params = ready(gaussian)
    generator = seeded(5)
    values = torch.stack([loss_of(full, world, params, full.noise(world, 4, True, generator)) for _ in range(200)])
    exact = loss_of(gaussian, world, params)
    assert abs(float(values.mean() - exact)) < 3 * float(values.std()) / 200**0.5 + 1e-5


def test_without_noise_and_masks_all_three_agree_and_only_the_full_one_has_several_draws() -> None:
    full = PFedBayesPT(keep_probability=1.0, kl_weight=0.0, initial_std=1e-6)
    world, params = ready(full)
    gaussian, plain = PFedBayesPTG(kl_weight=0.0), PFedBayesPTD()
    torch.testing.assert_close(loss_of(full, world, params), loss_of(plain, world, params), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss_of(gaussian, world, params), loss_of(plain, world, params), atol=1e-5, rtol=1e-5)
    alone = predicted(plain, world, params)
    assert alone.shape == (1, 4, 3)
    torch.testing.assert_close(predicted(gaussian, world, params), alone)
    torch.testing.assert_close(predicted(full, world, params), alone.expand(5, -1, -1), atol=1e-6, rtol=1e-5)


def test_predictions_use_the_mean_prompt_under_masks_and_equal_masks_give_equal_draws() -> None:
    method = PFedBayesPT(initial_std=10.0, predict_draws=3)
    world, params = ready(method)
    noise = method.noise(world, 4, False, seeded(1))
    assert set(noise) == {"masks"}
    draws = predicted(method, world, params, noise)
    assert draws.shape == (3, 4, 3)
    torch.testing.assert_close(draws.sum(-1), torch.ones(3, 4))
    assert not torch.allclose(draws[0], draws[1], atol=1e-6)
    same = {"masks": noise["masks"][:1].expand(3, -1, -1, -1)}
    torch.testing.assert_close(predicted(method, world, params, same), draws[:1].expand(3, -1, -1))


def test_probabilities_are_averaged_not_logits() -> None:
    """Two draws that are sure of different classes: the mean probability is one half each, with mutual information log 2."""
    from fedprompt.metrics.scoring import score

    logits = torch.tensor([[[20.0, 0.0, 14.0]], [[0.0, 20.0, 14.0]]])
    result = score(logits.softmax(-1), torch.tensor([2]), torch.zeros(1, dtype=torch.long).numpy(), ["all"])
    assert logits.mean(0).argmax() == 2  # averaging logits would have said class 2
    assert result.correct == 0
    assert result.mutual_information == pytest.approx(0.6931, abs=0.02)


def test_gradients_reach_prompt_both_networks_and_norm() -> None:
    method = PFedBayesPT(omega="layerwise")
    world, params = ready(method)
    names = [*world.roles.shared]
    leaves = {name: params[name].clone().requires_grad_() for name in names}
    loss = loss_of(method, world, {**params, **leaves})
    for name, grad in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        # behind a log-variance network that starts constant, only its last layer has a gradient
        if not name.startswith("encoder.logvar.in"):
            assert grad.abs().max() > 0, name


def test_the_weight_of_the_prior_warms_up_over_rounds() -> None:
    method = PFedBayesPTG(kl_warmup=4, kl_weight=1.0)
    scales = [float(ready(method, round)[1]["kl_scale"]) for round in (1, 2, 4, 9)]
    assert scales == [0.25, 0.5, 1.0, 1.0]
    world, params = ready(method, 1)
    quarter, nothing = loss_of(method, world, params), loss_of(replace(method, kl_weight=0.0), world, params)
    whole = loss_of(method, world, {**params, "kl_scale": torch.tensor(1.0)})
    torch.testing.assert_close(quarter - nothing, 0.25 * (whole - nothing), atol=1e-5, rtol=1e-4)


def test_the_literal_unit_multiplies_by_the_number_of_dimensions() -> None:
    world, params = ready(PFedBayesPTG())
    by_dimension, total, nothing = (
        loss_of(PFedBayesPTG(**fields), world, params)  # type: ignore[arg-type]
        for fields in ({}, {"kl_unit": "total"}, {"kl_weight": 0.0})
    )
    torch.testing.assert_close(total - nothing, 96 * (by_dimension - nothing), atol=1e-3, rtol=1e-4)


def test_a_prior_centred_on_the_cls_row_costs_nothing_for_a_mean_that_starts_there() -> None:
    centred = PFedBayesPTG(
        parametrisation="literal", prior_mean="cls", mean_init="cls", mean_scale=0.3, prior_scale=0.05, kl_weight=1.0
    )
    world, params = ready(centred)
    free = loss_of(replace(centred, kl_weight=0.0), world, params)
    torch.testing.assert_close(loss_of(centred, world, params), free, atol=1e-5, rtol=1e-5)  # same mean, same scale
    elsewhere = loss_of(replace(centred, prior_mean="zero"), world, params)
    assert elsewhere > free + 0.1


def test_padded_samples_do_not_count() -> None:
    method = PFedBayesPT()
    world, params = ready(method)
    seen, batch, noise = step(method, world, params)
    logits = method.logits(world, params, seen, batch, noise)
    weighted = replace(batch, weights=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    loss = method.loss(world, params, logits, seen, weighted, noise)
    shaken = replace(batch, labels=torch.tensor([0, 1, 0, 1]), weights=weighted.weights)
    torch.testing.assert_close(loss, method.loss(world, params, logits, seen, shaken, noise))
    assert not torch.isclose(loss, method.loss(world, params, logits, seen, batch, noise))


def test_no_instance_signal_reduces_to_fedvpt_deep_with_one_more_token() -> None:
    """A mean network that says a constant is a global token of that value in every channel."""
    method = PFedBayesPTD(parametrisation="literal", prompt_tokens=2)
    world, params = ready(method)
    constant = {
        **params,
        "encoder.mean.out.weight": torch.zeros(3, 1, 17),
        "encoder.mean.out.bias": torch.full((3, 1), 0.4),
    }
    constant["encoder.norm.bias"] = torch.zeros_like(params["encoder.norm.bias"])
    wider = {**params, "prompt": torch.cat([params["prompt"], torch.full((3, 1, 32), 0.4)], dim=1)}
    vpt = FedVPTDeep(prompt_tokens=3)
    torch.testing.assert_close(loss_of(method, world, constant), loss_of(vpt, world, wider), atol=1e-5, rtol=1e-5)


# --- the parametrisation: what one step of one rate does to global and to instance tokens


def tokens_before_and_after_a_step(method: PFedBayesPTD, rate: float, longer: float = 1.0) -> tuple[Tensor, Tensor]:
    """How far one step of SGD turns a global token and an instance token of the last block, in radians, mean over images.

    Global tokens may start longer than VPT's.
    """
    world, params = ready(method)
    prompt = longer * params["prompt"]
    world = replace(world, roles=replace(world.roles, shared={**world.roles.shared, "prompt": prompt}))
    params = {**params, **method.initial_encoder(world, seeded()), "prompt": prompt}
    leaves = {name: params[name].clone().requires_grad_() for name in world.roles.shared}
    loss = loss_of(method, world, {**params, **leaves}, {})
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    after = {
        **params,
        **{name: leaf.detach() - rate * slope for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)},
    }
    turned = []
    _, batch, noise = step(method, world, params, {})
    for slot in (0, 1):
        old, new = (method.prompts(world, each, batch, noise).tokens[slot].tokens for each in (params, after))
        cosine = torch.cosine_similarity(old[..., -1, :, :], new[..., -1, :, :], dim=-1)
        turned.append(cosine.clamp(-1, 1).arccos().mean())
    return turned[0], turned[1]


def test_one_rate_turns_instance_and_global_tokens_by_the_same_order_and_the_literal_form_does_not() -> None:
    for longer in (1.0, 10.0):
        everyones, own = tokens_before_and_after_a_step(PFedBayesPTD(), 0.01 * longer**2, longer)
        assert 1 / 20 < own / everyones < 20
    everyones, own = tokens_before_and_after_a_step(PFedBayesPTD(parametrisation="literal"), 0.01)
    assert own / everyones < 1 / 30


def test_instance_tokens_have_the_length_of_the_blocks_own_rows_and_differ_between_images() -> None:
    method = PFedBayesPTD()
    world, params = ready(method)
    _, batch, noise = step(method, world, params, {})
    tokens = method.prompts(world, params, batch, noise).tokens[1].tokens  # (B, L, 1, d)
    rows = batch.features["block_inputs"]
    torch.testing.assert_close(tokens.square().mean((-2, -1)), rows.square().mean((-2, -1)), atol=1e-5, rtol=1e-3)
    assert torch.cosine_similarity(tokens[0], tokens[1], dim=-1).max() < 0.999
    cls = torch.nn.functional.layer_norm(rows[..., 0, :], rows.shape[-1:])
    assert torch.cosine_similarity(tokens[..., 0, :], cls, dim=-1).max() < 0.95  # no copy of CLS


def test_the_length_of_the_row_weights_does_not_matter() -> None:
    method = PFedBayesPTD()
    world, params = ready(method)
    scaled = {**params, "encoder.mean.out.weight": 7.0 * params["encoder.mean.out.weight"]}
    torch.testing.assert_close(
        loss_of(method, world, params, {}), loss_of(method, world, scaled, {}), atol=1e-4, rtol=1e-4
    )


def trained(method: Method, rate: float, steps: int) -> tuple[list[float], Tensors]:
    """Plain SGD on everything that is shared."""
    world, params = ready(method)
    generator, losses = seeded(4), []
    for _ in range(steps):
        leaves = {name: params[name].clone().requires_grad_() for name in world.roles.shared}
        loss = loss_of(method, world, {**params, **leaves}, method.noise(world, 4, True, generator))
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        params = {
            **params,
            **{n: leaf.detach() - rate * slope for (n, leaf), slope in zip(leaves.items(), slopes, strict=True)},
        }
        losses.append(loss.item())
    return losses, params


def test_a_strong_prior_widens_the_posterior_and_leaves_the_directions_of_the_mean_alone() -> None:
    method = PFedBayesPTG(kl_weight=1.0)
    losses, params = trained(method, rate=0.5, steps=40)
    assert losses[-1] < losses[0]
    channels, _ = method._factors(small_world())
    assert (channels.squeeze(-1) * params["encoder.norm.weight"]).abs().max() < 10
    assert params["encoder.logvar.out.bias"].mean() > 2 * math.log(0.05)


@pytest.mark.parametrize("cls", [PFedBayesPT, PFedBayesPTG])
@pytest.mark.parametrize("parametrisation", ["literal", "normalised"])
def test_the_literal_objective_stays_finite(cls: type[PFedBayesPTG], parametrisation: Any) -> None:
    method = cls(parametrisation=parametrisation, kl_unit="total", kl_weight=1.0, initial_std=0.05)
    losses, params = trained(method, rate=0.5, steps=12)
    assert all(math.isfinite(loss) for loss in losses)
    assert all(torch.isfinite(tensor).all() for tensor in params.values())


def test_predictions_with_noise_are_those_of_training_prompts_and_differ_by_draw() -> None:
    method = PFedBayesPT(keep_probability=1.0, predict_draws=3, predict_with_noise=True, initial_std=2.0)
    world, params = ready(method)
    noise = method.noise(world, 4, False, seeded(1))
    assert noise["epsilon"].shape == (3, 4, 3, 1, 32)
    draws = predicted(method, world, params, noise)
    assert not torch.allclose(draws[0], draws[1], atol=1e-4)
    still = {**noise, "epsilon": torch.zeros_like(noise["epsilon"])}
    calm = replace(method, predict_with_noise=False)
    torch.testing.assert_close(
        predicted(method, world, params, still), predicted(calm, world, params, {"masks": noise["masks"]})
    )
    gaussian = PFedBayesPTG(predict_with_noise=True, initial_std=2.0)
    world, params = ready(gaussian)
    first, second = (predicted(gaussian, world, params, gaussian.noise(world, 4, False, seeded(n))) for n in (1, 2))
    assert not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("cls", [PFedBayesPTD, PFedBayesPTG, PFedBayesPT])
def test_controls_leave_predictions_as_they_are_and_show_what_instance_prompts_do(cls: type[PFedBayesPTD]) -> None:
    plain, asked = cls(), cls(diagnose=True)
    world, params = ready(plain)
    noise = asked.noise(world, 4, False, seeded(1))
    torch.testing.assert_close(
        predicted(asked, world, params, noise), predicted(plain, world, params, noise), atol=1e-6, rtol=1e-5
    )
    seen, batch, noise = step(asked, world, params, noise, training=False)
    found = asked.diagnostics(world, params, seen, batch)
    assert {"instance.accuracy", "instance.accuracy_mean_prompt", "instance.accuracy_other_prompt"} <= set(found)
    assert ("posterior.kl" in found) == (cls is not PFedBayesPTD)
    assert ("posterior.a_s" in found) == (cls is PFedBayesPT)
    right = predicted(plain, world, params, noise).mean(0).argmax(-1) == batch.labels
    assert found["instance.accuracy"].tolist() == right.float().tolist()
    # where every image has the same prompt, its mean and that of another image are that prompt
    same = {**params, "encoder.mean.out.weight": 0 * params["encoder.mean.out.weight"]}
    seen, batch, noise = step(asked, world, same, noise, training=False)
    found = asked.diagnostics(world, same, seen, batch)
    assert found["instance.accuracy"].tolist() == found["instance.accuracy_mean_prompt"].tolist()
    assert found["instance.accuracy"].tolist() == found["instance.accuracy_other_prompt"].tolist()


def test_a_control_uses_the_prompts_of_other_images() -> None:
    method = PFedBayesPTD(diagnose=True)
    world, params = ready(method)
    _, batch, noise = step(method, world, params, {}, training=False)
    own, mean, other = method.prompts(world, params, batch, noise).tokens[1].tokens.unflatten(0, (3, 4))
    assert torch.equal(other, own[[2, 3, 0, 1]])
    torch.testing.assert_close(mean, own.mean(0, keepdim=True).expand_as(own))


def test_the_attention_on_instance_prompts_is_that_of_watched_blocks() -> None:
    """Mean over heads and blocks, of the prompts as they are; the pass beside it computes the weights by their formula."""
    method = PFedBayesPTD(diagnose=True, prompt_tokens=3)
    world, params = ready(method)
    seen, batch, noise = step(method, world, params, {}, training=False)
    found = method.diagnostics(world, params, seen, batch)
    vit, inputs = VIT, images()
    own = method.prompts(world, params, batch, noise).tokens
    eye = Watch(vit.shape.tokens)
    replace(vit, block=eye).run(vit.embed(inputs).repeat(3, 1, 1), own, READS)
    by_block = torch.stack([looked.cls[:4, vit.shape.tokens :] for looked in eye.looked])  # 3 global rows and 1 own
    torch.testing.assert_close(found["prompt.attention"], by_block[..., :3].sum(-1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found["instance.attention"], by_block[..., 3].mean(0), atol=1e-6, rtol=1e-5)


def test_without_a_global_prompt_only_instance_prompts_have_attention() -> None:
    method = PFedBayesPTD(diagnose=True, prompt_tokens=0, instance_depth=1)
    world, params = ready(method)
    seen, batch, _ = step(method, world, params, {}, training=False)
    found = method.diagnostics(world, params, seen, batch)
    assert 0 < float(found["instance.attention"].min()) < 1
    assert "prompt.attention" not in found


def test_a_run_says_how_far_prompt_and_encoder_moved(settings: Any) -> None:
    values = settings(method={"name": "pfedbayespt", "prompt_tokens": 2, "diagnose": True}, train={"lr": 0.2})
    found = run(values).summary()["diagnostics"]
    assert found["prompt.moved"] > 0
    assert found["encoder.rows.moved"] > 0
    assert 0 <= found["posterior.a_s"] <= math.log(5) + 1e-4
    assert 0 < found["instance.attention"] + found["prompt.attention"] < 1
    alone = run({**values, "name": "alone", "engine": {"cohort": 1}}).summary()["diagnostics"]
    assert alone["instance.attention"] == pytest.approx(found["instance.attention"], rel=1e-4)
    still = run({**values, "name": "still", "train": {**values["train"], "lr": 0.0}}).summary()["diagnostics"]
    assert still["prompt.moved"] == still["encoder.rows.moved"] == still["encoder.gain.moved"] == 0.0


def test_evaluation_in_mixed_batches_gives_every_image_its_own_prediction(settings: Any) -> None:
    counts = [
        run(
            settings(
                name=f"d{asked}",
                method={"name": "pfedbayespt_d", "diagnose": asked},
                federation={"evaluation_batch": 4},
            )
        ).reader.evaluations(2)
        for asked in (False, True)
    ]
    for client, result in counts[0].items():
        for figure in ("samples", "correct", "domains"):
            assert counts[1][client][figure] == result[figure]
        assert counts[1][client]["nll"] == pytest.approx(result["nll"], rel=1e-4)


def test_a_run_of_an_earlier_version_is_read_in_its_literal_form(settings: Any) -> None:
    literal = {"name": "pfedbayespt_d", "parametrisation": "literal"}
    stored = registry.completed(parse(settings(method=literal))).model_dump(mode="json")
    del stored["method"]["parametrisation"]
    assert as_it_was(stored)["method"]["parametrisation"] == "literal"
    assert as_it_was({**stored, "method": {"name": "fedvpt"}})["method"] == {"name": "fedvpt"}


@pytest.mark.parametrize("policy", ["local", "shared", "shared_then_finetune"])
def test_head_policies(policy: str, settings: Any) -> None:
    changed = settings(
        method={"name": "pfedbayespt", "prompt_tokens": 2, "head": policy, "finetune_epochs": 2},
        federation={"rounds": 1},
    )
    done = run(changed)
    assert ("head.weight" in shared_tensors(done)) == (policy != "local")
    assert ("head.weight" in local_tensors(done, 0)) == (policy == "local")
    stages = PFedBayesPT(head=policy, finetune_epochs=2).adaptation(small_world(), experiment(changed).config.train)  # type: ignore[arg-type]
    assert [(stage.trainable, stage.epochs) for stage in stages] == (
        [(("head.weight", "head.bias"), 2)] if policy == "shared_then_finetune" else []
    )


def test_finetuning_happens_on_a_copy(settings: Any) -> None:
    """The server's tensors are those of the shared head; only the evaluation differs."""
    done = [
        run(settings(name=policy, method={"name": "fedvpt", "prompt_tokens": 2, "head": policy}, train={"lr": 0.3}))
        for policy in ("shared", "shared_then_finetune")
    ]
    first, second = (shared_tensors(each) for each in done)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert done[0].history() != done[1].history()


def test_the_encoder_has_a_rate_of_its_own(settings: Any) -> None:
    frozen = {"lr": 0.05, "lrs": {"encoder.*": 0.0}}
    done = run(settings(method={"name": "pfedbayespt", "prompt_tokens": 2}, train=frozen))
    start = (
        experiment(settings(method={"name": "pfedbayespt", "prompt_tokens": 2}, train=frozen))
        .factory.prepare()[3]
        .roles.shared
    )
    after = shared_tensors(done)
    assert all(torch.equal(after[name], start[name]) for name in after if name.startswith("encoder."))
    assert not torch.equal(after["prompt"], start["prompt"])


def test_a_run_reports_uncertainty_over_its_draws(settings: Any) -> None:
    done = run(settings(method={"name": "pfedbayespt", "prompt_tokens": 2, "keep_probability": 0.3}, train={"lr": 0.2}))
    summary = done.summary()
    assert summary["mutual_information"] > 0
    assert summary["entropy"] > summary["mutual_information"]
    assert 0 <= summary["ece"] <= 1
    single = run(settings(name="single", method={"name": "pfedbayespt_g", "prompt_tokens": 2}, train={"lr": 0.2}))
    assert single.summary()["mutual_information"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 13}, "method.depth must be at most the 3 blocks of the backbone, got 13"),
        ({"instance_depth": 4}, "method.instance_depth must be at most the 3 blocks of the backbone, got 4"),
        ({"encoder_hidden": 64}, "method.encoder_hidden must be 0 unless method.parametrisation is literal, got 64"),
        (
            {"parametrisation": "literal", "encoder_hidden": 64, "mean_init": "cls"},
            "method.mean_init must be default unless method.encoder_hidden is 0, got 'cls'",
        ),
        ({"keep_probability": 1.5}, "method.keep_probability must be less than or equal to 1, got 1.5"),
        ({"omega": "wide"}, "method.omega must be 'joint' or 'layerwise', got 'wide'"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str, settings: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(settings(method={"name": "pfedbayespt", **fields})).factory.prepare()
