"""Where features are kept, for how long, and that no bit of them depends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import content, experiment, run
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.data.cache import row_file
from fedprompt.data.cache.row_file import space
from fedprompt.data.sources.synthetic import TinySource
from fedprompt.errors import ContractError, DataError
from fedprompt.features import compute, feature_rows, feature_tables
from fedprompt.features.feature_rows import MEMORY, FileRows, make_room
from fedprompt.features.feature_tables import GIB
from fedprompt.features.image_bank import ImageBank
from fedprompt.io.cache_key import NAME

pytestmark = pytest.mark.unit

IMAGES = 360
HELD = 120  # images of the clients of `settings`
EVERYTHING = torch.arange(IMAGES)
TIERS: dict[str, dict[str, float]] = {
    "both": {},
    "memory": {"disk_gib": 0},
    "disk": {"memory_gib": 0},
    "nowhere": {"memory_gib": 0, "disk_gib": 0},
}
CLS = 32 * 4  # bytes of one row


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Rows outlive the banks they were computed for, and threads are set for the whole process."""
    threads = torch.get_num_threads()
    MEMORY.clear()
    yield
    torch.set_num_threads(threads)


class Spy:
    """Writes down which images features are computed for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[int] = []
        real = compute.computed

        def computed(backbone: Any, store: Any, feature: Any, indices: np.ndarray) -> Any:
            self._seen += indices.tolist()
            return real(backbone, store, feature, indices)

        monkeypatch.setattr(feature_tables, "computed", computed)

    def since(self) -> list[int]:
        """Those computed since the last look, in order."""
        seen, self._seen = self._seen, []
        return sorted(seen)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def bank_of(settings: Any, engine: Any = None, **changes: Any) -> ImageBank:
    made = experiment(settings(engine=engine or {}, **changes))
    return made.factory.bank(*made.factory.prepare()[:3])


def files(settings: Any) -> list[Path]:
    return sorted(Path(settings()["output"]["cache"], "features").glob("*.rows"))


def held(bank: ImageBank) -> Tensor:
    return torch.from_numpy(bank.tables._held)


# -- bits -------------------------------------------------------------------------------------------------------------


def asked(bank: ImageBank, how: str) -> dict[str, Tensor]:
    """Features of all images of all clients, in the order of the source, asked for in different ways."""
    names = [*bank.backbone.reads, "cls:1", "block_inputs:2"]
    everything = held(bank)
    if how == "at once":
        found = {name: bank.features(name, everything) for name in names}
        return {**found, **{f"tokens {start}": bank.tokens(everything, start) for start in range(3)}}
    orders = {"one by one": everything.split(1), "shuffled": everything[torch.randperm(len(everything))].split(7)}
    if how == "by client":
        clients = range(len(bank.sizes("train")) - 1, -1, -1)
        parts = [torch.from_numpy(bank.images(each, part).indices) for each in clients for part in ("test", "train")]
    else:
        parts = list(orders[how])
    order = torch.cat(parts).argsort()
    found = {name: torch.cat([bank.features(name, part) for part in parts])[order] for name in names}
    return {
        **found,
        **{f"tokens {start}": torch.cat([bank.tokens(part, start) for part in parts])[order] for start in range(3)},
    }


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sampled
@pytest.mark.parametrize("backbone", ["tiny", "tiny-clip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_no_bit_depends_on_what_is_kept_and_who_asked_first(settings: Any, backbone: str, dtype: str) -> None:
    torch.set_num_threads(1)
    changes = {"backbone": {"name": backbone, "dtype": dtype}}
    reference = asked(bank_of(settings, TIERS["nowhere"], **changes), "at once")
    ways = (("shuffled", "nowhere"), ("one by one", "memory"), ("shuffled", "both"), ("by client", "disk"))
    for how, tier in ways:
        MEMORY.clear()
        assert same_bits(asked(bank_of(settings, TIERS[tier], **changes), how), reference), (how, tier)
    assert files(settings)
    MEMORY.clear()
    assert same_bits(asked(bank_of(settings, TIERS["disk"], **changes), "shuffled"), reference), "read from files"


def test_no_bit_depends_on_the_number_of_threads(settings: Any) -> None:
    torch.set_num_threads(1)
    reference = asked(bank_of(settings, TIERS["nowhere"]), "at once")
    for threads, how in ((2, "shuffled"), (3, "at once")):
        torch.set_num_threads(threads)
        assert same_bits(asked(bank_of(settings, TIERS["nowhere"]), how), reference)
        assert torch.get_num_threads() == threads


def test_no_bit_depends_on_the_partition(settings: Any) -> None:
    changes = {"data": {"train_per_cell": 12, "test_per_cell": 6}}
    one, other = (
        bank_of(settings, **changes),
        bank_of(settings, seed=3, partition={"scheme": "iid", "clients": 7}, **changes),
    )
    assert len(held(one)) == len(held(other)) == IMAGES
    first = asked(one, "by client")
    MEMORY.clear()
    assert same_bits(asked(other, "by client"), first)


@pytest.mark.parametrize("method", ["promptfl", "fedvpt_deep", "sgpt"])
def test_a_run_is_the_same_with_every_cache_cold_and_warm(settings: Any, method: str) -> None:
    changes: dict[str, Any] = {"method": {"name": method}}
    if method == "promptfl":
        changes["backbone"] = {"name": "tiny-clip"}
    found = set()
    for name, engine in TIERS.items():
        for state in ("cold", "warm"):
            MEMORY.clear()
            found.add(content(run(settings(name=f"{name}-{state}", engine=engine, **changes))))
    assert len(found) == 1


# -- what is computed, and how often ----------------------------------------------------------------------------------


def test_a_feature_is_computed_once_in_a_process_whoever_asks(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings, TIERS["memory"])
    bank.features("cls", held(bank))
    assert spy.since() == held(bank).tolist()
    for part in ("train", "test"):
        for client in range(4):
            images = bank.images(client, part)
            images.features("cls", torch.arange(len(images)))
    again = bank_of(settings, TIERS["memory"], seed=1, partition={"scheme": "iid", "clients": 3}, method="head_tune")
    again.features("cls", held(bank))
    assert spy.since() == []


def test_a_feature_is_computed_once_for_all_processes(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings)
    first = bank.features("patches", held(bank))
    assert spy.since() == held(bank).tolist()
    for engine in (TIERS["disk"], TIERS["both"]):
        MEMORY.clear()  # as in another process
        assert torch.equal(bank_of(settings, engine).features("patches", held(bank)), first)
        assert spy.since() == []


def test_what_fits_nowhere_is_computed_whenever_it_is_asked_for_and_only_that(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings, TIERS["nowhere"])
    for _ in range(2):
        bank.features("cls", torch.tensor([5, 3, 5]))
        assert spy.since() == [3, 5]
    assert files(settings) == []


def test_images_asked_for_together_are_computed_together(
    settings: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = bank_of(settings)
    first, second = bank.images(0, "train"), bank.images(1, "test")
    first.features("cls", torch.tensor([3]))
    assert spy.since() == sorted(first.indices.tolist())
    bank.features("cls", torch.from_numpy(np.concatenate([first.indices[:2], second.indices[:2]])))
    assert spy.since() == sorted(second.indices.tolist())
    bank.tables.features("cls", torch.from_numpy(bank.images(2, "train").indices[:2]), alone=True)
    assert len(spy.since()) == 2
    monkeypatch.setattr(feature_tables, "NEIGHBOURS", 5)
    images = bank.images(3, "train")
    images.features("cls", torch.tensor([len(images) - 1]))
    computed = spy.since()
    assert len(computed) == 6
    assert images.indices[-1] in computed


def test_an_image_that_no_client_holds_can_be_asked_for(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings)
    nobodys = next(index for index in range(IMAGES) if index not in held(bank).tolist())
    mixed = torch.tensor([nobodys, int(held(bank)[0])])
    for _ in range(2):
        wanted = bank_of(settings, TIERS["nowhere"]).features("cls", mixed)
        spy.since()
        assert torch.equal(bank.features("cls", mixed), wanted)
    assert spy.since() == [], "it is in the file, though there was no room for it in memory"
    alone = bank_of(settings, TIERS["memory"])
    for _ in range(2):
        assert torch.equal(alone.features("cls", mixed), wanted)
    assert spy.since().count(nobodys) == 2


@pytest.mark.parametrize(
    "change", [{"data": {"resize": "crop"}}, {"backbone": {"stem": 1}}, {"backbone": {"dtype": "float64"}}]
)
def test_other_images_or_weights_never_share_features(settings: Any, spy: Spy, change: dict[str, Any]) -> None:
    for changes in ({}, change):
        bank = bank_of(settings, **changes)
        bank.features("cls", held(bank))
        assert len(spy.since()) == HELD
    assert len(files(settings)) == 2


def test_features_of_changed_weights_are_not_taken_for_those_of_the_old(settings: Any, spy: Spy) -> None:
    made = experiment(settings())
    source, manifest, backbone, _ = made.factory.prepare()
    made.factory.bank(source, manifest, backbone).features("cls", torch.tensor([0]))
    weights = {name: tensor.clone() for name, tensor in backbone.weights.items()}
    weights["norm.bias"][0] += 1
    other = ViT(*[getattr(backbone, name) for name in ("name", "shape", "mean", "std")], weights, 16)
    before = spy.since()
    found = made.factory.bank(source, manifest, other).features("cls", torch.tensor([0]))
    assert spy.since() == before
    assert found[0, 0] == pytest.approx(
        made.factory.bank(source, manifest, backbone).features("cls", torch.tensor([0]))[0, 0] + 1
    )


def test_a_damaged_row_is_computed_again_and_no_other(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings, TIERS["disk"])
    first, (path,) = bank.features("cls", held(bank)), files(settings)
    spy.since()
    victim = int(held(bank)[17])
    with path.open("r+b") as file:
        file.seek(victim * CLS + 5)
        file.write(b"\xff\xfe")
    for expected in ([victim], []):
        assert torch.equal(bank_of(settings, TIERS["disk"]).features("cls", held(bank)), first)
        assert spy.since() == expected


def test_names_of_the_same_feature_share_it(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings)
    assert torch.equal(bank.features("cls", held(bank)), bank.features("cls:3", held(bank)))
    assert torch.equal(bank.features("block_inputs", held(bank)), bank.features("block_inputs:3", held(bank)))
    assert len(spy.since()) == 2 * HELD


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_in_memory_is_decided_by_the_size_for_all_clients(settings: Any, spy: Spy) -> None:
    for spare, twice in ((0, 0), (-1, HELD)):
        MEMORY.clear()
        bank = bank_of(settings, {"memory_gib": (HELD * CLS + spare) / GIB, "disk_gib": 0})
        for name, again in (("cls", twice), ("patches", HELD)):
            bank.features(name, held(bank))
            spy.since()
            bank.features(name, held(bank))
            assert len(spy.since()) == again, (spare, name)


def test_rows_that_nobody_uses_make_room_for_others_and_those_in_use_do_not(settings: Any, spy: Spy) -> None:
    room = {"memory_gib": 1.5 * HELD * CLS / GIB, "disk_gib": 0}
    first = bank_of(settings, room)
    first.features("cls", held(first))
    second = bank_of(settings, room, backbone={"stem": 1})
    second.features("cls", held(first))
    spy.since()
    second.features("cls", held(first))
    assert len(spy.since()) == HELD, "no room beside the first"
    first.features("cls", held(first))
    assert spy.since() == []
    del first
    third = bank_of(settings, room, backbone={"stem": 2})
    third.features("cls", held(third))
    spy.since()
    third.features("cls", held(third))
    assert spy.since() == []


def test_rows_grow_when_another_partition_needs_more_images(settings: Any, spy: Spy) -> None:
    few = bank_of(settings, TIERS["memory"])
    before = few.features("cls", held(few))
    more = bank_of(settings, TIERS["memory"], data={"train_per_cell": 12, "test_per_cell": 6})
    everything = more.features("cls", EVERYTHING)
    assert len(spy.since()) == IMAGES, "what was there is not computed again"
    assert torch.equal(few.features("cls", held(few)), before)
    assert torch.equal(everything[held(few)], before)


def test_memory_follows_the_images_and_not_the_clients(settings: Any) -> None:
    sizes = []
    for clients in (4, 40):
        MEMORY.clear()
        bank = bank_of(settings, partition={"scheme": "iid", "clients": clients})
        for client in range(clients):
            images = bank.images(client, "train")
            images.features("cls", torch.arange(len(images)))
        sizes.append(MEMORY._used())
    assert sizes == [HELD * CLS, HELD * CLS]


def test_embedded_images_are_never_written(settings: Any, spy: Spy) -> None:
    bank = bank_of(settings)
    bank.tokens(held(bank))
    assert files(settings) == []
    bank.tokens(held(bank), 1)
    assert len(files(settings)) == 1
    behind = bank_of(settings, backbone={"stem": 1})
    behind.tokens(held(bank))
    assert len(files(settings)) == 2
    spy.since()
    bank.tokens(held(bank))
    assert spy.since() == [], "but kept in memory"


def test_files_together_stay_within_the_budget_and_the_oldest_goes_first(settings: Any) -> None:
    budget = 400 * 1024
    engine = {"memory_gib": 0, "disk_gib": budget / GIB}
    made: list[Path] = []
    for stem in range(3):
        for name in ("cls", "patches"):
            bank = bank_of(settings, engine, backbone={"stem": stem})
            bank.features(name, held(bank))
            del bank
            assert sum(space(path) for path in files(settings)) <= budget
            made += [path for path in files(settings) if path not in made]
            os.utime(made[-1], (len(made), len(made)))
    left = [number for number, path in enumerate(made) if path.exists()]
    assert left == list(range(left[0], len(made)))
    assert left[0] > 0


def test_files_that_are_in_use_are_not_removed_and_nothing_more_is_written(settings: Any, spy: Spy) -> None:
    first = bank_of(settings, TIERS["disk"])
    wanted = first.features("patches", held(first))
    (path,) = files(settings)
    budget = int(1.5 * space(path))
    engine = {"memory_gib": 0, "disk_gib": budget / GIB}
    second = bank_of(settings, engine, backbone={"stem": 1})
    for _ in range(2):
        second.features("patches", held(first))
    assert path.exists()
    assert sum(space(each) for each in files(settings)) <= budget
    spy.since()
    assert torch.equal(first.features("patches", held(first)), wanted)
    assert spy.since() == []
    images = second.images(0, "train")
    images.features("patches", torch.tensor([0, 1]))
    assert len(spy.since()) <= 2, "what cannot be kept is not computed for later"


def test_a_kind_of_feature_that_is_too_large_for_the_disk_is_not_begun(settings: Any) -> None:
    bank = bank_of(settings, {"memory_gib": 0, "disk_gib": (HELD * CLS - 1) / GIB})
    bank.features("cls", held(bank))
    assert files(settings) == []


def test_room_is_made_without_touching_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(bytes(100_000))
    rows = FileRows(tmp_path / "a.rows", 10, (1024,), torch.float32, torch.device("cpu"), GIB)
    rows.put(np.arange(10), torch.rand(10, 1024))
    assert not make_room(tmp_path, 1, 1000)
    del rows
    assert make_room(tmp_path, 1, 1000)
    assert {path.name for path in tmp_path.iterdir()} == {"letter.txt", NAME}


def test_a_full_disk_costs_time_and_nothing_else(settings: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bank_of(settings, TIERS["nowhere"]).features("cls", EVERYTHING)
    for engine, again in ((TIERS["both"], 0), (TIERS["disk"], HELD)):
        MEMORY.clear()
        bank = bank_of(settings, engine)
        bank.tables.store.pixels(EVERYTHING.numpy())

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(row_file, "write_at", full)
            assert torch.equal(bank.features("cls", held(bank)), wanted[held(bank)])
        spy.since()
        assert torch.equal(bank.features("cls", held(bank)), wanted[held(bank)])
        assert len(spy.since()) == again


def test_rows_are_in_place_when_they_are_all_known(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look-up and nothing else: no file, no sorting, no backbone."""
    for engine in (TIERS["both"], TIERS["disk"]):
        bank = bank_of(settings, engine)
        first = bank.features("cls", held(bank))
        with monkeypatch.context() as patch:
            for module, name in ((np, "unique"), (row_file, "read_at"), (ViT, "embed"), (feature_tables, "_gathered")):
                patch.setattr(module, name, None)
            assert torch.equal(bank.features("cls", held(bank).flip(0)), first.flip(0))


# -- threads ----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_pass_reaches_the_caller_and_leaves_the_threads_alone(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    bank = bank_of(settings, TIERS["nowhere"])
    with monkeypatch.context() as patch:
        patch.setattr(ViT, "read_early", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bank.features("cls", held(bank))
    with monkeypatch.context() as patch:
        patch.setattr(TinySource, "image", _broken)
        with pytest.raises(DataError, match="no such luck"):
            bank_of(settings, TIERS["nowhere"], data={"resize": "crop"}).features("cls", held(bank))
    assert torch.get_num_threads() == 2
    assert bank.features("cls", held(bank)).shape == (HELD, 32)


def _broken(source: TinySource, index: int) -> Any:
    raise DataError(f"image must be readable: no such luck with {index}")


def test_a_pass_has_a_multiple_of_eight_images_of_one_thread(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = ViT.embed

    def embed(vit: ViT, images: Tensor) -> Tensor:
        seen.append((len(images), torch.get_num_threads()))
        return real(vit, images)

    monkeypatch.setattr(ViT, "embed", embed)
    bank = bank_of(settings, TIERS["nowhere"])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 8, 13, 70):
            seen.clear()
            assert len(bank.features("cls", torch.arange(count))) == count
            assert all(size % 8 == 0 and used == 1 for size, used in seen)
            assert count <= sum(size for size, _ in seen) < count + 8 * threads
            assert len(seen) >= min(threads, -(-count // 8)), "all cores are used"


# -- ahead ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    real = TinySource.image

    def image(source: TinySource, index: int) -> Any:
        seen.append(index)
        return real(source, index)

    monkeypatch.setattr(TinySource, "image", image)
    return seen


@pytest.mark.parametrize("names", [["cls"], ["tokens"], ["tokens:1", "patches"], ["cls", "tokens"]])
def test_prefetching_decodes_what_will_be_needed_and_computes_nothing(
    settings: Any, spy: Spy, decoded: list[int], names: list[str]
) -> None:
    bank = bank_of(settings)
    wanted = held(bank)[[40, 2, 7, 2]]
    bank.prefetch(wanted, names)
    bank.tables.settle()
    assert sorted(decoded) == sorted(set(wanted.tolist()))
    assert spy.since() == []
    bank.tables.features("cls", wanted, alone=True)
    assert len(decoded) == 3


@pytest.mark.parametrize("where", ["memory", "disk", "another process"])
def test_images_whose_features_are_there_are_not_decoded(settings: Any, decoded: list[int], where: str) -> None:
    engine = TIERS["memory"] if where == "memory" else TIERS["disk"]
    bank = bank_of(settings, engine)
    known, unknown = held(bank)[:10], held(bank)[10:15]
    bank.tables.features("cls", known, alone=True)
    for path in Path(settings()["output"]["cache"], "pixels").iterdir():
        path.unlink()
    other = bank_of(settings, engine)
    decoded.clear()
    other.prefetch(torch.cat([known, unknown]), ["cls"])
    other.tables.settle()
    assert sorted(decoded) == unknown.tolist()
    decoded.clear()
    other.prefetch(torch.cat([known, unknown]), ["cls", "patches"])
    other.tables.settle()
    assert sorted(decoded) == known.tolist()


def test_names_that_say_nothing_are_refused_at_once(settings: Any) -> None:
    for name, rule in (
        ("words", "needs must name"),
        ("tokens:9", r"start must be in 0\.\.2"),
        ("tokens:x", "needs must"),
    ):
        with pytest.raises(ContractError, match=rule):
            bank_of(settings).prefetch(torch.tensor([0]), [name])


def test_nothing_is_left_of_rows_once_they_are_cleared(settings: Any) -> None:
    bank = bank_of(settings)
    bank.features("cls", held(bank))
    assert MEMORY._used() == HELD * CLS
    feature_rows.MEMORY.clear()
    assert MEMORY._used() == 0
