"""Orders of a server to a node, and the node's answers, as bytes. Free of Flower, which only transports them.

Both sides check every message against the rules here before they use it; a `ValueError` names the broken rule. No field can
carry a client's own tensors: they stay at the node, and an order contains only the number under which they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedprompt import __version__
from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.data.sources.base import MOST_NAMES
from fedprompt.engines.framing import Frame
from fedprompt.errors import RunError, broken
from fedprompt.metrics.accuracy import STAYING, ClientResult, is_result
from fedprompt.metrics.calibration import BINS
from fedprompt.tensors import Tensors

FORMAT = "fedprompt-order-2"
MOST_NUMBER = 2**62  # upper limit for numbers of states, rounds and clients
MOST_CLIENTS = 100_000  # sites of a run
MOST_RESULTS = 10_000  # domains or diagnostics in the report of one client
LONGEST_NAME = 200  # characters: of a site, a domain or a diagnostic
LONGEST_TEXT = 2000  # characters of a sentence from a node
ROUNDING = (
    1e-5  # how far the value of one image may be below 0: rounded probabilities may add up to slightly more than 1
)
LARGEST_FIGURE = 1e15  # for any number in an evaluation, so that sums over clients stay finite
RUN = re.compile(r"[0-9a-f]{32}")
RULE = re.compile(r"[a-z_]{1,40}")

Kind = Literal["meet", "survey", "work"]


@dataclass(frozen=True)
class Setting:
    """The settings of a run for a node; the same in all orders of the run."""

    run: str
    """The id of the run: 32 hexadecimal digits."""
    config: Mapping[str, Any]
    backbone: str
    """The digest of the frozen weights."""
    class_names: tuple[str, ...] | None = None
    """Agreed between the sites at the start; None if the config names the data."""
    client_names: tuple[str, ...] | None = None
    version: str = __version__
    """The server's version of fedprompt: another version may compute different results."""

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "config": dict(self.config),
            "backbone": self.backbone,
            "version": self.version,
            "class_names": None if self.class_names is None else list(self.class_names),
            "client_names": None if self.client_names is None else list(self.client_names),
        }

    @classmethod
    def from_json(cls, values: Any) -> Setting:
        _exactly("setting", values, {"run", "config", "backbone", "version", "class_names", "client_names"})
        _check("setting.run", "be 32 hexadecimal digits", values["run"], is_run(values["run"]))
        _check("setting.config", "be a mapping", values["config"], isinstance(values["config"], dict))
        for name in ("backbone", "version"):
            _check(f"setting.{name}", "be a text", values[name], isinstance(values[name], str))
        most = {"class_names": MOST_NAMES, "client_names": MOST_CLIENTS}
        names = {name: _names(f"setting.{name}", values[name], limit) for name, limit in most.items()}
        return cls(values["run"], values["config"], values["backbone"], **names, version=values["version"])


@dataclass(frozen=True)
class Order:
    """A task for one client. Evaluation comes before training: both begin with the received tensors and the stored state."""

    kind: Kind
    setting: Setting
    client: int = 0
    evaluate: int | None = None
    """The round whose model is evaluated."""
    train: int | None = None
    """The round to train in."""
    state: int | None = None
    """The number of the stored state to begin with; None for a client that never took part."""
    committed: int | None = None
    """The number of the state in the run file: a resumed run may need it again."""
    keep_as: int | None = None
    """The number under which the state after training is stored."""
    received: Tensors = field(default_factory=dict)

    _NUMBERS = ("client", "evaluate", "train", "state", "committed", "keep_as")

    def to_bytes(self) -> bytes:
        numbers = {name: getattr(self, name) for name in self._NUMBERS}
        header = {"format": FORMAT, "kind": self.kind, "setting": self.setting.to_json(), **numbers}
        return Frame(header, wire.encode(self.received)).to_bytes()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Order:
        frame = Frame.from_bytes(blob)
        header = frame.header
        _exactly("order", header, {"format", "kind", "setting", *cls._NUMBERS})
        _check("order.format", f"be {FORMAT!r}", header["format"], header["format"] == FORMAT)
        _check("order.kind", "be meet, survey or work", header["kind"], header["kind"] in ("meet", "survey", "work"))
        for name in cls._NUMBERS:
            value = header[name]
            fine = (value is None and name != "client") or (type(value) is int and 0 <= value < MOST_NUMBER)
            _check(f"order.{name}", f"be a whole number below {MOST_NUMBER}", value, fine)
        try:
            received = wire.decode(frame.tensors)
        except RunError as error:
            raise ValueError(str(error)) from error
        numbers = {name: header[name] for name in cls._NUMBERS}
        return cls(header["kind"], Setting.from_json(header["setting"]), received=received, **numbers)


@dataclass(frozen=True)
class Meeting:
    """How a site introduces itself."""

    name: str
    class_names: tuple[str, ...]
    backbone: str
    """The digest of its frozen weights."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "class_names": list(self.class_names), "backbone": self.backbone}

    @classmethod
    def from_json(cls, values: Any) -> Meeting:
        _exactly("meeting", values, {"name", "class_names", "backbone"})
        for name in ("name", "backbone"):
            value = values[name]
            _check(f"meeting.{name}", "be a short text", value, _is_short_text(value))
        class_names = _names("meeting.class_names", values["class_names"], MOST_NAMES) or ()
        return cls(values["name"], class_names, values["backbone"])


@dataclass(frozen=True)
class Answer:
    """A node's answer: the reason of a failure, or the results."""

    failure: tuple[str, str] | None = None
    """The name of the rule, and a sentence."""
    meeting: Meeting | None = None
    result: ClientResult | None = None
    """Of the evaluation, if any."""
    packed: bytes = b""
    """A reply, packed by `wire.pack`."""
    withheld: tuple[str, str] | None = None
    """Why an update comes without a result: a rule and a sentence."""

    def to_bytes(self) -> bytes:
        header = {
            "format": FORMAT,
            **{
                name: None if reason is None else [reason[0], reason[1][:LONGEST_TEXT]]
                for name, reason in (("failure", self.failure), ("withheld", self.withheld))
            },
            "meeting": None if self.meeting is None else self.meeting.to_json(),
            "result": None if self.result is None else self.result.to_send().to_json(),
        }
        return Frame(header, self.packed).to_bytes()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Answer:
        frame = Frame.from_bytes(blob)
        header = frame.header
        _exactly("answer", header, {"format", "failure", "withheld", "meeting", "result"})
        _check("answer.format", f"be {FORMAT!r}", header["format"], header["format"] == FORMAT)
        meeting, result = header["meeting"], header["result"]
        return cls(
            _reason("answer.failure", header["failure"]),
            None if meeting is None else Meeting.from_json(meeting),
            None if result is None else read_result(result),
            frame.tensors,
            _reason("answer.withheld", header["withheld"]),
        )

    def reply(self, limit: int) -> LocalUpdate | None:
        """Its upload, of at most `limit` bytes; a ContractError names what is wrong with it."""
        return wire.unpack(self.packed, limit) if self.packed else None


def read_result(values: Any) -> ClientResult:
    """Check the figures of an evaluation from an untrusted source."""
    expected = set(ClientResult.__dataclass_fields__) - set(STAYING)
    _exactly("result", values, expected)
    _check("result", "be the figures of an evaluation", values, is_result(values))
    likelihoods = [values[name] for name in ("nll", "entropy", "mutual_information")]
    counts_only = not values["bins"] and likelihoods == [None] * 3
    if not counts_only:
        _check("result.bins", f"have {BINS} rows", len(values["bins"]), len(values["bins"]) == BINS)
    figures = [values["samples"], values["correct"], *([] if counts_only else likelihoods)]
    figures += [number for row in values["bins"] for number in row] + list(values["diagnostics"].values())
    for group in ("domains", "diagnostics"):
        _check(f"result.{group}", f"have at most {MOST_RESULTS} rows", group, len(values[group]) <= MOST_RESULTS)
        for name in values[group]:
            _check(f"result.{group}", "have short texts as names", name, _is_short_text(name))
    for counts in values["domains"].values():
        fine = isinstance(counts, list) and len(counts) == 2 and all(type(each) is int for each in counts)
        _check("result.domains", "count images and hits", counts, fine and 0 <= counts[1] <= counts[0] != 0)
        figures += counts
    for number in figures:
        fine = type(number) in (int, float) and abs(number) <= LARGEST_FIGURE  # false for NaN
        _check("result", f"hold numbers of at most {LARGEST_FIGURE:g}", number, fine)
    if counts_only:
        return ClientResult(**values)
    counted = sum(row[0] for row in values["bins"] if all(number >= 0 for number in row))
    _check("result.bins", "count every image once", counted, abs(counted - values["samples"]) < 0.5)
    for name in ("nll", "entropy"):
        _check(f"result.{name}", "be at least 0", values[name], values[name] >= -ROUNDING * values["samples"])
    return ClientResult(**values)


def _is_short_text(value: object) -> bool:
    """Whether it is safe to print on a terminal."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _printable(text: str) -> str:
    """Text of a node, made safe to print on a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)


def is_run(value: object) -> bool:
    return isinstance(value, str) and RUN.fullmatch(value) is not None


def _names(what: str, values: Any, most: int) -> tuple[str, ...] | None:
    if values is None:
        return None
    fine = isinstance(values, list) and len(values) <= most and all(isinstance(name, str) for name in values)
    _check(what, f"be a list of names, {most} at most", values, fine)
    return tuple(values)


def _reason(what: str, value: Any) -> tuple[str, str] | None:
    """A rule and a sentence of a node, safe to print."""
    if value is None:
        return None
    fine = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    _check(what, "be a rule and a sentence", value, fine)
    return (value[0] if RULE.fullmatch(value[0]) else "node", _printable(value[1][:LONGEST_TEXT]))


def _exactly(what: str, values: Any, names: set[str]) -> None:
    _check(what, f"have exactly {', '.join(sorted(names))}", values, isinstance(values, dict) and set(values) == names)


def _check(what: str, rule: str, value: object, holds: bool) -> None:
    if not holds:
        raise ValueError(broken(what, rule, value))
