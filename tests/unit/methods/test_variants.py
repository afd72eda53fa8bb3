"""Each variant where it must reduce to something known, and where it must not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import local_tensors, run, server_tensors, shared_tensors, worst_difference
from text_methods import runtime_of

from fedprompt.core.method import Batch, Seen, World
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import ImageBank
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.methods.pfeddc import PFedDC
from fedprompt.methods.variants.ditto import PERSONAL, Ditto
from fedprompt.methods.variants.fedrep import FedRep
from fedprompt.modules.heads import NAMES, random_head
from fedprompt.random_streams import Stream

pytestmark = pytest.mark.unit

METHOD = {"name": "fedvpt", "prompt_tokens": 2, "head": "shared"}


@pytest.fixture
def plain(settings: Any) -> Any:
    """Plain SGD, everybody takes part, a large rate so that differences show."""

    def make(name: str, variant: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        changes.setdefault("method", METHOD)
        train = {"lr": 0.2, "momentum": 0.0, "epochs": 2, **changes.pop("train", {})}
        return settings(name=name, variant=variant, train=train, **changes)

    return make


def test_fedprox_without_weight_is_federated_averaging(plain: Any) -> None:
    with_variant = run(plain("a", {"name": "fedprox", "mu": 0.0}))
    assert worst_difference(shared_tensors(with_variant), shared_tensors(run(plain("b")))) == 0.0


def test_fedprox_has_a_gradient(plain: Any) -> None:
    """The public code's proximal term was detached: it changed the loss and nothing else."""
    with_variant = run(plain("a", {"name": "fedprox", "mu": 1.0}))
    assert worst_difference(shared_tensors(with_variant), shared_tensors(run(plain("b")))) > 1e-4


def test_fedprox_keeps_clients_closer_to_what_they_received(plain: Any) -> None:
    """Seen at the prompt: heads learn little but the classes of their last batch, which the other clients' cancel."""
    one = {"federation": {"rounds": 1}, "train": {"lr": 0.1}}
    start = shared_tensors(run(plain("zero", train={"lr": 0.0}, federation={"rounds": 1})))["prompt"]
    ends = [
        shared_tensors(run(plain(f"mu{mu}", {"name": "fedprox", "mu": mu}, **one)))["prompt"] for mu in (0.0, 1.0, 5.0)
    ]
    distances = [float((end - start).norm()) for end in ends]
    assert distances[0] > distances[1] > distances[2]


def test_the_first_round_of_scaffold_is_federated_averaging(plain: Any) -> None:
    one = {"federation": {"rounds": 1}}
    first = run(plain("a", {"name": "scaffold"}, **one))
    assert worst_difference(shared_tensors(first), shared_tensors(run(plain("b", **one)))) < 1e-6


def test_later_rounds_of_scaffold_differ_from_federated_averaging(plain: Any) -> None:
    assert (
        worst_difference(shared_tensors(run(plain("a", {"name": "scaffold"}))), shared_tensors(run(plain("b")))) > 1e-5
    )


def test_the_server_control_is_the_mean_of_the_clients_under_full_participation(plain: Any) -> None:
    done = run(plain("a", {"name": "scaffold"}, federation={"rounds": 3}))
    own = [local_tensors(done, client) for client in range(4)]
    for name in ("prompt", *NAMES):
        mean = torch.stack([each[f"scaffold.own.{name}"] for each in own]).mean(0)
        assert mean.abs().max() > 1e-6
        torch.testing.assert_close(server_tensors(done)[f"scaffold.control.{name}"], mean, atol=1e-6, rtol=1e-5)


def test_a_client_control_is_the_mean_gradient_of_its_steps(plain: Any) -> None:
    """After the first round c_k = (x - y) / (K eta), K = batches x epochs."""
    settings = plain("a", {"name": "scaffold"}, federation={"rounds": 1}, partition={"scheme": "iid", "clients": 1})
    done = run(settings)
    start = run(plain("zero", train={"lr": 0.0}, federation={"rounds": 1}, partition={"scheme": "iid", "clients": 1}))
    steps = 2 * 10  # two epochs over 4 x 5 x 4 images in batches of eight
    moved = (shared_tensors(start)["prompt"] - shared_tensors(done)["prompt"]) / (steps * 0.2)
    torch.testing.assert_close(local_tensors(done, 0)["scaffold.own.prompt"], moved, atol=1e-6, rtol=1e-4)


def test_scaffold_on_one_client_stays_federated_averaging(plain: Any) -> None:
    """c = c_k at all times, so the correction vanishes: the case of identical clients."""
    one = {"partition": {"scheme": "iid", "clients": 1}, "federation": {"rounds": 3}}
    first, second = run(plain("a", {"name": "scaffold"}, **one)), run(plain("b", **one))
    assert worst_difference(shared_tensors(first), shared_tensors(second)) < 1e-5


@pytest.mark.parametrize("train", [{"momentum": 0.9}, {"clip_norm": 1.0}])
def test_scaffold_refuses_what_breaks_its_formula(plain: Any, train: dict[str, float]) -> None:
    field = next(iter(train))
    with pytest.raises(ConfigError, match=rf"train\.{field} must be .* with variant scaffold"):
        run(plain("a", {"name": "scaffold"}, train=train))


def test_fedper_is_the_method_with_a_local_head(plain: Any) -> None:
    variant = run(plain("a", {"name": "fedper"}))
    local = run(plain("b", method={**METHOD, "head": "local"}))
    assert worst_difference(shared_tensors(variant), shared_tensors(local)) == 0.0
    assert worst_difference(local_tensors(variant, 2), local_tensors(local, 2)) == 0.0


@dataclass(frozen=True)
class RandomHead(FedVPT):
    """FedVPT whose head does not start at zero, so that prompts have a gradient while the head stands still."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        head = random_head(world.classes, world.width, world.dtype, world.device, generator)
        if self.head == "shared":
            return replace(roles, shared={**roles.shared, **head})
        return replace(roles, local={**roles.local, **head})


def test_fedrep_without_head_epochs_is_federated_averaging_with_the_head_at_rest(plain: Any) -> None:
    inner = RandomHead(prompt_tokens=2, head="shared")
    represented = run(plain("a"), FedRep(inner, head_epochs=0))
    averaged = run(plain("b", train={"lrs": {"head.*": 0.0}}), inner)
    assert torch.equal(shared_tensors(represented)["prompt"], shared_tensors(averaged)["prompt"])


def test_fedrep_trains_the_head_with_the_prompts_fixed_and_then_the_prompts_with_the_head_fixed(plain: Any) -> None:
    head_only = run(
        plain("a", {"name": "fedrep", "head_epochs": 2}, train={"lrs": {"prompt": 0.0}}, federation={"rounds": 1})
    )
    both = run(plain("b", {"name": "fedrep", "head_epochs": 2}, federation={"rounds": 1}))
    assert worst_difference(local_tensors(head_only, 0), local_tensors(both, 0)) == 0.0
    assert worst_difference(shared_tensors(head_only), shared_tensors(both)) > 1e-5


def test_fedbabu_never_updates_the_head_and_gives_all_clients_the_same(plain: Any) -> None:
    done = run(plain("a", {"name": "fedbabu"}))
    heads = [local_tensors(done, client)["head.weight"] for client in range(4)]
    assert all(torch.equal(heads[0], head) for head in heads)
    assert heads[0].abs().max() > 0


def test_fedbabu_tunes_the_head_before_an_evaluation_and_throws_it_away(plain: Any) -> None:
    gently = {"lrs": {"head.*": 0.02}}
    tuned = run(plain("a", {"name": "fedbabu", "finetune_epochs": 5}, train=gently))
    plainly = run(plain("b", {"name": "fedbabu", "finetune_epochs": 0}, train=gently))
    assert worst_difference(shared_tensors(tuned), shared_tensors(plainly)) == 0.0
    assert tuned.summary()["nll"] < plainly.summary()["nll"] - 1e-3


def test_fedbabu_moves_the_prompts(plain: Any) -> None:
    moved = run(plain("a", {"name": "fedbabu"}))
    still = run(plain("b", {"name": "fedbabu"}, train={"lr": 0.0}))
    assert worst_difference(shared_tensors(moved), shared_tensors(still)) > 1e-4


def test_ditto_without_a_pull_is_local_only_training(plain: Any) -> None:
    same = {"federation": {"rounds": 3}, "train": {"lrs": {"head.*": 0.01}}}
    ditto = run(plain("a", {"name": "ditto", "lam": 0.0}, **same))
    local = run(plain("b", method={"name": "local", "prompt_tokens": 2}, **same))
    for client in range(4):
        personal = local_tensors(ditto, client)
        for name, tensor in local_tensors(local, client).items():
            assert torch.equal(personal[f"ditto.personal.{name}"], tensor)
    assert ditto.client_accuracies() == local.client_accuracies()


def test_the_shared_part_of_ditto_is_federated_averaging_with_its_own_batches(plain: Any) -> None:
    """lambda touches the personal copies only."""
    weak, strong = run(plain("a", {"name": "ditto", "lam": 0.0})), run(plain("b", {"name": "ditto", "lam": 1.0}))
    assert worst_difference(shared_tensors(weak), shared_tensors(strong)) == 0.0


def test_a_strong_pull_brings_the_personal_copy_to_what_was_received(plain: Any) -> None:
    """With lr * lambda = 1 a step lands on the received tensor but for one gradient: the gap shrinks with the rate."""
    gaps = []
    for rate in (0.1, 0.01, 0.001):
        done = run(
            plain(
                f"lr{rate}",
                {"name": "ditto", "lam": 1 / rate},
                train={"lr": rate, "epochs": 1},
                federation={"rounds": 1},
            )
        )
        start = run(plain(f"zero{rate}", train={"lr": 0.0}, federation={"rounds": 1}))
        gaps.append(
            float((local_tensors(done, 0)["ditto.personal.prompt"] - shared_tensors(start)["prompt"]).abs().max())
        )
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-4


@pytest.mark.parametrize("variant", ["fedprox", "scaffold", "ditto"])
def test_a_variant_of_shared_tensors_refuses_a_method_that_shares_none(plain: Any, variant: str) -> None:
    with pytest.raises(ConfigError, match="shares none"):
        run(plain("a", {"name": variant}, method={"name": "local"}))


@pytest.mark.parametrize("method", ["fedpr", "per_fedavg"])
def test_scaffold_is_refused_where_steps_are_corrected(method: str, plain: Any) -> None:
    """The drift of a client is told from its steps, so they must be the optimiser's own."""
    with pytest.raises(ConfigError, match=r"a method that takes plain steps, got .*scaffold with"):
        run(plain("a", {"name": "scaffold"}, method={"name": method, "head": "shared"}))


def test_scaffold_is_refused_where_training_does_not_begin_with_what_was_received(plain: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"trains on from the shared tensors it received, got .*scaffold with PromptFLAMP"
    ):
        run(plain("a", {"name": "scaffold"}, method={"name": "promptfl_amp"}, backbone={"name": "tiny-clip"}))


@pytest.mark.parametrize("method", ["pfedpg", "flora_stacked", "flow"])
def test_ditto_is_refused_where_undeclared_tensors_are_trained(method: str, plain: Any) -> None:
    with pytest.raises(ConfigError, match=r"only its shared and local tensors, got .ditto with one that trains"):
        run(plain("a", {"name": "ditto"}, method={"name": method, "head": "shared"}))


def test_ditto_keeps_only_copies_of_declared_tensors(plain: Any) -> None:
    done = run(plain("a", {"name": "ditto"}, method={"name": "per_fedavg", "head": "shared"}))
    assert not [name for name in local_tensors(done, 0) if "start." in name]


def test_a_head_tuned_before_an_evaluation_is_the_personal_one_of_ditto(plain: Any) -> None:
    def nll(epochs: int) -> float:
        method = {**METHOD, "head": "shared_then_finetune", "finetune_epochs": epochs}
        done = run(plain(f"e{epochs}", {"name": "ditto"}, method=method, train={"lrs": {"head.*": 0.01}}))
        return float(done.summary()["nll"])

    assert nll(5) < nll(0) - 1e-3


def test_ditto_keeps_of_its_copy_what_the_method_itself_would_keep(plain: Any) -> None:
    """Per-FedAvg throws a look-ahead without a second step away; so must the personal copy."""
    once = {"train": {"epochs": 1, "batch_size": 1000}, "federation": {"rounds": 1}}
    done = run(plain("a", {"name": "ditto", "lam": 0.0}, method={"name": "per_fedavg", "head": "shared"}, **once))
    shared, local = shared_tensors(done), local_tensors(done, 0)
    for name, tensor in shared.items():
        torch.testing.assert_close(local[f"ditto.personal.{name}"], tensor, atol=1e-6, rtol=1e-6)


def test_scaffold_on_identical_clients_is_federated_averaging(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody holds the images of client 0 and takes whole-batch steps: nobody drifts, so nothing is corrected."""
    own = ImageBank.images
    monkeypatch.setattr(ImageBank, "images", lambda bank, client, part: own(bank, 0, part))
    whole = {"train": {"batch_size": 1000, "lr": 0.1}, "federation": {"rounds": 3}}
    corrected, averaged = run(plain("a", {"name": "scaffold"}, **whole)), run(plain("b", **whole))
    assert worst_difference(shared_tensors(corrected), shared_tensors(averaged)) < 1e-5


def test_fitting_before_an_evaluation_is_no_part_of_the_schedule(plain: Any) -> None:
    """At the end of a cosine the rates of training are almost zero; a newcomer's head must still be tuned."""
    held_out = {
        "federation": {"rounds": 10, "held_out": 0.5, "newcomer_epochs": 5, "evaluate_every": 10, "evaluate_last": 1}
    }
    fitted, plainly = (
        run(plain(schedule, train={"schedule": schedule, "lr": 0.02, "lrs": {"prompt": 0.0}}, **held_out))
        for schedule in ("cosine", "constant")
    )
    untouched = run(
        plain(
            "none",
            train={"lr": 0.02, "lrs": {"prompt": 0.0}},
            federation={**held_out["federation"], "newcomer_epochs": 0},
        )
    )
    gained = untouched.summary()["nll"] - fitted.summary()["nll"]
    assert gained > 0.3 * (untouched.summary()["nll"] - plainly.summary()["nll"]) > 0


def test_the_diagnostics_of_ditto_are_those_of_the_copy_that_predicts(settings: Any) -> None:
    """The personal prompts are four times the shared ones, so their norms are."""
    method = Ditto(inner=PFedDC(fusion="sum", use_vision=False))
    runtime, world = runtime_of(settings, method)
    who = runtime._client(0, 1)
    params = method.begin(world, who, world.roles.shared, runtime._new(who))
    personal = {PERSONAL + "global_text": 4 * params["global_text"], PERSONAL + "local_text": params["local_text"]}
    shares = [
        float(method.diagnostics(world, {**params, **given}, Seen(), Batch(torch.empty(0)))["text.global_share"])
        for given in ({}, personal)
    ]
    odds = [share / (1 - share) for share in shares]
    assert odds[1] == pytest.approx(4 * odds[0], rel=1e-5)
