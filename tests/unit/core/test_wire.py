"""The audit: what is local never leaves, and nothing undeclared travels."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.core import wire
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ContractError, DivergenceError, RunError

pytestmark = pytest.mark.unit

ROLES = Roles(
    shared={"prompt": torch.zeros(2, 3)},
    local={"head": torch.zeros(3)},
    server={"generator": torch.zeros(4)},
    stat={
        "sums": Statistic((2, 3), count="counts", minimum=3),
        "counts": Statistic((2,)),
        "early": Statistic((1,), "start"),
    },
)
GOOD = {"prompt": torch.ones(2, 3), "sums": torch.ones(2, 3), "counts": torch.tensor([3.0, 5.0])}


def test_an_upload_as_declared_passes() -> None:
    wire.audit_upload(GOOD, ROLES, "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": torch.zeros(3)}, "'head' has role local and must never go up"),
        ({"generator": torch.zeros(4)}, "'generator' has role server and must never go up"),
        ({"extra": torch.zeros(1)}, "'extra' was not declared"),
        ({"early": torch.zeros(1)}, "'early' was not declared"),
        ({"prompt": torch.ones(3, 2)}, r"'prompt' must have shape \(2, 3\), got \(3, 2\)"),
        (
            {"prompt": torch.ones(2, 3, dtype=torch.float64)},
            "'prompt' must have dtype torch.float32, got torch.float64",
        ),
        ({"counts": torch.tensor([2.0, 5.0])}, "'sums' must hold only rows of at least 3 images"),
    ],
)
def test_an_upload_that_breaks_its_declaration_is_an_error(change: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        wire.audit_upload({**GOOD, **change}, ROLES, "a")


def test_a_missing_tensor_is_an_error() -> None:
    with pytest.raises(ContractError, match="'sums' is missing"):
        wire.audit_upload({name: tensor for name, tensor in GOOD.items() if name != "sums"}, ROLES, "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error(value: float) -> None:
    with pytest.raises(DivergenceError, match=r"client 'a'.*'prompt' must be finite"):
        wire.audit_upload({**GOOD, "prompt": torch.full((2, 3), value)}, ROLES, "a")


def test_statistics_asked_before_the_first_round_travel_alone() -> None:
    wire.audit_upload({"early": torch.ones(1)}, ROLES, "a", when="start")
    with pytest.raises(ContractError, match="'prompt' was not declared"):
        wire.audit_upload({"early": torch.ones(1), "prompt": torch.ones(2, 3)}, ROLES, "a", when="start")


@pytest.mark.parametrize("name", ["generator", "head", "sums"])
def test_a_download_holds_nothing_that_must_stay_where_it_is(name: str) -> None:
    with pytest.raises(ContractError, match=f"'{name}' has role .* must never go down"):
        wire.audit_download({name: torch.zeros(1)}, ROLES, "a")


def test_a_download_may_hold_what_the_server_generated() -> None:
    wire.audit_download({"prompt": torch.zeros(2, 3), "experts": torch.zeros(5)}, ROLES, "a")


def test_rows_from_too_few_images_are_withheld_with_their_counts() -> None:
    kept = wire.withhold_small({"sums": torch.ones(2, 3), "counts": torch.tensor([2.0, 3.0])}, ROLES.stat)
    assert kept["sums"].tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert kept["counts"].tolist() == [0.0, 3.0]


def test_one_tensor_has_one_role() -> None:
    with pytest.raises(ContractError, match="'a' must have one role, got shared and local"):
        Roles(shared={"a": torch.zeros(1)}, local={"a": torch.zeros(1)})


def test_bytes_round_trip_to_the_same_bits_in_any_order() -> None:
    first = {"b": torch.randn(3, 4), "a": torch.arange(5)}
    second = {"a": first["a"], "b": first["b"].clone().T.contiguous().T}
    assert wire.encode(first) == wire.encode(second)
    assert torch.equal(wire.decode(wire.encode(first))["b"], first["b"])


def test_damaged_bytes_are_told() -> None:
    with pytest.raises(RunError, match="damaged"):
        wire.decode(wire.encode({"a": torch.zeros(3)})[:-5])


def test_the_size_counts_values() -> None:
    assert (
        wire.size_in_bytes({"a": torch.zeros(10, 768), "b": torch.zeros(2, dtype=torch.float64)}) == 10 * 768 * 4 + 16
    )


def test_tensors_come_back_in_the_order_of_their_names() -> None:
    names = [f"tensor{number}" for number in range(30)]
    assert list(wire.decode(wire.encode({name: torch.zeros(1) for name in reversed(names)}))) == sorted(names)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({}, "'head' must be kept"),
        ({"head": torch.zeros(3), "images": torch.zeros(9)}, "'images' must be declared as local"),
    ],
)
def test_a_client_keeps_exactly_what_it_declared(kept: dict, message: str) -> None:
    with pytest.raises(ContractError, match=f"state of client 'a': tensor {message}"):
        wire.audit_local(kept, ROLES, "a")


def test_a_state_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(DivergenceError, match="'head' must be finite"):
        wire.audit_local({"head": torch.full((3,), float("nan"))}, ROLES, "a")


def test_a_count_is_sent_with_what_it_counts_and_has_one_minimum() -> None:
    with pytest.raises(ContractError, match="sent with it"):
        Roles(stat={"sums": Statistic((2,), count="counts"), "counts": Statistic((2,), "start")})
    counted = {"a": Statistic((2,), count="n", minimum=2), "b": Statistic((2,), count="n", minimum=5)}
    with pytest.raises(ContractError, match="one minimum"):
        Roles(stat={**counted, "n": Statistic((2,))})


DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16)


@given(
    st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)))
)
def test_bytes_are_those_of_safetensors(kinds: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    """Whatever the names, shapes and precisions, also of tensors that lie in memory in another order."""
    tensors = {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype).mT.contiguous().mT
        if len(shape) > 1
        else torch.ones(shape, dtype=dtype)
        for name, (dtype, shape) in kinds.items()
        if name != "__metadata__"
    }
    plain = {name: tensor.contiguous().clone() for name, tensor in sorted(tensors.items())}
    assert wire.encode(tensors) == safetensors.torch.save(plain)
    found = wire.decode(wire.encode(tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
