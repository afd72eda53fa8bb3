"""How a round grows: CPU seconds and peak memory against one size at a time, with fitted exponents and a picture.

Every point is a run in a process of its own: the real command path on images that are made from their number. The first
round is the warm-up and does not count; of the others the median counts. Seconds are CPU time of one thread, training and
evaluation together, so that other work on the machine counts little. The exponent is the slope of the larger half of the points
in the log-log picture: 1 is linear, 0 is free. Below it a fixed cost hides the growth.

    make bench-scale
    python benchmarks/speed/growth.py [--only clients classes image tokens V J S] [--output FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedprompt.data.sources.base import Source

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIDE = 32
SECONDS = 1200  # the longest a point may take
BAYES = {"name": "pfedbayespt", "prompt_tokens": 4}


@dataclass(frozen=True)
class Axis:
    """One size that grows, and the job it grows in."""

    what: str
    values: tuple[int, ...]
    method: dict[str, Any]
    field: str = ""
    """Of the method, where the size is a setting of it."""
    backbone: str = "dinov2-small"
    clients: int = 2
    images: int = 4
    """For training, by client; half as many for testing."""
    rounds: int = 4


AXES = {
    "clients": Axis("clients in a round", (10, 100, 1000, 10000), {"name": "fedvpt"}, "", "tiny", images=4, rounds=3),
    "classes": Axis("classes", (10, 100, 1000), {"name": "fedvpt"}, "", "tiny", 10, 200),
    "image": Axis("image size in pixels", (56, 112, 224), {"name": "fedvpt_deep"}),
    "tokens": Axis("prompt tokens in a block", (1, 4, 16, 64), {"name": "fedvpt_deep"}, "prompt_tokens"),
    "V": Axis("V, draws of a prediction", (1, 4, 16), BAYES, "predict_draws"),
    "J": Axis("J, draws of a step", (1, 4, 16), BAYES, "draws"),
    "S": Axis("S, further posteriors of a step", (1, 4, 16), BAYES, "extra_samples"),
}


class MadeUp(Source):
    """Images that exist as numbers only."""

    def __init__(self, images: int, classes: int) -> None:
        self.name = "made up"
        self.class_names = tuple(f"class {label}" for label in range(classes))
        self.domain_names = ("all",)
        self.labels = np.arange(images) % classes
        self.domains = np.broadcast_to(np.int64(0), images)
        self.splits = None
        self.fingerprint = f"{images}-{classes}".rjust(64, "0")

    def image(self, index: int) -> Image.Image:
        pixels = np.full((SIDE, SIDE, 3), 20 * int(self.labels[index]) % 251, dtype=np.uint8)
        pixels[index % SIDE] = index % 251
        return Image.fromarray(pixels)


def settings(name: str, value: int, folder: Path) -> dict[str, Any]:
    axis = AXES[name]
    clients = value if name == "clients" else axis.clients
    method = {**axis.method, **({axis.field: value} if axis.field else {})}
    backbone: dict[str, Any] = {"name": axis.backbone}
    if axis.backbone != "tiny":
        backbone["image_size"] = value if name == "image" else 56
    return {
        "name": "growth",
        "data": {"source": "tiny", "test_fraction": 1 / 3},
        "partition": {"scheme": "iid", "clients": clients},
        "backbone": backbone,
        "method": method,
        "train": {"lr": 0.01, "batch_size": 8},
        "federation": {"rounds": axis.rounds},
        "output": {"directory": str(folder / "runs"), "threads": 1},
    }


def run_one(name: str, value: int, folder: Path) -> dict[str, float]:
    """One point, in this process."""
    from fedprompt.client import factory
    from fedprompt.experiment import Experiment
    from fedprompt.federation.observer import Observer
    from fedprompt.runs.store import RoundRecord

    class Watch(Observer):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def committed(self, record: RoundRecord) -> None:
            self.ends.append(time.process_time())

    axis = AXES[name]
    clients = value if name == "clients" else axis.clients
    classes = value if name == "classes" else 10
    source = MadeUp(clients * (axis.images + axis.images // 2), classes)
    factory.open_both = lambda data, cache: (source, None)  # type: ignore[assignment]  # the one thing that is not real
    watch = Watch()
    Experiment(settings(name, value, folder)).run(observer=watch).close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"value": value, "seconds": statistics.median(np.diff(watch.ends)), "megabytes": peak}


def run_apart(name: str, value: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", folder, "--only", name, "--value", str(value)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(points: Sequence[dict[str, float]], kind: str) -> float:
    """The least-squares slope of the larger half of the points, both axes as logarithms."""
    upper = points[(len(points) - 1) // 2 :]
    x = np.log([point["value"] for point in upper])
    y = np.log([point[kind] for point in upper])
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def draw(found: dict[str, Any], path: Path) -> None:
    """Seconds and memory of every axis, relative to its smallest size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for panel, kind, title in zip(
        panels, ("seconds", "megabytes"), ("CPU seconds of a round", "peak memory"), strict=True
    ):
        for axis in found.values():
            points = axis["points"]
            sizes = [point["value"] / points[0]["value"] for point in points]
            values = [point[kind] / points[0][kind] for point in points]
            panel.loglog(sizes, values, marker="o", label=f"{axis['what']}: {axis['exponents'][kind]:.2f}")
        most = max(axis["points"][-1]["value"] / axis["points"][0]["value"] for axis in found.values())
        panel.loglog([1, most], [1, most], color="0.7", linestyle=":", label="linear: 1")
        panel.set_xlabel("times the smallest size")
        panel.set_ylabel(f"{title}, relative")
        panel.set_ylim(0.7, 10 ** math.ceil(math.log10(max(panel.get_ylim()[1] / 10, 10))))
        panel.legend(fontsize="small", title="exponent")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/pictures/growth.png")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--value", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(run_one(asked.only[0], asked.value, asked.child)))
        return
    before = json.loads(asked.output.read_text(encoding="utf-8"))["axes"] if asked.output.is_file() else {}
    found: dict[str, Any] = {name: before[name] for name in AXES if name in before}
    for name in asked.only:
        axis = AXES[name]
        points = []
        for value in axis.values:
            points.append(run_apart(name, value))
            print(name, points[-1], file=sys.stderr)
        slopes = {kind: round(exponent(points, kind), 3) for kind in ("seconds", "megabytes")}
        found[name] = {"what": axis.what, "method": axis.method, "backbone": axis.backbone}
        found[name] |= {"points": points, "exponents": slopes}
        write(found, asked.output)
    draw({name: found[name] for name in AXES if name in found}, asked.picture)


def write(found: dict[str, Any], path: Path) -> None:
    """All axes so far: a stopped run keeps those that are finished, and `--only` measures some of them again."""
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    path.write_text(json.dumps({**about, "axes": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
