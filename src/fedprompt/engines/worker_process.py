"""The program of a worker process: `python -m fedprompt.engines.worker_process`. Only `engines/workers.py` starts it.

It reads frames from standard input and writes one answer for each to standard output. Between tasks it keeps
only data and backbone. It exits immediately when standard input closes.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

import torch

from fedprompt.backbones.weight_cache import identity
from fedprompt.client.client_states import ClientStates
from fedprompt.client.factory import ExperimentFactory
from fedprompt.client.runtime import ClientRuntime
from fedprompt.core import registry
from fedprompt.core.messages import LocalUpdate
from fedprompt.engines.framing import Frame, Packing, Unpacking, read_frame, write_frame
from fedprompt.errors import DivergenceError, FedpromptError
from fedprompt.metrics.accuracy import ClientResult
from fedprompt.tensors import Tensors


class CarriedStates(ClientStates):
    """The client states sent with a task, and their changes."""

    def __init__(self) -> None:
        super().__init__(lambda client: None)
        self._given: dict[int, Tensors | None] = {}

    def begin(self, given: dict[int, Tensors | None]) -> None:
        self._given, self._changed = given, {}

    def committed(self, client: int) -> Tensors | None:
        return self._given[client]

    def changed(self) -> dict[int, Tensors]:
        return self._changed


class WorkerLoop:
    """Answers frames: the first one contains the experiment, the others are tasks."""

    def __init__(self) -> None:
        self._states = CarriedStates()
        self._runtime: ClientRuntime | None = None

    def answer(self, frame: Frame) -> Frame:
        """The answer to a frame. An error is also returned as an answer."""
        try:
            if frame.header["kind"] == "begin":
                return self._prepared(frame.header)
            return self._frozen() if frame.header["kind"] == "frozen" else self._done(frame)
        except FedpromptError as error:
            family = next(each for each in type(error).__mro__ if each.__module__ == FedpromptError.__module__)
            return Frame({"error": family.__name__, "message": str(error)})
        except Exception:
            return Frame({"error": "", "message": traceback.format_exc()})

    def _prepared(self, header: Mapping[str, Any]) -> Frame:
        factory = ExperimentFactory(header["config"])
        source, manifest, backbone, world = factory.prepare()
        bank = factory.bank(source, manifest, backbone)
        self._runtime = factory.client_runtime(source, world, bank, self._states)
        return Frame({"ground": [identity(backbone), manifest.checksum]})

    def _frozen(self) -> Frame:
        """An empty answer; raises if a method has written to the backbone."""
        assert self._runtime is not None
        backbone = self._runtime.bank.backbone
        backbone.assert_frozen(identity(backbone))
        return Frame({})

    def _done(self, frame: Frame) -> Frame:
        """Do a task for all its clients; the answer includes their new states."""
        assert self._runtime is not None
        header, tensors, packing = frame.header, Unpacking(frame.tensors), Packing()
        states = {each["client"]: each["state"] for each in header["clients"]}
        self._states.begin(
            {client: None if places is None else tensors.take(places) for client, places in states.items()}
        )
        received = {
            each["client"]: _placed(tensors.take(each["received"]), self._runtime) for each in header["clients"]
        }
        answers = _answers(self._runtime, header["kind"], header["round"], received, packing)
        now = {client: packing.put(state) for client, state in self._states.changed().items()}
        results = [{"client": client, "state": now.get(client), **answer} for client, answer in answers.items()]
        return Frame({"clients": results, "notes": self._runtime.sizer.take_notes()}, packing.to_bytes())


def _placed(tensors: Tensors, runtime: ClientRuntime) -> Tensors:
    return {name: tensor.to(runtime.world.device) for name, tensor in tensors.items()}


def _answers(
    runtime: ClientRuntime, kind: str, round: int, received: Mapping[int, Tensors], packing: Packing
) -> dict[int, dict[str, Any]]:
    """The results of each client, by client."""
    if kind == "evaluate":
        results = runtime.evaluate_together(round, received)
        return {client: _result_fields(result, packing) for client, result in results.items()}
    if kind == "train":
        replies = runtime.train_together(round, received)
    else:
        replies = [_surveyed(runtime, client, tensors) for client, tensors in received.items()]
    return {client: _reply_fields(reply, packing) for client, reply in zip(received, replies, strict=True)}


def _surveyed(runtime: ClientRuntime, client: int, received: Tensors) -> LocalUpdate | DivergenceError:
    try:
        return runtime.survey(client, received)
    except DivergenceError as error:
        return error


def _result_fields(result: ClientResult, packing: Packing) -> dict[str, Any]:
    scores = {} if result.scores is None else vars(result.scores)
    return {
        "result": result.to_json(),
        "scores": packing.put({name: torch.from_numpy(scores[name]) for name in scores}),
    }


def _reply_fields(reply: LocalUpdate | DivergenceError, packing: Packing) -> dict[str, Any]:
    if isinstance(reply, DivergenceError):
        return {"diverged": str(reply)}
    return {"upload": packing.put(reply.upload), "samples": reply.samples, "loss": reply.loss}


def _listen(stream: IO[bytes], received: SimpleQueue[Frame]) -> None:
    """Read frames until the pipe closes. Then the parent has ended, and there is nothing to save."""
    try:
        while (frame := read_frame(stream)) is not None:
            received.put(frame)
    finally:
        os._exit(0)


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to standard error, not into the pipe
    received: SimpleQueue[Frame] = SimpleQueue()
    Thread(target=_listen, args=(sys.stdin.buffer, received), daemon=True).start()
    torch.set_num_threads(1)
    registry.methods()  # import methods while the parent prepares the run
    loop = WorkerLoop()
    while True:
        write_frame(output, loop.answer(received.get()))


if __name__ == "__main__":
    main()
