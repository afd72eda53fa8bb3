"""All speed figures of the project in one run: one table of ratios, and `bench.json` with everything behind it.

Ratios only: ours and the alternative take turns in processes that are warm, with one thread each, and medians are compared.
What a row measures is in README.md. A part that cannot be measured here says why in its row, and the rest goes on.

    make bench
    make bench DATA=folder   # whole jobs on real images: pacs.parquet and caltech101.parquet; else on embedded ones
    python benchmarks/speed/bench.py [--only toy clip vit start jobs] [--repeats 5] [--steps 1] [--data FOLDER] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import whole_jobs
import yaml
from peers import QUIET, REQUIREMENTS, Unavailable, environment, peak_megabytes, printed, take_turns
from toy import job

HERE = Path(__file__).resolve().parent
STEP_SECONDS = 1800  # the longest a part may take
MINUTES = 24  # after which no further job begins: the whole benchmark is to end within 25 on an idle machine
SHORTEST_ESTIMATE = 2.0  # seconds of rounds
LARGEST_ERROR = 30  # per cent, of an estimate before a run
POINTS_APART = 0.03  # of accuracy, that two sides of the toy job may be at its end
START = {
    "data": {"source": "embedded", "train_per_cell": 10, "test_per_cell": 10},
    "partition": {"scheme": "domains", "clients": 6, "domains_per_client": 2},
    "backbone": {"name": "dinov2-small", "image_size": 56, "stem": 8},
    "train": {"batch_size": 5},
    "federation": {"rounds": 1, "fraction": 0.2, "evaluate_clients": 1},
    "method": {"name": "fedvpt", "prompt_tokens": 4},
}  # one round of the demo, with one client


@dataclass(frozen=True)
class Row:
    """One line of the table. `figure` is what `target` is about; without a figure `why` tells what was in the way."""

    what: str
    ours: str = "-"
    other: str = "-"
    figure: float | None = None
    unit: str = "x"
    target: float | None = None
    at_most: bool = False
    why: str = ""

    @property
    def met(self) -> bool | None:
        """Nothing where there is no target or no figure."""
        if self.figure is None or self.target is None:
            return None
        return self.figure <= self.target if self.at_most else self.figure >= self.target

    def cells(self) -> tuple[str, ...]:
        figure = "-" if self.figure is None else f"{self.figure:.3g} {self.unit}"
        target = "-"
        if self.target is not None:
            verdict = {True: ", met", False: ", missed", None: ""}[self.met]
            target = f"{'<=' if self.at_most else '>='} {self.target:g} {self.unit}{verdict}"
        return self.what, self.ours, self.other, figure, f"{target} ({self.why})" if self.why else target


@dataclass(frozen=True)
class Part:
    """What a part of the benchmark found."""

    rows: list[Row]
    figures: dict[str, Any]


def told(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def median(found: Sequence[dict[str, float]], kind: str) -> float:
    """Of the seconds of a round."""
    return statistics.median(each[kind] for each in found) / job.ROUNDS


def toy(repeats: int, steps: int) -> Part:
    """(a) and (e): the toy job of every side, in pairs with ours."""
    sides: dict[str, tuple[str, float | None, Callable[[], str]]] = {
        "bare": ("(a) toy round: bare PyTorch loop", 3, lambda: sys.executable),
        "pfl_research": ("(a) toy round: pfl-research", 4, lambda: str(environment("pfl"))),
        "flower": ("(a) toy round: Flower on Ray, steady", 40, lambda: str(environment("flower"))),
        "arithmetic": ("(e) toy round: its arithmetic alone", None, lambda: sys.executable),
    }
    rows, figures = [], {}
    for side, (what, target, python) in sides.items():
        try:
            found = toy_pair(side, python(), repeats)
        except Unavailable as error:
            rows.append(Row(what, target=target, why=str(error)))
            continue
        figures[side] = found
        own, other = (median(found[name], "wall") for name in ("ours", side))
        rows.append(Row(what, told(own), told(other), other / own, target=target))
        if side == "arithmetic":
            cost = 1e3 * (own - other) / job.COHORT
            rows.append(Row("(e) framework, per client", figure=cost, unit="ms", target=0.15, at_most=True))
    return Part(rows, figures)


def toy_pair(side: str, python: str, repeats: int) -> dict[str, list[Any]]:
    """The answers of our engine and of another side, which must learn the same."""
    with tempfile.TemporaryDirectory(prefix="fb") as folder:  # a short name: Ray makes sockets in it
        data = Path(folder) / "toy.npz"
        job.write(data)
        commands = {
            "ours": [sys.executable, str(HERE / "toy" / "ours.py"), str(data)],
            side: [python, str(HERE / "toy" / f"{side}.py"), str(data), folder],
        }
        found = take_turns(commands, repeats, {**QUIET, "FLWR_HOME": folder, "PYTHONPATH": str(HERE / "toy")})
    require_same_result(found["ours"], found[side])
    return found


def require_same_result(ours: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> None:
    """Times of sides that learn different things cannot be compared; the arithmetic alone learns nothing."""
    expected = ours[0]["accuracy"]
    for each in other:
        if abs(each.get("accuracy", expected) - expected) > POINTS_APART:
            raise Unavailable(f"learned something else: {each['accuracy']:.3f} are right, {expected:.3f} of ours")


def clip(repeats: int, steps: int) -> Part:
    """(b): one step of text-prompt tuning."""
    found = printed([sys.executable, str(HERE / "clip_step.py"), f"--repeats={steps}"], STEP_SECONDS)
    rows = [
        Row(what, told(own["ours"]), told(own["naive"]), own["naive"] / own["ours"], target=target)
        for what, own, target in (
            ("(b) text-prompt step, CLIP B/16, 100 classes", found["median"], 20),
            ("(b) of which the text side", found["median_of_text"], None),
        )
    ]
    return Part(rows, found)


def vit(repeats: int, steps: int) -> Part:
    """(c) and (d): one step of visual prompt tuning, and how near it comes to the peak."""
    found = printed([sys.executable, str(HERE / "vit_step.py"), f"--repeats={steps}"], STEP_SECONDS)
    own, peak = found["median"], f"{found['peak_gflops_per_second']:.3g} GFLOP/s"
    share = 100 * found["share_of_peak"]
    rows = [
        Row(what, told(own["ours"]), told(own[way]), own[way] / own["ours"], target=target)
        for what, way, target in (
            ("(c) visual prompt step, ViT-B/16, deep prompts, queries", "naive", 1.6),
            ("(c) the same against fused attention", "fused", None),
        )
    ]
    speed = f"{found['share_of_peak'] * found['peak_gflops_per_second']:.3g} GFLOP/s"
    return Part([*rows, Row("(d) share of the GEMM peak", speed, peak, share, "%", 70)], found)


def start(repeats: int, steps: int) -> Part:
    """From the start of the process to the first round of a run whose data are in the cache, and the memory of that run."""
    with tempfile.TemporaryDirectory(prefix="fedprompt-start-") as folder:
        config = Path(folder) / "start.yaml"
        config.write_text(yaml.safe_dump({**START, "output": {"directory": folder}}), encoding="utf-8")
        seconds, memory = zip(*(started(config, number) for number in range(1 + repeats)), strict=True)
    waited = statistics.median(seconds[1:])
    rows = [
        Row("start of `fedprompt run` to its first round", figure=waited, unit="s", target=3, at_most=True),
        Row("memory of that run", figure=statistics.median(memory[1:]), unit="MB"),
    ]
    return Part(rows, {"seconds": seconds, "megabytes": memory, "config": START})


def started(config: Path, number: int) -> tuple[float, float]:
    """Seconds until a run says that its rounds begin, and the most memory it had, in MB."""
    name = f"start-{number}"
    command = [sys.executable, "-m", "fedprompt.cli", "run", str(config), f"name={name}"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seconds, said, megabytes = None, "", 0.0
    for line in process.stdout:
        said += line
        megabytes = max(megabytes, peak_megabytes(process.pid))
        if seconds is None and f": {name}-" in line:
            seconds = time.perf_counter() - began
    process.stdout.close()
    process.wait()
    if process.returncode or seconds is None:
        raise Unavailable(f"the run failed: {said.strip().splitlines()[-1][:200] if said.strip() else 'silently'}")
    return seconds, megabytes


def jobs(data: Path | None, until: float, letters: Sequence[str] = ()) -> Part:
    """(f) to (n), or those with some letters: whole jobs against plain programs."""
    rows: list[Row] = []
    figures: dict[str, Any] = {"peak_gflops_per_second": whole_jobs.gemm_peak() / 1e9}
    for work in whole_jobs.JOBS:
        if letters and work.letter not in letters:
            continue
        name = f"({work.letter}) {work.what}"
        if time.monotonic() > until:
            rows.append(Row(name, target=work.target, why=f"not begun: {MINUTES} minutes were over"))
            continue
        print(f"measuring: {name}", file=sys.stderr)
        try:
            with tempfile.TemporaryDirectory(prefix="fedprompt-job-") as folder:
                found = whole_jobs.measure(work, data, Path(folder))
        except Exception as error:  # one job must not cost the figures of all others
            rows.append(Row(name, target=work.target, why=str(error) or type(error).__name__))
            continue
        figures[work.letter] = found
        rows += job_rows(work, found, 1e9 * figures["peak_gflops_per_second"])
    return Part(rows, figures)


def job_rows(work: whole_jobs.Work, found: dict[str, Any], peak: float) -> list[Row]:
    """The lines on one job."""
    name, cold, warm, plain = f"({work.letter}) {work.what}", found["cold"], found["warm"], found.get("plain")
    why = found.get("why", "" if work.plain else "no plain program is written")
    beside = plain if plain is not None and not why else None
    rows = [
        Row(
            f"{name}, {which}",
            told(own["wall"]),
            "-" if plain is None else told(plain["wall"]),
            None if beside is None else beside["wall"] / own["wall"],
            target=work.target if own is warm else None,
            why=why if own is warm else "",
        )
        for which, own in (("warm", warm), ("cold", cold))
    ]
    if work.flower:
        other, reason = found.get("flower"), found.get("why flower", "")
        ratio = None if other is None else other / warm["wall"]
        what = f"{name}, warm: the plain program in Flower's simulation"
        rows.append(Row(what, told(warm["wall"]), "-" if other is None else told(other), ratio, why=reason))
    speed = found["flops"] / warm["wall"]
    share, most = 100 * speed / peak, f"{peak / 1e9:.3g} GFLOP/s"
    rows.append(Row(f"{name}: share of the GEMM peak, warm", f"{speed / 1e9:.3g} GFLOP/s", most, share, "%", work.peak))
    needs = [None if side is None else f"{told(side['cpu'])}, {side['megabytes']:.0f} MB" for side in (warm, plain)]
    ratio = None if beside is None else beside["cpu"] / warm["cpu"]
    rows.append(Row(f"{name}: CPU seconds and peak memory, warm", needs[0] or "-", needs[1] or "-", ratio))
    phases = found["seconds by phase"]
    evaluation = 100 * phases.get("evaluate", 0.0) / sum(phases.values())
    rows.append(Row(f"{name}: evaluations' share of the rounds, warm", figure=evaluation, unit="%"))
    expected, happened = found["estimated seconds of the rounds"], found["seconds of the rounds"]
    if happened < SHORTEST_ESTIMATE:
        return rows  # shorter than anybody asks about
    error = 100 * abs(expected - happened) / happened
    what = f"{name}: error of the estimate before it"
    return [*rows, Row(what, told(expected), told(happened), error, "%", LARGEST_ERROR, at_most=True)]


PARTS: dict[str, Callable[[int, int], Part]] = {"toy": toy, "clip": clip, "vit": vit, "start": start}


def table(rows: Sequence[Row]) -> str:
    cells = [("what", "ours", "the alternative", "ratio", "target"), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def machine() -> dict[str, Any]:
    packages = ("fedprompt", "torch", "numpy")
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "threads of each side": 1,
        "load before": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "peers": REQUIREMENTS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure all speed figures in one run.")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "jobs"], default=[*PARTS, "jobs"])
    parser.add_argument("--repeats", type=int, default=5, help="of the toy jobs and the starts")
    parser.add_argument("--steps", type=int, default=1, help="how often each training step is timed")
    parser.add_argument("--data", type=Path, help="a folder with pacs.parquet and caltech101.parquet, for the jobs")
    parser.add_argument(
        "--jobs", nargs="+", choices=[work.letter for work in whole_jobs.JOBS], default=[], help="all if not given"
    )
    parser.add_argument("--output", type=Path, default=HERE / "bench.json")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * MINUTES
    about, parts = machine(), {}
    for name in asked.only:
        print(f"measuring: {name}", file=sys.stderr)
        try:
            parts[name] = (
                jobs(asked.data, until, asked.jobs) if name == "jobs" else PARTS[name](asked.repeats, asked.steps)
            )
        except Unavailable as error:
            parts[name] = Part([Row(name, why=str(error))], {})
    rows = [row for part in parts.values() for row in part.rows]
    command = f"python benchmarks/speed/bench.py --only {' '.join(asked.only)} --repeats {asked.repeats} --steps {asked.steps}"
    command += f" --jobs {' '.join(asked.jobs)}" if asked.jobs else ""
    command += " --data FOLDER" if asked.data else ""  # where it lies is nobody's business
    result = {
        "command": command,
        "machine": about,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
        "figures": {name: part.figures for name, part in parts.items()},
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
