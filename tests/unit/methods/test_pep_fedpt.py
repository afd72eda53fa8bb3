"""PEP-FedPT: its weights and prototypes by hand, and whole rounds against an independent naive implementation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from naive import NaiveVPT, as_tensor
from support import content, experiment, local_tensors, run, seeded, server_tensors, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import forward, make_batch, step_loss
from fedprompt.config import TrainConfig, parse
from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Batch, Client, Seen, Server, Upload, World
from fedprompt.core.registry import build
from fedprompt.data.cache.pixel_store import ImageStore, normalise
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.pep_fedpt import PEPFedPT, fitting_temperature
from fedprompt.random_streams import stream
from fedprompt.runs.run import as_it_was
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit
RANDOM = {"prompt_init": "random", "class_prompt_init": "random"}  # gradients of blank starts are small

LR, MOMENTUM, BATCH = 0.1, 0.9, 8
CLASSES, WIDTH = 4, 6


def make_world(method: PEPFedPT, **changes: Any) -> World:
    names = tuple(f"class {number}" for number in range(CLASSES))
    world = World(WIDTH, 3, 5, 4, names, ("a", "b", "c"), **changes)
    return replace(world, roles=method.init(world, seeded()))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(method: PEPFedPT, features: Tensor, params: Tensors) -> Tensor:
    """m(x) of a frozen query, (B, blocks, n_c, d)."""
    given = method.prompts(make_world(method), params, Batch(torch.zeros(len(features)), {"cls": features}), {})
    return given.tokens[1].tokens


def parameters(
    method: PEPFedPT, prior: Tensor, known: Tensor | None = None, prototypes: Tensor | None = None
) -> Tensors:
    return {
        **make_world(method).roles.shared,
        "prior": prior,
        "sent.known": torch.ones(CLASSES) if known is None else known,
        "sent.temperature": torch.tensor(0.1),
        "sent.prototypes": random(CLASSES, WIDTH, seed=5) if prototypes is None else prototypes,
    }


UNIFORM = torch.full((CLASSES,), 1 / CLASSES)


def test_the_weights_of_two_classes_are_those_of_bayes_rule() -> None:
    """z = mu_0, orthogonal prototypes, tau 1: s_0 = e / (e + 3) for priors 1/4 and 3/4; kappa 2 squares the odds of the prior."""
    query, prototypes, known = torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.ones(2)
    prior = torch.tensor([0.25, 0.75])
    one = PEPFedPT().class_weights(query, prototypes, known, prior, 1.0)[0, 0]
    squared = PEPFedPT(kappa=2.0).class_weights(query, prototypes, known, prior, 1.0)[0, 0]
    sharp = PEPFedPT().class_weights(query, prototypes, known, prior, 0.5)[0, 0]
    assert one.item() == pytest.approx(2.718281828 / (2.718281828 + 3))
    assert squared.item() == pytest.approx(2.718281828 / (2.718281828 + 9))
    assert sharp.item() == pytest.approx(7.389056099 / (7.389056099 + 3))


@pytest.mark.parametrize("similarity", ["cosine", "neg_sq_dist"])
def test_a_training_image_does_not_count_in_the_prototype_of_its_class(similarity: Any) -> None:
    """As if the means had been made without it; a class of one image, and classes of others, keep theirs."""
    method, labels = PEPFedPT(similarity=similarity), torch.tensor([0, 0, 0, 1, 1, 2])
    queries = F.normalize(random(6, WIDTH), dim=-1)
    counts = torch.tensor([3.0, 2.0, 1.0, 0.0])
    means = torch.stack([queries[labels == number].mean(0) for number in range(3)] + [torch.zeros(WIDTH)])
    found = method.class_weights(queries, means, counts, UNIFORM, 0.1, F.one_hot(labels, CLASSES))
    for place, label in enumerate(labels.tolist()):
        rest = means.clone()
        others = (labels == label) & (torch.arange(6) != place)
        if others.any():
            rest[label] = queries[others].mean(0)
        expected = method.class_weights(queries[place : place + 1], rest, counts, UNIFORM, 0.1)[0]
        torch.testing.assert_close(found[place], expected, atol=1e-6, rtol=1e-5)
    plain = method.class_weights(queries, means, counts, UNIFORM, 0.1)
    right = torch.arange(5)
    assert (found[right, labels[:5]] < plain[right, labels[:5]]).all(), "with itself an image looks nearer than it is"


def test_only_images_that_were_counted_are_left_out(settings: Any) -> None:
    """In training, images of classes that a client has sent; never in a test, nor for clients whose images came later."""
    runtime, world, method = runtime_of(settings(method={"name": "pep_fedpt", "minimum_count": 3}))
    client = runtime._client(0, 1)
    counts = torch.arange(world.classes)
    few = replace(client, class_counts=counts)
    received = method.download(world, Server(world.roles.shared, world.roles.server), 0)
    local = method.enrol(world, few)
    assert torch.equal(method.begin(world, few, received, local)["counted"], (counts >= 3).float())
    later = replace(world, newcomers=(0,))
    assert not method.begin(later, few, received, local)["counted"].any()
    moving = replace(method, query="inline")
    assert not moving.begin(world, few, received, local)["counted"].any()
    params = {**parameters(PEPFedPT(), UNIFORM, torch.full((CLASSES,), 3.0)), "counted": torch.ones(CLASSES)}
    batch = Batch(torch.tensor([0, 1]), {"cls": random(2, WIDTH)}, training=True)
    small = make_world(PEPFedPT())
    training, testing = (
        PEPFedPT().prompts(small, params, each, {}).extra["weights"] for each in (batch, replace(batch, training=False))
    )
    assert not torch.allclose(training, testing)


def test_a_squared_distance_is_halved() -> None:
    """|z - mu_0|^2 = 0 and |z - mu_1|^2 = 4 at tau 1: odds e^2."""
    method = PEPFedPT(similarity="neg_sq_dist")
    prototypes = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    weights = method.class_weights(torch.tensor([[1.0, 0.0]]), prototypes, torch.ones(2), torch.full((2,), 0.5), 1.0)
    assert (weights[0, 0] / weights[0, 1]).item() == pytest.approx(7.389056099, rel=1e-5)


def test_the_temperature_that_fits_is_the_variance_around_prototypes_over_25_directions() -> None:
    """Class 0 has (1, 0) and (0, 1), class 1 twice (1, 0): w = (1 + 0) / (4 - 2) * (1 + 2 / 4) = 0.75."""
    sums, counts = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([2.0, 2.0])
    assert fitting_temperature(sums, counts, "neg_sq_dist").item() == pytest.approx(0.75 / 25)
    assert fitting_temperature(sums, counts, "cosine").item() == pytest.approx(0.75 / 25 / 0.25**0.5)
    alone = fitting_temperature(sums, torch.ones(2), "cosine").item()  # one image a class says nothing of a variance
    assert alone == pytest.approx(0.1)


@pytest.mark.parametrize("similarity", ["cosine", "neg_sq_dist"])
def test_a_soft_mixture_has_a_multiple_of_that_temperature_and_never_more_than_a_tenth(similarity: str) -> None:
    labels = torch.arange(300) % 6
    queries = F.normalize(random(6, 64)[labels] + random(300, 64, seed=1), dim=-1)
    sums = torch.stack([queries[labels == number].sum(0) for number in range(6)])
    counts = torch.bincount(labels).float()
    plain, twice, much = (fitting_temperature(sums, counts, similarity, each).item() for each in (1.0, 2.0, 1e3))  # type: ignore[arg-type]
    assert 0.01 < plain < 0.05
    assert twice == pytest.approx(2 * plain)
    assert much == pytest.approx(0.1)


def test_a_run_mixes_twice_as_softly_as_the_posterior_and_one_of_an_earlier_version_did_not(settings: Any) -> None:
    short = {"federation": {"rounds": 1}}
    plain, soft = (
        run(settings(name=name, method={"name": "pep_fedpt", **more}, **short))
        for name, more in (("posterior", {"softness": 1.0}), ("soft", {}))
    )
    expected = min(2 * server_tensors(plain)["temperature"].item(), 0.1)
    assert server_tensors(soft)["temperature"].item() == pytest.approx(expected)
    stored = registry.completed(parse(settings(method={"name": "pep_fedpt"}))).model_dump(mode="json")
    assert stored["method"].pop("softness") == 2.0
    assert as_it_was(stored)["method"]["softness"] == 1.0


def concentrated(images: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of length one as pretrained backbones give them: a large common part, classes and noise in few directions."""
    labels = torch.arange(images) % classes
    centres = 3.0 * random(1, 64, seed=seed) + 0.5 * random(classes, 64, seed=seed + 1)
    spread = torch.linspace(1, 0.05, 64)
    return F.normalize(centres[labels] + 0.7 * spread * random(images, 64, seed=seed + 2), dim=-1), labels


def test_where_prototypes_are_alike_the_fitting_temperature_tells_classes_apart_and_a_tenth_does_not() -> None:
    queries, labels = concentrated(300, 6)
    sums = torch.stack([queries[labels == number].sum(0) for number in range(6)])
    counts = torch.bincount(labels).float()
    tau = fitting_temperature(sums, counts, "cosine")
    weigh, known = PEPFedPT().class_weights, torch.ones(6)
    means = sums / counts[:, None]
    assert torch.cosine_similarity(means[:1], means[1:]).min() > 0.9
    fitting, tenth = (
        weigh(queries, means, known, known / 6, each)[torch.arange(300), labels] for each in (tau, torch.tensor(0.1))
    )
    assert tenth.mean() < 0.35
    assert fitting.mean() > 2 * tenth.mean()
    assert fitting.clamp_min(1e-9).log().mean() > tenth.log().mean()  # likelier, and not only sharper


def test_the_temperature_of_a_run_is_that_of_all_images_and_is_sent(settings: Any) -> None:
    done = run(settings(method={"name": "pep_fedpt"}, federation={"rounds": 1}))
    server = server_tensors(done)
    assert 0.01 <= server["temperature"].item() <= 0.1
    fixed = run(settings(name="fixed", method={"name": "pep_fedpt", "temperature": 0.1}, federation={"rounds": 1}))
    assert "temperature" not in server_tensors(fixed)
    difference = done.rounds()[1].bytes_down - fixed.rounds()[1].bytes_down
    assert difference == 4 * 4  # a number for each of four clients
    assert done.rounds()[0].bytes_up == fixed.rounds()[0].bytes_up  # and nothing more is uploaded


def test_the_control_without_tokens_is_a_shared_head_with_the_log_prior_on_its_logits() -> None:
    method = PEPFedPT(shared_tokens=0, class_tokens=0, logit_prior=1.0)
    prior = torch.tensor([0.75, 0.25, 0.0, 0.0])
    params = {**parameters(method, prior), "head.weight": random(CLASSES, WIDTH), "head.bias": random(CLASSES, seed=1)}
    cls = random(3, WIDTH, seed=2)
    found = method.logits(make_world(method), params, Seen(cls=cls), Batch(torch.zeros(3)), {})
    expected = cls @ params["head.weight"].T + params["head.bias"] + torch.tensor([0.75, 0.25, 1e-3, 1e-3]).log()
    torch.testing.assert_close(found, expected)


def test_a_temperature_from_the_data_needs_queries_of_length_one(settings: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"method\.temperature must be a number if .*normalise_query is false, got 'auto'"
    ):
        run(settings(method={"name": "pep_fedpt", "normalise_query": False}))


def test_diagnostics_say_how_sharp_the_weights_are_and_what_the_true_class_gets() -> None:
    method = PEPFedPT()
    seen = Seen(extra={"weights": torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]])})
    found = method.diagnostics(make_world(method), {}, seen, Batch(torch.tensor([0, 1])))
    torch.testing.assert_close(found["class_weights.entropy"], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(found["class_weights.true_class"], torch.tensor([0.25, 1.0]))


def test_the_control_needs_no_pass_with_prompts_and_runs(settings: Any) -> None:
    control = {"name": "pep_fedpt", "shared_tokens": 0, "class_tokens": 0, "logit_prior": 1.0}
    partition = {"scheme": "dirichlet", "clients": 4, "alpha": 0.3, "min_train": 2}
    plain, adjusted = (
        run(settings(name=name, method=method, partition=partition))
        for name, method in (("plain", {"name": "head_tune"}), ("adjusted", control))
    )
    assert adjusted.summary()["average"] >= plain.summary()["average"]


@given(
    similarity=st.sampled_from(["cosine", "neg_sq_dist"]),
    temperature=st.sampled_from([1e-6, 0.1, 1e6]),
    kappa=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    prior=st.lists(st.sampled_from([0.0, 1e-30, 0.3, 5.0]), min_size=CLASSES, max_size=CLASSES),
    known=st.lists(st.sampled_from([0.0, 1.0]), min_size=CLASSES, max_size=CLASSES),
    scale=st.sampled_from([0.0, 1.0, 50.0]),
)
def test_weights_are_in_the_simplex_and_gradients_finite_whatever_is_missing(
    similarity: Any, temperature: float, kappa: float, prior: list[float], known: list[float], scale: float
) -> None:
    method = PEPFedPT(similarity=similarity, kappa=kappa)
    query = (scale * random(5, WIDTH)).requires_grad_()
    prototypes = (random(CLASSES, WIDTH, seed=1) * torch.tensor(known)[:, None]).requires_grad_()
    weights = method.class_weights(query, prototypes, torch.tensor(known), torch.tensor(prior), temperature)
    assert weights.shape == (5, CLASSES)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    usable = torch.tensor(known).bool() & ((torch.tensor(prior) > 0) | (kappa == 0))
    if usable.any():
        assert (weights[:, ~usable] == 0).all()
    for grad in torch.autograd.grad((weights * random(5, CLASSES, seed=2)).sum(), [query, prototypes]):
        assert torch.isfinite(grad).all()


def test_without_any_prototype_the_prior_decides_and_without_a_prior_all_classes_count_the_same() -> None:
    query, nothing = random(3, WIDTH), torch.zeros(CLASSES)
    prior = torch.tensor([0.5, 0.3, 0.2, 0.0])
    weigh = PEPFedPT().class_weights
    none_known = weigh(query, torch.zeros(CLASSES, WIDTH), nothing, prior)
    torch.testing.assert_close(none_known, prior.expand(3, -1))
    only_elsewhere = weigh(query, random(CLASSES, WIDTH), torch.tensor([0.0, 0.0, 0.0, 1.0]), prior)
    torch.testing.assert_close(only_elsewhere, prior.expand(3, -1))
    neither = weigh(query, torch.zeros(CLASSES, WIDTH), nothing, nothing)
    torch.testing.assert_close(neither, UNIFORM.expand(3, -1))
    ignored = PEPFedPT(kappa=0.0).class_weights(query, torch.zeros(CLASSES, WIDTH), nothing, prior)
    torch.testing.assert_close(ignored, UNIFORM.expand(3, -1))


def test_a_uniform_prior_and_a_high_temperature_give_the_mean_of_the_class_prompts() -> None:
    method = PEPFedPT(temperature=1e6)
    params = parameters(method, UNIFORM)
    mean = params["class_prompts"].mean(0)
    torch.testing.assert_close(mixed(method, random(3, WIDTH), params), mean.expand(3, *mean.shape), atol=1e-5, rtol=0)


@pytest.mark.parametrize("similarity", ["cosine", "neg_sq_dist"])
def test_a_low_temperature_gives_the_prompt_of_the_nearest_prototype(similarity: Any) -> None:
    method = PEPFedPT(temperature=1e-5, similarity=similarity)
    prototypes = torch.nn.functional.normalize(random(CLASSES, WIDTH, seed=5), dim=-1)
    params, nearest = parameters(method, UNIFORM, prototypes=prototypes), torch.tensor([2, 0, 3])
    features = prototypes[nearest] + 0.05 * random(3, WIDTH)
    torch.testing.assert_close(mixed(method, features, params), params["class_prompts"][nearest])


@pytest.mark.parametrize("known", [1.0, 0.0])
def test_a_client_of_one_class_always_gets_the_prompt_of_that_class(known: float) -> None:
    method = PEPFedPT()
    params = parameters(method, torch.tensor([0.0, 0.0, 1.0, 0.0]), known=torch.full((CLASSES,), known))
    assert torch.equal(mixed(method, random(3, WIDTH), params), params["class_prompts"][[2, 2, 2]])


def test_equal_class_prompts_give_every_image_that_prompt() -> None:
    method = PEPFedPT()
    params = parameters(method, UNIFORM)
    params["class_prompts"] = params["class_prompts"][:1].expand(CLASSES, -1, -1, -1)
    torch.testing.assert_close(mixed(method, random(3, WIDTH), params), params["class_prompts"][:3])


def test_only_the_ratios_of_a_prior_matter() -> None:
    method, prior = PEPFedPT(), torch.tensor([0.1, 0.2, 0.0, 0.7])
    one, other = (mixed(method, random(3, WIDTH), parameters(method, scale * prior)) for scale in (1.0, 37.0))
    torch.testing.assert_close(one, other)


def test_classes_without_prior_or_prototype_get_no_weight_and_no_gradient() -> None:
    method = PEPFedPT()
    params = parameters(method, torch.tensor([0.0, 0.5, 0.5, 0.5]), known=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    params["class_prompts"].requires_grad_()
    (grad,) = torch.autograd.grad(mixed(method, random(3, WIDTH), params).square().sum(), [params["class_prompts"]])
    assert (grad[:2] == 0).all()
    assert (grad[2:] != 0).all()


def test_two_images_of_one_batch_get_prompts_of_their_own_that_do_not_depend_on_each_other() -> None:
    method = PEPFedPT()
    params, features = parameters(method, UNIFORM), random(2, WIDTH)
    both = mixed(method, features, params)
    assert (both[0] - both[1]).abs().max() > 1e-3
    for row in range(2):
        torch.testing.assert_close(mixed(method, features[row : row + 1], params)[0], both[row])


def test_cosine_and_distance_agree_for_vectors_of_length_one_and_only_for_them() -> None:
    cosine, distance = PEPFedPT(), PEPFedPT(similarity="neg_sq_dist")
    for length, agree in ((1.0, True), (0.5, False)):
        prototypes = length * torch.nn.functional.normalize(random(CLASSES, WIDTH, seed=5), dim=-1)
        params = parameters(cosine, torch.tensor([0.1, 0.2, 0.3, 0.4]), prototypes=prototypes)
        one, other = (mixed(method, 7 * random(3, WIDTH), params) for method in (cosine, distance))
        assert torch.allclose(one, other, atol=1e-6) is agree


def test_a_query_keeps_its_length_if_asked_to() -> None:
    cls = torch.tensor([[3.0, 4.0]])
    assert torch.equal(PEPFedPT(normalise_query=False).queries(cls), cls)
    torch.testing.assert_close(PEPFedPT().queries(cls), torch.tensor([[0.6, 0.8]]))


def make_client(index: int, counts: list[float]) -> Client:
    tensor = torch.tensor(counts)
    return Client(index, "k", 1, int(tensor.sum()), tensor, lambda params: 0.0, lambda purpose: seeded())


def test_the_prior_is_the_smoothed_share_of_a_clients_classes() -> None:
    """(n_c + a) / (n + a C) with counts 6, 2, 0, 0: a = 0 and a = 0.5."""
    client, settings = make_client(1, [6, 2, 0, 0]), PEPFedPT(smoothing=0.5)
    world = make_world(settings, newcomers=frozenset({2}))
    torch.testing.assert_close(PEPFedPT().enrol(world, client)["prior"], torch.tensor([0.75, 0.25, 0.0, 0.0]))
    torch.testing.assert_close(settings.enrol(world, client)["prior"], torch.tensor([6.5, 2.5, 0.5, 0.5]) / 10)
    assert torch.equal(PEPFedPT(prior="uniform").enrol(world, client)["prior"], UNIFORM)
    assert torch.equal(PEPFedPT().enrol(world, make_client(0, [0, 0, 0, 0]))["prior"], torch.zeros(CLASSES))


def test_a_held_out_client_has_its_own_prior_unless_told_otherwise() -> None:
    newcomer = make_client(2, [6, 2, 0, 0])
    world = make_world(PEPFedPT(), newcomers=frozenset({2}))
    assert torch.equal(PEPFedPT(newcomer_prior="uniform").enrol(world, newcomer)["prior"], UNIFORM)
    own = PEPFedPT(prior="uniform").enrol(world, newcomer)["prior"]
    torch.testing.assert_close(own, torch.tensor([0.75, 0.25, 0.0, 0.0]))


def uploads_of(method: PEPFedPT, features: Tensor, labels: Tensor, owners: Tensor, clients: int) -> list[Upload]:
    """What clients that own some rows each would send at the start."""
    world, found = make_world(method), []
    for client in range(clients):
        own = owners == client
        batch = Batch(labels[own], {"cls": features[own]})
        found.append(Upload(client, method.statistics(world, {}, batch, lambda: None), 0.0))  # type: ignore[arg-type, return-value]
    return found


@given(owners=st.lists(st.integers(0, 5), min_size=30, max_size=30))
def test_pooled_prototypes_are_the_class_means_of_all_images_for_any_partition(owners: list[int]) -> None:
    """Class 3 has no image; some partitions leave clients without any."""
    method, features = PEPFedPT(), 5 * random(30, WIDTH)
    labels = torch.arange(30) % 3
    world = make_world(method)
    uploads = uploads_of(method, features, labels, torch.tensor(owners), 6)
    after = method.survey(world, Server({}, world.roles.server), uploads)
    unit = features / features.norm(dim=-1, keepdim=True)
    means = torch.stack([unit[labels == c].mean(0) for c in range(3)])
    torch.testing.assert_close(after.own["prototypes"][:3], means, atol=1e-6, rtol=1e-5)
    assert torch.equal(after.own["known"], torch.tensor([10.0, 10.0, 10.0, 0.0]))
    assert (after.own["prototypes"][3] == 0).all()


def test_padded_images_are_in_no_sum_and_no_count() -> None:
    method, features, labels = PEPFedPT(), random(5, WIDTH), torch.tensor([0, 1, 0, 1, 2])
    padded = Batch(labels, {"cls": features}, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    whole = Batch(labels[:3], {"cls": features[:3]})
    found, expected = (method.statistics(make_world(method), {}, batch, lambda: None) for batch in (padded, whole))  # type: ignore[arg-type, return-value]
    assert found["start.counts"].tolist() == [2.0, 1.0, 0.0, 0.0]
    assert worst_difference(found, expected) < 1e-6


def class_upload(client: int, value: float, counts: list[float], weight: float, world: World) -> Upload:
    prompts = {name: torch.full_like(tensor, value) for name, tensor in world.roles.shared.items()}
    sums = torch.tensor(counts)[:, None].expand(-1, WIDTH) * value
    return Upload(client, {**prompts, "round.counts": torch.tensor(counts), "round.sums": sums}, weight)


@pytest.mark.parametrize("weighting", ["samples", "class_counts"])
@pytest.mark.parametrize("query", ["frozen_cls", "inline"])
def test_a_client_without_samples_changes_nothing(query: Any, weighting: Any) -> None:
    method = PEPFedPT(query=query, class_prompt_weighting=weighting)
    world = make_world(method)
    server = Server(world.roles.shared, {**world.roles.server, "prototypes": random(CLASSES, WIDTH)})
    held = [class_upload(0, 1.0, [1, 3, 0, 0], 0.4, world), class_upload(1, 2.0, [2, 0, 4, 0], 0.6, world)]
    empty = class_upload(2, 9.0, [0, 0, 0, 0], 0.0, world)
    without = method.aggregate(world, server, held, weighted_mean)
    with_it = method.aggregate(world, server, [*held, empty], weighted_mean)
    assert worst_difference(without.shared, with_it.shared) == 0.0
    assert worst_difference(without.own, with_it.own) == 0.0


def test_class_prompts_are_averaged_by_images_or_by_images_of_the_class() -> None:
    """Values 1 and 2. By images: 0.25 + 1.5. By class counts: 1:2, only the first, only the second, nobody (unchanged)."""
    plain, by_class = PEPFedPT(), PEPFedPT(class_prompt_weighting="class_counts")
    world = make_world(by_class)
    server = Server(world.roles.shared, world.roles.server)
    uploads = [class_upload(0, 1.0, [1, 3, 0, 0], 0.25, world), class_upload(1, 2.0, [2, 0, 4, 0], 0.75, world)]
    averaged = plain.aggregate(world, server, uploads, weighted_mean).shared
    assert all((tensor == 1.75).all() for tensor in averaged.values())
    found = by_class.aggregate(world, server, uploads, weighted_mean).shared
    for row, value in enumerate([5 / 3, 1.0, 2.0]):
        torch.testing.assert_close(found["class_prompts"][row], torch.full((1, 1, WIDTH), value))
    assert torch.equal(found["class_prompts"][3], world.roles.shared["class_prompts"][3])
    assert all((found[name] == 1.75).all() for name in found if name != "class_prompts")


def test_class_prompts_are_combined_the_federations_way() -> None:
    def largest(tensors: Any, weights: Any, around: Any = None) -> Tensors:
        assert sum(weights) == pytest.approx(1.0)
        return {name: torch.stack([each[name] for each in tensors]).amax(0) for name in tensors[0]}

    for weighting in ("samples", "class_counts"):
        method = PEPFedPT(class_prompt_weighting=weighting)  # type: ignore[arg-type]
        world = make_world(method)
        uploads = [class_upload(0, 1.0, [1, 1, 1, 1], 0.5, world), class_upload(1, 2.0, [1, 1, 1, 1], 0.5, world)]
        after = method.aggregate(world, Server(world.roles.shared, world.roles.server), uploads, largest)
        assert (after.shared["class_prompts"] == 2.0).all()


def test_inline_prototypes_move_for_classes_that_are_present_and_are_set_at_first_sight() -> None:
    """Known and present: 0.9 * 10 + 0.1 * (1*1 + 3*2) / 4; known, absent; new, present; new, absent."""
    method = PEPFedPT(query="inline", temperature=0.1)
    world = make_world(method)
    before = torch.tensor([10.0, 10.0, 0.0, 0.0])[:, None].expand(-1, WIDTH)
    server = Server(world.roles.shared, {"prototypes": before, "known": torch.tensor([1.0, 1.0, 0.0, 0.0])})
    uploads = [class_upload(0, 1.0, [1, 0, 2, 0], 0.5, world), class_upload(1, 2.0, [3, 0, 2, 0], 0.5, world)]
    after = method.aggregate(world, server, uploads, weighted_mean).own
    torch.testing.assert_close(after["prototypes"][:, 0], torch.tensor([9.175, 10.0, 1.5, 0.0]))
    assert torch.equal(after["prototypes"][1], before[1])
    assert torch.equal(after["known"], torch.tensor([1.0, 1.0, 1.0, 0.0]))
    fresh = replace(method, prototype_momentum=0.0).aggregate(world, server, uploads, weighted_mean).own
    torch.testing.assert_close(fresh["prototypes"][:, 0], torch.tensor([1.75, 10.0, 1.5, 0.0]))


@pytest.mark.parametrize(
    ("query", "weighting", "declared"),
    [
        ("frozen_cls", "samples", set()),
        ("frozen_cls", "class_counts", {"round.counts"}),
        ("inline", "samples", {"round.sums", "round.counts"}),
        ("inline", "class_counts", {"round.sums", "round.counts"}),
    ],
)
def test_clients_are_asked_for_no_more_statistics_than_are_used(query: Any, weighting: Any, declared: set[str]) -> None:
    roles = make_world(PEPFedPT(query=query, class_prompt_weighting=weighting, minimum_count=3)).roles
    assert set(roles.statistics("start")) == {"start.sums", "start.counts"}
    assert set(roles.statistics("round")) == declared
    assert all(statistic.minimum == 3 and statistic.count for statistic in roles.stat.values())


def test_what_is_communicated_at_the_size_of_cifar_100_on_vit_b_16() -> None:
    world = World(768, 12, 197, 16, tuple(map(str, range(100))), tuple(map(str, range(100))))
    method = PEPFedPT()
    roles = method.init(world, seeded())
    sizes = {name: tensor.numel() for name, tensor in roles.shared.items()}
    assert sizes["shared_prompt"] == 7_680
    assert sizes["class_prompts"] == 3 * 76_800
    assert sizes["head.weight"] + sizes["head.bias"] == 76_900
    assert sum(sizes.values()) == 7_680 + 3 * 76_800 + 76_900
    assert roles.statistics("round") == {}
    start = roles.statistics("start")
    assert {name: torch.Size(statistic.shape).numel() for name, statistic in start.items()} == {
        "start.sums": 76_800,
        "start.counts": 100,
    }
    down = method.download(world, Server(roles.shared, roles.server), 0)
    assert down["sent.prototypes"].numel() == 76_800


@pytest.mark.parametrize("query", ["frozen_cls", "inline"])
def test_no_stage_trains_a_tensor_of_a_clients_own(query: Any) -> None:
    method = PEPFedPT(query=query, head="shared_then_finetune")
    world, train = make_world(method), TrainConfig()
    assert set(world.roles.local) == {"prior"}
    (stage,) = method.stages(world, train)
    assert set(stage.trainable) == set(world.roles.shared)
    for each in (*method.adaptation(world, train), *method.newcomer(world, train, 5)):
        assert not set(each.trainable) & set(world.roles.local)


@pytest.mark.parametrize("variant", ["fedper", "fedrep", "fedbabu"])
def test_a_variant_that_keeps_the_head_at_home_is_refused(settings: Any, variant: str) -> None:
    message = r"variant\.name must leave pep_fedpt nothing local to train, got 'head\.bias, head\.weight'"
    with pytest.raises(ConfigError, match=message):
        run(settings(method={"name": "pep_fedpt"}, variant={"name": variant}))


@pytest.mark.parametrize("variant", ["fedprox", "scaffold", "ditto"])
def test_other_variants_wrap_it(settings: Any, variant: str) -> None:
    method = {"name": "pep_fedpt", "query": "inline", "class_prompt_weighting": "class_counts"}
    done = run(settings(method=method, variant={"name": variant}, train={"momentum": 0.0}))
    assert shared_tensors(done)["class_prompts"].isfinite().all()
    assert server_tensors(done)["known"].all()


@pytest.mark.parametrize("similarity", ["cosine", "neg_sq_dist"])
def test_an_inline_query_can_be_mapped_over_clients_whatever_each_of_them_lacks(similarity: Any) -> None:
    method = PEPFedPT(query="inline", similarity=similarity, class_blocks=(1, 2))
    world, some = make_world(method), torch.tensor([0.5, 0.5, 0.0, 0.0])
    cases = [
        (some, torch.ones(CLASSES)),
        (some, torch.tensor([0.0, 1.0, 1.0, 0.0])),
        (some, 1 - some.ceil()),
        (torch.zeros(CLASSES), torch.zeros(CLASSES)),
    ]
    each = [parameters(method, prior, known) for prior, known in cases]
    stacked = {name: torch.stack([params[name] for params in each]) for name in each[0]}
    cls, batch = random(len(each), 5, WIDTH), Batch(torch.zeros(5))
    together = torch.func.vmap(lambda params, cls: method.later(world, params, cls, batch, {}).tokens[0].tokens)(
        stacked, cls
    )
    alone = [
        method.later(world, params, rows, batch, {}).tokens[0].tokens for params, rows in zip(each, cls, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone))
    assert together.shape == (4, 5, 2, 1, WIDTH)


def test_the_prior_stays_with_its_client_and_never_changes(settings: Any) -> None:
    partition = {"scheme": "classes", "clients": 4, "classes_per_client": 2}
    values = settings(method={"name": "pep_fedpt"}, partition=partition, train={"weight_decay": 0.1})
    source, manifest, _, world = experiment(values).factory.prepare()
    done = run(values)
    for client, holder in enumerate(manifest.clients):
        counts = torch.bincount(torch.from_numpy(source.labels[holder.train]), minlength=world.classes)
        assert (counts == 0).any(), "the partition must leave classes out"
        torch.testing.assert_close(local_tensors(done, client)["prior"], counts / counts.sum())
    assert "prior" not in {**shared_tensors(done), **server_tensors(done)}


def test_small_counts_do_not_leave_the_client(settings: Any) -> None:
    """Every client holds 4 images of each class: with a minimum of 5 nobody says anything and the priors decide."""
    for minimum, known in ((4, 1.0), (5, 0.0)):
        method = {"name": "pep_fedpt", "minimum_count": minimum, "query": "inline"}
        own = server_tensors(run(settings(name=f"at-least-{minimum}", method=method)))
        assert (own["known"] == known).all()
        assert bool(own["prototypes"].any()) is bool(known)


def test_without_class_tokens_it_is_fedvpt_with_a_shared_head_bit_for_bit(settings: Any) -> None:
    plain = shared_tensors(run(settings(method={"name": "fedvpt", "prompt_tokens": 3, "head": "shared"})))
    for query in ("frozen_cls", "inline"):
        method = {"name": "pep_fedpt", "class_tokens": 0, "shared_tokens": 3, "query": query}
        found = shared_tensors(run(settings(name=query, method=method)))
        assert torch.equal(found["shared_prompt"], plain["prompt"])
        assert torch.equal(found["head.weight"], plain["head.weight"])


def test_shared_prompts_may_start_at_zero_and_so_may_class_prompts() -> None:
    roles = make_world(PEPFedPT(prompt_init="zero")).roles
    assert not roles.shared["shared_prompt"].any()
    assert roles.shared["class_prompts"].any()
    roles = make_world(PEPFedPT(class_prompt_init="zero", class_blocks=(0, 2), class_tokens=2)).roles
    assert roles.shared["shared_prompt"].any()
    assert roles.shared["class_prompts"].shape == (CLASSES, 2, 2, WIDTH)
    assert not roles.shared["class_prompts"].any()


@pytest.mark.parametrize(("blocks", "expected"), [(12, (9, 10, 11)), (3, (2,)), (1, (0,))])
def test_class_prompts_enter_before_the_last_quarter_of_the_blocks(blocks: int, expected: tuple[int, ...]) -> None:
    world = World(WIDTH, blocks, 5, 4, ("a", "b"), ("one",))
    assert PEPFedPT().blocks_of_classes(world) == expected
    assert PEPFedPT().init(world, seeded()).shared["class_prompts"].shape == (2, len(expected), 1, WIDTH)
    assert PEPFedPT(class_blocks=(0,)).blocks_of_classes(world) == (0,)


def test_class_prompts_part_from_each_other_in_a_few_rounds(settings: Any) -> None:
    """They start nearly equal. At the rate of shared prompts they would stay so, and a mixture would say nothing."""
    values = settings(method={"name": "pep_fedpt", "shared_tokens": 2}, federation={"rounds": 3})
    values["train"] = {"batch_size": 8}
    made = experiment(values)
    assert made.config.train.lrs == {"class_prompts": 20 * made.config.train.lr}
    begun = made.factory.prepare().world.roles.shared["class_prompts"]
    done = run(values)

    def apart(prompts: Tensor) -> float:
        return (prompts - prompts.mean(0)).norm().item()

    after = shared_tensors(done)["class_prompts"]
    assert apart(after) > 1.2 * apart(begun)
    slow = run({**values, "name": "slow", "train": {"batch_size": 8, "lrs": {"class_prompts": 0.003}}})
    assert apart(after - begun) > 5 * apart(shared_tensors(slow)["class_prompts"] - begun)


@pytest.mark.parametrize(
    ("blocks", "query", "message"),
    [
        ([3], "frozen_cls", r"method\.class_blocks must be increasing and in 0\.\.2, one at least, got \[3\]"),
        ([2, 1], "frozen_cls", r"method\.class_blocks must be increasing and in 0\.\.2, one at least, got \[2, 1\]"),
        ([], "frozen_cls", r"method\.class_blocks must be increasing and in 0\.\.2, one at least, got \[\]"),
        ([0, 1], "inline", r"method\.class_blocks must start behind block 0 with query inline, .* got \[0, 1\]"),
        ([-1], "frozen_cls", r"method\.class_blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(settings: Any, blocks: list[int], query: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(settings(method={"name": "pep_fedpt", "class_blocks": blocks, "query": query})).factory.prepare()


@pytest.mark.parametrize(
    "wrong", [{"head": "local"}, {"temperature": 0.0}, {"kappa": -1.0}, {"smoothing": -1.0}, {"minimum_count": 0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"method.{next(iter(wrong))}"):
        build({"name": "pep_fedpt", **wrong})


def test_held_out_clients_are_evaluated_and_a_run_may_be_resumed_from_its_own_settings(settings: Any) -> None:
    values = settings(
        method={"name": "pep_fedpt", "query": "inline", "class_blocks": [1, 2], "head": "shared_then_finetune"},
        federation={"held_out": 0.25, "newcomer_epochs": 1},
    )
    done = run(values)
    assert len(done.client_accuracies()) == 1
    before = content(done)
    assert content(run(values, resume=True)) == before


# -- against an independent implementation on `transformers`' layers -----------------------------------------------------------------


@pytest.fixture
def naive(folder: Path) -> NaiveVPT:
    from transformers import ViTModel

    return NaiveVPT(ViTModel.from_pretrained(folder, add_pooling_layer=False).eval())


@pytest.fixture
def vit_settings(settings: Any, folder: Path) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        backbone = {"name": str(folder), "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
        train = {"lr": LR, "batch_size": BATCH, "momentum": MOMENTUM}
        partition = {"scheme": "dirichlet", "clients": 4, "alpha": 0.5, "min_train": 8}
        return settings(backbone=backbone, train=train, partition=partition, **changes)

    return make


class NaivePEP:
    """One image at a time, one class at a time."""

    def __init__(self, naive: NaiveVPT, method: PEPFedPT) -> None:
        self.naive, self.method = naive, method

    def frozen_query(self, image: Tensor) -> Tensor:
        with torch.no_grad():
            cls = self.naive.vit(image[None]).last_hidden_state[0, 0]
        return cls / cls.norm()

    def mixed(self, query: Tensor, params: Tensors, prior: Tensor, prototypes: dict[int, Tensor]) -> Tensor:
        mass = {}
        for number, prototype in prototypes.items():
            likeness = query @ prototype / (query.norm() * prototype.norm())
            mass[number] = prior[number] * torch.exp(likeness / self.method.temperature)
        total = sum(mass.values())
        return sum(mass[number] / total * params["class_prompts"][number] for number in mass)  # type: ignore[return-value]

    def cls(
        self, image: Tensor, params: Tensors, prior: Tensor, prototypes: dict[int, Tensor], query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The final CLS row of one image, and its query."""
        blocks = list(self.method.class_blocks or ())
        hidden = self.naive.vit.embeddings(image[None])
        hidden = torch.cat([hidden[:, :1], params["shared_prompt"], hidden[:, 1:]], dim=1)
        for number, layer in enumerate(self.naive.layers()):
            if number == blocks[0]:
                if query is None:
                    query = (hidden[0, 0] / hidden[0, 0].norm()).detach()
                fresh = self.mixed(query, params, prior, prototypes) if prototypes else None
            if number in blocks and fresh is not None:
                tokens = fresh[blocks.index(number)][None]
                old = 0 if number == blocks[0] else tokens.shape[1]
                hidden = torch.cat([hidden[:, :1], tokens, hidden[:, 1 + old :]], dim=1)
            hidden = as_tensor(layer(hidden))
        assert query is not None
        return self.naive.vit.layernorm(hidden)[0, 0], query


def pixels_of(source: Any, manifest: Any, made: Any, client: int) -> tuple[Tensor, Tensor]:
    indices = manifest.clients[client].train
    pixels = ImageStore(source, 16, "squash", made.factory.cache).pixels(indices)
    images = normalise(pixels, (0.5,) * 3, (0.5,) * 3, torch.float32, torch.device("cpu"))
    return images, torch.from_numpy(source.labels[indices])


def batches(round: int, client: int, size: int) -> Iterator[Tensor]:
    yield from stream(0, round, client, "batches.local").permutation(size).split(BATCH)


def sums_by_class(queries: list[Tensor], labels: Tensor) -> dict[int, tuple[Tensor, int]]:
    found: dict[int, tuple[Tensor, int]] = {}
    for query, label in zip(queries, labels.tolist(), strict=True):
        total, count = found.get(label, (torch.zeros(32), 0))
        found[label] = (total + query, count + 1)
    return found


def class_means(parts: list[dict[int, tuple[Tensor, int]]]) -> dict[int, Tensor]:
    numbers = sorted({number for part in parts for number in part})
    return {
        number: sum(part[number][0] for part in parts if number in part)
        / sum(part[number][1] for part in parts if number in part)
        for number in numbers
    }


@pytest.mark.parametrize(
    "chosen",
    [
        {"query": "frozen_cls", "class_blocks": [1]},
        {"query": "inline", "class_prompt_weighting": "class_counts", "class_blocks": [1, 2], "class_tokens": 2},
    ],
    ids=["frozen", "inline"],
)
def test_two_rounds_equal_the_naive_implementation(vit_settings: Any, naive: NaiveVPT, chosen: dict[str, Any]) -> None:
    values = vit_settings(
        method={"name": "pep_fedpt", "shared_tokens": 3, "temperature": 0.1, **RANDOM, **chosen},
        federation={"rounds": 2, "fraction": 0.5},
    )
    made = experiment(values)
    source, manifest, _, world = made.factory.prepare()
    done = run(values)
    assert isinstance(made.method, PEPFedPT)
    reference, inline = NaivePEP(naive, made.method), chosen["query"] == "inline"
    data = [pixels_of(source, manifest, made, client) for client in range(world.clients)]
    priors = [torch.bincount(labels, minlength=world.classes) / len(labels) for _, labels in data]
    assert any((prior == 0).any() for prior in priors), "some client must lack a class"
    params = dict(world.roles.shared)

    def queries(client: int, params: Tensors) -> list[Tensor]:
        images = data[client][0]
        if not inline:
            return [reference.frozen_query(image) for image in images]
        with torch.no_grad():
            return [reference.cls(image, params, priors[client], {})[1] for image in images]

    everybody = range(world.clients)
    fixed = {client: queries(client, params) for client in everybody}
    prototypes = class_means([sums_by_class(fixed[client], data[client][1]) for client in everybody])

    def without(client: int, position: int) -> dict[int, Tensor]:
        """The prototypes as they would be if this image were not there."""
        label = int(data[client][1][position])
        others = [
            fixed[k][p]
            for k in everybody
            for p in range(len(fixed[k]))
            if data[k][1][p] == label and (k, p) != (client, position)
        ]
        return {**prototypes, label: torch.stack(others).mean(0)}

    for round in (1, 2):
        cohort = sample_cohort(0, round, everybody, 0.5)
        trained, parts = {}, []
        for client in cohort:
            images, labels = data[client]
            own = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in params.items()}
            optimiser = torch.optim.SGD(own.values(), lr=LR, momentum=MOMENTUM)
            for positions in batches(round, client, len(images)):
                logits = torch.stack(
                    [
                        own["head.weight"]
                        @ reference.cls(
                            images[p],
                            own,
                            priors[client],
                            prototypes if inline else without(client, p),
                            None if inline else fixed[client][p],
                        )[0]
                        + own["head.bias"]
                        for p in positions.tolist()
                    ]
                )
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(logits, labels[positions]).backward()
                optimiser.step()
            trained[client] = {name: tensor.detach() for name, tensor in own.items()}
            parts.append(sums_by_class(queries(client, trained[client]), labels))
        sizes = {client: len(data[client][1]) for client in cohort}
        before = params
        params = {n: sum(sizes[k] * trained[k][n] for k in cohort) / sum(sizes.values()) for n in params}
        if inline:
            for number in range(world.classes):
                counts = {k: int((data[k][1] == number).sum()) for k in cohort}
                total = sum(counts.values())
                rows = [counts[k] * trained[k]["class_prompts"][number] for k in cohort]
                params["class_prompts"][number] = sum(rows) / total if total else before["class_prompts"][number]
            for number, mean in class_means(parts).items():
                prototypes[number] = 0.9 * prototypes[number] + 0.1 * mean
    found = shared_tensors(done)
    for name, start in world.roles.shared.items():
        assert (params[name] - start).abs().max() > 1e-3, "training must have moved every tensor"
        torch.testing.assert_close(found[name], params[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    own = server_tensors(done)
    for number, prototype in prototypes.items():
        torch.testing.assert_close(own["prototypes"][number], prototype, atol=1e-5, rtol=1e-4)


def runtime_of(values: dict[str, Any]) -> tuple[ClientRuntime, World, PEPFedPT]:
    made = experiment(values)
    source, manifest, backbone, world = made.factory.prepare()
    bank = ImageBank(
        source, manifest, ImageStore(source, backbone.shape.image_size, "squash", made.factory.cache), backbone
    )
    runtime = ClientRuntime(made.config, world, made.method, bank, ClientStates(lambda client: None), ("a",))
    assert isinstance(made.method, PEPFedPT)
    return runtime, world, made.method


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_prototypes_of_a_run_are_the_class_means_of_all_images(settings: Any, clients: int) -> None:
    values = settings(method={"name": "pep_fedpt"}, partition={"scheme": "iid", "clients": clients})
    runtime, world, _ = runtime_of(values)
    held = [runtime.bank.images(client, "train") for client in range(clients)]
    features = torch.cat([images.features("cls", torch.arange(len(images))) for images in held])
    labels = torch.cat([images.labels for images in held])
    unit = features / features.norm(dim=-1, keepdim=True)
    means = torch.stack([unit[labels == c].mean(0) for c in range(world.classes)])
    torch.testing.assert_close(server_tensors(run(values))["prototypes"], means, atol=1e-6, rtol=1e-5)


def test_an_inline_query_is_the_row_that_enters_the_class_block_and_passes_no_gradient_unless_asked(
    settings: Any,
) -> None:
    """Without a gradient through the query, the weights might as well be constants."""
    runtime, world, method = runtime_of(settings(method={"name": "pep_fedpt", "query": "inline"}))
    images, positions = runtime.bank.images(0, "train"), torch.arange(6)
    params = {
        **world.roles.shared,
        "head.weight": random(world.classes, world.width),
        "prior": torch.full((world.classes,), 1 / world.classes),
        "sent.prototypes": random(world.classes, world.width, seed=3),
        "sent.known": torch.ones(world.classes),
        "sent.temperature": torch.tensor(0.1),
    }

    def gradient(step: PEPFedPT) -> Tensor:
        leaf = params["shared_prompt"].detach().requires_grad_()
        loss = step_loss(step, world, {**params, "shared_prompt": leaf}, images, positions, {})
        return torch.autograd.grad(loss, [leaf])[0]

    seen = forward(method, world, params, images, positions, make_batch(method, images, positions, training=True), {})

    class Constant(PEPFedPT):
        def class_weights(self, query: Tensor, *given: Tensor | float) -> Tensor:  # type: ignore[override]
            return seen.extra["weights"].detach()

    stopped = gradient(method)
    torch.testing.assert_close(stopped, gradient(Constant(query="inline", detach_query=False)))
    flowing = gradient(replace(method, detach_query=False))
    assert torch.isfinite(flowing).all()
    assert (flowing - stopped).abs().max() > 1e-4 * stopped.abs().max()
    entering: list[Tensor] = []
    shared = method.prompts(world, params, Batch(images.labels[positions]), {}).tokens
    runtime.bank.images(0, "train").backbone.run(
        images.tokens(positions),
        shared,
        pause=(method.blocks_of_classes(world)[0], lambda cls: entering.append(cls) or ()),
    )
    torch.testing.assert_close(
        seen.extra["query"], entering[0] / entering[0].norm(dim=-1, keepdim=True), atol=1e-6, rtol=1e-5
    )
