"""The pool of pFedMoAP at up to 100,000 prompts: what its search costs, and what the approximate one finds.

A run file is filled with prompts, and a cohort of 100 clients asks for its 9 nearest neighbours, as in a round. Each search runs in
a fresh process with one thread. Seconds are CPU time, so that other work on the machine counts little; megabytes are the peak of
the process beyond what it held before the pool was opened.

* `exact`: one pass over the run file in bounded blocks (`modules/knn.py`).
* `approximate`: building the index (once per process), then a cohort. Below 20,000 rows a federation searches exactly anyway.
  Recall is the share of the exact neighbours it finds, the distance how far away those are that it finds, over that of the exact ones.
* `one by one`: the naive search for two of the clients with all rows in memory, times 50.

Prompts are random (independent normal numbers: nobody is really near to anybody, the worst case of any index), clustered (200 centres with
normal numbers around them), or spread in 16 directions with a little noise, as prompts are that start from one and learn from data that
differ in a few ways.

    python benchmarks/speed/pool.py [--sizes 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprompt.core.pool import Pool
from fedprompt.federation import pool_index
from fedprompt.federation.stored_pool import StoredRows
from fedprompt.runs.store import RoundRecord, RunReader, RunStore

COHORT, WANTED = 100, 9
SHORT, LONG = (4, 512), (16, 512)
AT_ONCE = 5000  # rows of a commit
PROMPTS = ("random", "clustered", "directions")
ONE_BY_ONE = 2  # clients of the naive search

Finding = dict[str, Any]


def prompts(kind: str, count: int, shape: tuple[int, ...], start: int) -> Tensor:
    """Rows from number `start` on, by a seed of their own."""
    fixed, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(start + 1)
    noise = torch.randn(count, *shape, generator=generator)
    if kind == "random":
        return 0.02 * noise
    if kind == "clustered":
        centres = 0.02 * torch.randn(200, *shape, generator=fixed)
        return centres[torch.randint(200, (count,), generator=generator)] + 0.005 * noise
    directions = torch.randn(16, *shape, generator=fixed)
    return (
        0.02 * torch.einsum("cz,z...->c...", torch.randn(count, 16, generator=generator), directions) / 4 + 1e-3 * noise
    )


def fill(folder: Path, kind: str, count: int, shape: tuple[int, ...]) -> float:
    """Seconds to write a pool, all commits together."""
    store, spent = RunStore.create(folder, {}), 0.0
    kept = StoredRows(store)
    for round, start in enumerate(range(0, count, AT_ONCE)):
        rows = prompts(kind, min(AT_ONCE, count - start), shape, start)
        pool = Pool(kept).with_rows(dict(enumerate(rows, start)))
        begin = time.process_time()
        store.commit(RoundRecord(round, [], None, 0, 0, None, {}), b"", b"", {}, {}, pool=kept.change(pool))
        kept.committed(pool)
        spent += time.process_time() - begin
    store.close()
    return spent


def search(folder: Path, approximate: bool) -> Finding:
    """One cohort, in this process."""
    torch.set_num_threads(1)
    pool_index.LEAST = 0  # measured even where a federation would not use it
    before, kept = peak_megabytes(), StoredRows(RunReader(folder))
    pool = Pool(kept)
    every = len(pool.clients) // COHORT
    cohort = pool.clients[::every][:COHORT].tolist()
    begin, found = time.process_time(), {}
    if approximate:
        pool.nearest(cohort[0], WANTED, True)
        found["CPU seconds to build"] = time.process_time() - begin
        begin = time.process_time()
    asked = pool.for_clients(cohort)
    neighbours = [asked.nearest(client, WANTED, approximate) for client in cohort]
    found |= {"CPU seconds": time.process_time() - begin, "MB": peak_megabytes() - before}
    found["distance"] = sum(mean_distance(pool, *pair) for pair in zip(cohort, neighbours, strict=True)) / COHORT
    return {**found, "neighbours": neighbours}


def mean_distance(pool: Pool, client: int, neighbours: list[int]) -> float:
    own, *others = pool.rows([client, *neighbours])
    return float(sum((other - own).norm() for other in others)) / len(others)


def one_by_one(folder: Path) -> Finding:
    torch.set_num_threads(1)
    kept = StoredRows(RunReader(folder))
    rows = kept.chosen(kept.clients().tolist())
    begin = time.process_time()
    for client in list(rows)[:ONE_BY_ONE]:
        own = rows[client].double()
        sorted((float((row - own).square().sum()), other) for other, row in rows.items() if other != client)
    return {"CPU seconds": (time.process_time() - begin) * COHORT / ONE_BY_ONE}


def peak_megabytes() -> float:
    """The most this process held so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def apart(folder: Path, way: str) -> Finding:
    """A search in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", way, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: Finding = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(kind: str, count: int, shape: tuple[int, ...], ways: tuple[str, ...]) -> Finding:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = fill(folder, kind, count, shape)
        found = {way: apart(folder, way) for way in ways}
    exact, distance = found["exact"].pop("neighbours"), found["exact"].pop("distance")
    if "approximate" in found:
        found["approximate"]["distance, exact = 1"] = found["approximate"].pop("distance") / distance
        pairs = zip(exact, found["approximate"].pop("neighbours"), strict=True)
        found["approximate"]["recall"] = sum(len(set(a) & set(b)) for a, b in pairs) / (COHORT * WANTED)
    commit = written * COHORT / count
    return {"prompts": kind, "rows": count, "shape": list(shape), "CPU seconds to write a cohort": commit, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", choices=["exact", "approximate", "one by one"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        one = options.child == "one by one"
        print(json.dumps(one_by_one(options.folder) if one else search(options.folder, options.child == "approximate")))
        return
    rows = []
    for count in options.sizes:
        for kind in PROMPTS:
            naive = ("one by one",) if kind == PROMPTS[0] and count <= 10_000 else ()
            rows.append(measure(kind, count, SHORT, ("exact", "approximate", *naive)))
            print(json.dumps(rows[-1]))
    rows.append(measure("random", 10_000, LONG, ("exact",)))
    print(json.dumps(rows[-1]))
    report = {
        "cohort": COHORT,
        "neighbours": WANTED,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "pools": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
