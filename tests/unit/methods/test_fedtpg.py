"""FedTPG: which names a client's context is made of, what their order changes, and its limit as a whole run.

The generator itself is in tests/unit/modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import experiment, local_tensors, run, seeded, shared_tensors, trained_alone, worst_difference
from text_methods import on_clip, run_on_clip, runtime_of, working_parameters
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.core import registry
from fedprompt.core.method import Batch, Client, Seen, World
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError
from fedprompt.methods.fedtpg import CANDIDATES, GENERATOR, KNOWN, NAMES, FedTPG
from fedprompt.methods.promptfl import PromptFL
from fedprompt.modules.context_generator import generate
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, stripped

pytestmark = pytest.mark.unit

EVERYBODY = range(4)


def context_of(method: FedTPG, world: World, params: Tensors) -> Tensor:
    return method.prompts(world, params, Batch(torch.zeros(1)), {}).text["context"].tokens


def client_with(counts: Sequence[int]) -> Client:
    held = torch.tensor(counts)
    return Client(0, "someone", 1, int(held.sum()), held, lambda params: 0.0, lambda purpose: seeded())


def test_the_context_is_made_of_the_names_a_client_holds(settings: Any) -> None:
    method = FedTPG()
    _, world = runtime_of(settings, method)
    params = method.begin(world, client_with([3, 0, 0, 1, 0]), world.roles.shared, {})
    assert params[KNOWN].tolist() == [1, 0, 0, 1, 0]
    assert torch.equal(params[NAMES], world.text.encode_names())
    made = context_of(method, world, params)
    assert made.shape == (4, world.text.width)
    alike = method.begin(world, client_with([1, 0, 0, 9, 0]), world.roles.shared, {})
    assert torch.equal(context_of(method, world, alike), made)
    other = method.begin(world, client_with([3, 1, 0, 1, 0]), world.roles.shared, {})
    assert float((context_of(method, world, other) - made).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("names", "counts"), [("own", [0, 0, 0, 0, 0]), ("own", [1, 1, 1]), ("all", [1, 0, 0, 0, 0]), ("own", [1] * 5)]
)
def test_all_names_are_taken_where_none_are_a_clients_own(settings: Any, names: Any, counts: list[int]) -> None:
    method = FedTPG(names=names, training_classes=names)
    _, world = runtime_of(settings, method)
    params = method.begin(world, client_with(counts), world.roles.shared, {})
    assert params[KNOWN].tolist() == params[CANDIDATES].tolist() == [1] * 5


def test_the_generator_reads_bare_names_without_a_full_stop(settings: Any) -> None:
    made = experiment(on_clip(settings, "bare"), FedTPG())
    _, _, backbone, world = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    tower, weights = backbone.text, backbone.text.weights
    for name, found in zip(world.class_names, world.text.encode_names(), strict=True):
        ids = [tower.start, *tower.tokenise(name.replace("_", " ")), tower.end]
        rows = weights["token.weight"][ids] + weights["position.weight"][: len(ids)]
        prepared = tower._prepare(rows[None, :1])
        expected = tower.projection(tower._read(rows[None, None, 1:], *prepared))[0, 0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_training_is_a_cross_entropy_over_the_clients_own_classes_and_tests_are_over_all(settings: Any) -> None:
    method = FedTPG()
    _, world = runtime_of(settings, method)
    params = method.begin(world, client_with([3, 0, 0, 1, 0]), world.roles.shared, {})
    logits, labels = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 3, 0, 0, 3])
    own = torch.nn.functional.cross_entropy(logits[:, [0, 3]], (labels == 3).long())
    everything = torch.nn.functional.cross_entropy(logits, labels)
    assert float(own) < float(everything) - 0.1
    for training, expected in ((True, own), (False, everything)):
        found = method.loss(world, params, logits, Seen(), Batch(labels, training=training), {})
        torch.testing.assert_close(found, expected)
    over_all = FedTPG(training_classes="all")
    params = over_all.begin(world, client_with([3, 0, 0, 1, 0]), world.roles.shared, {})
    torch.testing.assert_close(over_all.loss(world, params, logits, Seen(), Batch(labels), {}), everything)


def test_all_clients_count_the_same_in_the_average(settings: Any) -> None:
    """Clients of unequal sizes, one round: the mean of what each trained, not weighted by images."""
    uneven: dict[str, Any] = {
        "partition": {"scheme": "dirichlet", "clients": 3, "alpha": 0.3},
        "federation": {"rounds": 1},
    }
    for averaging, weighting in (("uniform", "samples"), ("samples", "uniform")):
        uneven["federation"]["weighting"] = weighting
        method = FedTPG(averaging=averaging)
        done = run_on_clip(settings, method, averaging, **uneven)
        runtime, world = runtime_of(settings, method, **uneven)
        assert len({runtime._client(client, 1).samples for client in range(3)}) > 1
        trained = [
            trained_alone(
                runtime, method.stages(world, runtime.config.train), working_parameters(runtime, client), 1, client, ""
            )[0]
            for client in range(3)
        ]
        for name, tensor in shared_tensors(done).items():
            mean = torch.stack([each[name] for each in trained]).mean(0)
            torch.testing.assert_close(tensor, mean, atol=1e-5, rtol=1e-4)


def test_clients_of_disjoint_classes_get_contexts_of_their_own(settings: Any) -> None:
    method = FedTPG()
    runtime, world = runtime_of(settings, method, partition={"scheme": "disjoint", "clients": 4})
    params = [working_parameters(runtime, client) for client in EVERYBODY]
    for client, own in enumerate(params):
        held = torch.bincount(runtime.bank.images(client, "train").labels, minlength=5) > 0
        assert torch.equal(own[KNOWN] > 0, held)
        assert not held.all()
    made = [tuple(context_of(method, world, own).flatten().tolist()) for own in params]
    assert len(set(made)) == 4


def test_another_order_of_the_classes_reorders_the_logits_and_nothing_else(settings: Any) -> None:
    method = FedTPG()
    made = experiment(on_clip(settings, "order"), method)
    _, _, backbone, world = made.factory.prepare()
    assert isinstance(backbone, DualEncoder)
    order, counts = [3, 0, 4, 1, 2], [2, 0, 1, 0, 3]
    names = tuple(world.class_names[number] for number in order)
    turned = replace(world, class_names=names, language=backbone.language(names))
    image = torch.nn.functional.normalize(torch.randn(6, 128, generator=torch.Generator().manual_seed(0)), dim=-1)
    contexts, logits = [], []
    for where, held in ((world, counts), (turned, [counts[number] for number in order])):
        params = method.begin(where, client_with(held), world.roles.shared, {})
        contexts.append(context_of(method, where, params))
        seen = Seen(image=image, text={"context": where.text.encode(contexts[-1][None], "end")[0]})
        logits.append(method.logits(where, params, seen, Batch(torch.zeros(6)), {}))
    torch.testing.assert_close(contexts[1], contexts[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits[1], logits[0][:, order], atol=1e-4, rtol=1e-4)


def test_the_whole_generator_travels_and_nothing_stays(settings: Any) -> None:
    done = run_on_clip(settings, FedTPG(), "tpg")
    _, world = runtime_of(settings, FedTPG())
    shared = shared_tensors(done)
    assert all(name.startswith(GENERATOR) for name in shared)
    assert not local_tensors(done, 0)
    for name, tensor in shared.items():
        assert float((tensor - world.roles.shared[name]).abs().max()) > 0, name
    last = done.rounds()[-1]
    assert last.bytes_up == last.bytes_down == 4 * 4 * sum(tensor.numel() for tensor in shared.values())


@dataclass(frozen=True)
class Silent(FedTPG):
    """Queries pass through: what is added to them begins at zero, and stays there with a learning rate of zero."""

    def init(self, world: World, generator: Stream) -> Roles:
        made = super().init(world, generator).shared
        silent = ("attention.output", "feed_forward.out")
        return Roles(
            shared={n: torch.zeros_like(t) if any(part in n for part in silent) else t for n, t in made.items()}
        )


def test_a_generator_that_adds_nothing_to_its_queries_is_promptfl(settings: Any) -> None:
    rates = {"lrs": {"attention.*": 0.0, "feed_forward.*": 0.0, "*_norm.*": 0.0}}
    same: dict[str, Any] = {"residual": True, "training_classes": "all", "averaging": "samples"}
    silent = run_on_clip(settings, Silent(context_tokens=3, **same), "silent", train=rates)
    plain = run_on_clip(settings, PromptFL(context_tokens=3), "plain")
    found = {"context": shared_tensors(silent)[GENERATOR + "queries"]}
    assert worst_difference(found, shared_tensors(plain)) < 1e-6
    assert silent.client_accuracies() == plain.client_accuracies()


def test_queries_are_not_added_to_what_they_find_unless_asked(settings: Any) -> None:
    """The authors' code has no residual around the attention."""
    _, world = runtime_of(settings, FedTPG())
    params = FedTPG().begin(world, client_with([1, 1, 1, 1, 1]), world.roles.shared, {})
    made = (stripped(GENERATOR, params), params[NAMES], params[KNOWN], FedTPG().heads)
    plain, added = (context_of(method, world, params) for method in (FedTPG(), FedTPG(residual=True)))
    torch.testing.assert_close(plain, generate(*made, residual=False))
    torch.testing.assert_close(added, generate(*made, residual=True))
    assert float((plain - added).abs().max()) > 1e-3


def test_queries_may_begin_as_words_and_names_may_stand_alone(settings: Any) -> None:
    method = FedTPG(context_words="a photo of a")
    runtime, world = runtime_of(settings, method)
    assert torch.equal(world.roles.shared[GENERATOR + "queries"], world.text.words("a photo of a"))
    names = working_parameters(runtime)[NAMES]
    torch.testing.assert_close(names.norm(dim=-1), torch.ones(5))
    assert float((names - world.text.encode_words("a photo of a")).abs().max()) > 1e-2


def test_a_held_out_client_takes_the_generator_as_it_comes(settings: Any) -> None:
    federation = {"rounds": 1, "held_out": 0.25}
    done = run(on_clip(settings, "held", method={"name": "fedtpg"}, federation=federation))
    assert len(done.client_accuracies()) == 1


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"heads": 5}, r"method.heads must divide the text tower's width 32, got 5"),
        ({"class_specific": True}, r"method.class_specific must be false"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(settings: Any, asked: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(on_clip(settings, "refused", method={"name": "fedtpg", **asked}))


@pytest.mark.parametrize(("field", "value"), [("heads", 0), ("names", "some"), ("context_tokens", 0)])
def test_impossible_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        registry.build({"name": "fedtpg", field: value})
