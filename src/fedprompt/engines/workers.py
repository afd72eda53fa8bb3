"""`engine.workers`: the clients of a round shared among processes, with one thread each and the same weights mapped into memory.

A worker does not store client states: a task contains the messages and states of its clients, and the answer contains their
replies and new states. So commits and resuming work as without workers, and if a worker dies another one can do its task.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from fedprompt.client.runtime import ClientRuntime
from fedprompt.core.messages import Download, Failure, LocalUpdate, NextTraining
from fedprompt.engines.framing import Frame, Packing, Unpacking, read_frame, write_frame
from fedprompt.engines.in_process import InProcess
from fedprompt.errors import FedpromptError, RunError, named
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.metrics.one_against_rest import Scores
from fedprompt.privacy.budget import settled
from fedprompt.tensors import Tensors

MODULE = "fedprompt.engines.worker_process"
STDERR_LINES = 20  # last lines of a worker's standard error, quoted in an error
LONGEST_LINE = 2000
PATIENCE = 5.0  # seconds to wait for a process to end
AHEAD = 2  # open tasks per worker: the current one and the next
WAITING = 8  # finished tasks per worker that may wait for an earlier one


class WorkerDied(Exception):
    """A worker has died; the message contains its exit code and its last output."""


class Worker:
    """One process. It imports modules at its start, prepares when it receives the experiment, and then does tasks."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            process_group=0,  # Ctrl-C reaches only this process, which then ends the workers
        )
        self._ground: list[str] | None = None
        self._preparing = 0  # experiments whose grounds have not been read yet
        self._last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._listener = Thread(target=self._pass_on, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, experiment: Frame) -> None:
        """Send it the experiment, without waiting until it is ready."""
        self._ground = None
        if self.device is not None:
            config = experiment.header["config"]
            placed = {**config, "backbone": {**config["backbone"], "device": self.device}}
            experiment = Frame({**experiment.header, "config": placed}, experiment.tensors)
        with suppress(OSError):  # a dead worker is noticed at its next task
            self._write(experiment)
            self._preparing += 1

    def ground(self) -> list[str]:
        """Digests of its backbone and partition, which it sends when it is ready."""
        if self._ground is None:
            assert self._process.stdout is not None
            earlier, self._preparing = max(0, self._preparing - 1), 0
            for _ in range(earlier):  # of runs that ended before they needed this worker
                read_frame(self._process.stdout)
            self._ground = self._read().header["ground"]
        return self._ground

    def ask(self, question: Frame) -> Frame:
        """Its answer to one frame. The worker must be ready."""
        try:
            self._write(question)
        except OSError:
            raise self._death() from None
        return self._read()

    def kill(self) -> None:
        """Kill it: a worker has nothing to finish or to save."""
        self._process.kill()

    def close(self) -> None:
        """Release a killed worker, once its pipes are no longer used."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self._listener.join(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _write(self, frame: Frame) -> None:
        assert self._process.stdin is not None
        write_frame(self._process.stdin, frame)

    def _read(self) -> Frame:
        assert self._process.stdout is not None
        answer = read_frame(self._process.stdout)
        if answer is None:
            raise self._death()
        error = answer.header.get("error")
        if error is None:
            return answer
        message = answer.header["message"]
        raise (named(error) or _unforeseen)(message)

    def _death(self) -> WorkerDied:
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            return WorkerDied("gave no answer")
        self._listener.join(PATIENCE)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerDied(how + (f" after it wrote:\n{''.join(self._last_lines)}".rstrip() if self._last_lines else ""))

    def _pass_on(self) -> None:
        """Copy its standard error to ours and keep the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
                text = line.decode(errors="replace")
                self._last_lines.append(text)
                sys.stderr.write(text)


def _unforeseen(message: str) -> RuntimeError:
    return RuntimeError(f"in a worker of engine.workers:\n{message}")


def _environment() -> dict[str, str]:
    """The environment of this process with its import path, and one thread for OpenMP and MKL."""
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerPool:
    """Workers, with one thread each that waits for answers. If a worker dies, a new one gets its task, once."""

    def __init__(self, size: int, devices: Sequence[str] = ()) -> None:
        """The workers take the devices in turn; without any, all have that of the experiment."""
        self.size, self._devices = size, list(devices)
        self._experiment: Frame | None = None
        self._ground: list[str] = []
        self._lock, self._closed = Lock(), False
        self._threads = ThreadPoolExecutor(size, "worker")
        self._workers: list[Worker] = []
        self._free: SimpleQueue[Worker] = SimpleQueue()
        try:
            for number in range(size):
                self._free.put(self._start(self._devices[number % len(devices)] if devices else None))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def begin(self, experiment: Frame, ground: list[str]) -> None:
        """Let all workers prepare an experiment; `ground` holds the digests they must report."""
        self._experiment, self._ground = experiment, ground
        for worker in self._workers:
            worker.begin(experiment)

    def submit(self, task: Frame) -> Future[Frame]:
        """Give a task to the first free worker."""
        return self._threads.submit(self._done, task)

    def assert_frozen(self) -> None:
        """Raise if the backbone of a worker has changed."""
        list(self._threads.map(self._frozen, self._workers))

    def close(self) -> None:
        """End all workers, also in the middle of a task."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _frozen(self, worker: Worker) -> None:
        with suppress(WorkerDied):  # a dead worker has no backbone to check
            self._request(worker, Frame({"kind": "frozen"}))

    def _done(self, task: Frame) -> Frame:
        worker = self._free.get()
        try:
            try:
                return self._request(worker, task)
            except WorkerDied:
                worker = self._replaced(worker)
                return self._request(worker, task)
        except WorkerDied as death:
            clients = ", ".join(str(each["client"]) for each in task.header["clients"])
            raise FedpromptError(
                f"engine.workers: two workers in a row died at the same task (clients {clients}); the machine may "
                f"have too little memory for engine.workers={self.size}. The second one {death}"
            ) from None
        finally:
            self._free.put(worker)

    def _request(self, worker: Worker, question: Frame) -> Frame:
        if worker.ground() != self._ground:
            raise RunError(
                "engine.workers: weights of the backbone or partition of the data changed while the run began"
            )
        return worker.ask(question)

    def _replaced(self, dead: Worker) -> Worker:
        with self._lock:
            if self._closed:
                raise WorkerDied("was no longer needed")
            self._workers.remove(dead)
            dead.close()
            worker = self._start(dead.device)
        assert self._experiment is not None
        worker.begin(self._experiment)
        return worker

    def _start(self, device: str | None) -> Worker:
        worker = Worker(device)
        self._workers.append(worker)
        return worker


class Workers(InProcess):
    """The engine in many processes: a group of clients goes to the first free worker; answers come in the order of clients."""

    def __init__(self, runtime: ClientRuntime, pool: WorkerPool, ground: list[str]) -> None:
        super().__init__(runtime)
        self._pool = pool
        self._notes: list[str] = []
        pool.begin(Frame({"kind": "begin", "config": _settings(runtime, pool.size)}), ground)

    def survey(self, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        return self._replies("survey", 0, clients, download)

    def train(self, round: int, clients: Sequence[int], download: Download) -> Iterator[LocalUpdate | Failure]:
        return self._replies("train", round, clients, download)

    def evaluate(
        self, round: int, clients: Sequence[int], download: Download, ahead: NextTraining | None = None
    ) -> Iterator[tuple[int, ClientResult]]:
        for answers, take in self._answers("evaluate", round, clients, download):
            for each in answers:
                scores = {name: tensor.cpu().numpy() for name, tensor in take(each["scores"]).items()}
                yield each["client"], ClientResult(**each["result"], scores=Scores(**scores) if scores else None)

    def take_notes(self) -> list[str]:
        notes, self._notes = [*super().take_notes(), *self._notes], []
        return notes

    def group_size(self, clients: int) -> int:
        return max(1, min(super().group_size(clients), math.ceil(clients / self._pool.size)))

    def _replies(
        self, kind: str, round: int, clients: Sequence[int], download: Download
    ) -> Iterator[LocalUpdate | Failure]:
        for answers, take in self._answers(kind, round, clients, download):
            for each in answers:
                client = each["client"]
                if each["state"] is not None:
                    self._runtime.states.put(client, take(each["state"]))
                if "diverged" in each:
                    yield Failure(client, "finite", each["diverged"])
                else:
                    yield LocalUpdate(client, round, take(each["upload"]), each["samples"], each["loss"])

    def _answers(
        self, kind: str, round: int, clients: Sequence[int], download: Download
    ) -> Iterator[tuple[list[dict[str, Any]], Callable[[dict[str, int]], Tensors]]]:
        """The results of each group of clients, and a function that reads their tensors."""
        pending: deque[Future[Frame]] = deque()
        try:
            for group in self._groups(clients):
                while (under_way := [each for each in pending if not each.done()]) and (
                    len(under_way) >= AHEAD * self._pool.size or len(pending) >= WAITING * self._pool.size
                ):
                    wait(under_way, return_when=FIRST_COMPLETED)
                pending.append(self._pool.submit(self._task(kind, round, group, download)))
                while pending and pending[0].done():
                    yield self._opened(pending.popleft().result())
            while pending:
                yield self._opened(pending.popleft().result())
        finally:
            for each in pending:
                each.cancel()

    def _task(self, kind: str, round: int, group: Sequence[int], download: Download) -> Frame:
        """A task for some clients, with the tensors they receive and their states."""
        packing, kept = Packing(), bool(self._runtime.world.roles.local)
        clients = []
        for client in group:
            state = self._runtime.states.get(client) if kept else None
            received = packing.put(download(client))
            clients.append(
                {"client": client, "received": received, "state": None if state is None else packing.put(state)}
            )
        return Frame({"kind": kind, "round": round, "clients": clients}, packing.to_bytes())

    def _opened(self, answer: Frame) -> tuple[list[dict[str, Any]], Callable[[dict[str, int]], Tensors]]:
        self._notes += [text for text in answer.header.get("notes", []) if text not in self._notes]
        tensors, device = Unpacking(answer.tensors), self._runtime.world.device
        return answer.header["clients"], lambda places: {
            name: tensor.to(device) for name, tensor in tensors.take(places).items()
        }


def _settings(runtime: ClientRuntime, workers: int) -> dict[str, Any]:
    """The config of a worker, with its share of the memory."""
    settings = settled(runtime.config, runtime.terms).model_dump(mode="json")
    settings["engine"]["memory_gib"] /= workers
    return settings
