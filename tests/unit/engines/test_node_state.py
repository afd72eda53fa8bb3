"""What a client keeps to itself on the disk of its node: who may read it, which of it is kept, and what happens when it is gone."""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch
from forgery import forged
from remote_run import kept_tensors, node_folder, run_remotely
from support import local_tensors, run

from fedprompt.core import wire
from fedprompt.engines.remote.node_state import NodeState, stored_state
from fedprompt.engines.remote.protocol import Order, Setting
from fedprompt.errors import RunError, StorageError
from fedprompt.runs.run import Run
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

SETTING = Setting("0" * 32, {}, "digest")


def tensors(value: float) -> Tensors:
    return {"head": torch.full((3,), value)}


def order(state: int | None = None, committed: int | None = None, keep_as: int | None = None, client: int = 0) -> Order:
    return Order("work", SETTING, client, state=state, committed=committed, keep_as=keep_as)


@pytest.fixture
def states(tmp_path: Path) -> NodeState:
    return NodeState(tmp_path / "states")


def keep(states: NodeState, number: int, value: float, **more: int) -> None:
    """One participation."""
    states.begin(order(keep_as=number, **more))
    states.put(more.get("client", 0), tensors(value))


def numbers(states: NodeState, client: int = 0) -> set[int]:
    return {int(file.stem) for file in states.folder(client).iterdir()}


def test_what_is_kept_is_found_again_after_a_restart(states: NodeState, tmp_path: Path) -> None:
    keep(states, 7, 0.5)
    anew = NodeState(tmp_path / "states")
    anew.begin(order(state=7, committed=7))
    found = anew.get(0)
    assert found is not None
    assert torch.equal(found["head"], tensors(0.5)["head"])


def test_a_client_that_never_took_part_has_no_state(states: NodeState) -> None:
    states.begin(order())
    assert states.get(0) is None


def test_only_the_owner_can_read_it(states: NodeState) -> None:
    before = os.umask(0)
    try:
        keep(states, 7, 0.5)
    finally:
        os.umask(before)
    (file,) = states.folder(0).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(states.folder(0).stat().st_mode) == 0o700


@pytest.mark.parametrize("state", [1, None])
def test_an_order_of_an_old_copy_of_the_server_deletes_nothing(states: NodeState, state: int | None) -> None:
    keep(states, 2, 0.2)
    keep(states, 3, 0.3, state=2, committed=2)
    states.begin(order(state=state, committed=state))
    if state is not None:
        with pytest.raises(RunError, match="but it is lost"):
            states.get(0)
    assert numbers(states) == {2, 3}
    states.begin(order(state=3, committed=3))  # the right copy goes on
    assert states.get(0) is not None


def test_the_state_and_the_committed_one_stay_and_all_others_go(states: NodeState) -> None:
    keep(states, 1, 0.1)
    keep(states, 2, 0.2, state=1, committed=1)
    assert numbers(states) == {1, 2}
    keep(states, 3, 0.3, state=2, committed=1)  # round 2 is not committed yet
    assert numbers(states) == {1, 2, 3}
    states.begin(order(state=1, committed=1))  # the server was killed and goes back
    assert numbers(states) == {1}


def test_an_order_of_one_client_leaves_those_of_another_alone(states: NodeState) -> None:
    keep(states, 1, 0.1, client=0)
    keep(states, 2, 0.2, client=1)
    keep(states, 3, 0.3, client=1)
    states.begin(order(client=1, state=3, committed=3))
    assert numbers(states, 0) == {1}
    assert numbers(states, 1) == {3}


def test_what_the_training_changed_is_forgotten_with_the_next_order(states: NodeState) -> None:
    keep(states, 1, 0.1)
    keep(states, 2, 0.2, state=1, committed=1)
    states.begin(order(state=1, committed=1))
    found = states.get(0)
    assert found is not None
    assert torch.equal(found["head"], tensors(0.1)["head"])


def test_a_state_that_is_gone_is_an_error_that_says_what_to_do(states: NodeState) -> None:
    states.begin(order(state=5, committed=5))
    with pytest.raises(RunError, match=r"state must be the one this node stored .* lost; .*--anew"):
        states.get(0)


def test_a_node_that_is_told_so_begins_anew(tmp_path: Path) -> None:
    states = NodeState(tmp_path, anew=True)
    states.begin(order(state=5, committed=5))
    assert states.get(0) is None
    keep(states, 6, 0.6, state=5, committed=5)
    states.begin(order(state=6, committed=5))
    found = states.get(0)
    assert found is not None, "what it keeps from now on counts"
    assert torch.equal(found["head"], tensors(0.6)["head"])


@pytest.mark.parametrize("content", [b"", b"junk", wire.encode(tensors(0.5))[:-1], wire.encode(tensors(0.5)) + b"\0"])
def test_a_damaged_file_is_an_error(states: NodeState, content: bytes) -> None:
    keep(states, 7, 0.5)
    (states.folder(0) / "7.safetensors").write_bytes(content)
    states.begin(order(state=7, committed=7))
    with pytest.raises((RunError, StorageError), match=r"damaged|cannot be read"):
        states.get(0)


def test_a_file_that_cannot_be_opened_is_an_error(states: NodeState) -> None:
    keep(states, 7, 0.5)
    (states.folder(0) / "7.safetensors").unlink()
    (states.folder(0) / "7.safetensors").mkdir()
    states.begin(order(state=7, committed=7))
    with pytest.raises(StorageError, match="state of an earlier round cannot be read"):
        states.get(0)


def test_nothing_is_kept_without_a_number(states: NodeState) -> None:
    states.begin(order())
    with pytest.raises(RunError, match=r"order\.keep_as must be a number"):
        states.put(0, tensors(0.5))
    assert not states.folder(0).exists()


def test_nothing_is_given_out_that_no_order_asked_for(states: NodeState) -> None:
    with pytest.raises(RunError, match="state of client 0 must be named by an order"):
        states.get(0)
    keep(states, 7, 0.5)
    with pytest.raises(RunError, match="state of client 1 must be named by an order"):
        states.get(1)


def test_a_run_is_read_with_the_states_of_simulated_nodes(settings: object, tmp_path: Path) -> None:
    """After a run, whoever holds the files of its nodes can read them; elsewhere it is told that they are not there."""
    assert callable(settings)
    here, post = run(settings(name="here")), run_remotely(settings(name="post"))
    assert stored_state(here.reader)(0) == here.reader.client_state(0)
    read = stored_state(post.reader)
    kept = read(0)
    assert kept is not None
    own, expected = wire.decode(kept), local_tensors(here, 0)
    assert all(torch.allclose(own[name], expected[name], atol=1e-5) for name in expected)
    assert kept_tensors(post, 0) is not None
    for file in (node_folder(post) / "0").iterdir():
        file.unlink()
    with pytest.raises(RunError, match="keeps its own tensors to itself"):
        read(0)


def test_the_number_of_a_run_is_no_path(settings: object, tmp_path: Path) -> None:
    """A run file may come from anybody: its id must not lead to states elsewhere on this machine."""
    assert callable(settings)
    post = run_remotely(settings(name="post"))
    private = shutil.copytree(node_folder(post), tmp_path / "private")
    for path in (str(private), f"../../../{private.name}"):
        with forged(post.directory) as connection:
            connection.execute("UPDATE facts SET value = ? WHERE key = 'run_id'", (json.dumps(path),))
        with closing(Run(post.directory)) as theirs, pytest.raises(RunError, match="be 32 hexadecimal digits"):
            stored_state(theirs.reader)(0)
