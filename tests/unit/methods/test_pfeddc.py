"""pFedDC: its limits are CoOp, PromptFL and prompts of one kind; a whole round against an independent loop; who owns what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import experiment, local_tensors, run, seeded, shared_tensors, worst_difference
from torch import Tensor, nn

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.vit import ViT
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.core import registry
from fedprompt.core.method import Batch, Method, Seen, World
from fedprompt.data.cache.pixel_store import ImageStore
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.bases.with_local import TRAINED
from fedprompt.methods.coop import CoOp
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.methods.pfeddc import PFedDC
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules.contexts import Language
from fedprompt.modules.fusion import Direction
from fedprompt.modules.insertion import vpt_bound
from fedprompt.tensors import Tensors, stripped

pytestmark = pytest.mark.unit

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
GROUPS = ("global_text", "global_vision", "local_text", "local_vision", "fusion.text.", "fusion.vision.")


def prepared(settings: dict[str, Any], method: Method) -> tuple[World, DualEncoder, ClientRuntime]:
    made = experiment(settings, method)
    source, manifest, backbone, world = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    states = ClientStates(lambda client: None)
    return world, backbone, ClientRuntime(made.config, world, method, bank, states, source.domain_names)


def logits_of(method: Method, params: Tensors, world: World, runtime: ClientRuntime) -> Tensor:
    images, positions = runtime.bank.images(0, "train"), torch.arange(6)
    batch = make_batch(method, images, positions, training=False)
    seen = forward(method, world, params, images, positions, batch, {})
    return method.logits(world, params, seen, batch, {})


def gradients(method: Method, params: Tensors, world: World, runtime: ClientRuntime) -> Tensors:
    images = runtime.bank.images(0, "train")
    (stage,) = method.stages(world, runtime.config.train)
    leaves = {name: params[name].detach().requires_grad_() for name in stage.trainable}
    loss = step_loss(method, world, {**params, **leaves}, images, torch.arange(8), {})
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))


def everything(world: World) -> Tensors:
    return {**world.roles.shared, **world.roles.local}


# ---------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("direction", ["local_queries", "concat_keys"])
def test_before_the_first_step_it_is_a_model_with_local_prompts_alone(
    settings: Any, direction: Direction, depth: int
) -> None:
    method = PFedDC(direction=direction, vision_depth=depth)
    world, _, runtime = prepared(settings(), method)
    alone = replace(method, use_global=False)
    own = {name: tensor for name, tensor in everything(world).items() if name.startswith("local_")}
    assert torch.equal(logits_of(method, everything(world), world, runtime), logits_of(alone, own, world, runtime))


def test_with_global_queries_it_begins_with_the_global_prompts_alone(settings: Any) -> None:
    method = PFedDC(direction="global_queries")
    world, _, runtime = prepared(settings(), method)
    alone = replace(method, use_local=False)
    found = logits_of(method, everything(world), world, runtime)
    assert torch.equal(found, logits_of(alone, world.roles.shared, world, runtime))


ONCE = {"evaluate_every": 9, "evaluate_last": 1}
STEADY = {"train": {"lr": 0.05, "epochs": 2}, "federation": {"rounds": 2, "fraction": 0.5, **ONCE}}


def same_local_context(first: Any, second: Any) -> None:
    cohorts = {client for record in first.rounds() for client in record.cohort}
    assert cohorts == {client for record in second.rounds() for client in record.cohort}
    for client in cohorts:
        found, expected = local_tensors(first, client)["local_text"], local_tensors(second, client)["context"]
        assert torch.equal(found, expected)


def test_without_global_prompts_and_vision_it_is_coop(settings: Any) -> None:
    method = PFedDC(use_vision=False, use_global=False, context_tokens=3)
    found = run(settings(name="one", **STEADY), method)
    expected = run(settings(name="two", **STEADY), CoOp(context_tokens=3))
    same_local_context(found, expected)
    assert found.client_accuracies() == expected.client_accuracies()
    assert all(record.bytes_up == record.bytes_down == 0 for record in found.rounds())


def test_with_a_fusion_that_never_learns_it_trains_as_coop(settings: Any) -> None:
    rates = {**STEADY, "train": {**STEADY["train"], "lrs": {"fusion.*": 0.0}}}
    found = run(settings(name="one", **rates), PFedDC(use_vision=False, context_tokens=3))
    expected = run(settings(name="two", **STEADY), CoOp(context_tokens=3))
    same_local_context(found, expected)
    learning = run(settings(name="three", **STEADY), PFedDC(use_vision=False, context_tokens=3))
    client = learning.rounds()[-1].cohort[0]
    assert not torch.equal(local_tensors(learning, client)["local_text"], local_tensors(found, client)["local_text"])


def test_without_local_prompts_and_vision_it_is_promptfl(settings: Any) -> None:
    found = run(settings(name="one", **STEADY), PFedDC(use_vision=False, use_local=False, context_tokens=3))
    expected = run(settings(name="two", **STEADY), PromptFL(context_tokens=3))
    assert torch.equal(shared_tensors(found)["global_text"], shared_tensors(expected)["context"])
    assert found.client_accuracies() == expected.client_accuracies()
    assert [record.bytes_up for record in found.rounds()] == [record.bytes_up for record in expected.rounds()]


def test_without_local_prompts_it_is_fedvlp(settings: Any) -> None:
    found = run(settings(name="one", **STEADY), PFedDC(use_local=False, context_tokens=3, vision_tokens=2))
    independent = FedMaPLe(coupling="independent", context_tokens=3, vision_tokens=2, vision_depth=1)
    expected = run(settings(name="two", **STEADY), independent)
    renamed = {"context": shared_tensors(found)["global_text"], "vision": shared_tensors(found)["global_vision"]}
    assert worst_difference(renamed, shared_tensors(expected)) == 0


def test_no_vision_tokens_are_no_vision(settings: Any) -> None:
    found = run(settings(name="one", **STEADY), PFedDC(vision_tokens=0))
    expected = run(settings(name="two", **STEADY), PFedDC(use_vision=False))
    assert set(shared_tensors(found)) == {"global_text"}
    assert worst_difference(shared_tensors(found), shared_tensors(expected)) == 0
    assert found.client_accuracies() == expected.client_accuracies()


def test_without_vision_prompts_images_are_seen_as_the_dual_encoder_sees_them(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = PFedDC(use_vision=False)
    world, backbone, runtime = prepared(settings(), method)
    images, positions = runtime.bank.images(0, "train"), torch.arange(6)
    batch = make_batch(method, images, positions, training=True)
    stock = backbone.run(images.tokens(positions), reads=("image",))["image"]
    seen = forward(method, world, everything(world), images, positions, batch, {})
    torch.testing.assert_close(seen.image, stock, atol=1e-6, rtol=0)
    monkeypatch.setattr(ViT, "run", lambda *_, **__: pytest.fail("the image tower ran again"))
    forward(method, world, everything(world), images, positions, batch, {})


@pytest.mark.parametrize("kind", ["mean", "sum", "concat"])
def test_without_attention_prompts_are_put_together_as_the_setting_says(settings: Any, kind: Any) -> None:
    method = PFedDC(fusion=kind, context_tokens=3, vision_tokens=2, vision_depth=2)
    world, _, runtime = prepared(settings(), method)
    assert set(everything(world)) == {*GROUPS[:4], TRAINED}
    params = everything(world)
    for modality in ("text", "vision"):
        shared, own = params[f"global_{modality}"], params[f"local_{modality}"]
        expected = {"mean": 0.5 * shared + 0.5 * own, "sum": shared + own, "concat": torch.cat([shared, own], -2)}
        torch.testing.assert_close(method.fused(modality, params), expected[kind])
    norms = {name: float(params[name].norm()) for name in GROUPS[:4]}
    found = replace(method, measure_drift=False).diagnostics(world, params, Seen(), Batch(torch.empty(0)))
    assert set(found) == {"text.global_share", "vision.global_share"}
    expected_share = norms["global_text"] / (norms["global_text"] + norms["local_text"])
    assert float(found["text.global_share"]) == pytest.approx(expected_share)
    assert all(bool(gradient.any()) for gradient in gradients(method, params, world, runtime).values())


# ---------------------------------------------------------------------------------------- the model itself


def naive_layers(roles: Tensors, widths: dict[str, int], heads: int) -> dict[str, nn.MultiheadAttention]:
    """torch's own attention with the weights of a start."""
    found = {}
    for modality, width in widths.items():
        layer = nn.MultiheadAttention(width, heads, batch_first=True)
        weights = stripped(f"fusion.{modality}.", roles)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([weights[f"{name}.weight"] for name in ("query", "key", "value")]))
            layer.out_proj.weight.copy_(weights["output.weight"])
            for bias in (layer.in_proj_bias, layer.out_proj.bias):
                bias.zero_()
        found[modality] = layer
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_round_is_that_of_an_independent_loop(settings: Any, depth: int) -> None:
    """Modules, torch's optimiser and CLIP's forward by hand, one client, three steps over all of its images."""
    method = PFedDC(context_tokens=3, local_tokens=2, vision_tokens=2, local_vision_tokens=3, vision_depth=depth)
    changes = {
        "train": {"lr": 0.05, "lrs": {"fusion.*": 0.02}, "batch_size": 1000, "epochs": 3, "weight_decay": 0.01},
        "federation": {"rounds": 1},
    }
    world, backbone, runtime = prepared(settings(**changes), method)
    start = everything(world)
    runtime.train(1, 0, world.roles.shared)
    kept = runtime.states.get(0)
    assert kept is not None

    prompts = {name: nn.Parameter(start[name].clone()) for name in GROUPS[:4]}
    layers = naive_layers(start, {"text": 32, "vision": 32}, heads=8)
    groups = [
        {"params": list(prompts.values()), "lr": 0.05},
        {"params": [each for layer in layers.values() for each in layer.parameters()], "lr": 0.02},
    ]
    optimiser = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)
    images = runtime.bank.images(0, "train")
    embedded, labels = images.tokens(torch.arange(len(images))), images.labels

    def fused(modality: str) -> Tensor:
        shared, own = prompts[f"global_{modality}"], prompts[f"local_{modality}"]
        blocks = (1, *own.shape) if own.dim() == 2 else own.shape
        said, _ = layers[modality](
            F.layer_norm(own, own.shape[-1:]).view(blocks),
            *[F.layer_norm(shared, shared.shape[-1:]).view(blocks[0], *shared.shape[-2:])] * 2,
        )
        return own + said.view(own.shape)

    for _ in range(3):
        text = backbone.text.encode(fused("text").unsqueeze(0), backbone.text.names(world.class_names))[0]
        image = naive_image(backbone, embedded, fused("vision"))
        loss = F.cross_entropy(backbone.scale * image @ text.T, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    for name in ("local_text", "local_vision"):
        assert float((kept[name] - start[name]).abs().max()) > 1e-3
        torch.testing.assert_close(kept[name], prompts[name].detach(), atol=2e-5, rtol=1e-4)
    for modality in ("text", "vision"):
        found, layer = stripped(f"fusion.{modality}.", kept), layers[modality]
        torch.testing.assert_close(found["output.weight"], layer.out_proj.weight.detach(), atol=2e-5, rtol=1e-4)
        together = torch.cat([found[f"{name}.weight"] for name in ("query", "key", "value")])
        torch.testing.assert_close(together, layer.in_proj_weight.detach(), atol=2e-5, rtol=1e-4)


def naive_image(backbone: DualEncoder, embedded: Tensor, prompt: Tensor) -> Tensor:
    """CLIP's image tower on whole sequences [image ; prompt]: no shortcut, the prompt normalised by `ln_pre` as the image was."""
    weights, shape = backbone.weights, backbone.shape
    image_rows = embedded.shape[1]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], shape.norm_eps)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = embedded
    for block in range(shape.depth):
        if block < len(prompt):
            fresh = norm("ln_pre", prompt[block]) if block == 0 else prompt[block]
            x = torch.cat([x[:, :image_rows], fresh.expand(len(x), -1, -1)], dim=1)
        prefix = f"blocks.{block}."
        parts = linear(prefix + "attention.in", norm(prefix + "norm1", x)).chunk(3, dim=-1)
        query, key, value = (each.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for each in parts)
        listened = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        x = x + linear(prefix + "attention.out", (listened @ value).transpose(1, 2).flatten(2))
        hidden = linear(prefix + "mlp.in", norm(prefix + "norm2", x))
        x = x + linear(prefix + "mlp.out", hidden * torch.sigmoid(1.702 * hidden))
    projected = norm("norm", x[:, 0]) @ backbone.image_projection.weights["linear.weight"].T
    return F.normalize(projected, dim=-1)


def test_the_naive_image_tower_without_prompts_is_the_stock_one(settings: Any) -> None:
    _, backbone, runtime = prepared(settings(), PFedDC())
    embedded = runtime.bank.images(0, "train").tokens(torch.arange(6))
    stock = backbone.run(embedded, reads=("image",))["image"]
    torch.testing.assert_close(naive_image(backbone, embedded, torch.empty(0, 0, 32)), stock, atol=1e-6, rtol=1e-5)


def test_vision_prompts_have_no_position_and_leave_those_of_the_patches_alone(settings: Any) -> None:
    method = PFedDC(use_global=False)
    world, _, runtime = prepared(settings(), method)
    params = {**everything(world), "local_vision": torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))}
    turned = {**params, "local_vision": params["local_vision"][:, [2, 0, 3, 1]]}
    found, expected = (logits_of(method, each, world, runtime) for each in (turned, params))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_fusion_does_not_look_at_images(settings: Any) -> None:
    method = PFedDC(vision_depth=2, context_tokens=16)
    world, _, _ = prepared(settings(), method)
    given = method.prompts(world, everything(world), Batch(torch.zeros(7, dtype=torch.long)), {})
    assert given.text["context"].tokens.shape == (16, 32)
    assert [slot.tokens.shape for slot in given.tokens] == [(2, 4, 32)]
    assert given.tokens[0].blocks == (0, 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_group_has_a_gradient_from_the_second_step_on(settings: Any, direction: Direction) -> None:
    method = PFedDC(direction=direction)
    world, _, runtime = prepared(settings(), method)
    params = everything(world)
    first = gradients(method, params, world, runtime)
    assert set(first) == set(params) - {TRAINED}
    moved = {name: bool(gradient.any()) for name, gradient in first.items()}
    asleep = {
        "local_queries": ("global_text", "global_vision"),
        "concat_keys": ("global_text", "global_vision"),
        "global_queries": ("local_text", "local_vision"),
        "bidirectional": (),
    }[direction]
    for name, has_gradient in moved.items():
        behind = name.startswith("fusion.") and ".output." not in name
        assert has_gradient == (name not in asleep and not behind), name
    stepped = {**params, **{name: params[name] - 0.05 * gradient for name, gradient in first.items()}}
    second = gradients(method, stepped, world, runtime)
    for name, gradient in second.items():
        if not name.endswith("key.bias"):  # it shifts all scores of a query alike
            assert float(gradient.abs().max()) > 1e-7, name
    for group in GROUPS:
        assert any(bool(gradient.any()) for name, gradient in second.items() if name.startswith(group))


# ----------------------------------------------------------------------------------------- who owns what


def clip_world(method: Method) -> World:
    """The widths of CLIP ViT-B/16, without its weights."""
    language = Language(512, 512, 100.0, lambda words: torch.zeros(len(words.split()), 512), lambda *_: torch.empty(0))
    world = World(768, 12, 197, 16, ("a", "b", "c"), ("one", "two"), language=language)
    return replace(world, roles=method.init(world, seeded()))


def count(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def test_sizes_at_the_widths_of_clip() -> None:
    roles = clip_world(PFedDC(context_tokens=16, vision_start="random")).roles
    assert count(roles.shared) == 16 * 512 + 4 * 768 == 11_264
    assert count(stripped("fusion.text.", roles.local)) == 4 * (512**2 + 512) == 1_050_624
    assert count(stripped("fusion.vision.", roles.local)) == 4 * (768**2 + 768) == 2_362_368
    assert count(roles.local) == 11_264 + 1_050_624 + 2_362_368 + 1
    for name in GROUPS[:4]:
        prompt = {**roles.shared, **roles.local}[name]
        assert float(prompt.std()) == pytest.approx(0.02, rel=0.05)


def test_deep_prompts_have_tokens_for_every_block_and_one_attention() -> None:
    roles = clip_world(PFedDC(vision_depth=None, vision_tokens=3)).roles
    assert roles.shared["global_vision"].shape == roles.local["local_vision"].shape == (12, 3, 768)
    assert count(stripped("fusion.vision.", roles.local)) == 2_362_368


def test_global_prompts_go_up_and_all_else_stays(settings: Any) -> None:
    done = run(settings(federation={"rounds": 2, **ONCE}), PFedDC(context_tokens=16))
    assert set(shared_tensors(done)) == {"global_text", "global_vision"}
    for record in done.rounds()[1:]:
        assert record.bytes_up == record.bytes_down == 4 * 4 * (16 * 32 + 4 * 32)
    first, second = local_tensors(done, 0), local_tensors(done, 1)
    assert {name.split(".")[0] for name in first} == {"local_text", "local_vision", "fusion", TRAINED}
    for name in ("local_text", "local_vision", "fusion.text.output.weight", "fusion.vision.query.weight"):
        assert not torch.equal(first[name], second[name]), name


def test_after_a_round_all_clients_receive_the_weighted_mean_of_the_global_prompts(settings: Any) -> None:
    method = PFedDC(vision_depth=2)
    changes = {"train": {"epochs": 2}, "federation": {"rounds": 1}}
    done = run(settings(**changes), method)
    world, _, runtime = prepared(settings(**changes), method)
    replies = [runtime.train(1, client, world.roles.shared) for client in range(world.clients)]
    samples = sum(reply.samples for reply in replies)
    for name, found in shared_tensors(done).items():
        expected = torch.stack([reply.upload[name] * (reply.samples / samples) for reply in replies]).sum(0)
        torch.testing.assert_close(found, expected)
        assert not torch.equal(replies[0].upload[name], replies[1].upload[name])


def test_shared_attention_goes_up_with_the_prompts(settings: Any) -> None:
    method = PFedDC(share_attention=True, context_tokens=16)
    done = run(settings(federation={"rounds": 1, **ONCE}), method)
    assert {name for name in shared_tensors(done) if not name.startswith("fusion.")} == set(GROUPS[:2])
    assert set(local_tensors(done, 0)) == {"local_text", "local_vision", TRAINED}
    assert done.rounds()[-1].bytes_up == 4 * 4 * (20 * 32 + 2 * 4 * (32**2 + 32))


def test_a_client_that_never_trained_predicts_with_the_global_prompts(settings: Any) -> None:
    method, alone = PFedDC(local_tokens=5), PFedDC(use_local=False)
    world, _, runtime = prepared(settings(), method)
    who = runtime._client(0, 1)
    received = {name: tensor + 1 for name, tensor in world.roles.shared.items()}
    params = method.personalise(world, who, received, world.roles.local)
    found = logits_of(method, params, world, runtime)
    assert torch.equal(found, logits_of(alone, received, world, runtime))
    silent = replace(method, measure_drift=False)
    assert silent.diagnostics(world, params, Seen(), Batch(torch.empty(0))) == {}
    trained = {**world.roles.local, TRAINED: torch.ones(())}
    params = method.personalise(world, who, received, trained)
    assert set(params) == {*received, *trained}
    assert not torch.equal(found, logits_of(method, params, world, runtime))


def test_evaluating_what_is_global_is_evaluating_the_global_prompts(settings: Any) -> None:
    changes = {"federation": {"rounds": 1, "evaluate_at": "global"}}
    found = run(settings(**changes), PFedDC())
    method = PFedDC(use_local=False)
    world, _, runtime = prepared(settings(), method)
    expected = {
        world.client_names[client]: runtime.evaluate(1, client, shared_tensors(found)).accuracy for client in range(4)
    }
    assert found.client_accuracies() == expected


def test_a_held_out_client_fits_what_is_local(settings: Any) -> None:
    method = PFedDC()
    world, _, runtime = prepared(settings(federation={"held_out": 0.5}), method)
    (stage,) = method.newcomer(world, runtime.config.train, epochs=3)
    assert set(stage.trainable) == set(world.roles.local) - {TRAINED}
    newcomer = min(world.newcomers)
    params = method.personalise(world, runtime._client(newcomer, 1), world.roles.shared, world.roles.local)
    assert set(stage.trainable) < set(params)


# ------------------------------------------------------------------------------------- settings and numbers


@pytest.mark.parametrize(("direction", "lengths"), [("local_queries", (2, 3)), ("global_queries", (5, 4))])
def test_lengths_may_differ(settings: Any, direction: Direction, lengths: tuple[int, int]) -> None:
    method = PFedDC(direction=direction, context_tokens=5, local_tokens=2, local_vision_tokens=3)
    world, _, runtime = prepared(settings(), method)
    params = everything(world)
    assert len(method.fused("text", params)) == lengths[0]
    assert method.fused("vision", params).shape == (1, lengths[1], 32)
    assert torch.isfinite(logits_of(method, params, world, runtime)).all()


def test_both_contexts_may_begin_with_words_and_be_class_specific(settings: Any) -> None:
    method = PFedDC(context_words="a photo of a", use_vision=False)
    world, _, _ = prepared(settings(), method)
    words = world.text.words("a photo of a")
    assert torch.equal(world.roles.shared["global_text"], words)
    assert torch.equal(world.roles.local["local_text"], words)
    method = PFedDC(class_specific=True, local_tokens=4, context_tokens=3, vision_tokens=1)
    world, _, runtime = prepared(settings(), method)
    assert world.roles.shared["global_text"].shape == (5, 3, 32)
    assert method.fused("text", everything(world)).shape == (5, 4, 32)
    assert torch.isfinite(logits_of(method, everything(world), world, runtime)).all()


@pytest.mark.parametrize("direction", ["local_queries", "concat_keys"])
def test_the_metrics_say_how_much_is_global_and_whether_the_attention_has_collapsed(
    settings: Any, direction: Direction
) -> None:
    changes = {"train": {"lr": 0.1}, "federation": {"rounds": 2, "fraction": 0.25, **ONCE}}
    done = run(settings(**changes), PFedDC(direction=direction, vision_depth=2))
    trained = {client for record in done.rounds() for client in record.cohort}
    numbers = [result["diagnostics"] for client, result in done.reader.evaluations(2).items() if client in trained]
    names = {"global_share", "attention_share", "attention_entropy", "attention_peak"}
    names |= {"global_mass"} if direction == "concat_keys" else set()
    for each in numbers:
        told = {f"{modality}.{name}" for modality in ("text", "vision") for name in names}
        assert set(each) == {*told, "vision.drift"}
        assert all(0 < number <= 1 for number in each.values())
        assert each["text.attention_entropy"] > 0.5, "attention starts nearly even"
    summary = done.rounds()[-1].summary
    assert summary is not None
    mean = sum(each["text.global_share"] for each in numbers) / len(numbers)
    assert summary["diagnostics"]["text.global_share"] == pytest.approx(mean), "those who never trained say nothing"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"heads": 5}, "method.heads must divide the width 32 of the text tower, got 5"),
        ({"vision_depth": 4}, "method.vision_depth must be at most the 3 blocks of the backbone, got 4"),
        ({"use_local": False, "use_global": False}, "method.use_local or method.use_global must be true, got False"),
        (
            {"fusion": "mean", "context_tokens": 16, "local_tokens": 3},
            r"method.local_tokens must be the 16 .* \(mean\), got 3",
        ),
        ({"fusion": "sum", "local_vision_tokens": 3}, r"method.local_vision_tokens must be the 4 .* \(sum\), got 3"),
        ({"direction": "bidirectional", "local_tokens": 3}, r"method.local_tokens .* \(bidirectional\), got 3"),
        ({"fusion": "cross"}, "method.fusion"),
        ({"direction": "sideways"}, "method.direction"),
        ({"vision_tokens": -1}, "method.vision_tokens"),
        ({"local_tokens": 0}, "method.local_tokens"),
        ({"heads": 0}, "method.heads"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        prepared(settings(), registry.build({"name": "pfeddc", **given}))


@pytest.mark.parametrize(
    "given",
    [
        {"heads": 5, "fusion": "mean"},
        {"heads": 5, "use_global": False},
        {"fusion": "concat", "local_tokens": 3, "local_vision_tokens": 2},
        {"fusion": "mean", "context_tokens": 16, "local_tokens": 16},
        {"fusion": "mean", "use_vision": False, "local_vision_tokens": 2},
    ],
)
def test_settings_that_do_not_matter_are_not_in_the_way(settings: Any, given: dict[str, Any]) -> None:
    method = registry.build({"name": "pfeddc", **given})
    world, _, runtime = prepared(settings(), method)
    assert torch.isfinite(logits_of(method, everything(world), world, runtime)).all()


# ----------------------------------------------------------------------------------------- starts, controls, drift


def test_a_random_start_of_the_attention_is_xaviers_for_all_maps_and_everything_learns_at_once(settings: Any) -> None:
    method = PFedDC(attention_start="random")
    world, _, runtime = prepared(settings(), method)
    for modality, width in (("text", world.text.width), ("vision", world.width)):
        maps = stripped(f"fusion.{modality}.", world.roles.local)
        for name in ("query", "key", "value", "output"):
            assert float(maps[f"{name}.weight"].abs().max()) == pytest.approx((3 / width) ** 0.5, rel=0.05)
    found = gradients(method, everything(world), world, runtime)
    for name in GROUPS:
        assert any(bool(gradient.any()) for other, gradient in found.items() if other.startswith(name)), name


@pytest.mark.parametrize("method", [PFedDC(vision_depth=2), FedMaPLe(coupling="independent", vision_depth=2)])
def test_vision_prompts_start_near_the_tokens_of_a_blank_image(settings: Any, method: Any) -> None:
    world, backbone, _ = prepared(settings(), method)
    found = {name: each for name, each in world.roles.initial.items() if name.endswith("vision")}
    assert found
    blank = backbone.blank_tokens()[:2].unsqueeze(1)
    for prompt in found.values():
        assert float((prompt - blank).abs().max()) <= 0.3 * vpt_bound(world.patch, world.width)
        assert not torch.equal(prompt[:, 0], prompt[:, 1])


def test_the_maps_of_maple_start_at_the_tokens_of_a_blank_image(settings: Any) -> None:
    world, backbone, _ = prepared(settings(), FedMaPLe())
    far = (world.roles.shared["coupling.bias"] - backbone.blank_tokens()).abs().max()
    assert float(far) <= 0.3 * vpt_bound(world.patch, world.width)


def test_local_vision_prompts_may_start_as_means_of_patch_embeddings(settings: Any) -> None:
    method = PFedDC(vision_start="patches", vision_tokens=3, vision_depth=2)
    world, _, runtime = prepared(settings(), method)
    images = runtime.bank.images(1, "train")
    inputs = images.features("block_inputs:2", torch.arange(len(images)))  # (n, 2, T, d)
    start = runtime._new(runtime._client(1, 1))["local_vision"]
    patches = [list(part) for part in np.array_split(range(inputs.shape[2] - 1), 3)]
    for block in range(2):
        for token, part in enumerate(patches):
            rows = [inputs[image, block, 1 + patch] for image in range(len(images)) for patch in part]
            torch.testing.assert_close(start[block, token], torch.stack(rows).mean(0), atol=1e-5, rtol=1e-4)
    other = runtime._new(runtime._client(0, 1))["local_vision"]
    assert not torch.equal(start, other)
    assert torch.equal(runtime.world.roles.local["local_vision"], world.roles.local["local_vision"])


def test_frozen_global_prompts_stay_at_their_start_while_all_else_learns(settings: Any) -> None:
    method = PFedDC(freeze_global=True)
    world, _, _ = prepared(settings(), method)
    done = run(settings(federation={"rounds": 2, **ONCE}), method)
    for name, tensor in shared_tensors(done).items():
        assert torch.equal(tensor, world.roles.shared[name])
    free = run(settings(name="free", federation={"rounds": 2, **ONCE}), PFedDC())
    assert not torch.equal(shared_tensors(free)["global_text"], world.roles.shared["global_text"])
    moved = local_tensors(done, 0)
    for name in ("local_text", "local_vision", "fusion.text.output.weight", "fusion.vision.query.weight"):
        assert not torch.equal(moved[name], world.roles.local[name]), name
    with pytest.raises(ConfigError, match=r"method\.freeze_global must be false unless"):
        run(settings(name="alone"), PFedDC(freeze_global=True, use_local=False))


def test_the_drift_is_the_distance_from_the_features_without_prompts(settings: Any) -> None:
    done = run(settings(federation={"rounds": 1, **ONCE}), PFedDC())
    drift = done.rounds()[-1].summary["diagnostics"]["vision.drift"]
    assert 0 < drift < 2
    world, _, runtime = prepared(settings(), PFedDC())
    images, rows = runtime.bank.images(0, "test"), torch.arange(3)
    params = {**everything(world)}
    batch = make_batch(PFedDC(), images, rows, False)
    seen = forward(PFedDC(), world, params, images, rows, batch, {})
    found = PFedDC().diagnostics(world, params, seen, batch)["vision.drift"]
    plain = images.features("image", rows)
    torch.testing.assert_close(found, (seen.image - plain).square().sum(-1).sqrt())
    without = PFedDC(measure_drift=False)
    assert without.needs == ()
    assert PFedDC(use_vision=False).needs == ()
