"""Safetensors bytes from outside: they become valid tensors, or a typed error before anything large is allocated."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from support import peak_of

from fedprompt.backbones.weight_files import read_file, read_folder
from fedprompt.core import wire
from fedprompt.core.messages import COHORT, LocalUpdate
from fedprompt.errors import BackboneError, ContractError, RunError
from fedprompt.io.safetensors_header import DTYPES, FILE, read_header

pytestmark = pytest.mark.unit

MEGABYTE = 2**20
LIMIT = MEGABYTE
ALL_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
GOOD = wire.pack(
    LocalUpdate(1, 2, {"prompt": torch.arange(6.0).reshape(2, 3), "counts": torch.tensor([3, 4])}, 12, 0.5)
)


def blob(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a length beyond the bytes": blob({}, length=2**63),
    "a length beyond the limit": blob(b"{" + b" " * (FILE + 1) + b"}"),
    "no JSON": blob(b"{oops"),
    "no UTF-8": blob(b'{"\xff": 1}'),
    "no mapping": blob([1, 2]),
    "deep brackets": blob(b'{"a":' + b"[" * 100_000),
    "deep brackets behind a cut string": blob(b'{"a' + b'\\"' * 100_000),
    "a name twice": blob(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "a field twice": blob(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "a field too many": blob({"a": {**entry(), "more": 1}}, bytes(4)),
    "a terabyte": blob({"a": entry(shape=[2**38], offsets=[0, 2**40])}, bytes(4)),
    "a terabyte that does not fit its bytes": blob({"a": entry(shape=[2**38])}, bytes(4)),
    "an overflow to four bytes": blob({"a": entry(shape=[2**62 + 1])}, bytes(4)),
    "an empty tensor with sizes that overflow": blob({"a": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}),
    "too many sizes": blob({"a": entry(shape=[1] * 9)}, bytes(4)),
    "a negative size": blob({"a": entry(shape=[-1, -1])}, bytes(4)),
    "a size that is a fraction": blob({"a": entry(shape=[1.0])}, bytes(4)),
    "a size that is true": blob({"a": entry(shape=[True])}, bytes(4)),
    "a size with thousands of digits": blob(b'{"a":{"dtype":"F32","shape":[%b],"data_offsets":[0,4]}}' % (b"9" * 5000)),
    "an unknown dtype": blob({"a": entry(dtype="F4")}, bytes(4)),
    "a dtype that is a list": blob({"a": entry(dtype=["F32"])}, bytes(4)),
    "tensors one over the other": blob({"a": entry(), "b": entry()}, bytes(4)),
    "a hole between tensors": blob({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)),
    "bytes after the tensors": blob({"a": entry()}, bytes(5)),
    "bytes missing": blob({"a": entry()}, bytes(3)),
    "an end before the beginning": blob({"a": entry(shape=[0], offsets=[4, 0])}, bytes(4)),
    "metadata that are numbers": blob({"__metadata__": {"a": 1}, "a": entry()}, bytes(4)),
    "a truth value of two": blob({"a": entry("BOOL", [1], [0, 1])}, b"\x02"),
    "infinity": blob(b'{"a": 1e999}'),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_wherever_tensors_come_in_and_cost_no_memory(name: str, tmp_path: Path) -> None:
    content = BOMBS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    room = 4 * MEGABYTE + 4 * len(content)
    assert peak_of(lambda: wire.decode(content), RunError) < room
    assert peak_of(lambda: wire.unpack(content, 2 * FILE), ContractError) < room
    if name != "a truth value of two":  # weights are converted to floats, where it does no harm
        assert peak_of(lambda: read_file(path), BackboneError) < room
        assert peak_of(lambda: read_folder(tmp_path), BackboneError) < room


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_reply_survives_the_wire_exactly(dtype: torch.dtype) -> None:
    upload = {"b": torch.tensor([[0.0, 1.0, 0.1]]).to(dtype), "a": torch.ones((), dtype=dtype), "c": torch.zeros(0, 7)}
    sent = LocalUpdate(3, 4, upload, 10**17, loss=0.1 + 0.2)
    message = wire.pack(sent)
    got = wire.unpack(message, LIMIT)
    assert (got.client, got.round, got.samples, got.loss) == (3, 4, 10**17, 0.1 + 0.2)
    assert list(got.upload) == ["a", "b", "c"]
    for name, tensor in upload.items():
        assert got.upload[name].dtype == tensor.dtype
        assert got.upload[name].shape == tensor.shape
        assert torch.equal(got.upload[name], tensor)
    assert wire.pack(got) == message


def test_values_that_are_not_finite_travel_for_the_guard_to_see() -> None:
    upload = wire.unpack(
        wire.pack(LocalUpdate(0, 1, {"a": torch.tensor([float("nan"), float("inf")])}, 1)), LIMIT
    ).upload
    assert upload["a"].isnan().tolist() == [True, False]


def test_a_reply_for_a_cohort_without_loss_or_tensors_travels() -> None:
    assert wire.unpack(wire.pack(LocalUpdate(COHORT, 0, {}, 0)), LIMIT) == LocalUpdate(COHORT, 0, {}, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client": -2}, "client must be a whole number of at least -1"),
        ({"client": True}, "client must be a whole number"),
        ({"round": -1}, "round must be"),
        ({"round": 1.0}, "round must be"),
        ({"samples": 10**18}, "samples must be"),
        ({"samples": "12"}, "samples must be"),
        ({"samples": -1}, "samples must be"),
        ({"loss": float("nan")}, "finite"),
        ({"loss": float("inf")}, "finite"),
        ({"loss": "0.5"}, "loss must be"),
        ({"loss": [0.5]}, "loss must be"),
    ],
)
def test_values_that_no_reply_has_are_refused_on_both_sides(change: dict[str, Any], message: str) -> None:
    values = {"client": 1, "round": 2, "samples": 3, "loss": None, **change}
    forged = blob({"__metadata__": {"fedprompt-reply-1": json.dumps(values)}})
    with pytest.raises(ContractError, match=message):
        wire.unpack(forged, LIMIT)
    with pytest.raises(ContractError, match=message):
        wire.pack(LocalUpdate(upload={}, **values))


@pytest.mark.parametrize("metadata", [{}, {"other": "{}"}, {"fedprompt-reply-1": "{}"}, {"fedprompt-reply-1": "[]"}])
def test_a_message_says_whose_reply_it_is(metadata: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="malformed"):
        wire.unpack(blob({"__metadata__": metadata, "a": entry()}, bytes(4)), LIMIT)


def test_a_message_has_a_limit_and_its_header_a_smaller_one() -> None:
    with pytest.raises(ContractError, match=f"at most {len(GOOD) - 1} bytes, got {len(GOOD)}"):
        wire.unpack(GOOD, len(GOOD) - 1)
    many = wire.pack(LocalUpdate(0, 1, {f"tensor{number}": torch.zeros(1) for number in range(5000)}, 1))
    with pytest.raises(ContractError, match="header must have at most 262144 bytes"):
        wire.unpack(many, len(many))
    assert len(wire.decode(many)) == 5000


@settings(max_examples=300)
@given(st.data())
def test_damaged_messages_are_replies_or_contract_errors(data: st.DataObject) -> None:
    damaged = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ContractError):
        assert wire.size_in_bytes(wire.unpack(bytes(damaged), LIMIT).upload) < len(GOOD)
    with contextlib.suppress(RunError):
        assert wire.size_in_bytes(wire.decode(bytes(damaged))) < len(GOOD)


SIZES = st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**63, 2**64]), max_size=3)
OFFSETS = st.lists(st.integers(-1, 40), min_size=1, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*DTYPES, "F8_E4M3", "X"]), "shape": SIZES, "data_offsets": OFFSETS}
)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Headers that are often right: each tensor begins where the last one ended, unless something else was drawn."""
    header, reached = {}, 0
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype = draw(st.sampled_from([*DTYPES]))
        size = DTYPES[dtype]
        for side in shape:
            size *= side
        header[name] = draw(st.just(entry(dtype, shape, [reached, reached + size])) | ENTRIES)
        reached += size
    return header


@settings(max_examples=300)
@given(layouts(), st.integers(0, 60))
def test_what_the_header_check_accepts_is_what_safetensors_then_gives(header: dict[str, Any], spare: int) -> None:
    ends = [value["data_offsets"][-1] for value in header.values()]
    content = blob(header, bytes(max([0, *ends]) if spare < 50 else spare))
    try:
        checked = read_header(io.BytesIO(content), len(content), FILE).entries
    except ValueError:
        return
    tensors = load(content)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: announced.shape for name, announced in checked.items()
    }


@settings(max_examples=300)
@given(layouts(), st.integers(-2, 2))
def test_what_safetensors_refuses_the_header_check_refuses_first(header: dict[str, Any], more: int) -> None:
    ends = [value["data_offsets"][-1] for value in header.values()]
    content = blob(header, bytes(max(0, max([0, *ends]) + more)))
    try:
        load(content)
    except (SafetensorError, KeyError, RuntimeError, OverflowError, TypeError, ValueError):
        with pytest.raises(ValueError, match="must"):
            read_header(io.BytesIO(content), len(content), FILE)


def test_stored_tensors_of_another_shape_are_not_taken_for_the_declared_ones() -> None:
    declared = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int64)}
    assert wire.require_like(dict(declared), declared, "state") == declared
    for wrong in ({"a": torch.zeros(2)}, {**declared, "c": torch.zeros(1)}, {**declared, "a": torch.zeros(3)}):
        with pytest.raises(RunError, match="state"):
            wire.require_like(wrong, declared, "state")
    with pytest.raises(RunError, match="int64"):
        wire.require_like({**declared, "b": torch.zeros(3)}, declared, "state")


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../elsewhere.safetensors"}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": ' + "[" * 5000,
        '{"weight_map": {"a": ["x"]}}',
    ],
)
def test_an_index_of_shards_names_files_beside_it(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BackboneError):
        read_folder(tmp_path)


def test_shards_that_hold_a_tensor_twice_are_told(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(wire.encode({"a": torch.zeros(1)}))
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(BackboneError, match="every tensor once, got 'a'"):
        read_folder(tmp_path)
