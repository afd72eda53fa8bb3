"""What a federation of 1,000, 10,000 and 100,000 clients costs when 20 of them are picked in a round.

Every size runs in a process of its own: the real command path (`Experiment.run`, the in-process engine, run.db) on images that
are made from their number when they are asked for, 4 for training and 2 for testing per client, the `tiny` backbone,
FedVPT with a head that stays with the client, and 20 clients that stand for all in evaluations.

Reported: seconds from the start of the process to the first cohort (imports included), of making the partition, of a median
round and its phases, and of resuming the finished run; resident memory at the first cohort, at most, and at the end; the size
of run.db. CPU time is what other work on the machine hardly changes.

    python benchmarks/speed/scale.py [--sizes 1000 10000 100000] [--rounds 10] [--scheme iid]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedprompt.data.sources.base import Source

COHORT = TESTED = 20
CLASSES = 10
TRAIN, TEST = 4, 2  # images of a client
SIDE = 32


class MadeUp(Source):
    """Images that exist as numbers only: a plain colour by label and a pattern by index."""

    def __init__(self, clients: int) -> None:
        self.name = "made up"
        self.class_names = tuple(f"class {label}" for label in range(CLASSES))
        self.domain_names = ("all",)
        images = clients * (TRAIN + TEST)
        self.labels = np.arange(images) % CLASSES
        self.domains = np.broadcast_to(np.int64(0), images)
        self.splits = None
        self.fingerprint = f"{clients:064d}"

    def image(self, index: int) -> Image.Image:
        pixels = np.full((SIDE, SIDE, 3), 20 * int(self.labels[index]), dtype=np.uint8)
        pixels[index % SIDE] = index % 251
        return Image.fromarray(pixels)


def settings(clients: int, rounds: int, scheme: str, folder: Path) -> dict[str, Any]:
    partition = {"scheme": scheme, "clients": clients, "alpha": 100.0}
    return {
        "name": "scale",
        "seed": 0,
        "data": {"source": "tiny", "test_fraction": TEST / (TRAIN + TEST)},
        "partition": partition,
        "backbone": {"name": "tiny"},
        "method": {"name": "fedvpt", "prompt_tokens": 2},
        "train": {"lr": 0.05, "batch_size": 4},
        "federation": {"rounds": rounds, "fraction": COHORT / clients, "evaluate_clients": TESTED},
        "output": {"directory": str(folder / "runs"), "cache": str(folder / "cache"), "threads": 1},
    }


def megabytes_now() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_one(clients: int, rounds: int, scheme: str, folder: Path, started: float) -> dict[str, Any]:
    """One size, in this process; `started` is the wall clock when it was started."""
    from fedprompt.client import factory
    from fedprompt.config import DataConfig, PartitionConfig
    from fedprompt.data.partition.divide import make_manifest
    from fedprompt.data.partition.manifest import Manifest
    from fedprompt.experiment import Experiment
    from fedprompt.federation.loop import Observer
    from fedprompt.runs.store import RoundRecord

    class Watch(Observer):
        def __init__(self) -> None:
            self.first = self.busy = self.megabytes = 0.0
            self.ends: list[float] = []
            self.busy_ends: list[float] = []

        def cohort(self, round: int, clients: Sequence[int]) -> None:
            if not self.first:
                self.first, self.busy, self.megabytes = time.time(), time.process_time(), megabytes_now()

        def committed(self, record: RoundRecord) -> None:
            self.ends.append(time.time())
            self.busy_ends.append(time.process_time())

    partition_seconds: list[float] = []

    def timed_manifest(source: Source, data: DataConfig, partition: PartitionConfig, seed: int) -> Manifest:
        begin = time.process_time()
        made = make_manifest(source, data, partition, seed)
        partition_seconds.append(time.process_time() - begin)
        return made

    source = MadeUp(clients)
    factory.open_both = lambda data, cache: (source, None)  # type: ignore[assignment]  # the one thing that is not real
    factory.make_manifest = timed_manifest
    watch = Watch()
    experiment = Experiment(settings(clients, rounds, scheme, folder))
    run = experiment.run(observer=watch)
    records = run.rounds()[1:]
    phases = sorted({phase for record in records for phase in record.seconds})
    run.close()
    found = {
        "clients": clients,
        "seconds to the first cohort": watch.first - started,
        "CPU seconds to the first cohort": watch.busy,
        "CPU seconds of the partition": partition_seconds[0],
        "seconds of a round": statistics.median(np.diff([watch.first, *watch.ends])),
        "CPU seconds of a round": statistics.median(np.diff([watch.busy, *watch.busy_ends])),
        "of which": {
            phase: statistics.median(record.seconds.get(phase, 0.0) for record in records) for phase in phases
        },
        "MB at the first cohort": watch.megabytes,
        "MB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "MB at the end": megabytes_now(),
        "MB of run.db": (run.directory / "run.db").stat().st_size / 2**20,
    }
    begin = time.process_time()
    experiment.run(resume=True).close()
    return {**found, "CPU seconds to resume": time.process_time() - begin}


def run_apart(clients: int, rounds: int, scheme: str) -> dict[str, Any]:
    """One size, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        child = ["--child", folder, "--sizes", str(clients), "--rounds", str(rounds), "--scheme", scheme]
        command = [sys.executable, __file__, *child, "--started", str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scheme", default="iid")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_one(options.sizes[0], options.rounds, options.scheme, options.child, options.started)))
        return
    rows = []
    for clients in options.sizes:
        rows.append(run_apart(clients, options.rounds, options.scheme))
        print(json.dumps(rows[-1], indent=1))
    report = {
        "cohort": COHORT,
        "tested": TESTED,
        "rounds": options.rounds,
        "scheme": options.scheme,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "sizes": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
