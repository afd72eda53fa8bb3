"""SGPT against an independent naive implementation, and the properties its definition promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import as_tensor, naive_vit
from support import content, experiment, local_tensors, run, seeded, server_tensors, shared_tensors, trained_alone
from torch import Tensor, nn

from fedprompt.backbones.vit import ViT
from fedprompt.client import local_training
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Batch, Server, Stage, Upload, World
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank, Images
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.sgpt import SGPT, group_shares
from fedprompt.modules.insertion import BLANK_NOISE, TokenPrompt, vpt_bound
from fedprompt.random_streams import stream
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

BATCH, EPOCHS, LR, MOMENTUM, DECAY = 8, 2, 0.02, 0.9, 1e-3
GREY = (0.5, 0.5, 0.5)


class Bench:
    """One experiment laid open: its parts, and the working parameters of a client with a head that is not zero."""

    def __init__(self, values: dict[str, Any], method: SGPT | None = None) -> None:
        made = experiment(values, method)
        source, manifest, self.backbone, self.world = made.factory.prepare()
        assert isinstance(made.method, SGPT)
        self.method, self.train = made.method, made.config.train
        store = ImageStore(source, self.backbone.shape.image_size, "squash", made.factory.cache)
        bank = ImageBank(source, manifest, store, self.backbone)
        states = ClientStates(lambda client: None)
        self.runtime = ClientRuntime(made.config, self.world, self.method, bank, states, source.domain_names)
        self.images = bank.images(0, "train")

    def params(self, round: int = 1, counts: Sequence[float] | None = None) -> Tensors:
        roles = self.world.roles
        own = roles.server if counts is None else {"counts": torch.tensor(counts, dtype=torch.float32)}
        received = self.method.download(self.world, Server(roles.shared, own), 0)
        params = self.method.begin(self.world, self.runtime._client(0, round), received, roles.local)
        generator = torch.Generator().manual_seed(1)
        shape = params["head.weight"].shape
        return {**params, "head.weight": torch.randn(shape, generator=generator)}

    def logits(self, params: Tensors, positions: Tensor, training: bool = False) -> Tensor:
        batch = make_batch(self.method, self.images, positions, training)
        seen = forward(self.method, self.world, params, self.images, positions, batch, {})
        return self.method.logits(self.world, params, seen, batch, {})

    def loss(self, params: Tensors, positions: Tensor) -> Tensor:
        return local_training.step_loss(self.method, self.world, params, self.images, positions, {})


def toy(method: SGPT, queries: Tensor, training: bool, weights: Tensor | None = None) -> Batch:
    return Batch(torch.zeros(len(queries), dtype=torch.long), {method.query: queries}, weights, training)


def toy_world(width: int = 2, blocks: int = 3) -> World:
    return World(width, blocks, 17, 4, ("a", "b"), ("one", "two"))


def chosen(method: SGPT, params: Tensors, batch: Batch) -> list[int]:
    """The groups in use, told from group prompts that hold their own number."""
    groups, width = params["keys"].shape
    blocks = len(method.blocks_of_groups(toy_world(width)))
    labelled = torch.arange(groups).float().reshape(-1, 1, 1, 1).expand(-1, blocks, 1, width)
    full = {"shared_prompts": torch.zeros(1, width), "group_prompts": labelled, **params}
    tokens = method.prompts(toy_world(width), full, batch, {}).tokens[0].tokens
    assert (tokens == tokens[:, :1, :1, :1]).all()
    return [int(value) for value in tokens[:, 0, 0, 0]]


# --- against an implementation that shares no code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit")
    naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0).save_pretrained(path)
    return path


class Naive:
    """Tokens are put right behind CLS, block after block, on `transformers`' own layers; torch's SGD trains them."""

    shared_blocks, group_blocks, first_tokens = (0, 1), (1, 2), 2

    def __init__(self, folder: Path) -> None:
        from transformers import ViTModel

        self.vit = ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()

    def feature(self, images: Tensor, shared: Tensor | None = None, group: Tensor | None = None) -> Tensor:
        """Mean of the rows of CLS and of the group tokens, which lie right behind it as nothing comes in after them."""
        hidden = self.vit.embeddings(images)
        layers = self.vit.layers if hasattr(self.vit, "layers") else self.vit.encoder.layer
        for number, layer in enumerate(layers):
            if shared is not None and number == 0:
                hidden = self.behind_cls(hidden, shared[:2].unsqueeze(0).repeat(len(images), 1, 1))
            if shared is not None and number == 1:
                hidden = self.behind_cls(hidden, shared[2:].unsqueeze(0).repeat(len(images), 1, 1))
            if group is not None and number in (1, 2):
                hidden = self.behind_cls(hidden, group[:, number - 1])
            hidden = as_tensor(layer(hidden))
        return self.vit.layernorm(hidden)[:, : 1 if group is None else 3].mean(1)

    @staticmethod
    def behind_cls(hidden: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([hidden[:, :1], tokens, hidden[:, 1:]], dim=1)

    def queries(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            query = self.feature(images).clamp(min=0)
            return query / query.norm(dim=1, keepdim=True)

    def cosines(self, images: Tensor, keys: Tensor) -> Tensor:
        return self.queries(images) @ (keys / keys.norm(dim=1, keepdim=True)).T

    @staticmethod
    def balanced(cosines: Tensor, counts: Tensor) -> Tensor:
        total = float(counts.sum())
        frequency = counts / total if total else torch.zeros_like(counts)
        return torch.stack([((1 - row) * (frequency + 5e-4)).argmin() for row in cosines])

    def local_training(
        self,
        images: Tensor,
        labels: Tensor,
        params: Tensors,
        counts: Tensor,
        key_loss: bool,
        orders: list[list[Tensor]],
    ) -> tuple[Tensors, Tensor]:
        live = {name: nn.Parameter(tensor.clone()) for name, tensor in params.items()}
        head = ["head.weight", "head.bias"]
        for stage, (names, batches) in enumerate(
            zip((["shared_prompts"], ["group_prompts", "keys"]), orders, strict=True)
        ):
            trained = [live[name] for name in names + head]
            optimiser = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
            for positions in batches:
                shared, group, pull = live["shared_prompts"], None, torch.zeros(())
                if stage == 1:
                    cosines = self.cosines(images[positions], live["keys"])
                    picks = self.balanced(cosines.detach(), counts)
                    group = live["group_prompts"][picks]
                    pull = cosines[torch.arange(len(picks)), picks].mean()
                feature = self.feature(images[positions], shared, group)
                logits = feature @ live["head.weight"].T + live["head.bias"]
                loss = nn.functional.cross_entropy(logits, labels[positions]) - (pull if key_loss else 0)
                optimiser.zero_grad()
                loss.backward()
                for name in names + head:  # torch skips what has no gradient; decay still counts
                    if live[name].grad is None:
                        live[name].grad = torch.zeros_like(live[name])
                optimiser.step()
        after = {name: tensor.detach() for name, tensor in live.items()}
        picks = self.balanced(self.cosines(images, after["keys"]), counts)
        return after, torch.bincount(picks, minlength=len(counts)).float()


def orders(round: int, client: int, size: int) -> Iterator[list[Tensor]]:
    for stage in ("shared", "groups"):
        generator = stream(0, round, client, f"batches.{stage}")
        yield [batch for _ in range(EPOCHS) for batch in generator.permutation(size).split(BATCH)]


@pytest.mark.parametrize("head", ["local", "shared"])
def test_three_rounds_equal_the_naive_implementation(settings: Any, folder: Path, head: str) -> None:
    minimum, group_momentum, key_momentum, rounds = 18, 0.25, 0.75, 3
    values = settings(
        backbone={"name": str(folder), "mean": list(GREY), "std": list(GREY)},
        train={"lr": LR, "batch_size": BATCH, "epochs": EPOCHS, "momentum": MOMENTUM, "weight_decay": DECAY},
        method={
            "name": "sgpt",
            "group_readout": True,
            "head": head,
            "groups": 3,
            "shared_blocks": [0, 1],
            "group_blocks": [1, 2],
            "first_tokens": 2,
            "minimum_group": minimum,
            "group_momentum": group_momentum,
            "key_momentum": key_momentum,
        },
        federation={"rounds": rounds, "fraction": 0.5},
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)

    naive, store = Naive(folder), ImageStore(source, 16, "squash", made.factory.cache)
    start = {**world.roles.shared, **world.roles.local}
    heads = {client: {name: start[name] for name in ("head.weight", "head.bias")} for client in range(world.clients)}
    state, counts = dict(start), torch.zeros(3)
    sparse, dense = 0, 0
    for round in range(1, rounds + 1):
        results = []
        cohort = sample_cohort(0, round, range(world.clients), 0.5)
        for client in cohort:
            indices = manifest.clients[client].train
            images = normalise(store.pixels(indices), GREY, GREY, torch.float32, torch.device("cpu"))
            labels = torch.from_numpy(source.labels[indices])
            begun = {**state, **(heads[client] if head == "local" else {})}
            begun["group_prompts"] = begun["group_prompts"].reshape(3, 2, 1, 32)
            after, picks = naive.local_training(
                images, labels, begun, counts, True, list(orders(round, client, len(indices)))
            )
            heads[client] = {name: after[name] for name in heads[client]}
            results.append((len(indices), after, picks))
        total = sum(size for size, _, _ in results)
        mean = {name: sum(size / total * after[name] for size, after, _ in results) for name in state}
        for group in range(3):
            choosers = sum(float(picks[group]) for _, _, picks in results)
            often = EPOCHS * choosers > minimum
            sparse, dense = sparse + (not often), dense + often
            share = [float(picks[group]) / choosers if often else 1 / len(results) for *_, picks in results]
            mean["keys"][group] = sum(
                part * after["keys"][group] for part, (_, after, _) in zip(share, results, strict=True)
            )
        for name, momentum in (("group_prompts", group_momentum), ("keys", key_momentum)):
            mean[name] = momentum * state[name] + (1 - momentum) * mean[name]
        state, counts = mean, counts + sum(picks for _, _, picks in results)
    assert min(sparse, dense) > 0, "groups on both sides of the minimum must occur"
    found = shared_tensors(done)
    for name in ("shared_prompts", "group_prompts", "keys"):
        assert (state[name] - start[name]).abs().max() > 1e-3, f"{name} must have moved"
        torch.testing.assert_close(found[name], state[name], atol=1e-5, rtol=1e-4)
    assert server_tensors(done)["counts"].tolist() == counts.tolist()
    if head == "shared":
        torch.testing.assert_close(found["head.weight"], state["head.weight"], atol=1e-5, rtol=1e-4)
    else:
        own = local_tensors(done, cohort[0])["head.weight"]
        torch.testing.assert_close(own, heads[cohort[0]]["head.weight"], atol=1e-5, rtol=1e-4)


# --- the pass


@pytest.mark.parametrize("first_tokens", [1, 3])
def test_the_sequence_grows_by_one_token_per_prompted_block(
    settings: Any, monkeypatch: pytest.MonkeyPatch, first_tokens: int
) -> None:
    method = SGPT(groups=2, shared_blocks=(0, 1), group_blocks=(1, 2), first_tokens=first_tokens, group_readout=True)
    bench = Bench(settings(), method)
    lengths: dict[int, int] = {}
    plain = ViT._block

    def spied(self: ViT, block: int, live: list[Tensor], passive: list[Tensor], *rest: Any) -> list[Tensor]:
        lengths[block] = sum(rows.shape[1] for rows in [*live, *passive])
        return plain(self, block, live, passive, *rest)

    params, positions = bench.params(), torch.arange(3)
    batch = make_batch(method, bench.images, positions, training=False)
    monkeypatch.setattr(ViT, "_block", spied)
    seen = forward(method, bench.world, params, bench.images, positions, batch, {})
    tokens = bench.world.tokens
    assert lengths == {0: tokens + first_tokens, 1: tokens + first_tokens + 2, 2: tokens + first_tokens + 3}
    assert seen.prompts is not None
    assert seen.prompts.shape[1] == first_tokens + 3


@pytest.mark.parametrize("readout", [True, False])
def test_the_head_reads_cls_or_the_mean_of_cls_and_the_group_rows(settings: Any, readout: bool) -> None:
    """A last group token that comes in at the last block and a shared one there too: only the group's are read."""
    method = SGPT(groups=1, shared_blocks=(0, 2), group_blocks=(1, 2), group_readout=readout)
    bench = Bench(settings(), method)
    params, positions = bench.params(), torch.arange(4)
    tokens = params["group_prompts"][0]  # (2, 1, d)
    shared = TokenPrompt(params["shared_prompts"].unsqueeze(1), (0, 2), mode="append")
    group = TokenPrompt(tokens, (1, 2), mode="append")
    rows = bench.backbone.run(bench.images.tokens(positions), [shared, group], ("cls", "prompts"))
    mean = (rows["cls"] + rows["prompts"][:, 2] + rows["prompts"][:, 3]) / 3
    feature = mean if readout else rows["cls"]
    expected = feature @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(bench.logits(params, positions), expected, atol=1e-5, rtol=1e-5)


def test_an_image_is_treated_the_same_alone_and_in_a_batch(settings: Any) -> None:
    bench = Bench(settings(), SGPT(groups=3, balanced=False))
    positions = torch.arange(6)
    own = make_batch(bench.method, bench.images, positions, training=False).features["cls"]
    params = {**bench.params(), "keys": own[:3].relu()}  # so the first three images choose three groups
    alone = torch.cat([bench.logits(params, positions[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(bench.logits(params, positions), alone, atol=1e-5, rtol=1e-5)
    turned = {**params, "keys": params["keys"].roll(1, 0), "group_prompts": params["group_prompts"].roll(1, 0)}
    torch.testing.assert_close(bench.logits(turned, positions), alone, atol=1e-5, rtol=1e-5)
    mixed_up = bench.logits({**params, "keys": params["keys"].roll(1, 0)}, positions)
    assert ((mixed_up - alone).abs().amax(-1) > 1e-3)[:3].all()


# --- selection


def test_training_prefers_groups_that_were_chosen_less_often() -> None:
    method = SGPT(groups=2)
    params = {"keys": torch.eye(2), "sent.counts": torch.tensor([300.0, 100.0])}
    queries = torch.tensor([[4.0, 3.0], [12.0, 5.0]])  # cosines (0.8, 0.6) and (12/13, 5/13)
    # (1 - 0.8) * 0.7505 > (1 - 0.6) * 0.2505, but (1 - 12/13) * 0.7505 < (1 - 5/13) * 0.2505
    assert chosen(method, params, toy(method, queries, training=True)) == [1, 0]
    assert chosen(method, params, toy(method, queries, training=False)) == [0, 0]
    assert chosen(replace(method, balanced=False), params, toy(method, queries, training=True)) == [0, 0]


def test_frequencies_are_shares_and_the_offset_keeps_unseen_groups_comparable() -> None:
    method = SGPT(groups=2)
    query = toy(method, torch.tensor([[1.0, 0.0]]), training=True)
    keys = torch.tensor([[0.0, 1.0], [0.9, 0.19**0.5]])  # cosines 0 and 0.9
    # 1 * (0 + 5e-4) against 0.1 * (c / (c + other) + 5e-4): even at a share of 0.0045
    for counts, expected in (([0.0, 0.0], 1), ([996.0, 4.0], 1), ([0.0, 1e6], 0)):
        params = {"keys": keys, "sent.counts": torch.tensor(counts)}
        assert chosen(method, params, query) == [expected], counts
    three = SGPT(groups=3)
    keys = torch.tensor([[0.0, 1.0], [0.9, 0.19**0.5], [-1.0, 0.0]])
    for many, expected in ((4.0, 1), (5.0, 0)):  # 1 * 5e-4 against 0.1 * (many / 1000 + 5e-4): equal at 4.5
        params = {"keys": keys, "sent.counts": torch.tensor([0.0, many, 1000.0 - many])}
        assert chosen(three, params, query) == [expected]


def test_only_the_positive_part_of_the_query_counts() -> None:
    method = SGPT(groups=2)
    keys = torch.tensor([[1.0, 0.5], [0.1, -1.0]])
    batch = toy(method, torch.tensor([[1.0, -10.0]]), training=False)
    assert chosen(method, {"keys": keys}, batch) == [0]
    torch.testing.assert_close(
        method.likeness({"keys": keys}, batch), torch.tensor([[1 / 1.25**0.5, 0.1 / 1.01**0.5]]), atol=1e-6, rtol=1e-6
    )


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.integers(0, 99))
def test_the_choice_does_not_depend_on_the_lengths_of_keys(scales: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, queries = torch.randn(4, 6, generator=generator), torch.randn(5, 6, generator=generator)
    counts = torch.randint(1, 9, (4,), generator=generator).float()
    method = SGPT(groups=4)
    for training in (True, False):
        batch = toy(method, queries, training)
        one = chosen(method, {"keys": keys, "sent.counts": counts}, batch)
        scaled = {"keys": keys * torch.tensor(scales)[:, None], "sent.counts": counts}
        assert chosen(method, scaled, batch) == one


def test_a_batch_votes_in_training_only_and_padding_has_no_vote() -> None:
    method = SGPT(groups=3, balanced=False, batch_vote=True)
    queries = torch.eye(3)[[2, 1, 1, 0, 0, 0]]
    params = {"keys": torch.eye(3)}
    assert chosen(method, params, toy(method, queries, training=True)) == [0] * 6
    assert chosen(method, params, toy(method, queries, training=False)) == [2, 1, 1, 0, 0, 0]
    padded = torch.tensor([1.0, 1, 1, 1, 0, 0])
    assert chosen(method, params, toy(method, queries, True, padded)) == [1] * 6


def test_the_key_loss_is_the_likeness_of_the_key_that_was_voted_for() -> None:
    method = SGPT(groups=2, balanced=False, batch_vote=True)
    params = {"keys": torch.eye(2), "shared_prompts": torch.zeros(1, 2), "group_prompts": torch.zeros(2, 1, 1, 2)}
    batch = toy(method, torch.tensor([[4.0, 3.0], [1.0, 0.0], [3.0, 4.0]]), training=True)
    extra = method.prompts(toy_world(), params, batch, {}).extra
    torch.testing.assert_close(extra["likeness"], torch.tensor([0.8, 1.0, 0.6]))


def test_with_one_group_every_way_of_choosing_is_the_same(settings: Any) -> None:
    ways: list[dict[str, Any]] = [{}, {"balanced": False}, {"batch_vote": True}]
    runs = [run(settings(name=f"way{number}"), SGPT(groups=1, **way)) for number, way in enumerate(ways)]
    for other in runs[1:]:
        for name, tensor in shared_tensors(runs[0]).items():
            assert torch.equal(shared_tensors(other)[name], tensor)
    assert server_tensors(runs[0])["counts"].tolist() == [2 * training_images(settings())]


def training_images(values: dict[str, Any]) -> int:
    _, manifest, _, _ = experiment(values).factory.prepare()
    return sum(len(client.train) for client in manifest.clients)


def test_a_query_after_all_blocks_is_the_usual_one_and_an_earlier_one_is_not(settings: Any) -> None:
    assert SGPT().needs == ("cls",)
    assert SGPT(query_block=2).needs == ("cls:2",)
    usual, whole, early = (
        run(settings(name=f"query-{block}", federation={"rounds": 1}), SGPT(groups=4, query_block=block))
        for block in (None, 3, 1)
    )
    assert content(usual) == content(whole)
    assert not torch.equal(shared_tensors(usual)["keys"], shared_tensors(early)["keys"])


# --- losses, gradients and stages


def test_the_key_loss_is_on_in_every_round_of_five_epochs(settings: Any) -> None:
    bench = Bench(settings(train={"epochs": 5}), SGPT(groups=3, key_weight=0.5))
    positions = torch.arange(8)
    batch = make_batch(bench.method, bench.images, positions, training=True)
    (_, second) = bench.method.stages(bench.world, bench.train)
    assert second.epochs == 5
    silent = replace(bench.method, key_weight=0.0)
    for round in (1, 6, 100):
        params = bench.params(round)
        seen = forward(silent, bench.world, params, bench.images, positions, batch, {})
        losses = [
            each.loss(bench.world, params, each.logits(bench.world, params, seen, batch, {}), seen, batch, {})
            for each in (second.step, silent)
        ]
        # nothing was counted yet, so every image has chosen its nearest key
        nearest = bench.method.likeness(params, batch).max(-1).values.mean()
        torch.testing.assert_close(losses[1] - losses[0], 0.5 * nearest, atol=1e-5, rtol=1e-5)


def test_the_key_loss_ends_within_a_round_after_its_local_epochs(settings: Any) -> None:
    bench = Bench(settings(train={"epochs": 5}), SGPT(groups=3, key_epochs=2))
    _, with_keys, rest = bench.method.stages(bench.world, bench.train)
    assert (with_keys.epochs, rest.epochs) == (2, 3)
    before = bench.params()
    after, _ = trained_alone(bench.runtime, (rest,), before, 1, 0, "")
    assert torch.equal(before["keys"], after["keys"])
    after, _ = trained_alone(bench.runtime, (with_keys,), before, 1, 0, "")
    assert not torch.equal(before["keys"], after["keys"])


def test_choices_add_up_over_the_epochs_of_the_second_stage_before_they_are_too_few() -> None:
    method = SGPT(groups=2, minimum_group=50, key_momentum=0.0)
    choices = [[11.0, 3.0], [0.0, 7.0]]  # 11 and 10 images, so 55 and 50 choices in five epochs
    for epochs, shares in ((1, [1 / 2, 1 / 2]), (5, [0.0, 1 / 2])):
        world = replace(declared(method, toy_world()), epochs=epochs)
        server = Server(world.roles.shared, world.roles.server)
        after = method.aggregate(world, server, two_uploads(world, choices), weighted_mean)
        assert after.shared["keys"][:, 0].tolist() == shares


def test_a_retired_setting_is_refused_with_what_to_do(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"method\.key_rounds must be left out: .*`key_epochs` local epochs.*, got 5"):
        run(settings(method={"name": "sgpt", "key_rounds": 5}))


def test_groups_that_nobody_chose_get_no_gradient_and_keys_learn_from_the_key_loss_alone(settings: Any) -> None:
    bench = Bench(settings(), SGPT(groups=5))
    positions = torch.arange(4)
    for weight, keys_learn in ((1.0, True), (0.0, False)):
        bench.method, params = replace(bench.method, key_weight=weight), bench.params()
        leaves = {name: params[name].clone().requires_grad_() for name in ("group_prompts", "keys")}
        loss = bench.loss({**params, **leaves}, positions)
        prompts, keys = torch.autograd.grad(loss, list(leaves.values()))
        batch = make_batch(bench.method, bench.images, positions, training=True)
        used = set(bench.method.likeness(params, batch).argmax(-1).tolist())
        assert 0 < len(used) < 5
        for group in range(5):
            assert bool(prompts[group].abs().max() > 0) == (group in used)
            assert bool(keys[group].abs().max() > 0) == (keys_learn and group in used)


def test_each_stage_leaves_the_tensors_of_the_other_alone(settings: Any) -> None:
    bench = Bench(settings(), SGPT(groups=3))
    first, second = bench.method.stages(bench.world, bench.train)
    before = bench.params()
    for stage, moved in ((first, {"shared_prompts"}), (second, {"group_prompts", "keys"})):
        after, _ = trained_alone(bench.runtime, (stage,), before, 1, 0, "")
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {*moved, "head.weight", "head.bias"}


def test_the_first_stage_is_blind_to_groups(settings: Any) -> None:
    bench = Bench(settings(), SGPT(groups=3))
    step = bench.method.stages(bench.world, bench.train)[0].step
    params, positions = bench.params(), torch.arange(5)
    other = {**params, "group_prompts": params["group_prompts"] + 1, "keys": -params["keys"]}
    one, two = (
        local_training.step_loss(step, bench.world, each, bench.images, positions, {}) for each in (params, other)
    )
    assert torch.equal(one, two)
    assert not torch.equal(bench.loss(params, positions), bench.loss(other, positions))


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_with_equal_compute_both_stages_together_see_as_many_images_as_one(
    settings: Any, monkeypatch: pytest.MonkeyPatch, epochs: int
) -> None:
    shown: list[tuple[str, list[int]]] = []
    loaded: list[int] = []
    plain, load = local_training.step_loss, Images.load

    def spied(step: Any, *rest: Any) -> Tensor:
        shown.append((type(step).__name__, list(loaded)))
        return plain(step, *rest)

    def loads(images: Images, positions: Tensor, *rest: Any) -> Any:
        loaded[:] = images.indices[positions.numpy()].tolist()
        return load(images, positions, *rest)

    monkeypatch.setattr(local_training, "step_loss", spied)
    monkeypatch.setattr(Images, "load", loads)
    for equal, budget in ((True, 1), (False, 2)):
        bench = Bench(settings(train={"epochs": epochs}), SGPT(groups=2, equal_compute=equal))
        shown.clear()
        trained_alone(bench.runtime, bench.method.stages(bench.world, bench.train), bench.params(), 1, 0, "")
        seen = {kind: [image for name, images in shown if name == kind for image in images] for kind, _ in shown}
        assert set(seen) == {"SharedPrompts", "SGPT"}
        assert sum(map(len, seen.values())) == budget * epochs * len(bench.images)
        if equal and epochs == 1:
            assert sorted(seen["SharedPrompts"] + seen["SGPT"]) == sorted(bench.images.indices.tolist())
        if equal and epochs == 3:
            assert len(seen["SharedPrompts"]) == 2 * len(seen["SGPT"])


def test_heads_are_tuned_before_an_evaluation_with_groups_chosen_as_at_test(settings: Any) -> None:
    method = SGPT(groups=2, head="shared_then_finetune", batch_vote=True, finetune_epochs=3)
    bench = Bench(settings(), method)
    stages: tuple[Stage, ...] = (
        *method.adaptation(bench.world, bench.train),
        *method.newcomer(bench.world, bench.train, 4),
    )
    assert [stage.epochs for stage in stages] == [3, 4]
    params = {"keys": torch.eye(2), "sent.counts": torch.tensor([1000.0, 0.0])}
    queries = torch.tensor([[4.0, 3.0], [0.0, 1.0], [1.0, 0.0]])
    for stage in stages:
        assert stage.trainable == ("head.weight", "head.bias")
        assert isinstance(stage.step, SGPT)
        assert chosen(stage.step, params, toy(method, queries, training=True)) == [0, 1, 0]


# --- the server


@given(
    st.integers(1, 5).flatmap(
        lambda clients: st.lists(
            st.lists(st.integers(0, 60), min_size=3, max_size=3), min_size=clients, max_size=clients
        )
    ),
    st.integers(0, 100),
)
def test_the_shares_of_a_group_sum_to_one(choices: list[list[int]], minimum: int) -> None:
    found = group_shares(torch.tensor(choices, dtype=torch.float32), minimum)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(0), torch.ones(3, dtype=torch.float64))
    for group in range(3):
        column = [row[group] for row in choices]
        if sum(column) <= minimum:
            assert found[:, group].tolist() == [1 / len(choices)] * len(choices)
        else:
            assert found[:, group].tolist() == pytest.approx([count / sum(column) for count in column])


def two_uploads(world: World, choices: list[list[float]]) -> list[Upload]:
    shared = world.roles.shared
    return [
        Upload(
            number,
            {**{n: torch.full_like(t, float(number)) for n, t in shared.items()}, "choices": torch.tensor(row)},
            weight,
        )
        for number, (row, weight) in enumerate(zip(choices, (0.25, 0.75), strict=True))
    ]


def declared(method: SGPT, world: World) -> World:
    return replace(world, roles=method.init(world, seeded()))


def test_one_round_of_the_server_in_numbers() -> None:
    method = SGPT(groups=3, head="shared", minimum_group=10, group_momentum=0.5, key_momentum=0.25)
    world = declared(method, toy_world(width=4))
    old = {name: torch.full_like(tensor, 8.0) for name, tensor in world.roles.shared.items()}
    server = Server(old, {"counts": torch.tensor([1.0, 2.0, 3.0])}, round=6)
    uploads = two_uploads(world, [[30.0, 4.0, 0.0], [10.0, 6.0, 11.0]])  # clients of zeros and of ones
    after = method.aggregate(world, server, uploads, weighted_mean)
    assert after.shared["shared_prompts"].unique().tolist() == [0.75]
    assert after.shared["head.weight"].unique().tolist() == [0.75]
    assert after.shared["group_prompts"].unique().tolist() == [0.5 * 8 + 0.5 * 0.75]
    expected = [0.25 * 8 + 0.75 * mean for mean in (10 / 40, 1 / 2, 11 / 11)]  # 4 + 6 choices are not more than 10
    assert after.shared["keys"].tolist() == [pytest.approx([value] * 4) for value in expected]
    assert after.own["counts"].tolist() == [41.0, 12.0, 14.0]


def test_with_momentum_one_nothing_of_the_groups_changes_and_with_zero_the_old_is_forgotten() -> None:
    for momentum in (1.0, 0.0):
        method = SGPT(groups=2, group_momentum=momentum, key_momentum=momentum)
        world = declared(method, toy_world())
        server = Server(world.roles.shared, world.roles.server)
        after = method.aggregate(world, server, two_uploads(world, [[60.0, 0.0], [0.0, 60.0]]), weighted_mean)
        if momentum == 1:
            for name in ("keys", "group_prompts"):
                assert torch.equal(after.shared[name], server.shared[name])
        else:
            assert after.shared["group_prompts"].unique().tolist() == [0.75]
            assert after.shared["keys"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert after.shared["shared_prompts"].unique().tolist() == [0.75]


def test_identical_clients_are_averaged_to_what_they_sent() -> None:
    method = SGPT(groups=3, group_momentum=0.0, key_momentum=0.0)
    world = declared(method, toy_world(width=4))
    uploads = [
        Upload(number, {**world.roles.shared, "choices": torch.tensor(row)}, weight)
        for number, (row, weight) in enumerate((([70.0, 0.0, 1.0], 0.25), ([5.0, 90.0, 0.0], 0.75)))
    ]
    server = Server({name: tensor + 1 for name, tensor in world.roles.shared.items()}, world.roles.server)
    after = method.aggregate(world, server, uploads, weighted_mean)
    for name, tensor in world.roles.shared.items():
        torch.testing.assert_close(after.shared[name], tensor)


def test_choices_count_every_training_image_once_by_the_training_rule(settings: Any) -> None:
    bench = Bench(settings(), SGPT(groups=4, batch_vote=True))
    skewed = [900.0, 50.0, 40.0, 10.0]
    params = bench.params(counts=skewed)
    sent = bench.runtime._statistics("round", 1, 0, params)["choices"]
    batch = make_batch(bench.method, bench.images, torch.arange(len(bench.images)), training=False)
    cosines = bench.method.likeness(params, batch)
    frequency = torch.tensor(skewed) / 1000
    rule = [int(((1 - row) * (frequency + 5e-4)).argmin()) for row in cosines]
    assert sent.tolist() == [float(rule.count(group)) for group in range(4)]
    assert rule != cosines.argmax(-1).tolist()
    assert sent.sum() == len(bench.images)


def test_what_goes_up_is_prompts_keys_and_choices_and_no_local_head(settings: Any) -> None:
    done = run(settings(method={"name": "sgpt", "groups": 6}, federation={"rounds": 1}))
    record = done.rounds()[1]
    values = 1 * 32 + 6 * 32 + 6 * 32 + 6  # a shared token, group tokens at one block, keys, choices or counts
    assert record.bytes_up == record.bytes_down == 4 * 4 * values


# --- settings and start


def test_the_defaults_on_a_base_vit_are_those_of_the_cifar_runs() -> None:
    method, world = SGPT(), World(768, 12, 197, 16, ("a",) * 100, ("one",))
    assert method.blocks_of_shared(world) == (0, 1, 2, 3)
    assert method.blocks_of_groups(world) == (4, 5, 6)
    roles = method.init(world, seeded())
    assert sum(tensor.numel() for tensor in roles.shared.values()) == 64_512


@pytest.mark.parametrize("blocks", range(1, 25))
def test_the_default_blocks_fit_every_depth(blocks: int) -> None:
    SGPT(groups=2).check(toy_world(blocks=blocks), None)  # type: ignore[arg-type]


def test_all_prompts_start_as_tokens_of_a_blank_image_with_noise_of_their_own() -> None:
    blank = 10 * torch.eye(3, 8)  # by block
    method = SGPT(groups=6, shared_blocks=(0, 2), first_tokens=2, group_blocks=(1, 2))
    shared = method.init(replace(toy_world(width=8), blank=lambda: blank), seeded(3)).shared
    noise = {
        "shared": shared["shared_prompts"] - blank[[0, 0, 2]],
        "group": shared["group_prompts"].squeeze(2) - blank[[1, 2]],
    }
    for found in noise.values():
        assert 0 < float(found.abs().min()) < float(found.abs().max()) <= BLANK_NOISE * vpt_bound(4, 8)
        assert len(found.unique()) == found.numel()


def test_with_random_ones_shared_prompts_start_at_zero_group_prompts_as_vpt_and_keys_orthonormal() -> None:
    roles = SGPT(groups=6, prompt_init="random").init(toy_world(width=8), seeded(3))
    assert not roles.shared["shared_prompts"].any()
    prompts, bound = roles.shared["group_prompts"], vpt_bound(4, 8)
    assert prompts.abs().max() <= bound
    assert prompts.std() > bound / 3
    keys = roles.shared["keys"]
    torch.testing.assert_close(keys @ keys.T, torch.eye(6), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_blocks": [0, 3]}, r"method\.shared_blocks must be increasing and in 0\.\.2, got \[0, 3\]"),
        ({"group_blocks": [2, 1]}, r"method\.group_blocks must be increasing and in 0\.\.2, got \[2, 1\]"),
        ({"group_blocks": [-1]}, r"method\.group_blocks must be increasing and in 0\.\.2, got \[-1\]"),
        ({"groups": 33}, r"method\.groups must be at most the backbone's width of 32, .* got 33"),
        ({"query_block": 4}, r"method\.query_block must be at most the 3 blocks of the backbone, got 4"),
        ({"shared_blocks": []}, r"method\.shared_blocks"),
        ({"key_momentum": 1.5}, r"method\.key_momentum"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(settings(method={"name": "sgpt", **changes}))
