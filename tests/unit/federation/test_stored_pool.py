"""The pool: a value over rows in the run file, written with its round, read in bounded blocks, and the same after a resume."""

from __future__ import annotations

import math
import sqlite3
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from forgery import as_version, forged
from hypothesis import given
from hypothesis import strategies as st
from support import StopAfter, Stopped, content, pool_tensors, run
from torch import Tensor

from fedprompt.core import wire
from fedprompt.core.method import World
from fedprompt.core.pool import PAIR_BYTES, REMEMBERED, TOGETHER, Pool
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, ContractError, RunError, StorageError
from fedprompt.evaluation.leak_audit import open_audit
from fedprompt.federation import pool_index
from fedprompt.federation.stored_pool import Kind, StoredRows, open_pool, packed
from fedprompt.methods.pfedmoap import PFedMoAP
from fedprompt.modules.knn import Block, nearest
from fedprompt.runs.run import Run
from fedprompt.runs.store import RoundRecord, RunReader, RunStore
from fedprompt.runs.tables import FILE

pytestmark = pytest.mark.unit

SHAPE = (2, 8)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rows_of(clients: Sequence[int], seed: int = 0, shape: tuple[int, ...] = SHAPE) -> dict[int, Tensor]:
    return dict(zip(clients, normal(len(clients), *shape, seed=seed), strict=True))


def write(store: RunStore, rows: StoredRows, pool: Pool, round: int) -> Pool:
    """A round that changed nothing but the pool."""
    store.commit(RoundRecord(round, [], None, 0, 0, None, {}), b"", b"", {}, {}, pool=rows.change(pool))
    return rows.committed(pool)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Callable[..., tuple[RunStore, StoredRows, Pool]]]:
    """A run file whose pool holds some rows."""
    stores: list[RunStore] = []

    def make(rows: dict[int, Tensor], name: str = "run") -> tuple[RunStore, StoredRows, Pool]:
        store = RunStore.create(tmp_path / name, {})
        stores.append(store)
        kept = StoredRows(store)
        return store, kept, write(store, kept, Pool(kept).with_rows(rows), 0)

    yield make
    for store in stores:
        store.close()


def naive(rows: dict[int, Tensor], client: int, count: int) -> list[int]:
    def distance(other: int) -> float:
        return math.fsum((rows[other].double() - rows[client].double()).square().flatten().tolist())

    return sorted((other for other in rows if other != client), key=lambda other: (distance(other), other))[:count]


# --- the value ------------------------------------------------------------------------------------------------------------------------


def test_new_rows_lie_over_kept_ones_and_change_no_older_pool(filled: Any) -> None:
    old, new = rows_of([1, 4, 7]), rows_of([4, 5], seed=1)
    _, _, pool = filled(old)
    changed = pool.with_rows(new)
    assert pool.clients.tolist() == [1, 4, 7]
    assert changed.clients.tolist() == [1, 4, 5, 7]
    assert torch.equal(pool.rows([4])[0], old[4])
    assert torch.equal(changed.rows([7, 4, 5]), torch.stack([old[7], new[4], new[5]]))
    assert 5 in changed
    assert 5 not in pool
    seen = {key: row for block in changed.blocks() for key, row in zip(block.keys.tolist(), block.rows, strict=True)}
    assert set(seen) == {1, 4, 5, 7}
    assert torch.equal(seen[4], new[4].flatten())


def test_rows_of_several_shapes_are_refused() -> None:
    with pytest.raises(ContractError, match="one shape"):
        Pool().with_rows({1: torch.zeros(2), 2: torch.zeros(3)})


@given(
    old=st.dictionaries(st.integers(0, 30), st.integers(0, 5), max_size=20),
    new=st.dictionaries(st.integers(0, 30), st.integers(0, 5), min_size=1, max_size=10),
    count=st.integers(1, 6),
    together=st.integers(1, 7),
)
def test_answers_given_together_are_those_given_alone_and_the_naive_ones(
    old: dict[int, int],
    new: dict[int, int],
    count: int,
    together: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Few different rows, so that there are many ties; kept and pending ones mixed."""
    values = normal(6, *SHAPE)
    store = RunStore.create(tmp_path_factory.mktemp("pool"), {})
    kept = StoredRows(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedprompt.core.pool.TOGETHER", together)
        patch.setattr("fedprompt.core.pool.BLOCK_BYTES", 3 * (64 + PAIR_BYTES * together))
        pool = write(store, kept, Pool(kept).with_rows({client: values[each] for client, each in old.items()}), 0)
        pool = pool.with_rows({client: values[each] for client, each in new.items()})
        rows = {client: values[each] for client, each in {**old, **new}.items()}
        asked = pool.for_clients(range(31))
        for client in rows:
            assert asked.nearest(client, count) == pool.nearest(client, count) == naive(rows, client, count)
    store.close()


def test_one_pass_answers_many_and_a_second_question_none(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = range(0, 3 * TOGETHER)
    _, kept, pool = filled(rows_of(clients))
    passes = []
    blocks = kept.blocks
    monkeypatch.setattr(kept, "blocks", lambda: passes.append(1) or blocks())
    asked = pool.for_clients(clients[: 2 * TOGETHER + 1])
    first = {client: asked.nearest(client, 3) for client in reversed(asked.asking)}
    assert len(passes) == 3
    assert first == {client: asked.nearest(client, 3) for client in asked.asking}
    assert len(passes) == 3
    assert asked.nearest(3 * TOGETHER - 1, 3) == pool.nearest(3 * TOGETHER - 1, 3), "one that was not expected"
    assert len(asked._answers) <= REMEMBERED


# --- in the run file ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_rows_come_back_as_they_were(dtype: torch.dtype, shape: tuple[int, ...], filled: Any, tmp_path: Path) -> None:
    rows = {client: row.to(dtype) for client, row in rows_of([3, 900], shape=shape).items()}
    filled(rows)
    found = StoredRows(RunReader(tmp_path / "run")).chosen([3, 900, 5])
    assert set(found) == {3, 900}
    assert all(torch.equal(found[client], row) and found[client].dtype == dtype for client, row in rows.items())


def test_a_commit_writes_the_rows_of_its_round_and_no_others(filled: Any, tmp_path: Path) -> None:
    store, kept, pool = filled(rows_of(range(20)))

    def table() -> dict[int, tuple[int, bytes]]:
        with sqlite3.connect(tmp_path / "run" / FILE) as connection:
            return {
                client: (round, row) for client, round, row in connection.execute("SELECT client, round, row FROM pool")
            }

    before, new = table(), rows_of([2, 40], seed=5)
    changes = store._connection.total_changes
    pool = write(store, kept, pool.with_rows(new), 1)
    assert store._connection.total_changes - changes == 3 + 2, "the round, the server's state, a link, two rows"
    after = table()
    assert {client for client in after if after[client] != before.get(client)} == {2, 40}
    assert after[40] == (1, packed(new[40])[1])
    assert pool.clients.tolist() == [*range(20), 40]
    assert not pool.pending


def test_a_round_that_cannot_be_written_leaves_no_row(filled: Any, tmp_path: Path) -> None:
    store, kept, pool = filled(rows_of([1]))
    with pytest.raises((RunError, StorageError)):
        write(store, kept, pool.with_rows(rows_of([1, 2], seed=3)), 0)  # this round is there already
    found = StoredRows(RunReader(tmp_path / "run"))
    assert found.clients().tolist() == [1]
    assert torch.equal(found.chosen([1])[1], rows_of([1])[1])


@pytest.mark.parametrize(
    "forgery",
    [
        "UPDATE pool SET row = x'0000' WHERE client = 2",
        "UPDATE pool SET row = 'text' WHERE client = 2",
        "UPDATE pool SET kind = 'F32 2 9' WHERE client = 2",
        "UPDATE pool SET kind = 'F32 999999999 999999999 999999999'",
        "UPDATE pool SET kind = 'I8 64'",
        "UPDATE pool SET kind = 'F32 -2 -8'",
        "UPDATE pool SET kind = ''",
        "UPDATE pool SET kind = 7",
    ],
)
def test_forged_rows_are_told(forgery: str, filled: Any, tmp_path: Path) -> None:
    filled(rows_of(range(5)))
    with forged(tmp_path / "run") as connection:
        connection.execute(forgery)
    for read in (lambda rows: list(rows.blocks()), lambda rows: rows.chosen(range(5))):
        with pytest.raises(RunError):
            read(StoredRows(RunReader(tmp_path / "run")))


def world_of(clients: int, *shape: int) -> World:
    """Clients that upload one tensor."""
    roles = Roles(shared={"context": torch.zeros(shape), "seen": torch.zeros((), dtype=torch.int64)})
    return World(8, 1, 1, 1, ("cat",), [f"client_{number}" for number in range(clients)], roles=roles)


@pytest.mark.parametrize(
    ("forgery", "message"),
    [
        ("UPDATE pool SET client = -4 WHERE client = 2", r"client in 0\.\.4, got one of client -4"),
        ("UPDATE pool SET client = 999999 WHERE client = 2", r"client in 0\.\.4, got one of client 999999"),
        ("UPDATE pool SET client = 5 WHERE client = 2", r"client in 0\.\.4, got one of client 5"),
        ("UPDATE pool SET kind = 'F32 16'", r"clients of this method upload \(F32 2 8\), got F32 16"),
        ("UPDATE pool SET kind = 'BF16 2 16'", "got BF16 2 16"),
    ],
)
def test_rows_that_do_not_fit_the_world_are_told(forgery: str, message: str, filled: Any, tmp_path: Path) -> None:
    filled(rows_of(range(5)))
    world = world_of(5, *SHAPE)
    assert len(list(StoredRows(RunReader(tmp_path / "run"), world).blocks())) == 1
    with forged(tmp_path / "run") as connection:
        connection.execute(forgery)
    pool = Pool(StoredRows(RunReader(tmp_path / "run"), world))
    for ask in (lambda: pool.nearest(3, 1), lambda: 3 in pool and pool.rows([3])):
        with pytest.raises(RunError, match=message):
            ask()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stored_rows_are_finite(number: float, dtype: torch.dtype, filled: Any) -> None:
    rows = {client: row.to(dtype) for client, row in rows_of(range(5)).items()}
    rows[3] = torch.full(SHAPE, torch.finfo(dtype).max, dtype=dtype)  # the sum of these is not
    _, kept, pool = filled(rows)
    assert pool.nearest(0, 4)[-1] == 3
    rows[2][1, 1] = number
    _, kept, _ = filled(rows, "forged")
    for read in (lambda: list(kept.blocks()), lambda: kept.chosen([1, 2])):
        with pytest.raises(RunError, match="must be finite, got NaN or infinity"):
            read()


def test_a_row_that_could_not_be_read_again_is_not_written(filled: Any) -> None:
    store, _, pool = filled(rows_of([1]))
    with pytest.raises(ContractError, match="got F32 3 over F32 2 8"):
        write(store, StoredRows(store), pool.with_rows({2: torch.zeros(3)}), 1)
    with pytest.raises(ContractError, match=r"like what clients upload \(F32 3\), got F32 2 8"):
        StoredRows(filled({}, "empty")[0], world_of(5, 3)).change(Pool().with_rows(rows_of([2])))


def test_a_block_has_room_for_what_is_computed_of_its_rows(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of four bytes: what they are compared in is far larger than they are."""
    monkeypatch.setattr("fedprompt.core.pool.BLOCK_BYTES", 10 * (4 + PAIR_BYTES * TOGETHER))
    _, _, pool = filled(rows_of(range(95), shape=()))
    sizes = [len(block.keys) for block in pool.with_rows(rows_of(range(100, 125), shape=())).blocks()]
    assert sizes == [*[10] * 9, 5, 10, 10, 5]


def test_a_kind_is_read_as_it_is_written() -> None:
    assert Kind.parse("BF16 16 512") == Kind(torch.bfloat16, (16, 512))
    assert str(Kind(torch.float32, ())) == "F32"
    assert Kind.parse("F32").nbytes == 4


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pool(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedprompt.core.pool.BLOCK_BYTES", 2**19)

    def peak(count: int) -> int:
        _, kept, pool = filled({}, f"run-{count}")
        for start in range(0, count, 500):
            rows = rows_of(range(start, start + 500), seed=start, shape=(4, 64))
            pool = write(kept._reader, kept, pool.with_rows(rows), start // 500 + 1)
        asked = pool.for_clients(range(100))
        tracemalloc.start()
        try:
            assert len(asked.nearest(7, 9)) == 9
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(1000), peak(8000)
    assert many < 1.3 * few, f"{few} bytes for 1000 rows, {many} for 8000"
    assert many < 4 * 2**19


def test_an_old_run_can_be_read_and_not_resumed(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, {})
    rows, seed = rows_of([3, 12]), torch.tensor(5)
    own = {"selection_seed": seed, **{f"pool.{client}": row for client, row in rows.items()}}
    store.commit(RoundRecord(0, [], None, 0, 0, None, {}), wire.encode({}), wire.encode(own), {}, {})
    store.close()
    as_version(tmp_path, 1)
    reader = RunReader(tmp_path)
    pool, rest = open_pool(reader, own)
    assert set(rest) == {"selection_seed"}
    assert torch.equal(pool.rows([12, 3]), torch.stack([rows[12], rows[3]]))
    assert StoredRows(reader).clients().size == 0
    with pytest.raises(RunError, match="format version 3 to go on, got 1"):
        RunStore(tmp_path)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("99999999999999999999999", torch.zeros(SHAPE), "named by the number of a client"),
        ("9" * 5000, torch.zeros(SHAPE), "named by the number of a client"),
        ("007", torch.zeros(SHAPE), "named by the number of a client"),
        ("\u0667", torch.zeros(SHAPE), "named by the number of a client"),
        ("5", torch.zeros(SHAPE), r"client in 0\.\.4, got one of client 5"),
        ("3", torch.zeros(2), "one shape and precision with all others, got 2 kinds"),
        ("3", torch.full(SHAPE, math.nan), "must be finite"),
        ("0", torch.zeros(2), "clients of this method upload"),
        ("0", torch.zeros(SHAPE, dtype=torch.int64), r"got torch\.int64 2 8"),
    ],
)
def test_forged_rows_of_an_old_run_are_told(name: str, row: Tensor, message: str) -> None:
    old, world = cast(RunReader, SimpleNamespace(version=1)), world_of(5, *SHAPE)
    own = {"pool.0": torch.zeros(SHAPE), "pool.keys": torch.zeros(3)}
    pool, rest = open_pool(old, own, world)
    assert (pool.clients.tolist(), set(rest)) == ([0], {"pool.keys"})
    with pytest.raises(RunError, match=message):
        open_pool(old, {**own, f"pool.{name}": row}, world)


# --- the approximate index ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_index, "LEAST", 200)


def clusters(clients: Sequence[int], seed: int, shape: tuple[int, ...] = (4, 80)) -> dict[int, Tensor]:
    centres, kinds = (
        3 * normal(20, *shape, seed=99),
        torch.randint(20, (len(clients),), generator=torch.Generator().manual_seed(seed)),
    )
    return dict(zip(clients, centres[kinds] + normal(len(clients), *shape, seed=seed), strict=True))


def test_approximate_neighbours_are_mostly_the_exact_ones_and_pending_rows_count(
    filled: Any, small_index: None
) -> None:
    _, _, pool = filled(clusters(range(1500), seed=0))
    for state in (pool, pool.with_rows(clusters(range(0, 1500, 10), seed=1))):
        asked = state.for_clients(range(100))
        right = sum(len(set(asked.nearest(client, 9, True)) & set(asked.nearest(client, 9))) for client in range(100))
        assert right / 900 > 0.95
    twin = pool.with_rows({2000: pool.rows([7])[0]})
    assert twin.nearest(7, 3, True)[0] == 2000


def test_pending_rows_are_looked_through_once_for_all_who_ask(
    filled: Any, small_index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kept, pool = filled(clusters(range(600), seed=0))
    pool = pool.with_rows(clusters(range(0, 700, 7), seed=1))
    alone = {client: pool.nearest(client, 9, True) for client in range(60)}
    likely = kept.shortlists({client: pool.rows([client])[0].flatten() for client in range(60)}, 9)
    assert len(likely) == 60, "all of them must have a shortlist"
    passes = []
    blocks = Pool._pending_blocks
    monkeypatch.setattr(Pool, "_pending_blocks", lambda self: passes.append(1) or blocks(self))
    asked = pool.for_clients(range(60))
    assert {client: asked.nearest(client, 9, True) for client in range(60)} == alone
    assert len(passes) == 1
    for client, found in alone.items():
        known = {client, *likely[client], *pool.pending}
        assert found == naive({each: pool.rows([each])[0] for each in known}, client, 9)


def test_what_is_shortlisted_is_compared_exactly(filled: Any, small_index: None) -> None:
    rows = clusters(range(600), seed=0)
    _, _, pool = filled(rows)
    found = pool.nearest(5, 9, approximate=True)
    assert found == naive({client: rows[client] for client in [5, *found]}, 5, 9)


def test_a_small_pool_and_equal_rows_are_searched_exactly(filled: Any, small_index: None) -> None:
    rows = clusters(range(150), seed=0)
    _, kept, pool = filled(rows)
    assert pool.nearest(5, 9, approximate=True) == naive(rows, 5, 9)
    assert kept._index._cells is None
    _, kept, pool = filled({client: torch.ones(4, 80) for client in range(400)}, "equal")
    assert pool.nearest(5, 3, approximate=True) == [0, 1, 2]
    assert kept._index._cells is not None


def test_a_changed_row_is_found_at_its_new_place_only(filled: Any, small_index: None) -> None:
    store, kept, pool = filled(clusters(range(600), seed=0))
    before = pool.nearest(5, 1, approximate=True)[0]
    far, near = pool.rows([before])[0] + 1000, pool.rows([5])[0] + 0.01
    pool = write(store, kept, pool.with_rows({before: far, 44: near}), 1)
    found = pool.nearest(5, 9, approximate=True)
    assert found[0] == 44
    assert before not in found
    assert len(kept._index._cells) == 600  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_index_built_again_gives_the_same_answers_and_the_same_cells(filled: Any, small_index: None) -> None:
    """Rounds that change a tenth of the rows each, asked in one process, and in a new one for every round."""
    answers: dict[str, list[Any]] = {"one": [], "many": []}
    trained: dict[str, list[Any]] = {"one": [], "many": []}
    for name in answers:
        store, kept, pool = filled(clusters(range(500), seed=0), name)
        for round in range(1, 9):
            if name == "many":
                kept = StoredRows(store)
                pool = Pool(kept)
            if round % 3:  # nobody asks in some rounds
                asked = pool.for_clients(range(60))
                answers[name].append([asked.nearest(client, 9, True) for client in range(60)])
            pool = write(store, kept, pool.with_rows(clusters(range(round, 700, 10), seed=round)), round)
            trained[name].append(store.pool_cells())
    assert answers["one"] == answers["many"]
    assert trained["one"] == trained["many"]
    assert len({cells[0] for cells in trained["one"] if cells}) > 1, "new cells must have been made on the way"


@pytest.mark.parametrize("blob", [b"", b"\0" * 10, np.full(256, np.nan, np.float32).tobytes()])
def test_forged_cells_are_told(blob: bytes, filled: Any, small_index: None, tmp_path: Path) -> None:
    filled(clusters(range(300), seed=0))
    with forged(tmp_path / "run") as connection:
        connection.execute("INSERT INTO pool_cells VALUES (0, 0, x'', ?)", (blob,))
    with pytest.raises(RunError, match="cells of the pool"):
        Pool(StoredRows(RunReader(tmp_path / "run"))).nearest(3, 3, approximate=True)


def test_the_index_leaves_torchs_threads_alone(filled: Any, small_index: None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        filled(clusters(range(300), seed=0))[2].nearest(3, 3, approximate=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- in runs --------------------------------------------------------------------------------------------------------------------------

MANY = PFedMoAP(context_tokens=2, gate_width=32, experts=3, search="approximate")


def test_without_faiss_an_approximate_search_is_refused_before_the_run(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"method\.search must be exact .*fedprompt\[index\]"):
        run(settings(), MANY)


def test_an_approximate_run_resumes_to_the_same_bits(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_index, "LEAST", 2)
    monkeypatch.setattr(pool_index, "SHORTLIST", 1)

    def values(name: str) -> dict[str, Any]:
        return settings(name=name, federation={"rounds": 4, "fraction": 0.75})

    with pytest.raises(Stopped):
        run(values("broken"), MANY, StopAfter(2))
    resumed = run(values("broken"), MANY, resume=True)
    assert content(resumed) == content(run(values("whole"), MANY))
    assert resumed.reader.pool_cells() is not None


@pytest.mark.parametrize(
    ("forgery", "message"),
    [
        ("UPDATE pool SET client = 999999 WHERE client = 0", "got one of client 999999"),
        ("UPDATE pool SET kind = 'F32 ' || (length(row) / 4)", "clients of this method upload"),
        ("UPDATE pool SET row = CAST(zeroblob(length(row) - 4) || x'0000C07F' AS BLOB)", "must be finite"),
    ],
)
def test_a_resumed_run_and_an_audit_hold_the_pool_against_their_world(
    forgery: str, message: str, settings: Any
) -> None:
    method = {"name": "pfedmoap", "context_tokens": 2, "gate_width": 32}
    values = settings(method=method, backbone={"name": "tiny-clip"}, federation={"rounds": 2})
    with pytest.raises(Stopped):
        run(values, observer=StopAfter(1))
    (folder,) = Path(values["output"]["directory"]).iterdir()
    with forged(folder) as connection:
        connection.execute(forgery)
    with pytest.raises(RunError, match=message):
        run(values, resume=True)
    audit = open_audit(Run(folder))
    with pytest.raises(RunError, match=message):
        audit.download(audit.server, 1)


def test_the_audit_of_a_run_sees_its_pool(settings: Any) -> None:
    method = {"name": "pfedmoap", "context_tokens": 2, "gate_width": 32}
    done = run(settings(method=method, backbone={"name": "tiny-clip"}))
    rows, audit = pool_tensors(done), open_audit(done)
    own = {0: rows[0].flatten()}
    expected = nearest(
        own, [Block(np.array(sorted(rows)), torch.stack([rows[each].flatten() for each in sorted(rows)]))], 3
    )
    experts = audit.download(audit.server, 0)["experts"]
    assert torch.equal(experts, torch.stack([rows[each] for each in expected[0]]))
