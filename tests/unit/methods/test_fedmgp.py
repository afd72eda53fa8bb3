"""FedMGP: groups, their draw, what is replaced, and its limit FedVLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import local_tensors, run, shared_tensors
from text_methods import gradient, noise_like, on_clip, runtime_of, working_parameters

from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Progress, cross_entropy
from fedprompt.errors import ConfigError
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.methods.fedmgp import FedMGP, apart, draw, similarity_to_global
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import stream

pytestmark = pytest.mark.unit


def test_the_distance_of_groups_by_hand() -> None:
    """Pairs differ by (1, 1), (0, 2) and (1, 3) in two numbers: means 1, 1 and 2."""
    features = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]], [[0.0, -2.0]]])
    torch.testing.assert_close(apart(features), torch.tensor([(1 + 1 + 2) / 3]))


def test_the_likeness_of_a_group_is_its_largest_cosine_with_a_global_prompt() -> None:
    own = torch.tensor([[[3.0, 4.0]], [[-1.0, 0.0]]])
    common = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    torch.testing.assert_close(similarity_to_global(own, common), torch.tensor([0.8, 0.0]))


def test_groups_are_drawn_with_softmax_probabilities_without_replacement() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0])
    drawn = torch.stack([draw(scores, 2, stream(0, 1, number, "test")) for number in range(3000)])
    assert bool((drawn[:, 0] != drawn[:, 1]).all())
    first = torch.bincount(drawn[:, 0], minlength=3) / 3000
    torch.testing.assert_close(first, scores.softmax(0), atol=0.03, rtol=0)
    after_last = drawn[drawn[:, 0] == 2][:, 1]
    share = float((after_last == 1).double().mean())
    assert share == pytest.approx(float(scores[:2].softmax(0)[1]), abs=0.04)


def test_logits_are_the_mean_over_pairs_and_the_loss_is_the_papers(settings: Any) -> None:
    method = FedMGP(groups=3, sent=2, context_tokens=2, diversity=0.7)
    runtime, world = runtime_of(settings, method)
    params = {n: t + noise_like(t, 1) if n.startswith("groups") else t for n, t in working_parameters(runtime).items()}
    images, positions = runtime.bank.images(0, "train"), torch.arange(4)
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, {})
    found = method.logits(world, params, seen, batch, {})
    text, image = [], []
    for group in range(3):
        text.append(world.text.encode(params["groups.context"][group].unsqueeze(0), "end")[0])
        slot = TokenPrompt(params["groups.vision"][group].unsqueeze(0), (0,))
        image.append(runtime.bank.backbone.run(images.tokens(positions), [slot], ("image",))["image"])
    each = [world.text.scale * i @ t.T for i, t in zip(image, text, strict=True)]
    torch.testing.assert_close(found, sum(each) / 3, atol=1e-4, rtol=1e-4)
    plain = sum(cross_entropy(logits, batch.labels).mean() for logits in each) / 3
    pairs = [(0, 1), (0, 2), (1, 2)]
    texts = sum((text[a] - text[b]).abs().mean() for a, b in pairs) / 3
    pictures = sum((image[a] - image[b]).abs().mean() for a, b in pairs) / 3
    expected = plain - 0.7 * (texts + pictures) / 2
    torch.testing.assert_close(method.loss(world, params, found, seen, batch, {}), expected, atol=1e-5, rtol=1e-5)


def test_what_arrives_replaces_what_was_sent_last(settings: Any) -> None:
    method = FedMGP(groups=4, sent=2, context_tokens=2)
    runtime, world = runtime_of(settings, method)
    client = runtime._client(0, 2)
    local = {n: t + noise_like(t, 1) if n.startswith("groups") else t for n, t in runtime._new(client).items()}
    local["drawn.context"] = torch.tensor([3, 1])
    received = {name: noise_like(tensor, 5) for name, tensor in world.roles.shared.items()}
    begun = method.begin(world, client, received, local)
    assert torch.equal(begun["groups.context"][[3, 1]], received["context"])
    assert torch.equal(begun["groups.context"][[0, 2]], local["groups.context"][[0, 2]])
    assert torch.equal(begun["groups.vision"][:2], received["vision"])
    sent, kept = method.finish(world, client, received, begun, Progress(1, {}))
    assert torch.equal(sent["context"], begun["groups.context"][kept["drawn.context"]])
    assert torch.equal(sent["vision"], begun["groups.vision"][kept["drawn.vision"]])


def test_a_first_round_begins_where_all_groups_began(settings: Any) -> None:
    method = FedMGP(context_tokens=2)
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    for name in ("context", "vision"):
        assert torch.equal(params[f"groups.{name}"], world.roles.local[f"groups.{name}"])
        for group in gradient(runtime, method, params, f"groups.{name}"):
            assert float(group.abs().max()) > 0


def test_one_group_without_diversity_is_independent_prompts(settings: Any) -> None:
    one = FedMGP(groups=1, sent=1, diversity=0.0, vision_tokens=4)
    even = {"federation": {"rounds": 2, "weighting": "uniform"}}
    found = run(on_clip(settings, "one", **even), one)
    plain = run(on_clip(settings, "plain", **even), FedMaPLe(coupling="independent", vision_tokens=4, vision_depth=1))
    for name in ("context", "vision"):
        first, second = shared_tensors(found)[name][0], shared_tensors(plain)[name]
        torch.testing.assert_close(first, second.reshape(first.shape), atol=1e-5, rtol=1e-4)


def test_clients_keep_groups_of_their_own(settings: Any) -> None:
    done = run(on_clip(settings, "groups"), FedMGP(groups=3, sent=1, context_tokens=2))
    own = [local_tensors(done, client)["groups.context"] for client in range(4)]
    assert len({tuple(each.flatten().tolist()) for each in own}) == 4
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"groups": 2, "sent": 3}, "method.sent must be at most the 2 groups of a client, got 3"),
        ({"groups": 0}, "groups"),
        ({"temperature": 0.0}, "temperature"),
        ({"diversity": -1.0}, "diversity"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runtime_of(settings, registry.build({"name": "fedmgp", **given}))
