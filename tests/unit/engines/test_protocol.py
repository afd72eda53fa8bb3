"""Orders and answers as bytes: they arrive as they were sent, and any other bytes are a ValueError that comes at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.engines.framing import HEADER_BYTES, MOST_MARKS, Frame
from fedprompt.engines.remote.protocol import (
    LONGEST_TEXT,
    MOST_NUMBER,
    MOST_RESULTS,
    Answer,
    Meeting,
    Order,
    Setting,
    read_result,
)
from fedprompt.errors import ContractError
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.metrics.calibration import BINS
from fedprompt.tensors import Tensors

pytestmark = pytest.mark.unit

RUN = "0123456789abcdef" * 2
SETTING = Setting(RUN, {"seed": 0}, "digest", ("cat", "dog"), ("a", "b"))
RESULT = ClientResult(4, 3, 1.5, 2.0, 0.0, [[0, 0.0, 0]] * (BINS - 1) + [[4, 3.5, 3]], {"photo": [4, 3]}, {"gate": 0.5})
REPLY = LocalUpdate(1, 2, {"prompt": torch.arange(6.0).reshape(2, 3)}, 12, 0.25)
ORDER = Order("work", SETTING, 1, 2, 3, 4, 5, 6, {"prompt": torch.ones(2, 3)})
ANSWER = Answer(None, Meeting("a", ("cat", "dog"), "digest"), RESULT, wire.pack(REPLY))

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBERS = st.none() | st.integers(0, MOST_NUMBER - 1)
NAMES = st.none() | st.lists(TEXTS, max_size=3).map(tuple)
PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
)
CONFIGS = st.dictionaries(
    TEXTS, PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(TEXTS, PLAIN, max_size=2), max_size=3
)
SETTINGS = st.builds(Setting, st.from_regex(r"[0-9a-f]{32}", fullmatch=True), CONFIGS, TEXTS, NAMES, NAMES)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


SHORT = TEXTS.filter(str.isprintable)


@st.composite
def bundles(draw: st.DrawFn) -> Tensors:
    """A few tensors of any kind and shape."""
    found = {}
    for name in draw(st.lists(TEXTS.filter(lambda name: name != "__metadata__"), unique=True, max_size=3)):
        shape, dtype = (
            draw(st.lists(st.integers(0, 3), max_size=3)),
            draw(st.sampled_from([torch.float32, torch.int64])),
        )
        found[name] = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return found


@given(
    st.sampled_from(["meet", "survey", "work"]),
    SETTINGS,
    st.integers(0, MOST_NUMBER - 1),
    st.tuples(*[NUMBERS] * 5),
    bundles(),
)
def test_an_order_arrives_as_it_was_sent(
    kind: Any, setting: Setting, client: int, numbers: tuple[int | None, ...], received: Tensors
) -> None:
    named = dict(zip(Order._NUMBERS[1:], numbers, strict=True))
    order = Order(kind, setting, client, received=received, **named)
    found = Order.from_bytes(order.to_bytes())
    assert found.setting == setting
    assert [getattr(found, name) for name in Order._NUMBERS] == [client, *numbers]
    assert found.kind == kind
    assert found.received.keys() == received.keys()
    for name, tensor in received.items():
        assert found.received[name].dtype == tensor.dtype
        assert torch.equal(found.received[name], tensor)


@given(
    st.none() | st.tuples(st.from_regex(r"[a-z_]{1,40}", fullmatch=True), SHORT),
    st.none() | st.builds(Meeting, SHORT, st.lists(TEXTS, max_size=3).map(tuple), SHORT),
    st.none() | st.just(RESULT),
    st.binary(max_size=50),
)
def test_an_answer_arrives_as_it_was_sent(failure: Any, meeting: Any, result: Any, packed: bytes) -> None:
    answer = Answer(failure, meeting, result, packed)
    assert Answer.from_bytes(answer.to_bytes()) == answer


def test_a_reply_comes_out_of_an_answer() -> None:
    reply = ANSWER.reply(10_000)
    assert reply is not None
    assert (reply.client, reply.round, reply.samples, reply.loss) == (1, 2, 12, 0.25)
    assert torch.equal(reply.upload["prompt"], REPLY.upload["prompt"])
    assert Answer().reply(0) is None


def test_a_reply_that_is_too_large_or_none_at_all_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match="must have at most 20 bytes"):
        ANSWER.reply(20)
    with pytest.raises(ContractError, match="message is malformed"):
        Answer(packed=b"junk").reply(100)


def test_a_long_story_of_a_failure_is_cut() -> None:
    told = Answer.from_bytes(Answer(("story", "y" * 10**6)).to_bytes()).failure
    assert told == ("story", "y" * LONGEST_TEXT)


@pytest.mark.parametrize("rule", ["x" * 41, "", "Finite", "fin ite", "finite\n", "\x1b[31m"])
def test_a_failure_is_told_in_a_plain_word_and_printable_text(rule: str) -> None:
    told = Answer.from_bytes(Answer((rule, "red\x1b[31m\nand\x00 black\u202e")).to_bytes()).failure
    assert told == ("node", "red [31m\nand  black ")


READERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "order": (Order.from_bytes, ORDER.to_bytes()),
    "answer": (Answer.from_bytes, ANSWER.to_bytes()),
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> tuple[Callable[[bytes], object], bytes]:
    return READERS[request.param]


@given(st.binary(max_size=300))
def test_junk_is_a_value_error(junk: bytes) -> None:
    for read, _ in READERS.values():
        with pytest.raises(ValueError):  # noqa: PT011 - any rule will do
            read(junk)


@given(ANYTHING, st.binary(max_size=20))
def test_any_header_but_its_own_is_a_value_error(header: Any, tensors: bytes) -> None:
    text = json.dumps(header).encode()
    blob = len(text).to_bytes(8, "little") + len(tensors).to_bytes(8, "little") + text + tensors
    for read, _ in READERS.values():
        with pytest.raises(ValueError):  # noqa: PT011
            read(blob)


def test_a_message_that_is_cut_anywhere_or_has_more_behind_it_is_refused(reader: Any) -> None:
    read, blob = reader
    for end in range(0, len(blob), 7):
        with pytest.raises(ValueError):  # noqa: PT011
            read(blob[:end])
    with pytest.raises(ValueError, match="one complete frame"):
        read(blob + b"\0")


@given(st.data())
def test_a_message_with_a_changed_byte_is_another_message_or_a_value_error(data: st.DataObject) -> None:
    read, blob = READERS[data.draw(st.sampled_from(sorted(READERS)))]
    place, value = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(0, 255))
    try:
        read(blob[:place] + bytes([value]) + blob[place + 1 :])
    except ValueError:
        return


def changed(blob: bytes, path: str, value: Any) -> bytes:
    """The message with one value of its header replaced; `...` takes it out."""
    frame = Frame.from_bytes(blob)
    *way, last = path.split(".")
    place = frame.header
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return Frame(frame.header, frame.tensors).to_bytes()


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("format", "fedprompt-order-0", r"order\.format must be 'fedprompt-order-2'"),
        ("kind", "exec", r"order\.kind must be meet, survey or work"),
        ("kind", ["meet"], r"order\.kind must be"),
        ("kind", ..., "order must have exactly"),
        ("extra", 1, "order must have exactly"),
        ("client", None, r"order\.client must be a whole number"),
        ("client", -1, r"order\.client must be a whole number"),
        ("client", True, r"order\.client must be a whole number"),
        ("client", 1.0, r"order\.client must be a whole number"),
        ("train", "3", r"order\.train must be a whole number"),
        ("state", MOST_NUMBER, r"order\.state must be a whole number"),
        ("keep_as", 10**400, r"order\.keep_as must be a whole number"),
        ("setting", [], "setting must have exactly"),
        ("setting.run", "../" + RUN[3:], r"setting\.run must be 32 hexadecimal digits"),
        ("setting.run", RUN + "\n", r"setting\.run must be 32 hexadecimal digits"),
        ("setting.run", RUN.upper(), r"setting\.run must be 32 hexadecimal digits"),
        ("setting.run", 7, r"setting\.run must be 32 hexadecimal digits"),
        ("setting.config", "seed: 0", r"setting\.config must be a mapping"),
        ("setting.backbone", None, r"setting\.backbone must be a text"),
        ("setting.class_names", "cat", r"setting\.class_names must be a list of names"),
        ("setting.client_names", ["a", 1], r"setting\.client_names must be a list of names"),
        ("setting.pickle", "x", "setting must have exactly"),
    ],
)
def test_an_order_that_breaks_a_rule_is_refused_with_it(path: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Order.from_bytes(changed(ORDER.to_bytes(), path, value))


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("format", None, r"answer\.format must be"),
        ("result", ..., "answer must have exactly"),
        ("local", {}, "answer must have exactly"),
        ("failure", "no", r"answer\.failure must be a rule and a sentence"),
        ("failure", ["a", 1], r"answer\.failure must be a rule and a sentence"),
        ("failure", ["a", "b", "c"], r"answer\.failure must be a rule and a sentence"),
        ("meeting", 5, "meeting must have exactly"),
        ("meeting.name", "n" * 201, r"meeting\.name must be a short text"),
        ("meeting.backbone", "\x1b[2J", r"meeting\.backbone must be a short text"),
        ("result.domains", {"\x1b[2J": [1, 1]}, r"result\.domains must have short texts as names"),
        ("meeting.backbone", 1, r"meeting\.backbone must be a short text"),
        ("meeting.class_names", {"cat": 1}, r"meeting\.class_names must be a list of names"),
        ("result", [], "result must have exactly"),
        ("result.correct", 5, "result must be the figures of an evaluation"),
    ],
)
def test_an_answer_that_breaks_a_rule_is_refused_with_it(path: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Answer.from_bytes(changed(ANSWER.to_bytes(), path, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 0),
        ("samples", -4),
        ("samples", 4.0),
        ("samples", True),
        ("correct", 5),
        ("correct", -1),
        ("samples", 10**16),
        ("nll", float("nan")),
        ("nll", float("inf")),
        ("nll", 1e300),
        ("nll", None),
        ("nll", "1.5"),
        ("nll", -1.0),
        ("entropy", -1e-3),
        ("entropy", True),
        ("entropy", 10**400),
        ("mutual_information", -1e16),
        ("bins", []),
        ("bins", [[0, 0, 0]] * (BINS + 1)),
        ("bins", [[0, 0]] * BINS),
        ("bins", [[0, 0, float("nan")]] * BINS),
        ("bins", [[0, 0, "0"]] * BINS),
        ("bins", [[1e16, 0, 0]] * BINS),
        ("bins", {}),
        ("bins", [[0, 0, 0]] * BINS),
        ("bins", [[5, 0, 0]] + [[0, 0, 0]] * (BINS - 1)),
        ("bins", [[10**400, 0, 0], [0.5, 0, 0]] + [[0, 0, 0]] * (BINS - 2)),
        ("bins", [[-1, 0, 0], [5, 0, 0]] + [[0, 0, 0]] * (BINS - 2)),
        ("domains", []),
        ("domains", {"photo": [4, 5]}),
        ("domains", {"photo": [0, 0]}),
        ("domains", {"photo": [4.0, 3]}),
        ("domains", {"photo": [True, True]}),
        ("domains", {"photo": [4]}),
        ("domains", {"photo": None}),
        ("domains", {"photo": [10**16, 3]}),
        ("domains", {str(place): [1, 1] for place in range(MOST_RESULTS + 1)}),
        ("diagnostics", {"gate": "high"}),
        ("diagnostics", {"gate": float("-inf")}),
        ("diagnostics", {"gate": 1e20}),
        ("diagnostics", {"gate": {}}),
        ("diagnostics", {str(place): 1.0 for place in range(MOST_RESULTS + 1)}),
        ("diagnostics", None),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_figures_that_cannot_be_are_refused(name: str, value: Any) -> None:
    assert read_result(RESULT.to_json()) == RESULT
    with pytest.raises(ValueError, match=r"^result"):
        read_result({**RESULT.to_json(), name: value})


def test_which_images_are_right_is_not_sent() -> None:
    """Also where a node has it: a message has no place for it, and one that makes a place is refused."""
    told = Answer.from_bytes(Answer(result=replace(RESULT, hits="/w==")).to_bytes())
    assert told.result == RESULT
    with pytest.raises(ValueError, match="have exactly"):
        read_result({**RESULT.to_json(), "hits": "/w=="})


def test_figures_a_little_below_nought_are_a_matter_of_rounding() -> None:
    """Of images that a client is all but certain of."""
    assert read_result({**RESULT.to_json(), "nll": -1e-7, "entropy": -1e-7}).nll == -1e-7


@given(ANYTHING)
def test_no_other_value_is_a_result(value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_result(value)
    for name in RESULT.to_json():
        try:
            read_result({**RESULT.to_json(), name: value})
        except ValueError:
            continue


def framed(header: bytes, tensors: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + len(tensors).to_bytes(8, "little") + header + tensors


@pytest.mark.parametrize(
    "blob",
    [
        framed(b"[" * 10**6),
        framed(b'{"format":' * 10**5),
        framed(b'{"format": "a", "format": "b"}'),
        framed(b'{"failure": NaN}'),
        framed(b'{"failure": 1e999}'),
        framed(b'{"failure": "\\ud800"}'),
        framed(b'{"failure": "\xff"}'),
        framed(b'"text"'),
        framed(b'{"client": ' + b"9" * 5000 + b"}"),
        framed(json.dumps({str(place): place for place in range(10**5)}).encode()),
        (HEADER_BYTES + 1).to_bytes(8, "little") + bytes(8),
        b"\xff" * 16,
        bytes(16),
    ],
    ids=range(13),
)
def test_bytes_that_mean_harm_are_refused_at_once(blob: bytes) -> None:
    for read, _ in READERS.values():
        begin = time.process_time()
        with pytest.raises(ValueError):  # noqa: PT011
            read(blob)
        assert time.process_time() - begin < 1


def test_an_order_with_tensors_that_are_none_is_refused() -> None:
    frame = Frame.from_bytes(ORDER.to_bytes())
    for tensors in (b"", b"junk", frame.tensors[:-1], frame.tensors + b"\0"):
        with pytest.raises(ValueError, match="stored tensors are damaged"):
            Order.from_bytes(Frame(frame.header, tensors).to_bytes())


@pytest.mark.parametrize("values", [b"[],", b'{"":0},', b"0,"])
def test_a_header_of_very_many_values_is_refused_before_it_is_read(values: bytes) -> None:
    """64 MB of empty lists are some gigabytes in memory."""
    header = b'{"format": [' + values * (MOST_MARKS // 2) + values * (MOST_MARKS // 2) + b"0]}"
    blob = b"".join(size.to_bytes(8, "little") for size in (len(header), 0)) + header
    with pytest.raises(ValueError, match=f"at most {MOST_MARKS} values"):
        Order.from_bytes(blob)
