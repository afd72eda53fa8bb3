"""PromptFL with FedAMP: the weights, the cloud's contexts, and whole rounds against a naive loop."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support import fitting_stages, local_tensors, pool_tensors, shared_tensors, trained_alone
from text_methods import gradient, noise_like, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.core import registry
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.method import Server, Upload
from fedprompt.core.pool import Pool
from fedprompt.errors import ConfigError
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.methods.coop import CoOp
from fedprompt.methods.promptfl import PromptFL
from fedprompt.methods.promptfl_amp import ENTROPY, OWN, SELF, TRAINED, PromptFLAMP, clouds, median_distance
from fedprompt.modules.knn import Block

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


def naive_cloud(contexts: dict[int, Tensor], client: int, sigma: float, step: float) -> tuple[Tensor, float]:
    """u_i and a_i, number by number and in double precision."""
    mine = contexts[client].double()
    slopes = {
        other: math.exp(-float((mine - context.double()).pow(2).sum()) / sigma) / sigma
        for other, context in contexts.items()
        if other != client
    }
    total = sum(slopes.values())
    capped = step if step * total <= 1 else 1 / total
    mixed = (1 - capped * total) * mine
    for other, slope in slopes.items():
        mixed = mixed + capped * slope * contexts[other].double()
    return mixed, capped


def cloud(contexts: Tensor, sigma: float, step: float, asking: int = 1, size: int = 2) -> list[tuple[Tensor, float]]:
    """u_i and a_i of the first clients, by one pass over blocks of a size."""
    mine = {client: contexts[client].flatten() for client in range(asking)}
    blocks = [
        Block(np.array(part), contexts[part].flatten(1))
        for part in np.split(np.arange(len(contexts)), range(size, len(contexts), size))
    ]
    found = clouds(mine, blocks, sigma, 1 / sigma, step)
    return [(found[client].context.view_as(contexts[0]), float(found[client].step)) for client in range(asking)]


@hypothesis.given(
    clients=st.integers(1, 12),
    spread=st.floats(0, 30),
    offset=st.sampled_from([0.0, 1.0, -1e4]),
    sigma=st.floats(1e-3, 1e4),
    step=st.floats(1e-3, 1e4),
    asking=st.integers(1, 12),
    size=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_one_pass_for_many_equals_the_naive_cloud_of_each_and_is_an_average(
    clients: int, spread: float, offset: float, sigma: float, step: float, asking: int, size: int, seed: int
) -> None:
    contexts = (offset + spread * torch.randn(clients, 2, 3, generator=torch.Generator().manual_seed(seed))).double()
    for client, (found, capped) in enumerate(cloud(contexts, sigma, step, min(asking, clients), size)):
        expected, length = naive_cloud(dict(enumerate(contexts)), client, sigma, step)
        assert capped == pytest.approx(length, rel=1e-6)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        small = 1e-6 * (1 + abs(offset))
        assert (found >= contexts.amin(0) - small).all()
        assert (found <= contexts.amax(0) + small).all()


def test_weights_fall_with_the_distance_as_the_slope_of_the_attraction() -> None:
    """A'(x) by the difference quotient of A(x) = 1 - exp(-x / sigma). Each context has an axis of its own to read its weight from."""
    lengths, sigma, step = (0.5, 2**0.5, 3.0), 2.0, 0.1
    ((found, capped),) = cloud(
        torch.cat([torch.zeros(1, 3), torch.diag(torch.tensor(lengths))]).unsqueeze(1), sigma, step
    )
    assert capped == pytest.approx(step), "no cap is needed here"
    for weighed, length in zip(found.flatten().tolist(), lengths, strict=True):
        small = 1e-6
        slope = (math.exp(-(length**2) / sigma) - math.exp(-(length**2 + small) / sigma)) / small
        assert weighed / length == pytest.approx(step * slope, rel=1e-4)


def test_a_step_that_is_too_long_is_cut_to_an_average_of_the_others() -> None:
    contexts = 0.01 * torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    ((found, capped),) = cloud(contexts, sigma=1.0, step=1.0)
    distances = (contexts[1:] - contexts[0]).square().sum((1, 2))
    expected = torch.einsum("j,jmd->md", (-distances).softmax(0), contexts[1:])
    torch.testing.assert_close(found, expected)
    assert capped == pytest.approx(0.25, rel=1e-2)


def test_contexts_far_away_and_nobody_there_leave_a_context_as_it_is() -> None:
    mine = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for others in ([], [mine + 100, mine - 100]):
        ((found, capped),) = cloud(torch.stack([mine, *others]), sigma=1.0, step=0.5)
        assert torch.equal(found, mine)
        assert capped == 0.5


def test_with_the_median_as_scale_the_attention_tells_near_from_far_whatever_the_unit(settings: Any) -> None:
    """Three clients near each other and one far away, all within 1e-3: with sigma 1 every weight is 1/3 and none is its own."""
    method = PromptFLAMP(context_tokens=2)
    _, world = runtime_of(settings, method)
    start = world.roles.shared["context"]
    for unit in (1e-4, 1.0):
        places = [0.0, 1.0, -1.0, 20.0]
        contexts = {client: start + unit * place * torch.eye(*start.shape) for client, place in enumerate(places)}
        pool = Pool().with_rows(contexts)
        distances = sorted((unit * (a - b)) ** 2 * 2 for a, b in itertools.combinations(places, 2))
        assert median_distance(pool) == pytest.approx(distances[2], rel=1e-3)
        sigma = distances[2]
        server = Server(world.roles.shared, world.roles.server, 1, pool)
        for client in (0, 3):
            weights = {
                other: math.exp(-2 * (unit * (places[client] - places[other])) ** 2 / sigma) / 3
                for other in range(4)
                if other != client
            }
            own = 1 - sum(weights.values())
            expected = own * contexts[client] + sum(weight * contexts[other] for other, weight in weights.items())
            found = method.download(world, server, client)
            torch.testing.assert_close(found["context"], expected, atol=2e-7, rtol=1e-5)
            assert float(found[SELF]) == pytest.approx(own, abs=1e-4)
            shares = [weight / sum(weights.values()) for weight in weights.values()]
            entropy = -sum(share * math.log(share) for share in shares if share) / math.log(3)
            if client == 0:
                assert float(found[ENTROPY]) == pytest.approx(entropy, abs=1e-3)
                assert 0.3 < own < 0.9
            else:
                assert own > 0.99, "nobody is near it"
        inert = PromptFLAMP(context_tokens=2, sigma=1.0)
        if unit == 1e-4:
            assert float(inert.download(world, server, 0)[SELF]) == 0
            assert float(inert.download(world, server, 0)[ENTROPY]) == pytest.approx(1, abs=1e-4)


def test_the_weights_of_the_attention_are_among_the_figures_of_a_run(settings: Any) -> None:
    done = run_on_clip(settings, PromptFLAMP(context_tokens=2), "figures", federation={"rounds": 3})
    found = done.rounds()[-1].summary["diagnostics"]
    assert set(found) == {"amp.weight_self", "amp.weight_entropy", "amp.distance"}
    assert 0 < found["amp.weight_self"] < 1
    assert 0 < found["amp.weight_entropy"] < 1


def test_the_gradient_differs_from_that_of_promptfl_by_the_pull_to_the_cloud(settings: Any) -> None:
    method = PromptFLAMP(context_tokens=4, lam=0.6)
    runtime, _ = runtime_of(settings, method)
    params = working_parameters(runtime)
    change = noise_like(params["context"], 1)
    params = {**params, "context": params["context"] + change, "step": torch.tensor(0.2)}
    found = gradient(runtime, method, params, "context")
    plain = gradient(runtime, PromptFL(context_tokens=4), params, "context")
    torch.testing.assert_close(found - plain, 0.6 / 0.2 * change, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("step", "is_capped"), [(0.2, False), (20.0, True)])
def test_three_rounds_are_what_the_rule_says(settings: Any, step: float, is_capped: bool) -> None:
    """Half of the clients in a round: what each receives, begins with and leaves behind, against a naive pool."""
    sigma, method = 5.0, PromptFLAMP(context_tokens=4, sigma=5.0, step=step, lam=0.3)
    changes: dict[str, Any] = {"federation": {"rounds": 3, "fraction": 0.5}}
    done = run_on_clip(settings, method, "amp", **changes)
    runtime, world = runtime_of(settings, method, **changes)
    pool: dict[int, Tensor] = {}
    mean, mixed = world.roles.shared["context"], 0
    for round in (1, 2, 3):
        cohort = sample_cohort(0, round, EVERYBODY, 0.5)
        trained = {}
        for client in cohort:
            anchor, taken = naive_cloud(pool, client, sigma, step) if client in pool else (mean.double(), step)
            if client in pool and len(pool) > 1:
                mixed += 1
                assert (taken < step) == is_capped
            params = {
                "context": pool.get(client, mean),
                "cloud.context": anchor.float(),
                "step": torch.tensor(taken),
            }
            after, _ = trained_alone(runtime, method.stages(world, runtime.config.train), params, round, client, "")
            trained[client] = after["context"]
        pool = {**pool, **trained}
        sizes = {client: runtime._client(client, round).samples for client in cohort}
        mean = torch.stack([sizes[client] * trained[client] for client in cohort]).sum(0) / sum(sizes.values())
    assert mixed, "somebody must come back"
    found = pool_tensors(done)
    assert set(found) == set(pool)
    for client, context in pool.items():
        torch.testing.assert_close(found[client], context, atol=1e-5, rtol=1e-4)
        assert torch.equal(local_tensors(done, client)[OWN], found[client])
        assert local_tensors(done, client)[TRAINED] == 1
    torch.testing.assert_close(shared_tensors(done)["context"], mean, atol=1e-5, rtol=1e-4)


def test_the_pool_gains_newcomers_and_overwrites_the_rest(settings: Any) -> None:
    method = PromptFLAMP(context_tokens=2)
    _, world = runtime_of(settings, method)
    server = Server(world.roles.shared, world.roles.server)
    assert not server.pool.clients.size
    contexts = [world.roles.shared["context"] + noise_like(world.roles.shared["context"], seed) for seed in range(3)]
    server = method.aggregate(world, server, [Upload(2, {"context": contexts[0]}, 1.0)], weighted_mean)
    uploads = [Upload(0, {"context": contexts[1]}, 0.5), Upload(2, {"context": contexts[2]}, 0.5)]
    server = method.aggregate(world, server, uploads, weighted_mean)
    assert server.pool.clients.tolist() == [0, 2]
    assert torch.equal(server.pool.rows([2])[0], contexts[2])
    torch.testing.assert_close(server.shared["context"], (contexts[1] + contexts[2]) / 2)
    assert torch.equal(method.download(world, server, 1)["context"], server.shared["context"])


@pytest.mark.parametrize("class_specific", [False, True])
def test_without_attraction_and_with_everybody_in_every_round_it_is_coop(settings: Any, class_specific: bool) -> None:
    shape: dict[str, Any] = {"context_tokens": 4, "class_specific": class_specific}
    alone = run_on_clip(settings, CoOp(**shape), "alone")
    amp = run_on_clip(settings, PromptFLAMP(lam=0.0, **shape), "amp")
    for client in EVERYBODY:
        assert torch.equal(local_tensors(alone, client)["context"], local_tensors(amp, client)[OWN])
    assert alone.client_accuracies() == amp.client_accuracies()


def test_attraction_draws_clients_together(settings: Any) -> None:
    spreads = []
    for lam in (0.0, 0.5, 2.0):
        done = run_on_clip(settings, PromptFLAMP(context_tokens=4, lam=lam), f"lam{lam:g}")
        contexts = torch.stack([local_tensors(done, client)[OWN] for client in EVERYBODY])
        spreads.append(float((contexts - contexts.mean(0)).norm()))
    assert spreads[0] > spreads[1] > spreads[2]


def test_a_client_predicts_with_its_own_context_once_it_has_one(settings: Any) -> None:
    method = PromptFLAMP(context_tokens=2)
    runtime, world = runtime_of(settings, method)
    who, mean = runtime._client(0, 1), world.roles.shared["context"] + 1
    received = {"context": mean, "step": torch.tensor(1.0), SELF: torch.tensor(0.0), ENTROPY: torch.tensor(1.0)}
    new = method.personalise(world, who, received, world.roles.local)
    assert torch.equal(new["context"], mean)
    own = {OWN: mean + 1, TRAINED: torch.ones(())}
    assert torch.equal(method.personalise(world, who, received, own)["context"], mean + 1)


def test_a_held_out_client_trains_a_context_near_the_mean(settings: Any) -> None:
    method = PromptFLAMP(context_tokens=4)
    runtime, world = runtime_of(settings, method, federation={"held_out": 0.5, "newcomer_epochs": 1})
    client = min(world.newcomers)
    before = working_parameters(runtime, client)
    after, _ = trained_alone(runtime, fitting_stages(runtime, client), before, 1, client, "adaptation.", fitting=True)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"context"}


@pytest.mark.parametrize(("setting", "value"), [("lam", -1), ("sigma", 0), ("step", 0)])
def test_settings_that_cannot_work_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{setting} must .*, got {value}"):
        registry.build({"name": "promptfl_amp", setting: value})
