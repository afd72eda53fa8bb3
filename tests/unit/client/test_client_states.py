"""What clients keep: committed states stay where they were computed, up to a size, and are otherwise read from the run file."""

from __future__ import annotations

import pytest
import torch

from fedprompt.client.client_states import ClientStates
from fedprompt.core import wire

pytestmark = pytest.mark.unit


class Store:
    """The states of a run file, and which of them were read."""

    def __init__(self) -> None:
        self.blobs: dict[int, bytes] = {}
        self.read: list[int] = []

    def state(self, client: int) -> bytes | None:
        self.read.append(client)
        return self.blobs.get(client)


def test_a_committed_state_is_not_read_again_and_has_the_layout_that_a_resumed_run_reads() -> None:
    """A part of a stack of clients has strides of its own, with which a product may have other bits."""
    store, own = Store(), {"b": torch.arange(12.0).reshape(3, 4).T, "a": torch.zeros(2)}
    states = ClientStates(store.state)
    states.put(4, own)
    store.blobs = states.take_changes()
    found = states.get(4)
    assert found is not None
    assert list(found) == ["a", "b"]  # as from the run file
    assert not store.read
    read = ClientStates(store.state).get(4)
    assert read is not None
    assert all(torch.equal(read[name], found[name]) for name in found)
    assert all(read[name].stride() == found[name].stride() for name in found)
    assert all(
        found[name].data_ptr() != own[name].data_ptr() for name in own
    )  # a view would keep the whole stack alive


def test_what_was_not_committed_is_forgotten_and_the_commit_before_counts() -> None:
    states = ClientStates(Store().state)
    states.put(1, {"x": torch.ones(1)})
    states.take_changes()
    states.put(1, {"x": torch.full((1,), 2.0)})
    committed = states.committed(1)
    assert committed is not None
    assert float(committed["x"]) == 1
    states.discard(1)
    now = states.get(1)
    assert now is not None
    assert float(now["x"]) == 1


def test_states_that_were_used_longest_ago_are_read_from_the_run_file_again() -> None:
    store = Store()
    states = ClientStates(store.state, capacity=2 * 4 * 10)  # two of them
    for client in range(3):
        states.put(client, {"x": torch.full((10,), float(client))})
        store.blobs |= states.take_changes()
    for client in (2, 1):
        states.get(client)
    assert store.read == []
    found = states.get(0)
    assert found is not None
    assert torch.equal(found["x"], wire.decode(store.blobs[0])["x"])
    assert store.read == [0]
    states.put(2, {"x": torch.zeros(10)})  # a newer state takes the place of the older one
    store.blobs |= states.take_changes()
    states.get(1)
    assert store.read == [0]
