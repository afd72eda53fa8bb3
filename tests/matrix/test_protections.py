"""Every method behind every protection: robust rules, secure sums, noise. What cannot be protected is refused, not half protected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hard_users import HARD_USERS
from support import experiment, run, server_tensors, shared_tensors, worst_difference
from torch import Tensor

from fedprompt.core import registry
from fedprompt.core.messages import Failure, LocalUpdate
from fedprompt.core.method import Method
from fedprompt.engines import kinds
from fedprompt.engines.in_process import InProcess
from fedprompt.errors import ConfigError
from fedprompt.methods.fedvpt import FedVPT

pytestmark = pytest.mark.matrix

CASES: dict[str, Method] = {
    **{name: cls() for name, cls in registry.methods().items()},
    "fedvpt+scaffold": registry.variants()["scaffold"](inner=FedVPT(head="shared")),  # type: ignore[call-arg]
    **HARD_USERS,
}


@pytest.fixture(params=CASES, ids=list(CASES))
def method(request: pytest.FixtureRequest) -> Method:
    return CASES[request.param]


@pytest.fixture
def one_round(settings: Any) -> Any:
    def make(**changes: Any) -> dict[str, Any]:
        federation = {"rounds": 1, **changes.pop("federation", {})}
        return settings(train={"momentum": 0.0}, federation=federation, **changes)

    return make


@pytest.mark.sampled
def test_a_robust_rule_takes_a_wild_client_better_than_the_mean(method: Method, one_round: Any) -> None:
    """One of four sends its update 10,000 times as long; the median of the others' shared tensors stays where they are."""
    honest = shared_tensors(run(one_round(name="honest"), method))
    attack = {"kind": "scale", "fraction": 0.25, "strength": 1e4}
    mean = worst_difference(shared_tensors(run(one_round(name="mean", attack=attack), method)), honest)
    robust = shared_tensors(run(one_round(name="median", attack=attack, aggregation={"rule": "median"}), method))
    assert all(tensor.isfinite().all() for tensor in robust.values())
    chosen = any(each.choice for each in experiment(one_round(), method).factory.prepare()[3].roles.stat.values())
    if (
        mean > 1 and not chosen
    ):  # some share little in their first round; a liar who chooses its group may be alone in it
        assert worst_difference(robust, honest) < 0.2 * mean


@pytest.mark.sampled
def test_a_secure_sum_changes_nothing_but_what_the_server_sees(method: Method, one_round: Any) -> None:
    secure = one_round(name="secure", federation={"secure_sum": True})
    if not method.sums_suffice:
        with pytest.raises(ConfigError, match=r"federation\.secure_sum must be false for method"):
            experiment(secure, method).factory.prepare()
        return
    plain = run(one_round(name="plain"), method)
    hidden = run(secure, method)
    assert worst_difference(shared_tensors(plain), shared_tensors(hidden)) < 1e-5
    assert worst_difference(server_tensors(plain), server_tensors(hidden)) < 1e-4
    if plain.rounds()[1].loss is not None:
        assert hidden.rounds()[1].loss == pytest.approx(plain.rounds()[1].loss, abs=1e-5)


@pytest.mark.sampled
def test_noise_reaches_everything_a_method_uploads(
    method: Method, one_round: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of every upload is another one with a little noise, unless the method is refused with a reason."""

    def uploads(name: str, **changes: Any) -> dict[tuple[int, str], Tensor]:
        seen: list[LocalUpdate] = []
        monkeypatch.setattr(kinds, "InProcess", type("Watching", (Recorded,), {"seen": seen}))
        run(one_round(name=name, **changes), method)
        return {(reply.client, key): tensor for reply in seen for key, tensor in reply.upload.items()}

    try:
        noisy = uploads("noisy", privacy={"noise": 1e-3, "clip": 100.0})
    except ConfigError as error:
        assert "is a choice and has no meaning with noise" in str(error)  # noqa: PT017 - other methods run
        return
    plain = uploads("plain")
    assert plain.keys() == noisy.keys()
    for key, tensor in noisy.items():
        assert tensor.isfinite().all(), key
        assert not torch.equal(tensor, plain[key]), key


class Recorded(InProcess):
    """Keeps what clients sent."""

    seen: list[LocalUpdate]

    def train(self, round: int, clients: Sequence[int], download: Any) -> Iterator[LocalUpdate | Failure]:
        for message in super().train(round, clients, download):
            assert isinstance(message, LocalUpdate)
            type(self).seen.append(message)
            yield message
