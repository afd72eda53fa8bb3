"""`engine.workers` with real processes: the same bits, and nobody left behind whatever ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from support import StopAfter, Stopped, content, offer_method, run
from warm_processes import Started

from fedprompt.backbones.random_weights import random_weights
from fedprompt.backbones.shape import ViTShape
from fedprompt.engines import kinds, workers
from fedprompt.engines.framing import Frame
from fedprompt.engines.workers import WorkerPool
from fedprompt.errors import ContractError, FedpromptError, RunError
from fedprompt.federation.loop import Observer
from fedprompt.runs.run import Run

pytestmark = pytest.mark.e2e

PARTITION = {"scheme": "dirichlet", "alpha": 1.0, "clients": 5, "min_train": 3}
ALONE = {"cohort": 2}
SHARED = {"cohort": 2, "workers": 2}


@pytest.fixture(scope="module")
def crew() -> Iterator[WorkerPool]:
    """Two workers that serve one run after the other: starting them is what takes long."""
    with WorkerPool(2) as crew:
        yield crew


@pytest.fixture
def served(crew: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    monkeypatch.setattr(kinds, "WorkerPool", lambda size, devices: nullcontext(crew))
    return crew


RUNS: dict[str, dict[str, Any]] = {
    "fedvpt": {},
    "scaffold": {"variant": {"name": "scaffold"}, "train": {"momentum": 0.0}},
    "pfedbayespt": {"method": {"name": "pfedbayespt"}},
    "pep_fedpt": {"method": {"name": "pep_fedpt"}},
    "pfedmoap": {"method": {"name": "pfedmoap"}, "backbone": {"name": "tiny-clip"}},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_two_workers_compute_the_bits_of_one_process(
    served: WorkerPool, settings: Any, changes: dict[str, Any]
) -> None:
    alone = run(settings(name="alone", engine=ALONE, partition=PARTITION, **changes))
    shared = run(settings(name="shared", engine=SHARED, partition=PARTITION, **changes))
    assert content(alone) == content(shared)


def test_a_run_may_go_on_with_workers_or_without(served: WorkerPool, settings: Any) -> None:
    changes: dict[str, Any] = {"variant": {"name": "scaffold"}, "train": {"momentum": 0.0}, "federation": {"rounds": 4}}
    whole = run(settings(name="whole", engine=ALONE, partition=PARTITION, **changes))
    for round, engine in ((1, SHARED), (3, ALONE)):
        made = settings(name="parts", engine=engine, partition=PARTITION, **changes)
        with pytest.raises(Stopped):
            run(made, observer=StopAfter(round), resume=round > 1)
    parts = run(settings(name="parts", engine=SHARED, partition=PARTITION, **changes), resume=True)
    assert content(whole) == content(parts)


class KillsOne(Observer):
    """Ends a worker before a round is trained."""

    def __init__(self, crew: WorkerPool, round: int) -> None:
        self._crew, self._round = crew, round
        self.pid = 0

    def cohort(self, round: int, clients: object) -> None:
        if round == self._round:
            self.pid = self._crew.pids[0]
            os.kill(self.pid, signal.SIGKILL)


def test_a_worker_that_dies_is_replaced(served: WorkerPool, settings: Any) -> None:
    killer = KillsOne(served, 2)
    alone = run(settings(name="alone", engine=ALONE))
    shared = run(settings(name="shared", engine=SHARED), observer=killer)
    assert content(alone) == content(shared)
    assert killer.pid not in served.pids
    assert len(served.pids) == 2


def test_data_that_changed_since_the_run_began_is_noticed(served: WorkerPool, settings: Any, monkeypatch: Any) -> None:
    begin = WorkerPool.begin
    monkeypatch.setattr(
        WorkerPool, "begin", lambda self, frame, ground: begin(self, frame, [ground[0], "another partition"])
    )
    with pytest.raises(RunError, match=r"engine\.workers: .* changed while the run began"):
        run(settings(engine=SHARED))


# -- workers with a fault planted in them -----------------------------------------------------------------------------

PLANTED = """
import os, signal, sys, time
from pathlib import Path
from fedprompt.engines import worker_process as worker
from fedprompt.client.runtime import ClientRuntime
from fedprompt.errors import ContractError
true = ClientRuntime.train_together
def train_together(self, round, received):
    exec(compile(Path({fault!r}).read_text(), {fault!r}, "exec"))
    return true(self, round, received)
ClientRuntime.train_together = train_together
worker.main()
"""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that planted workers execute before they train; its folder holds their module."""
    file = tmp_path_factory.mktemp("planted") / "fault.py"
    (file.parent / "planted_worker.py").write_text(PLANTED.format(fault=str(file)))
    return file


@contextmanager
def planting(fault: Path) -> Iterator[None]:
    """Workers that are started here are planted ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(fault.parent)
        patch.setattr(workers, "MODULE", "planted_worker")
        yield


@pytest.fixture(scope="module")
def planted_worker(fault: Path) -> Iterator[WorkerPool]:
    """One, which errors do not end. It has answered all it was asked when the only task of a run fails."""
    with planting(fault):
        crew = WorkerPool(1)
    with crew:
        yield crew


@pytest.fixture
def failing(planted_worker: WorkerPool, monkeypatch: pytest.MonkeyPatch, settings: Any) -> dict[str, Any]:
    monkeypatch.setattr(kinds, "WorkerPool", lambda size, devices: nullcontext(planted_worker))
    return settings(engine={"cohort": 4, "workers": 2})  # type: ignore[no-any-return]


def test_an_error_of_the_family_is_the_same_error_here(fault: Path, failing: dict[str, Any]) -> None:
    fault.write_text("raise ContractError(f'tensor must be declared, got {sorted(received)}')")
    with pytest.raises(ContractError, match=r"^tensor must be declared, got \[0, 1, 2, 3\]$") as told:
        run(failing)
    assert told.value.exit_code == 6


def test_an_unforeseen_error_shows_where_it_happened(fault: Path, failing: dict[str, Any]) -> None:
    fault.write_text("1 / 0")
    told = r"(?s)in a worker of engine.workers.*fault.py.*1 / 0.*ZeroDivisionError"
    with pytest.raises(RuntimeError, match=told):
        run(failing)


@pytest.mark.slow
def test_a_task_that_kills_two_workers_ends_the_run(fault: Path, settings: Any) -> None:
    fault.write_text("print('so much memory', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    told = r"(?s)engine.workers=2.*ended by SIGKILL after it wrote:\nso much memory"
    with planting(fault), pytest.raises(FedpromptError, match=told):
        run(settings(engine=SHARED))


def test_a_slow_worker_stops_nobody_and_answers_stay_in_order(fault: Path, settings: Any, tmp_path: Path) -> None:
    """The first client returns when all others have: which they could not if anybody waited for it. What is printed does no harm."""
    fault.write_text(
        f"print('not for the pipe'); done = Path({str(tmp_path)!r})\n"
        "(done / f'done{sorted(received)[0]}').touch()\n"
        "while 0 in received and len(list(done.glob('done*'))) < 12: time.sleep(0.02)"
    )
    seen: list[int] = []
    watching = Observer()
    watching.trained = lambda round, reply: seen.append(reply.client)  # type: ignore[method-assign]
    made = settings(engine={"cohort": 1, "workers": 2}, federation={"rounds": 1})
    with planting(fault):
        run({**made, "partition": {"scheme": "iid", "clients": 12}}, observer=watching)
    assert seen == list(range(12))


# -- whole commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, settings: Any) -> Callable[..., Started]:
    """`fedprompt run` on a config that keeps state on the server and the clients."""

    def start(name: str, rounds: int, *more: str) -> Started:
        values = settings(
            variant={"name": "scaffold"},
            train={"momentum": 0.0},
            federation={"rounds": rounds, "evaluate_every": 5},
            output={"directory": "runs", "cache": "cache", "threads": 1},
        )
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        return Started(
            tmp_path, ("run", "config.yaml", f"name={name}", "engine.cohort=2", *more, "--resume"), COLUMNS="200"
        )

    return start


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def gone(pids: list[int]) -> bool:
    """Whether these processes end by themselves within a minute."""
    for _ in range(3000):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_killed_and_resumed_a_run_ends_bit_identical_and_nobody_is_left(
    command: Callable[..., Started], tmp_path: Path
) -> None:
    assert command("whole", 12).end().code == 0
    for round in (3, 7):
        process = command("parts", 12, "engine.workers=2")
        process.wait_for(f"round {round}/12")
        busy = children(process.pid)
        assert len(busy) == 2
        process.kill()
        assert process.end().code == -signal.SIGKILL
        assert gone(busy)
    assert command("parts", 12, "engine.workers=2").end().code == 0
    runs = [Run(tmp_path / "runs" / f"{name}-fedvpt+scaffold-seed0") for name in ("whole", "parts")]
    assert content(runs[0]) == content(runs[1])


def test_an_interrupt_from_the_keyboard_ends_all(command: Callable[..., Started]) -> None:
    process = command("long", 5000, "engine.workers=2")
    process.wait_for("round 2/5000")
    busy = children(process.pid)
    assert len(busy) == 2
    process.interrupt()
    ended = process.end()
    assert ended.code == 130
    assert "Continue with --resume" in ended.words
    assert "Traceback" not in ended.words
    assert gone(busy)


@pytest.mark.slow
def test_a_busy_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """In the middle of a task that takes forever, which nobody will ask the result of."""
    (tmp_path / "endless.py").write_text(
        "import torch\nfrom fedprompt.engines import worker_process as worker\n"
        "def forever(self, frame):\n    while True: torch.ones(100, 100) @ torch.ones(100, 100)\n"
        "worker.WorkerLoop.answer = forever\nworker.main()\n"
    )
    (tmp_path / "starts.py").write_text(
        "import time\nfrom fedprompt.engines import workers\nworkers.MODULE = 'endless'\n"
        "crew = workers.WorkerPool(2)\ncrew.begin(workers.Frame({}), [])\nprint(*crew.pids, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "starts.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    assert len(pids) == 2
    assert gone(pids)


@pytest.mark.slow
def test_a_method_of_another_package_is_known_to_workers(tmp_path: Path, settings: Any) -> None:
    (tmp_path / "their_method.py").write_text(
        "from dataclasses import dataclass\nfrom fedprompt import register\nfrom fedprompt.methods.fedvpt import FedVPT\n"
        "@register('theirs')\n@dataclass(frozen=True)\nclass Theirs(FedVPT):\n    pass\n"
    )
    offer_method(tmp_path, "their_method")
    values = settings(method={"name": "theirs", "prompt_tokens": 2}, engine=SHARED)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [sys.executable, "-m", "fedprompt.cli", "run", "config.yaml", "--quiet"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_worker_that_the_run_before_did_not_need_serves_the_next_one(settings: Any, served: WorkerPool) -> None:
    served.begin(Frame({"kind": "begin", "config": {}}), [])  # its answer is never read
    assert run(settings(engine=SHARED, federation={"rounds": 1})).finished


def test_workers_share_the_memory_of_the_weights(tmp_path: Path, settings: Any, served: WorkerPool) -> None:
    shape = ViTShape(width=384, depth=3, heads=6, mlp_width=1536, patch=8, image_size=32)
    tensors = {_in_a_file(name): tensor for name, tensor in random_weights(shape, seed=0).items()}
    tensors["pos_embed"] = torch.cat([torch.zeros(1, 384), tensors["pos_embed"]])[None]
    tensors["cls_token"] = tensors["cls_token"][None]
    save_file(tensors, tmp_path / "mine.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    backbone = {"name": str(tmp_path / "mine.safetensors"), "mean": [0.5] * 3, "std": [0.5] * 3}
    run(settings(backbone=backbone, engine=SHARED, federation={"rounds": 1}))
    (kept,) = (tmp_path / "cache" / "backbones").glob("*.safetensors")
    for pid in served.pids:
        found = mapped(pid, kept)
        assert found["Rss"] > 0.5 * size
        assert found["Private_Dirty"] == 0


def _in_a_file(name: str) -> str:
    """The name timm gives to a tensor."""
    for ours, theirs in (
        ("lead", "cls_token"),
        ("position", "pos_embed"),
        ("patch.", "patch_embed.proj."),
        ("attention.in", "attn.qkv"),
        ("attention.out", "attn.proj"),
        ("mlp.in", "mlp.fc1"),
        ("mlp.out", "mlp.fc2"),
    ):
        name = name.replace(ours, theirs)
    return name


def mapped(pid: int, file: Path) -> dict[str, int]:
    """What a file costs a process, in bytes by kind."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            if inside:
                found[name] = found.get(name, 0) + 1024 * int(rest.split()[0])
        elif "-" in line.split()[0]:
            inside = line.endswith(str(file))
    return found
