"""What Prometheus reads of a server and of a node: numbers, with labels that name sites, phases, rules and the run.

No label holds the name of a class, a file or a patient. A rule that is not one of our words becomes `other`, so that a site cannot
write into a label. Needs `prometheus-client` (extra `metrics`).
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fedprompt.deploy.expiry import Term
from fedprompt.deploy.federation_state import FederationState, RunState
from fedprompt.errors import ConfigError

if TYPE_CHECKING:
    from fedprompt.deploy.watch_server import Watch
    from fedprompt.engines.remote.node import Done

PREFIX = "fedprompt_"
_RULE = re.compile(r"[a-z][a-z_]{0,39}")

Labels = dict[str, str]
Sample = tuple[Labels, float]


@dataclass(frozen=True)
class Family:
    """One metric: a gauge, or a counter if its name says `_total`."""

    name: str
    help: str
    samples: tuple[Sample, ...]


class Figures(Protocol):
    """What can be scraped."""

    def families(self) -> Iterable[Family]: ...

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True)
class ServerFigures:
    """The metrics of a server: those of the last look."""

    watch: Watch

    def families(self) -> Iterator[Family]:
        return of_server(self.watch.state, self.watch.ready)

    @property
    def ready(self) -> bool:
        return self.watch.ready


def of_server(state: FederationState | None, ready: bool) -> Iterator[Family]:
    """The metrics of a server."""
    yield _one("ready", "1 if sites can connect.", float(ready))
    if state is None:
        return
    online = [site for site in state.sites if site.connected]
    yield _one("sites_connected", "Sites whose node is connected.", len(online))
    yield _one("sites_absent", "Admitted sites whose node is not connected.", len(state.sites) - len(online))
    samples = tuple(({"site": site.name}, float(site.connected)) for site in state.sites)
    yield Family("site_connected", "1 if the node of the site is connected.", samples)
    yield _days(state.certificates)
    if state.run is not None and not state.run.error:
        yield from of_run(state.run)


def of_run(run: RunState) -> Iterator[Family]:
    """The metrics of the run whose file changed last."""
    about = {"run": run.name}
    yield _one("run_round", "The last committed round.", run.round, about)
    yield _one("run_rounds", "Rounds of the run.", run.rounds, about)
    yield _one("run_finished", "1 after the last round.", float(run.finished), about)
    yield _one("run_changed_timestamp_seconds", "When the run file last changed.", run.changed, about)
    phases = tuple(({**about, "phase": _word(phase)}, spent) for phase, spent in sorted(run.seconds.items()))
    yield Family("run_phase_seconds_total", "Seconds by phase, all rounds.", phases)
    both = (("down", run.bytes_down), ("up", run.bytes_up))
    flows = tuple(({**about, "direction": way}, float(count)) for way, count in both)
    yield Family("run_bytes_total", "Bytes of tensors to sites (down) and of accepted updates (up).", flows)
    for kind, help in (
        ("refused", "Updates that were refused, by rule."),
        ("absent", "Updates that did not come, or not in time, by rule."),
        ("untested", "Evaluations that gave no figures, by rule."),
        ("late", "Updates that counted in a later round."),
    ):
        found = Counter[str]()
        for rule, count in run.counted(kind).items():
            found[_word(rule)] += count
        rules = tuple(({**about, "rule": rule}, float(count)) for rule, count in sorted(found.items()))
        yield Family(f"run_{kind}_total", help, rules)
    by_site = Counter(each.site for each in run.incidents if each.kind == "absent")
    yield Family(
        "site_absent_total",
        "Rounds in which a site sent nothing, or nothing in time.",
        tuple(({**about, "site": name}, float(by_site[name])) for name in run.sites),
    )
    if run.epsilon is not None:
        yield _one("run_epsilon_spent", "Epsilon of the run so far.", run.epsilon, about)
        if run.most_epsilon is not None:
            yield _one(
                "run_epsilon_left", "Epsilon that the run may still spend.", run.most_epsilon - run.epsilon, about
            )


@dataclass
class NodeFigures:
    """The metrics of a node, counted from its start."""

    site: str
    certificates: Callable[[], Iterable[Term]]
    budget: Callable[[], tuple[float, float | None]]
    """Epsilon spent in all runs, and the most that may be spent; None without a limit."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _orders: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=dict)
    _bytes: Counter[str] = field(default_factory=Counter)
    _refused: Counter[str] = field(default_factory=Counter)
    _latest: tuple[str, int] | None = None
    _answers: bool = False

    def done(self, order: Done) -> None:
        """Count an order."""
        with self._lock:
            self._orders[order.kind] += 1
            self._seconds[order.kind] = self._seconds.get(order.kind, 0.0) + order.seconds
            self._bytes["down"] += order.bytes_in
            self._bytes["up"] += order.bytes_out
            if order.rule is not None:
                self._refused[_word(order.rule)] += 1
            if order.round is not None:
                self._latest = (order.run, order.round)

    def heard(self, well: bool) -> None:
        """Note whether the server answers."""
        self._answers = well

    @property
    def ready(self) -> bool:
        """Whether the server answers. During a long order nothing is asked, which does not count against it."""
        return self._answers

    def families(self) -> Iterator[Family]:
        with self._lock:
            orders, seconds, sizes = dict(self._orders), dict(self._seconds), dict(self._bytes)
            refused, latest = dict(self._refused), self._latest
        yield _one("ready", "1 if the server answers this node.", float(self.ready))
        yield _by("node_orders_total", "Orders that were answered, by kind.", "kind", orders)
        yield _by("node_order_seconds_total", "Seconds by kind of order.", "phase", seconds)
        yield _by("node_bytes_total", "Bytes of orders (down) and answers (up).", "direction", sizes)
        yield _by("node_refused_total", "Orders that were refused or failed here, by rule.", "rule", refused)
        if latest is not None:
            yield _one("node_round", "The round of the last order.", latest[1], {"run": latest[0]})
        spent, most = self.budget()
        yield _one("node_epsilon_spent", "Epsilon of all runs so far, by this site's own accounting.", spent)
        if most is not None:
            yield _one("node_epsilon_left", "Epsilon that all runs may still spend.", most - spent)
        yield _days(self.certificates())


def exposition(families: Iterable[Family]) -> bytes:
    """Prometheus's text format."""
    client = _prometheus()
    registry = client.CollectorRegistry()
    registry.register(_Collected(list(families), client))
    return bytes(client.generate_latest(registry))


def check_prometheus() -> None:
    """Raise unless prometheus-client is installed."""
    _prometheus()


class _Collected:
    def __init__(self, families: Iterable[Family], client: Any) -> None:
        self._families, self._client = families, client

    def collect(self) -> Iterator[Any]:
        core = self._client.core
        for family in self._families:
            names = list(family.samples[0][0]) if family.samples else []
            counts = family.name.endswith("_total")
            kind = core.CounterMetricFamily if counts else core.GaugeMetricFamily
            metric = kind(PREFIX + family.name, family.help, labels=names)
            for labels, value in family.samples:
                metric.add_metric([labels[name] for name in names], value)
            yield metric


def _prometheus() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise ConfigError("--metrics needs prometheus-client: pip install 'fedprompt[metrics]'") from None
    return prometheus_client


def _one(name: str, help: str, value: float, labels: Labels | None = None) -> Family:
    return Family(name, help, ((labels or {}, float(value)),))


def _by(name: str, help: str, label: str, values: dict[str, Any]) -> Family:
    return Family(name, help, tuple(({label: key}, float(value)) for key, value in sorted(values.items())))


def _days(terms: Iterable[Term]) -> Family:
    samples = tuple(({"certificate": term.kind}, float(term.days)) for term in terms)
    return Family("certificate_days_left", "Days until a certificate expires.", samples)


def _word(rule: str) -> str:
    return rule if _RULE.fullmatch(rule) else "other"
