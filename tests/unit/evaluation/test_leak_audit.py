"""What an audit finds in uploads, and that it changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support import StopAfter, Stopped, run
from typer.testing import CliRunner

from fedprompt.cli import app
from fedprompt.client.step import step_loss
from fedprompt.core import registry
from fedprompt.errors import RunError
from fedprompt.evaluation import leak_attacks
from fedprompt.evaluation.leak_attacks import Observed
from fedprompt.evaluation.leak_audit import audit_run, open_audit
from fedprompt.metrics.auc import Area, area, mean_area
from fedprompt.report.leak_table import leak_table, privacy_text
from fedprompt.runs.run import Run

pytestmark = pytest.mark.unit

Settings = Callable[..., dict[str, Any]]
scores = st.lists(st.integers(-3, 3), min_size=1, max_size=12)  # few values: many ties


@given(scores, scores)
def test_the_area_is_the_share_of_pairs_in_order(members: list[int], others: list[int]) -> None:
    pairs = [(m > o) + (m == o) / 2 for m in members for o in others]
    found = area(torch.tensor(members), torch.tensor(others))
    assert found.auc == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert (found.members, found.others) == (len(members), len(others))
    assert 0 <= found.error <= 0.5


def test_the_error_of_a_guess_is_that_of_the_rank_test() -> None:
    """With A = 1/2 the formula is the null variance of Mann and Whitney's U, (m + n + 1) / 12 m n."""
    found = area(torch.zeros(30), torch.zeros(20))
    assert found.auc == 0.5
    assert found.error == pytest.approx(math.sqrt(51 / (12 * 600)))


def test_the_mean_of_areas_is_unweighted() -> None:
    found = mean_area([Area(0.6, 0.03, 10, 5), Area(0.8, 0.04, 2, 1)])
    assert found == Area(pytest.approx(0.7), pytest.approx(0.025), 12, 6)
    assert mean_area([]) is None


@pytest.fixture
def finished(settings: Settings) -> Callable[..., Run]:
    return lambda **changes: run(settings(**changes))


def test_losses_of_single_images_are_those_of_batches_of_one(finished: Callable[..., Run]) -> None:
    audit = open_audit(finished())
    runtime, received = audit.runtime(), audit.download(audit.server, 0)
    params = runtime.working(audit.round, 0, received)
    images = audit.bank.images(0, "train")
    naive = [
        2 * step_loss(audit.method, audit.world, params, images, one, {}) for one in torch.arange(len(images)).split(1)
    ]  # here the training loss is the cross entropy
    found = runtime.losses(audit.method, audit.round, 0, params, "train")
    assert torch.allclose(found, torch.stack(naive).detach().double(), atol=1e-5)
    assert len(set(found.tolist())) > 5


def test_overtraining_shows(finished: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images of noisy classes, learned by heart: the insider can tell them from others."""
    monkeypatch.setattr(leak_attacks, "REHEARSALS", 1)  # those of the server, which this is not about
    learned = finished(
        data={"train_per_cell": 2, "test_per_cell": 6}, train={"lr": 0.3, "epochs": 30}, federation={"rounds": 1}
    )
    found = audit_run(learned)["membership"]
    assert found["insider"]["loss"]["auc"] > 0.7
    assert found["insider"]["loss"]["auc"] - 3 * found["insider"]["loss"]["error"] > 0.5
    assert found["insider"]["loss"]["members"] == 40
    assert found["insider"]["loss"]["others"] == 120


def test_without_training_there_is_nothing_to_tell(finished: Callable[..., Run]) -> None:
    found = audit_run(finished(train={"lr": 0.0}))["membership"]
    for who in ("server", "insider"):
        assert found[who]["update"]["auc"] == 0.5
        assert found[who]["loss"]["auc"] == 0.5, "a head of zeros loses log C on every image"


def test_the_server_sees_an_upload_that_names_its_images(
    finished: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that fall only for members give an area of one: the probe would notice."""
    audit = open_audit(finished(method={"name": "fedvpt", "prompt_tokens": 2, "head": "shared"}))

    def losses(self: Any, step: Any, round: int, client: int, params: Any, part: str) -> torch.Tensor:
        moved = bool((params["head.weight"] != audit.server.shared["head.weight"]).any())
        return torch.full((3,), 1.0 - moved * (part == "train"))

    monkeypatch.setattr(leak_attacks.Observed, "losses", losses)
    found, _ = audit.membership(0)
    assert found["server"]["update"].auc == 1.0


@pytest.fixture
def private(settings: Settings) -> Callable[..., Run]:
    pytest.importorskip("dp_accounting")

    def finish(privacy: dict[str, Any], **changes: Any) -> Run:
        return run({**settings(**changes), "privacy": privacy})

    return finish


def test_an_upload_of_nothing_but_noise_tells_the_server_nothing(private: Callable[..., Run]) -> None:
    found = audit_run(
        private({"clip": 1e-6, "noise": 100.0}, method={"name": "fedvpt", "prompt_tokens": 2, "head": "shared"})
    )
    area = found["membership"]["server"]["update"]
    assert abs(area["auc"] - 0.5) < 3 * area["error"]
    assert found["seen"] == "as uploaded"
    assert found["privacy"]["noise"] == 100
    assert found["privacy"]["epsilon"] > 0


def test_noise_hides_prototypes(private: Callable[..., Run]) -> None:
    method = {"name": "pep_fedpt", "shared_tokens": 2}
    found = audit_run(
        private({"clip": 1.0, "noise": 10.0, "clips": {"*": 5.0}}, method=method, data={"train_per_cell": 1})
    )["prototypes"]
    assert found["nearest_is_member"] < 0.5


def test_noise_of_the_server_comes_later(private: Callable[..., Run]) -> None:
    adaptive = {"clip": 0.1, "noise": 1.0, "noise_at": "server", "quantile": 0.5}
    trained = private(adaptive, method={"name": "fedvpt", "prompt_tokens": 2, "head": "shared"})
    found, audit = audit_run(trained, clients=1), open_audit(trained)
    assert found["seen"] == "before the server's noise"
    assert audit.clip is not None
    _, reply = audit.membership(0)
    moved = [reply.upload[name] - tensor for name, tensor in audit.server.shared.items()]
    assert torch.cat([each.flatten() for each in moved]).norm() <= audit.clip * 1.0001
    assert "read before the server's noise" in leak_table([found])


def test_prototypes_of_one_image_are_that_image(finished: Callable[..., Run]) -> None:
    method = {"name": "pep_fedpt", "shared_tokens": 2}
    one = audit_run(finished(method=method, data={"train_per_cell": 1}))["prototypes"]
    assert (one["rows"], one["single_rows"], one["small_rows"]) == (20, 20, 20)
    assert one["nearest_is_member"] == 1.0
    assert one["by_chance"] == pytest.approx(1 / 3)
    assert one["membership"]["auc"] == 1.0


def test_rows_that_are_withheld_tell_nothing(finished: Callable[..., Run]) -> None:
    method = {"name": "pep_fedpt", "shared_tokens": 2, "minimum_count": 2}
    assert audit_run(finished(method=method, data={"train_per_cell": 1}))["prototypes"] is None


def test_prototypes_against_a_naive_look(finished: Callable[..., Run]) -> None:
    """A row of four images: cosine of their mean feature with every feature of the class."""
    audit = open_audit(finished(method={"name": "pep_fedpt", "shared_tokens": 2}))
    _, reply = audit.membership(1)
    rows = list(audit.prototypes(reply))
    train, test = (audit.bank.images(1, part) for part in ("train", "test"))
    own, others = (F.normalize(each.features("cls", torch.arange(len(each))), dim=-1) for each in (train, test))
    assert len(rows) == audit.world.classes
    for label, row in enumerate(rows):
        prototype = own[train.labels == label].mean(0)
        pairs = [
            float(prototype @ member > prototype @ other)
            for member in own[train.labels == label]
            for other in others[test.labels == label]
        ]
        assert (row.members, row.others) == (4, 2)
        assert row.membership is not None
        assert row.membership.auc == pytest.approx(sum(pairs) / len(pairs))


def test_moving_prototypes_are_audited_with_every_round(finished: Callable[..., Run]) -> None:
    method = {"name": "pep_fedpt", "shared_tokens": 2, "query": "inline"}
    found = audit_run(finished(method=method, data={"train_per_cell": 1}))["prototypes"]
    assert found["rows"] == 40, "those of the start and those of the round"
    assert found["nearest_is_member"] == 1.0


def test_images_of_the_server_are_no_training_images(finished: Callable[..., Run]) -> None:
    audit = open_audit(finished())
    public_images = audit.public_images(0)
    assert public_images is not None
    mine = {*audit.bank.images(0, "train").indices, *audit.bank.images(0, "test").indices}
    trained = {index for client in range(4) for index in audit.bank.images(client, "train").indices}
    assert len(public_images) == 30
    assert not {*public_images.indices} & (mine | trained)
    test = audit.bank.images(2, "test")
    where = public_images.indices.tolist().index(test.indices[3])
    assert public_images.labels[where] == test.labels[3]


@pytest.mark.parametrize("name", ["local", "ditto", "ifca", "pfedpg", "pfedbayespt"])
def test_methods_are_known_by_their_roles(name: str, finished: Callable[..., Run]) -> None:
    variant = {"name": name} if name in registry.variants() else None
    method = {"name": "fedvpt" if variant else name, "prompt_tokens": 2}
    found = audit_run(finished(method=method, variant=variant), clients=2)
    assert found["clients"] == 2
    assert found["prototypes"] is None
    server, insider = found["membership"]["server"], found["membership"]["insider"]
    assert insider["update"]["auc"] != 0.5
    if name == "local":
        assert server is None, "nothing goes up"
    else:
        assert server["update"]["auc"] != 0.5, "the upload changed nothing in the eyes of the server"


def test_an_audit_writes_nothing_and_says_the_same_twice(finished: Callable[..., Run]) -> None:
    trained = finished()
    trained.close()
    before = {path: path.read_bytes() for path in trained.directory.iterdir()}
    findings = []
    for _ in range(2):
        opened = Run(trained.directory)
        findings.append(audit_run(opened))
        opened.close()
    assert findings[0] == findings[1]
    assert {path: path.read_bytes() for path in trained.directory.iterdir()} == before


def test_a_stopped_run_can_be_audited(settings: Settings, tmp_path: Path) -> None:
    made = settings(federation={"rounds": 3})
    with pytest.raises(Stopped):
        run(made, observer=StopAfter(1))
    found = audit_run(Run(tmp_path / "runs" / "tiny-fedvpt-seed0"), clients=1)
    assert found["round"] == 1
    assert found["fairness"] is not None


def test_runs_that_cannot_be_audited(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="must be a run file"):
        Run(tmp_path / "nowhere")

    class StopBefore(StopAfter):
        def started(self, *_: Any) -> None:
            raise Stopped

    with pytest.raises(Stopped):
        run(settings(), observer=StopBefore(0))
    with pytest.raises(RunError, match="must have a finished round to be audited, got none"):
        audit_run(Run(tmp_path / "runs" / "tiny-fedvpt-seed0"))


def test_a_rate_that_has_fallen_hides_no_leak(finished: Callable[..., Run]) -> None:
    """An update of the last rounds of a cosine tells nearly nothing. The server has also seen the first ones."""
    train = {"lr": 0.05, "schedules": {"head.*": "cosine"}, "schedule": "cosine"}
    trained = finished(
        method={"name": "fedvpt", "prompt_tokens": 2, "head": "shared"}, train=train, federation={"rounds": 30}
    )
    audit = open_audit(trained)
    _, reply = audit.membership(0)
    still = Observed(audit.config, audit.world, audit.method, audit.bank, audit.states, audit.domain_names)
    moved, crept = (
        (update.upload["head.weight"] - audit.server.shared["head.weight"]).norm()
        for update in (reply, still.train(audit.round, 0, audit.download(audit.server, 0)))
    )
    assert audit.rate_share == pytest.approx(0.5 * (1 + math.cos(math.pi * 29 / 30)))
    assert 0 < crept < 0.01 * moved
    found = audit_run(trained, clients=1)
    assert found["rate_share"] == audit.rate_share
    assert "audited at the full learning rate, of which its schedule leaves 0% in that round" in leak_table([found])


@pytest.mark.parametrize("schedule", ["constant", "local_cosine"])
def test_a_rate_that_does_not_fall_over_the_rounds_stays(finished: Callable[..., Run], schedule: str) -> None:
    trained = finished(train={"schedule": schedule})
    audit = open_audit(trained)
    assert audit.rate_share == 1
    assert audit.runtime().config.train == audit.config.train
    assert "full learning rate" not in leak_table([audit_run(trained, clients=1)])


def test_other_weights_are_refused(finished: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = finished()
    stored = trained.reader.fact
    monkeypatch.setattr(trained.reader, "fact", lambda key: "others" if key == "backbone" else stored(key))
    with pytest.raises(RunError, match="cannot be audited: the weights of the backbone"):
        audit_run(trained)


def test_the_spread_of_clients(finished: Callable[..., Run]) -> None:
    trained = finished()
    accuracies = torch.tensor(list(trained.client_accuracies().values()), dtype=torch.float64)
    found = audit_run(trained, clients=1)["fairness"]
    assert found["std"] == pytest.approx(float(accuracies.std(correction=0)))
    assert found["spread"] == pytest.approx(float(accuracies.max() - accuracies.min()))


def test_a_secure_sum_comes_later(finished: Callable[..., Run]) -> None:
    found = audit_run(finished(federation={"rounds": 1, "secure_sum": True}), clients=1)
    assert found["seen"] == "before the secure sum"
    assert found["membership"]["server"] is not None


def test_privacy_in_words() -> None:
    settings = {"noise_at": "client", "clip": 1.0, "noise": 0.5, "target_epsilon": None, "delta": 1e-5}
    assert privacy_text(None) == "none"
    assert privacy_text({**settings, "epsilon": 12.345}) == "client z=0.5 epsilon=12.3"
    assert privacy_text({**settings, "noise": None, "epsilon": None}) == "client"


def test_the_command_prints_a_table_or_json(settings: Settings, tmp_path: Path) -> None:
    run(settings(method={"name": "pep_fedpt", "shared_tokens": 2})).close()
    run(settings()).close()

    def audit(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["audit", *arguments])

    vpt, pep = json.loads(audit(str(tmp_path / "runs"), "--clients", "2", "--json").stdout)
    assert list(vpt) == list(pep)
    assert list(vpt) == [
        *("run", "method", "seed", "round", "rate_share"),
        *("clients", "privacy", "seen", "membership", "prototypes", "fairness"),
    ]
    assert set(pep["membership"]) == {"server", "insider"}
    assert set(pep["membership"]["server"]) == {"update", "loss"}
    assert set(pep["membership"]["server"]["loss"]) == {"auc", "error", "members", "others"}
    assert set(pep["prototypes"]) == {
        *("rows", "single_rows", "small_rows", "nearest_is_member", "by_chance", "membership"),
    }
    assert set(pep["fairness"]) == {"std", "worst", "best", "spread"}
    table = leak_table([vpt, pep])
    assert table.splitlines()[0].split("  ")[0] == "run"
    assert "– " in table.splitlines()[1]
    assert audit(str(tmp_path / "runs"), "--clients", "2").stdout.strip() == table
    assert isinstance(audit(str(tmp_path / "nowhere")).exception, RunError)
    assert audit(str(tmp_path / "runs"), "--clients", "0").exit_code == 2
