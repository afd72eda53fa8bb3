"""What a round costs by method: bytes, seconds of the server, storage. Sizes are declared ones, seconds are measured and fitted.

*Sizes.* Every registered method declares its tensors in a world of the size of ViT-B/16 (width 768, 12 blocks, 197 tokens), with
a text side of the size of CLIP's (width 512) where it reads class names, 100 classes, default settings. What it downloads is
asked of the method after one aggregation, so that a pool is filled.

*Seconds of the server.* Real rounds (`Federation`, guard, aggregation, run.db) with an engine whose clients answer at once,
for cohorts of 10 to 300, uploads of 10 kB to 3 MB, client states of 4 kB to 300 kB and up to 40 MB that only the server
holds. CPU time of one thread, so that other work on the machine counts little; waiting for the disk is not in it. Fitted by
least squares on relative errors:

    server seconds = a + b * cohort + c * cohort * bytes up + d * cohort * bytes of a client's state
                     + e * bytes of the server's state + f * clients

The last term is drawing the cohort, measured by itself.

*Storage.* A round adds a row, a state for every client that takes part for the first time, and about 0.5 kB for every client that
is tested; the server's state is replaced.

    python benchmarks/speed/cost_model.py [--clients 1000000] [--cohort 100] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedprompt.config import parse
from fedprompt.core import registry, wire
from fedprompt.core.client_sampling import sample_cohort
from fedprompt.core.messages import LocalUpdate
from fedprompt.core.method import Method, Server, Upload, World
from fedprompt.core.roles import Roles
from fedprompt.data.partition.client_names import NumberedNames
from fedprompt.federation.aggregate import weighted_mean
from fedprompt.federation.loop import Federation, Observer
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.modules.contexts import Language
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.runs.store import RoundRecord, RunStore
from fedprompt.tensors import Tensors

CLASSES = 100
TEXT_WIDTH = FEATURES = 512
FLOAT = 4  # bytes of a number
RESULT = 500  # bytes of one client's result in run.db; as many clients are tested as train


def language() -> Language:
    """A text side that has a size and nothing else."""
    return Language(
        width=TEXT_WIDTH,
        features=FEATURES,
        scale=100.0,
        words=lambda text: torch.ones(len(text.split()), TEXT_WIDTH),
        encode=lambda contexts, position: torch.ones(len(contexts), CLASSES, FEATURES),
        room=60,
    )


def world_of(method: Method, clients: int) -> World:
    """A world of the size of ViT-B/16 or CLIP, with the method's tensors declared."""
    names = tuple(f"class {label}" for label in range(CLASSES))
    text = language() if method.uses_text else None
    world = World(768, 12, 197, 16, names, NumberedNames(clients), language=text)
    return replace(world, roles=method.init(world, stream(0, 0, SERVER, "init")))


def steady_download(method: Method, world: World, cohort: int) -> Tensors:
    """What client 0 gets once the server has aggregated, where it needs no statistics for that."""
    roles = world.roles
    server = Server(roles.shared, roles.server)
    if not roles.stat and roles.shared:
        uploads = [Upload(client, roles.shared, 1 / cohort) for client in range(cohort)]
        server = method.aggregate(world, server, uploads, weighted_mean)
    return method.download(world, server, 0)


def sizes(name: str, cls: type[Method], cohort: int) -> dict[str, Any]:
    """Bytes of one participation and of what is kept, by role; what grows with the clients is told apart."""
    method = cls()
    few, many = world_of(method, 1_000), world_of(method, 2_000)
    numbers = {
        when: sum(int(np.prod(each.shape)) for each in few.roles.statistics(when).values())
        for when in ("start", "round")
    }
    server_few, server_many = (wire.size_in_bytes(world.roles.server) for world in (few, many))
    shared = wire.size_in_bytes(few.roles.shared)
    return {
        "method": name,
        "down": wire.size_in_bytes(steady_download(method, few, cohort)),
        "up": shared + FLOAT * numbers["round"],
        "survey": FLOAT * numbers["start"],
        "client state": len(wire.encode(few.roles.local)),
        "server state": shared + server_few - (server_many - server_few),
        "server state per client": (server_many - server_few) / 1_000,
    }


@dataclass
class Instant:
    """Clients that answer at once: what is left of a round is the server."""

    upload: Tensors
    state: bytes

    def __post_init__(self) -> None:
        self._answered: list[int] = []

    def survey(self, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        return iter(())

    def train(self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]) -> Iterator[LocalUpdate]:
        for client in clients:
            download(client)
            self._answered.append(client)
            yield LocalUpdate(client, round, self.upload, 10, 0.5)

    def evaluate(
        self, round: int, clients: Sequence[int], download: Callable[[int], Tensors]
    ) -> Iterator[tuple[int, ClientResult]]:
        return iter(())

    def discard(self, clients: Iterable[int]) -> None: ...

    def take_states(self) -> dict[int, bytes]:
        answered, self._answered = self._answered, []
        return dict.fromkeys(answered, self.state)


class Stopwatch(Observer):
    """CPU seconds between commits."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def committed(self, record: RoundRecord) -> None:
        self.ends.append(time.process_time())


@dataclass(frozen=True)
class Averaged(Method):
    """One shared tensor of any size, and one of the server's own."""

    numbers: int = 1
    own: int = 1

    def init(self, world: World, generator: Stream) -> Roles:
        shared, own = (generator.normal(count) for count in (self.numbers, self.own))
        return Roles(shared={"prompt": shared}, server={"own": own})


def server_seconds(cohort: int, numbers: int, own: int, kept: int, rounds: int, folder: Path) -> float:
    """The median round of a server with 1,000 clients that cost nothing and keep so many numbers."""
    clients = 1_000
    settings = {"rounds": rounds, "fraction": cohort / clients, "evaluate_every": rounds}
    config = parse(
        {"name": f"{cohort}-{numbers}-{own}-{kept}", "federation": settings, "output": {"directory": str(folder)}}
    )
    method = Averaged(numbers, own)
    world = World(8, 1, 5, 4, ("a", "b"), NumberedNames(clients))
    world = replace(world, roles=method.init(world, stream(0, 0, SERVER, "init")))
    store = RunStore.create(config.run_directory, {"config": config.model_dump(mode="json")})
    watch, engine = Stopwatch(), Instant(world.roles.shared, wire.encode({"head": torch.randn(kept)}))
    try:
        Federation(config, world, method, engine, store, watch).run()
    finally:
        store.close()
    return statistics.median(np.diff(watch.ends))


def drawing_seconds(clients: int, repeats: int = 9) -> float:
    """The median draw of a cohort of 100."""
    found = []
    for round in range(repeats):
        begin = time.process_time()
        sample_cohort(0, round, range(clients), 100 / clients)
        found.append(time.process_time() - begin)
    return statistics.median(found)


def measurements(rounds: int) -> list[dict[str, float]]:
    """Cohorts, uploads and states of different sizes."""
    plans = [
        (cohort, numbers, 1, 1_000) for cohort in (10, 30, 100, 300) for numbers in (2_500, 25_000, 250_000, 750_000)
    ]
    plans = [plan for plan in plans if plan[0] * plan[1] <= 30_000_000]  # 120 MB of uploads
    plans += [(10, 2_500, own, 1_000) for own in (100_000, 1_000_000, 10_000_000)]
    plans += [(cohort, 2_500, 1, kept) for cohort in (10, 30, 100) for kept in (10_000, 75_000)]
    with tempfile.TemporaryDirectory() as folder:
        return [
            {
                "cohort": cohort,
                "bytes": FLOAT * numbers,
                "client state": FLOAT * kept,
                "server state": FLOAT * (numbers + own),
                "seconds": server_seconds(cohort, numbers, own, kept, rounds, Path(folder)),
            }
            for cohort, numbers, own, kept in plans
        ]


def factors(cohort: float, up: float, client_state: float, server_state: float) -> list[float]:
    """What a to e of the docstring are multiplied with."""
    return [1.0, cohort, cohort * up, cohort * client_state, server_state]


def fitted(rows: list[dict[str, float]]) -> dict[str, float]:
    """a to e of the docstring."""
    terms = np.array([factors(row["cohort"], row["bytes"], row["client state"], row["server state"]) for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    found, *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(rows)), rcond=None)
    error = np.abs(terms @ found / seconds - 1)
    named = dict(zip("abcde", found.tolist(), strict=True))
    return {**named, "median relative error": float(np.median(error)), "worst relative error": float(error.max())}


def predicted(row: dict[str, Any], fit: dict[str, float], clients: int, cohort: int) -> dict[str, Any]:
    """A round of a federation of any size."""
    server_state = row["server state"] + row["server state per client"] * clients
    terms = factors(cohort, row["up"], row["client state"], server_state)
    seconds = sum(fit[name] * term for name, term in zip("abcde", terms, strict=True)) + fit["f"] * clients
    return {
        "MB down a round": cohort * row["down"] / 1e6,
        "MB up a round": cohort * row["up"] / 1e6,
        "server seconds a round": seconds,
        "MB stored a round": cohort * (row["client state"] + RESULT) / 1e6,
        "MB of server state": server_state / 1e6,
        "GB of the survey": clients * row["survey"] / 1e9,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: sizes of one participation, then the prediction."""

    def written(value: float, digits: int = 1) -> str:
        return f"{value:,.{digits}f}" if value else "–"

    head = "method | down kB | up kB | client state kB | server state kB | survey kB | MB down | MB up | server s | stored MB"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in rows:
        ahead, grows = row["predicted"], row["server state per client"]
        state = written(row["server state"] / 1e3) + (f" + {grows / 1e3:.1f} per client" if grows else "")
        cells = [written(row[key] / 1e3) for key in ("down", "up", "client state")] + [
            state,
            written(row["survey"] / 1e3),
        ]
        cells += [written(ahead[f"MB {way} a round"]) for way in ("down", "up")]
        cells += [written(ahead["server seconds a round"], 2), written(ahead["MB stored a round"])]
        lines.append(f"| `{row['method']}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = measurements(options.rounds)
    draws = {clients: drawing_seconds(clients) for clients in (1_000, 10_000, 100_000, 1_000_000)}
    fit = fitted(measured) | {"f": draws[1_000_000] / 1_000_000}
    rows = [sizes(name, cls, options.cohort) for name, cls in registry.methods().items()]
    rows = [{**row, "predicted": predicted(row, fit, options.clients, options.cohort)} for row in rows]
    print(json.dumps(fit, indent=1), json.dumps(draws), table(rows), sep="\n")
    report = {
        "clients": options.clients,
        "cohort": options.cohort,
        "classes": CLASSES,
        "fit": fit,
        "seconds of drawing a cohort": draws,
        "measured": measured,
        "methods": rows,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
