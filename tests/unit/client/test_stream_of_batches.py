"""Evaluations as one stream of full batches, whoever the images belong to, against one client and one batch at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import experiment
from torch import Tensor

import fedprompt.client.local_evaluation as local_evaluation
from fedprompt.client.client_states import ClientStates
from fedprompt.client.runtime import ClientRuntime

pytestmark = pytest.mark.unit

CLIENTS = range(5)
METHODS: dict[str, dict[str, Any]] = {
    "head_tune": {},
    "fedvpt_deep": {},
    "pep_fedpt": {},
    "pfedbayespt": {"predict_draws": 3},
    "pfedbayespt, noise": {"predict_draws": 2, "predict_with_noise": True},
    "pfedbayespt, batches mixed": {"predict_draws": 2, "diagnose": True},
    "promptfl": {},
    "pfeddc": {},
    "fedcocoop": {},
}


def runtime_of(settings: Any, case: str, cohort: int | str) -> ClientRuntime:
    name = case.partition(",")[0]
    asked = settings(
        data={"train_per_cell": 2, "test_per_cell": 2},
        partition={"scheme": "dirichlet", "alpha": 1.0, "clients": len(CLIENTS), "min_train": 3, "min_test": 1},
        method={"name": name, **METHODS[case]},
        backbone={"name": "tiny-clip" if name in ("promptfl", "pfeddc", "fedcocoop") else "tiny"},
        federation={"evaluation_batch": 7},
        engine={"cohort": cohort},
    )
    factory = experiment(asked).factory
    source, manifest, backbone, world = factory.prepare()
    bank = factory.bank(source, manifest, backbone)
    return factory.client_runtime(source, world, bank, ClientStates(lambda client: None))


def predicted(runtime: ClientRuntime) -> dict[int, tuple[Tensor, dict[str, float]]]:
    """Of clients that differ in what they have learned."""
    start, method, generator = runtime.world.roles, runtime.method, torch.Generator().manual_seed(0)
    params = {}
    for client in CLIENTS:
        who = runtime._client(client, 1)
        received = {**start.shared, **{f"sent.{name}": tensor for name, tensor in start.server.items()}}
        begun = method.begin(runtime.world, who, received, runtime._local(client, who))
        learned = {name for stage in method.stages(runtime.world, runtime.config.train) for name in stage.trainable}
        params[client] = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if name in learned else tensor
            for name, tensor in begun.items()
        }
    return runtime.testing.run(params, {client: runtime.bank.images(client, "test") for client in CLIENTS}, 1)


@pytest.mark.parametrize("case", METHODS)
def test_a_stream_of_full_batches_equals_one_client_and_one_batch_at_a_time(
    case: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_evaluation, "ROW", 3)
    expected = predicted(runtime_of(settings, case, 1))
    for cohort in ("auto", 4):
        found = predicted(runtime_of(settings, case, cohort))
        assert set(found) == set(expected)
        for client, (draws, numbers) in expected.items():
            torch.testing.assert_close(found[client][0], draws, atol=1e-5, rtol=1e-5)
            assert found[client][1] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def test_batches_are_full_and_hardly_anything_fills_them_up(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_evaluation, "ROW", 3)
    runtime = runtime_of(settings, "fedvpt_deep", 4)
    passes: list[int] = []
    run = type(runtime.bank.backbone).run

    def counted(self: Any, tokens: Tensor, *others: Any, **named: Any) -> Any:
        passes.append(len(tokens))
        return run(self, tokens, *others, **named)

    monkeypatch.setattr(type(runtime.bank.backbone), "run", counted)
    predicted(runtime)
    images = int(runtime.bank.sizes("test").sum())
    assert images <= sum(passes) <= 1.3 * images
    assert all(count > 4 for count in passes[:-1])
