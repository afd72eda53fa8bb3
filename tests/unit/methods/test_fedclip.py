"""FedCLIP: the adapter, the contrastive loss against torch's cross-entropy, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import experiment, run, seeded, shared_tensors
from text_methods import gradient, on_clip, results, run_on_clip, runtime_of, working_parameters
from torch import Tensor, nn

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.client.step import forward, make_batch
from fedprompt.core import registry
from fedprompt.core.method import Batch, Seen
from fedprompt.errors import ConfigError
from fedprompt.methods.fedclip import ADAPTER, FedCLIP, attention, contrast
from fedprompt.methods.zero_shot import ZeroShot
from fedprompt.modules.contexts import Language
from fedprompt.tensors import stripped

pytestmark = pytest.mark.unit

LABELS = torch.tensor([0, 1, 0, 3, 0, 1])


def some_logits(seed: int = 0) -> Tensor:
    return 3 * torch.randn(len(LABELS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_adapter_is_two_linear_layers_and_a_softmax_that_sums_to_one(settings: Any) -> None:
    _, world = runtime_of(settings, FedCLIP())
    weights = stripped(ADAPTER, world.roles.shared)
    width = world.text.features
    first, second = nn.Linear(width, width), nn.Linear(width, width)
    first.load_state_dict({"weight": weights["in.weight"], "bias": weights["in.bias"]})
    second.load_state_dict({"weight": weights["out.weight"], "bias": weights["out.bias"]})
    features = F.normalize(torch.randn(5, width, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = attention(weights, features)
    torch.testing.assert_close(found, nn.Sequential(first, nn.Tanh(), second, nn.Softmax(-1))(features).detach())
    torch.testing.assert_close(found.sum(-1), torch.ones(5))
    assert (found > 0).all()


def test_the_adapter_starts_as_torchs_linear_layers_do(settings: Any) -> None:
    _, world = runtime_of(settings, FedCLIP())
    bound = world.text.features**-0.5
    for name, tensor in world.roles.shared.items():
        assert float(tensor.abs().max()) <= bound, name
        assert float(tensor.std()) == pytest.approx(bound / 3**0.5, rel=0.2), name


@pytest.mark.parametrize(("features", "numbers"), [(512, 525_312), (1024, 2_099_200)])
def test_the_adapter_has_two_square_layers(settings: Any, features: int, numbers: int) -> None:
    _, world = runtime_of(settings, FedCLIP())
    wide = Language(8, features, 1.0, world.text.words, world.text.encode)
    roles = FedCLIP().init(type(world)(**{**vars(world), "language": wide}), seeded())
    assert sum(tensor.numel() for tensor in roles.shared.values()) == numbers == 2 * (features**2 + features)


def test_logits_are_those_of_the_weighted_and_normalised_feature(settings: Any) -> None:
    method = FedCLIP()
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    image = F.normalize(torch.randn(5, world.text.features, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = method.logits(world, params, Seen(image_raw=image), Batch(torch.zeros(5)), {})
    weighted = attention(stripped(ADAPTER, params), image) * image
    for row in range(5):
        for label, text in enumerate(world.text.encode_words("a photo of a")):
            expected = world.text.scale * float(F.cosine_similarity(weighted[row], text, dim=0))
            assert float(found[row, label]) == pytest.approx(expected, abs=1e-4)


def test_the_adapter_reads_the_feature_before_it_is_normalised(settings: Any) -> None:
    """The authors' order, from the images on: project, weight by the adapter, normalise, compare with the texts."""
    method = FedCLIP()
    runtime, world = runtime_of(settings, method)
    params, images, rows = working_parameters(runtime), runtime.bank.images(0, "train"), torch.arange(6)
    encoder = images.backbone
    assert isinstance(encoder, DualEncoder)
    raw = (
        encoder.run(images.tokens(rows, 0), reads=("cls",))["cls"] @ encoder.image_projection.weights["linear.weight"].T
    )
    assert float((raw.norm(dim=-1) - 1).abs().min()) > 0.1
    weights = stripped(ADAPTER, params)
    hidden = (raw @ weights["in.weight"].T + weights["in.bias"]).tanh()
    weighted = (hidden @ weights["out.weight"].T + weights["out.bias"]).softmax(-1) * raw
    weighted = weighted / weighted.norm(dim=-1, keepdim=True)
    expected = world.text.scale * weighted @ world.text.encode_words("a photo of a").T
    batch = make_batch(method, images, rows, False)
    found = method.logits(world, params, forward(method, world, params, images, rows, batch, {}), batch, {})
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_even_attention_is_zero_shot(settings: Any) -> None:
    """Softmax and normalising make the adapter's scale irrelevant: the same weight on every entry changes nothing."""
    runtime, world = runtime_of(settings, FedCLIP())
    params = working_parameters(runtime)
    params = {name: torch.zeros_like(tensor) if "out." in name else tensor for name, tensor in params.items()}
    image = F.normalize(torch.randn(5, world.text.features, generator=torch.Generator().manual_seed(0)), dim=-1)
    seen, batch = Seen(image=image, image_raw=7 * image), Batch(torch.zeros(5))
    plain = ZeroShot()
    expected = plain.logits(world, plain.begin(world, runtime._client(0, 1), {}, {}), seen, batch, {})
    torch.testing.assert_close(FedCLIP().logits(world, params, seen, batch, {}), expected, atol=1e-4, rtol=1e-5)


def test_with_distinct_labels_the_loss_is_clips_own() -> None:
    logits = some_logits()[:4]
    labels = torch.tensor([2, 0, 3, 1])
    pairs, diagonal = logits[:, labels], torch.arange(4)
    expected = (F.cross_entropy(pairs, diagonal) + F.cross_entropy(pairs.T, diagonal)) / 2
    torch.testing.assert_close(contrast(logits, Batch(labels)), expected)


def test_diagonal_targets_and_targets_spread_over_equal_labels_are_the_same_loss() -> None:
    logits = some_logits().requires_grad_()
    same = (LABELS[:, None] == LABELS[None]).double()
    targets = same / same.sum(1, keepdim=True)
    pairs = logits[:, LABELS]
    spread = (F.cross_entropy(pairs, targets) + F.cross_entropy(pairs.T, targets)) / 2
    found = contrast(logits, Batch(LABELS))
    torch.testing.assert_close(found, spread)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (found, spread)))


def test_padding_is_neither_counted_nor_anybodys_partner() -> None:
    logits = some_logits().requires_grad_()
    padded = Batch(LABELS, weights=torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64))
    found, expected = contrast(logits, padded), contrast(logits[:4], Batch(LABELS[:4]))
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(each, logits)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert (ours[4:] == 0).all()


def test_cross_entropy_over_all_classes_can_be_had_instead() -> None:
    method, logits = FedCLIP(objective="cross_entropy"), some_logits()
    found = method.loss(None, {}, logits, Seen(), Batch(LABELS), {})  # type: ignore[arg-type]
    torch.testing.assert_close(found, F.cross_entropy(logits, LABELS))


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
def test_every_part_of_the_adapter_learns(settings: Any, objective: str) -> None:
    method = registry.build({"name": "fedclip", "objective": objective})
    runtime, world = runtime_of(settings, method)
    params = working_parameters(runtime)
    for name in world.roles.shared:
        assert float(gradient(runtime, method, params, name).abs().max()) > 1e-6, name


@pytest.mark.parametrize("objective", ["contrastive", "cross_entropy"])
def test_training_lowers_the_loss_and_only_the_adapter_travels(settings: Any, objective: str) -> None:
    method = registry.build({"name": "fedclip", "objective": objective})
    done = run_on_clip(settings, method, objective, federation={"rounds": 5}, train={"lr": 0.02})
    losses = [record.loss for record in done.rounds()[1:] if record.loss is not None]
    assert losses[-1] < losses[0] - 0.01
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * 2 * (128**2 + 128)
    _, _, _, world = experiment(on_clip(settings, "again"), method).factory.prepare()
    assert set(shared_tensors(done)) == set(world.roles.shared)
    assert not world.roles.local


def test_the_words_matter_and_must_be_there(settings: Any) -> None:
    frozen: dict[str, Any] = {"train": {"lr": 0.0}, "federation": {"rounds": 1}}
    first, second = (run_on_clip(settings, FedCLIP(words=word), word, **frozen) for word in ("photo", "drawing"))
    assert results(first, 1) != results(second, 1)
    with pytest.raises(ConfigError, match=r"method\.words must "):
        registry.build({"name": "fedclip", "words": ""})
    with pytest.raises(ConfigError, match=r"method\.words must have at least one token, got ' '"):
        run(on_clip(settings, "empty"), FedCLIP(words=" "))
