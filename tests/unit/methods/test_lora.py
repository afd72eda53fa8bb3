"""FedLoRA, FFA-LoRA and FLoRA against a naive implementation on `transformers`' own ViT, and what each promises about its average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import experiment, local_tensors, run, seeded, server_tensors, shared_tensors, worst_difference
from torch import Tensor, nn
from torch.func import functional_call

from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.config import parse
from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Batch, Client, Method, Seen, Server, Upload, World
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.fedlora import FedLoRA
from fedprompt.methods.ffa_lora import FFALoRA
from fedprompt.methods.flora_stacked import FLoRA
from fedprompt.modules.lora import attention_changes, initial_factors, product, stacked
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

BATCH, EPOCHS, LR, MOMENTUM, DECAY = 8, 2, 0.05, 0.9, 1e-3
METHODS: dict[str, FedLoRA] = {
    "fedlora": FedLoRA(rank=3, alpha=6.0),
    "ffa_lora": FFALoRA(rank=3, alpha=6.0),
    "flora_stacked": FLoRA(rank=3, alpha=6.0),
}
VIT_B = World(768, 12, 197, 16, tuple("abcde"), ("one", "two"))


@pytest.fixture
def vit_settings(settings: Any, folder: Path) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        backbone = {"name": str(folder), "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], **changes.pop("backbone", {})}
        train = {"lr": LR, "batch_size": BATCH, "epochs": EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY}
        return settings(backbone=backbone, train={**train, **changes.pop("train", {})}, **changes)

    return make


@dataclass
class NaiveLoRA:
    """`transformers`' ViT whose projections are changed one matrix at a time."""

    folder: Path
    targets: Sequence[str] = ("q", "v")
    first: int = 0  # block that the first factors belong to

    def __post_init__(self) -> None:
        from transformers import ViTModel

        self.vit = ViTModel.from_pretrained(self.folder, add_pooling_layer=False).eval()
        self.frozen = {name: tensor.detach() for name, tensor in self.vit.named_parameters()}

    def cls(self, images: Tensor, a: Tensor, b: Tensor, scale: float, merged: Tensor | None = None) -> Tensor:
        weights = dict(self.frozen)
        for block in range(len(a)):
            for number, target in enumerate(self.targets):
                name = f"layers.{self.first + block}.attention.{target}_proj.weight"
                weights[name] = weights[name] + scale * torch.mm(b[block, number], a[block, number])
                if merged is not None:
                    weights[name] = weights[name] + merged[block, number]
        return functional_call(self.vit, weights, (images,)).last_hidden_state[:, 0]


def pixels(store: ImageStore, indices: Any) -> Tensor:
    return normalise(store.pixels(indices), (0.5,) * 3, (0.5,) * 3, torch.float32, torch.device("cpu"))


def bank_of(made: Any, prepared: Any) -> ImageBank:
    source, manifest, backbone, _ = prepared
    return ImageBank(source, manifest, ImageStore(source, 16, "squash", made.factory.cache), backbone)


def starting_params(method: Method, world: World, index: int = 0) -> Tensors:
    """What a client works with in round 1, with a head that lets gradients through and a B that is not zero."""
    received = method.download(world, Server(world.roles.shared, world.roles.server), index)
    params = method.begin(world, client(index), received, world.roles.local)
    generator = torch.Generator().manual_seed(1)
    for name in ("lora.b", "head.weight"):
        params[name] = 0.3 * torch.randn(params[name].shape, generator=generator)
    return params


def client(index: int) -> Client:
    return Client(index, str(index), 1, 10, torch.ones(5), lambda params: 0.0, lambda purpose: seeded())


# the forward pass and its gradient


@pytest.mark.parametrize("targets", [("q", "v"), ("v", "k", "q"), ("k",)], ids="".join)
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_and_gradient_of_a_step_equal_the_naive_ones(
    vit_settings: Any, folder: Path, name: str, targets: Any
) -> None:
    method = replace(METHODS[name], targets=targets)
    made = experiment(vit_settings(), method)
    prepared = made.factory.prepare()
    images, world = bank_of(made, prepared).images(0, "train"), prepared[-1]
    params = starting_params(method, world)
    merged = None
    if name == "flora_stacked":
        merged = 0.1 * torch.randn(3, len(targets), 32, 32, generator=torch.Generator().manual_seed(2))
        params["sent.merged"] = merged
    (stage,) = method.stages(world, made.config.train)
    leaves = {key: params[key].requires_grad_() for key in stage.trainable}
    loss = step_loss(method, world, params, images, torch.arange(10), {})
    found = torch.autograd.grad(loss, list(leaves.values()))

    cls = NaiveLoRA(folder, targets).cls(
        pixels(images.store, images.indices[:10]), params["lora.a"], params["lora.b"], 2.0, merged
    )
    logits = cls @ params["head.weight"].T + params["head.bias"]
    expected_loss = nn.functional.cross_entropy(logits, images.labels[:10])
    expected = torch.autograd.grad(expected_loss, list(leaves.values()))
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=1e-5)
    for key, one, other in zip(leaves, found, expected, strict=True):
        assert other.abs().max() > 1e-4, f"{key} must have a gradient to compare"
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda m, n=key: f"{n}: {m}")


def test_behind_a_stem_the_first_factors_belong_to_the_first_block_prompts_can_reach(
    vit_settings: Any, folder: Path
) -> None:
    method = METHODS["fedlora"]
    made = experiment(vit_settings(backbone={"stem": 1}), method)
    prepared = made.factory.prepare()
    images, world = bank_of(made, prepared).images(0, "train"), prepared[-1]
    params = starting_params(method, world)
    assert params["lora.a"].shape == (2, 2, 3, 32)
    seen = seen_by(method, world, params, images)
    expected = NaiveLoRA(folder, first=1).cls(
        pixels(images.store, images.indices[:6]), params["lora.a"], params["lora.b"], 2.0
    )
    torch.testing.assert_close(seen.cls, expected, atol=1e-5, rtol=1e-5)


def seen_by(method: Method, world: World, params: Tensors, images: Images, count: int = 6) -> Seen:
    positions = torch.arange(count)
    batch = make_batch(method, images, positions, training=False)
    with torch.no_grad():
        return forward(method, world, params, images, positions, batch, {})


@pytest.mark.parametrize("name", METHODS)
def test_with_b_zero_the_head_reads_the_frozen_features_of_head_tune(settings: Any, name: str) -> None:
    method = METHODS[name]
    made = experiment(settings(), method)
    prepared = made.factory.prepare()
    images, world = bank_of(made, prepared).images(0, "train"), prepared[-1]
    params = starting_params(method, world)
    changed = seen_by(method, world, params, images).cls
    params["lora.b"] = torch.zeros_like(params["lora.b"])
    found = seen_by(method, world, params, images)
    frozen = images.features("cls", torch.arange(6))
    torch.testing.assert_close(found.cls, frozen, atol=1e-6, rtol=1e-6)
    batch = Batch(images.labels[:6])
    expected = frozen @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(method.logits(world, params, found, batch, {}), expected, atol=1e-5, rtol=1e-5)
    assert (changed - frozen).abs().max() > 0.01, "another B must show"


@pytest.mark.parametrize("name", METHODS)
def test_a_change_of_depth_one_touches_only_the_first_block(name: str) -> None:
    method = replace(METHODS[name], depth=1)
    world = replace(VIT_B, width=8, blocks=3)
    world = replace(world, roles=method.init(world, seeded()))
    given = method.prompts(world, starting_params(method, world), Batch(torch.zeros(1)), {})
    assert set(given.weights) == {"blocks.0.attention.in.weight"}
    assert not given.tokens


def test_changes_lie_on_the_rows_of_their_projection() -> None:
    change = torch.arange(1.0, 9.0).reshape(1, 2, 2, 2)
    (found,) = attention_changes(change, ("v", "q")).values()
    assert found.tolist() == [[5, 6], [7, 8], [0, 0], [0, 0], [1, 2], [3, 4]]


# the start


def test_a_starts_uniform_within_one_over_the_root_of_the_width_and_b_at_zero() -> None:
    a, b = initial_factors(12, 2, 8, 768, seeded())
    reference = torch.empty(8, 768)
    nn.init.kaiming_uniform_(reference, a=5**0.5)
    assert a.abs().max() <= 768**-0.5
    assert a.std().item() == pytest.approx(reference.std().item(), rel=0.02)
    assert a.mean().abs() < 1e-3
    assert not b.any()
    assert (a.shape, b.shape) == ((12, 2, 8, 768), (12, 2, 768, 8))


@pytest.mark.parametrize(
    ("method", "count"),
    [
        (FedLoRA(), 294_912),
        (FFALoRA(), 147_456),
        (FLoRA(), 294_912),
        (FedLoRA(rank=4), 147_456),
        (FedLoRA(targets=("q", "k", "v")), 442_368),
        (FedLoRA(depth=6), 147_456),
    ],
)
def test_the_values_a_client_with_a_vit_b_sends_up(method: FedLoRA, count: int) -> None:
    roles = method.init(VIT_B, seeded())
    sent = sum(tensor.numel() for tensor in roles.shared.values())
    assert sent + sum(torch.Size(statistic.shape).numel() for statistic in roles.stat.values()) == count


# whole rounds against the naive federation


@dataclass
class NaiveFederation:
    """Plain loops over clients, torch's SGD, one matrix at a time."""

    naive: NaiveLoRA
    world: World
    a: Tensor
    train_a: bool
    b: Tensor = field(init=False)
    heads: dict[int, list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.b = torch.zeros_like(self.a.mT)
        self.heads = {number: [torch.zeros(5, 32), torch.zeros(5)] for number in range(self.world.clients)}

    def local_training(
        self, who: int, round: int, images: Tensor, labels: Tensor, a: Tensor, scale: float, merged: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        a, b, weight, bias = (nn.Parameter(t.clone()) for t in (a, self.b[..., : a.shape[-2]], *self.heads[who]))
        trained = [a, b, weight, bias] if self.train_a else [b, weight, bias]
        optimiser = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        generator = stream(0, round, who, "batches.local")
        for _ in range(EPOCHS):
            for positions in generator.permutation(len(images)).split(BATCH):
                logits = self.naive.cls(images[positions], a, b, scale, merged) @ weight.T + bias
                loss = nn.functional.cross_entropy(logits, labels[positions])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        self.heads[who] = [weight.detach(), bias.detach()]
        return a.detach(), b.detach()


@pytest.mark.parametrize("name", ["fedlora", "ffa_lora"])
def test_two_rounds_equal_the_naive_implementation(vit_settings: Any, folder: Path, name: str) -> None:
    values = vit_settings(
        method={"name": name, "rank": 3, "alpha": 6.0}, federation={"rounds": 2, "fraction": 0.5}, name=name
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)
    store = ImageStore(source, 16, "squash", made.factory.cache)
    start = {**world.roles.shared, **world.roles.local}["lora.a"]
    federation = NaiveFederation(NaiveLoRA(folder), world, start, train_a=name == "fedlora")
    a = start
    for round in (1, 2):
        results = []
        for who in sample_cohort(0, round, range(world.clients), 0.5):
            indices = manifest.clients[who].train
            labels = torch.from_numpy(source.labels[indices])
            pair = federation.local_training(who, round, pixels(store, indices), labels, a, 2.0, None)
            results.append((len(indices), pair))
        total = sum(size for size, _ in results)
        a = sum(size / total * pair[0] for size, pair in results)  # type: ignore[assignment]
        federation.b = sum(size / total * pair[1] for size, pair in results)  # type: ignore[assignment]
    assert federation.b.abs().max() > 1e-3, "training must have moved B"
    torch.testing.assert_close(shared_tensors(done)["lora.b"], federation.b, atol=1e-5, rtol=1e-4)
    if name == "fedlora":
        assert (a - start).abs().max() > 1e-5
        torch.testing.assert_close(shared_tensors(done)["lora.a"], a, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(local_tensors(done, who)["head.weight"], federation.heads[who][0], atol=1e-5, rtol=1e-4)


def test_two_rounds_of_flora_with_two_ranks_equal_the_naive_implementation(vit_settings: Any, folder: Path) -> None:
    """The naive clients have factors of their own rank: nothing is padded there."""
    ranks = (2, 4)
    values = vit_settings(method={"name": "flora_stacked", "ranks": list(ranks), "alpha": 6.0})
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)
    store = ImageStore(source, 16, "squash", made.factory.cache)
    merged = torch.zeros(3, 2, 32, 32)
    federation = NaiveFederation(NaiveLoRA(folder), world, torch.zeros(3, 2, 4, 32), train_a=True)
    sizes = [len(holder.train) for holder in manifest.clients]
    for round in (1, 2):
        server = Server({}, world.roles.server, round - 1)
        before = merged
        for who in range(world.clients):
            rank = ranks[who % 2]
            a = made.method.download(world, server, who)["sent.a"][..., :rank, :]
            indices = manifest.clients[who].train
            labels = torch.from_numpy(source.labels[indices])
            a, b = federation.local_training(who, round, pixels(store, indices), labels, a, 6.0 / rank, before)
            merged = merged + sizes[who] / sum(sizes) * 6.0 / rank * b @ a
    assert merged.abs().max() > 1e-3, "training must have changed the weights"
    torch.testing.assert_close(server_tensors(done)["merged"], merged, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["fedlora", "ffa_lora"])
def test_a_federation_of_one_client_is_centralised_training_bit_for_bit(settings: Any, name: str) -> None:
    values = settings(
        method={"name": name, "head": "shared", "rank": 2},
        partition={"scheme": "iid", "clients": 1},
        federation={"rounds": 3},
        train={"momentum": 0.0},
    )
    made = experiment(values)
    prepared = made.factory.prepare()
    images, world = bank_of(made, prepared).images(0, "train"), prepared[-1]
    params = {**world.roles.shared, **world.roles.local}
    for round in (1, 2, 3):
        for positions in stream(0, round, 0, "batches.local").permutation(len(images)).split(8):
            leaves = {key: params[key].detach().requires_grad_() for key in world.roles.shared}
            loss = step_loss(made.method, world, {**params, **leaves}, images, positions, {})
            grads = torch.autograd.grad(loss, list(leaves.values()))
            params |= {key: params[key] - 0.05 * (g + 0.0 * params[key]) for key, g in zip(leaves, grads, strict=True)}
    found = shared_tensors(run(values))
    assert worst_difference(found, {key: params[key] for key in found}) == 0.0


# what the server makes of a cohort


def cohort(shapes: dict[str, tuple[int, ...]], shares: Sequence[float], seed: int = 0) -> list[Upload]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Upload(number, {name: torch.randn(size, generator=generator) for name, size in shapes.items()}, share)
        for number, share in enumerate(shares)
    ]


def true_change(factors: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float], scales: Sequence[float]) -> Tensor:
    """sum_k p_k s_k B_k A_k, element by element in double precision."""
    terms = [
        share * scale * torch.einsum("ltir,ltrj->ltij", b.double(), a.double())
        for (a, b), share, scale in zip(factors, shares, scales, strict=True)
    ]
    return torch.stack(terms).sum(0)


SHARES = (0.5, 0.3, 0.2)
PAIR = {"lora.a": (2, 2, 3, 8), "lora.b": (2, 2, 8, 3)}


def of_width_8(method: FedLoRA) -> World:
    world = replace(VIT_B, width=8, blocks=2)
    return replace(world, roles=method.init(world, seeded()))


def test_fedlora_averages_each_factor_which_is_not_the_average_change() -> None:
    method = METHODS["fedlora"]
    world = of_width_8(method)
    uploads = cohort(PAIR, SHARES)
    server = method.aggregate(world, Server(world.roles.shared, {}), uploads, weighted_mean)
    for name in PAIR:
        mean = sum(share * upload.tensors[name] for share, upload in zip(SHARES, uploads, strict=True))
        torch.testing.assert_close(server.shared[name], mean, atol=1e-6, rtol=1e-6)
    pairs = [(upload.tensors["lora.a"], upload.tensors["lora.b"]) for upload in uploads]
    wanted = true_change(pairs, SHARES, [2.0] * 3)
    assert (merged_change(method, world, server.shared) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("same", [("lora.a",), ("lora.b",), ("lora.a", "lora.b")])
def test_fedlora_is_exact_where_the_clients_agree_in_a_factor(same: tuple[str, ...]) -> None:
    method = METHODS["fedlora"]
    world = of_width_8(method)
    uploads = cohort(PAIR, SHARES)
    agreeing = {name: uploads[0].tensors[name] for name in same}
    uploads = [replace(upload, tensors={**upload.tensors, **agreeing}) for upload in uploads]
    server = method.aggregate(world, Server(world.roles.shared, {}), uploads, weighted_mean)
    pairs = [(upload.tensors["lora.a"], upload.tensors["lora.b"]) for upload in uploads]
    wanted = true_change(pairs, SHARES, [2.0] * 3)
    torch.testing.assert_close(merged_change(method, world, server.shared), wanted.float(), atol=1e-5, rtol=1e-6)


def merged_change(method: FedLoRA, world: World, params: Tensors) -> Tensor:
    """The change (blocks, 2, d, d) of q and v that a method's parameters mean to the backbone."""
    given = method.prompts(world, params, Batch(torch.zeros(1)), {}).weights
    parts = [given[f"blocks.{number}.attention.in.weight"].unflatten(0, (3, world.width)) for number in range(2)]
    return torch.stack(parts)[:, [0, 2]]


def test_ffa_lora_averages_the_change_exactly() -> None:
    method = METHODS["ffa_lora"]
    world = of_width_8(method)
    uploads = cohort({"lora.b": PAIR["lora.b"]}, SHARES)
    server = method.aggregate(world, Server(world.roles.shared, {}), uploads, weighted_mean)
    a = world.roles.local["lora.a"]
    wanted = true_change([(a, upload.tensors["lora.b"]) for upload in uploads], SHARES, [2.0] * 3)
    found = merged_change(method, world, {**server.shared, **world.roles.local})
    torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("ranks", [None, (3, 1, 2)], ids=["one rank", "three ranks"])
def test_flora_merges_the_change_exactly_round_after_round(ranks: tuple[int, ...] | None) -> None:
    method = FLoRA(rank=3, alpha=6.0, ranks=ranks)
    world = of_width_8(method)
    server = Server({}, world.roles.server)
    wanted = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    for round in (1, 2):
        uploads = cohort(PAIR, SHARES, seed=round)
        server = replace(method.aggregate(world, server, uploads, weighted_mean), round=round)
        rank = ranks or (3, 3, 3)
        pairs = [
            (upload.tensors["lora.a"][..., :r, :], upload.tensors["lora.b"][..., :r])
            for upload, r in zip(uploads, rank, strict=True)
        ]
        wanted += true_change(pairs, SHARES, [6.0 / r for r in rank])
    torch.testing.assert_close(server.own["merged"], wanted.float(), atol=1e-6, rtol=1e-6)
    params = method.begin(world, client(0), method.download(world, server, 0), {})
    torch.testing.assert_close(merged_change(method, world, params), wanted.float(), atol=1e-6, rtol=1e-6)


def test_a_stack_has_the_summed_rank_and_the_summed_product() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(2, 1, r, 5, generator=generator), torch.randn(2, 1, 5, r, generator=generator)) for r in (1, 4, 2)
    ]
    a, b = stacked(pairs, SHARES)
    assert (a.shape, b.shape) == ((2, 1, 7, 5), (2, 1, 5, 7))
    torch.testing.assert_close(product(a, b), true_change(pairs, SHARES, [1.0] * 3).float(), atol=1e-6, rtol=1e-6)


# FFA-LoRA: a factor that never moves


def test_the_frozen_factor_of_ffa_lora_is_the_same_everywhere_and_never_travels(settings: Any) -> None:
    values = settings(method={"name": "ffa_lora", "rank": 2}, federation={"rounds": 3}, train={"weight_decay": 0.1})
    _, _, _, world = experiment(values).factory.prepare()
    done = run(values)
    assert set(shared_tensors(done)) == {"lora.b"}
    assert shared_tensors(done)["lora.b"].any()
    for number in range(world.clients):
        assert torch.equal(local_tensors(done, number)["lora.a"], world.roles.local["lora.a"])


def test_ffa_lora_moves_half_the_bytes_of_fedlora(settings: Any) -> None:
    federation = {"rounds": 1}
    half = run(settings(method={"name": "ffa_lora", "rank": 2}, federation=federation)).rounds()[1]
    whole = run(settings(method={"name": "fedlora", "rank": 2}, federation=federation)).rounds()[1]
    values = 3 * 2 * 2 * 32  # blocks x targets x rank x width
    assert (half.bytes_up, half.bytes_down) == (4 * 4 * values, 4 * 4 * values)
    assert (whole.bytes_up, whole.bytes_down) == (2 * half.bytes_up, 2 * half.bytes_down)


# FLoRA: pairs that begin anew


def test_flora_sends_pairs_up_and_the_merged_change_with_a_new_a_down(settings: Any) -> None:
    record = run(settings(method={"name": "flora_stacked", "rank": 2}, federation={"rounds": 1})).rounds()[1]
    matrices, factor = 3 * 2, 2 * 32
    assert record.bytes_up == 4 * 4 * matrices * 2 * factor
    assert record.bytes_down == 4 * 4 * matrices * (32 * 32 + factor)


def test_the_pair_is_the_same_for_every_client_of_a_round_and_new_in_the_next() -> None:
    method = METHODS["flora_stacked"]
    world = of_width_8(method)
    rounds = [
        [
            method.begin(world, client(who), method.download(world, Server({}, world.roles.server, round), who), {})
            for who in (0, 1)
        ]
        for round in (0, 1)
    ]
    assert torch.equal(rounds[0][0]["lora.a"], rounds[0][1]["lora.a"])
    assert not any(params["lora.b"].any() for begun in rounds for params in begun)
    overlap = torch.corrcoef(torch.stack([begun[0]["lora.a"].flatten() for begun in rounds]))[0, 1]
    assert overlap.abs() < 0.4
    bound = 8**-0.5
    assert all(0.8 * bound < begun[0]["lora.a"].abs().max() <= bound for begun in rounds)


def test_another_seed_of_the_run_gives_other_pairs() -> None:
    method = METHODS["flora_stacked"]
    world = replace(VIT_B, width=8, blocks=2)
    sent = [method.download(world, Server({}, method.init(world, seeded(seed)).server), 0)["sent.a"] for seed in (0, 1)]
    assert not torch.equal(*sent)


def test_merging_leaves_the_predictions_of_a_lone_client_as_they_were(settings: Any) -> None:
    """What one client trained is what the server merges: the features before and after the round's end are the same."""
    method = METHODS["flora_stacked"]
    made = experiment(settings(), method)
    prepared = made.factory.prepare()
    images, world = bank_of(made, prepared).images(0, "train"), prepared[-1]
    params = starting_params(method, world)
    upload = Upload(0, {name: params[name] for name in ("lora.a", "lora.b")}, 1.0)
    server = method.aggregate(world, Server({}, world.roles.server), [upload], weighted_mean)
    later = method.begin(world, client(0), method.download(world, replace(server, round=1), 0), world.roles.local)
    assert not later["lora.b"].any()
    before, after = (seen_by(method, world, each, images).cls for each in (params, later))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_the_padding_of_a_small_rank_stays_zero_through_training(settings: Any) -> None:
    uploads: dict[int, Tensors] = {}

    @dataclass(frozen=True)
    class Spy(FLoRA):
        def aggregate(self, world: World, server: Server, arrived: Sequence[Upload], combine: Any) -> Server:
            uploads.update({upload.client: upload.tensors for upload in arrived})
            return super().aggregate(world, server, arrived, combine)

    train = {"momentum": 0.9, "weight_decay": 0.01, "epochs": 2}
    run(settings(train=train), Spy(ranks=(1, 4)))
    assert set(uploads) == {0, 1, 2, 3}
    for number, tensors in uploads.items():
        rank = (1, 4)[number % 2]
        a, b = tensors["lora.a"], tensors["lora.b"]
        assert a.shape[-2] == b.shape[-1] == 4
        assert not a[..., rank:, :].any()
        assert not b[..., rank:].any()
        assert (b[..., :rank].abs().sum((0, 1, 2)) > 0).all()


def test_the_mask_keeps_padding_out_of_the_change_and_without_a_gradient() -> None:
    method = FLoRA(ranks=(1, 3), alpha=6.0)
    world = of_width_8(method)
    params = starting_params(method, world)
    params["lora.a"] = torch.randn(params["lora.a"].shape, generator=torch.Generator().manual_seed(3))
    a, b = params["lora.a"].requires_grad_(), params["lora.b"].requires_grad_()
    change = merged_change(method, world, params)
    wanted = 6.0 * torch.einsum("lti,ltj->ltij", b[..., 0], a[..., 0, :])
    torch.testing.assert_close(change, wanted, atol=1e-6, rtol=1e-6)
    (change * torch.randn(change.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert not a.grad[..., 1:, :].any()
    assert not b.grad[..., 1:].any()
    assert a.grad[..., 0, :].any()
    assert b.grad[..., 0].any()


def test_one_rank_for_everybody_is_the_same_by_either_setting(settings: Any) -> None:
    one = run(settings(name="a", method={"name": "flora_stacked", "rank": 3}))
    other = run(settings(name="b", method={"name": "flora_stacked", "rank": 8, "ranks": [3]}))
    assert worst_difference(server_tensors(one), server_tensors(other)) == 0.0
    assert server_tensors(one)["merged"].any()


def test_evaluation_after_local_training_uses_the_trained_pair(settings: Any) -> None:
    used = []

    @dataclass(frozen=True)
    class Spy(FLoRA):
        def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
            used.append(bool(params["lora.b"].any()))
            return super().predict(world, params, seen, batch, noise)

    for point, trained in (("personalised", False), ("after_local", True)):
        used.clear()
        run(settings(name=point, federation={"rounds": 1, "evaluate_at": point}, train={"epochs": 2}), Spy(rank=2))
        assert used
        assert set(used) == {trained}


# settings


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ({"name": "fedlora", "rank": 33}, r"method\.rank must be at most the width 32 of the backbone, got 33"),
        ({"name": "ffa_lora", "depth": 4}, r"method\.depth must be at most the 3 blocks of the backbone, got 4"),
        (
            {"name": "fedlora", "targets": ["q", "q"]},
            r"method\.targets must name each projection once, got \['q', 'q'\]",
        ),
        ({"name": "flora_stacked", "ranks": [4, 33]}, r"method\.ranks must be at most the width 32 .* got \[4, 33\]"),
        ({"name": "fedlora", "targets": []}, r"method\.targets"),
        ({"name": "fedlora", "targets": ["o"]}, r"method\.targets"),
        ({"name": "flora_stacked", "ranks": []}, r"method\.ranks"),
        ({"name": "flora_stacked", "ranks": [0]}, r"method\.ranks"),
        ({"name": "fedlora", "alpha": 0}, r"method\.alpha"),
        ({"name": "fedlora", "rank": 0}, r"method\.rank"),
        ({"name": "fedlora", "ranks": [2]}, r"method\.ranks is not a setting of fedlora"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, method: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        experiment(settings(method=method)).factory.prepare()


def test_settings_come_from_a_config_as_they_are_written(settings: Any) -> None:
    written = {"name": "flora_stacked", "ranks": [2, 4], "targets": ["k"], "alpha": 3, "depth": 2, "head": "shared"}
    assert experiment(settings(method=written)).method == FLoRA(
        head="shared", ranks=(2, 4), targets=("k",), alpha=3.0, depth=2
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_shared_head_is_averaged_and_a_local_one_stays(settings: Any, name: str) -> None:
    shared = run(settings(name="a", method={"name": name, "head": "shared", "rank": 2}))
    assert {"head.weight", "head.bias"} <= set(shared_tensors(shared))
    assert shared_tensors(shared)["head.weight"].any()
    local = run(settings(name="b", method={"name": name, "rank": 2}))
    assert not {"head.weight", "head.bias"} & set(shared_tensors(local))


def test_the_earlier_name_flora_is_the_same_method_and_the_same_run(settings: Any) -> None:
    assert registry.build({"name": "flora", "rank": 2}) == registry.build({"name": "flora_stacked", "rank": 2})
    today, before = (
        registry.completed(parse(settings(method={"name": name, "rank": 2}))) for name in ("flora_stacked", "flora")
    )
    assert before.method["name"] == "flora_stacked"
    assert before.digest() == today.digest()
    assert "flora" not in registry.methods()
    with pytest.raises(ConfigError, match="earlier name of 'flora_stacked', got 'flora'"):
        registry.register("flora")(FedLoRA)
