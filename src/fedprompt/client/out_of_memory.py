"""Clients that share a pass until memory runs out: then half of them do, and the work goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from fedprompt.client.advance import Advance
from fedprompt.client.batch_sizing import BatchSizer

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on a CPU


def in_fitting_parts(
    clients: list[int], sizer: BatchSizer, advance: Advance, work: Callable[[list[int]], Result]
) -> Iterator[Result]:
    """The work of all clients together; where memory runs out, of halves of them, and later batches are as small.

    Work that fails is done again from its start, so it must not change anything before it ends.
    """
    waiting = [clients]
    while waiting:
        group, begun = waiting.pop(0), advance.done
        try:
            result = work(group)
        except Exception as error:
            if len(group) == 1 or not is_out_of_memory(error):
                raise
        else:
            yield result
            continue
        advance.done = begun
        size = sizer.halved(len(group))  # behind the handler: the error holds the tensors of the failed work
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        left = [*group, *(client for others in waiting for client in others)]
        waiting = [left[start : start + size] for start in range(0, len(left), size)]
