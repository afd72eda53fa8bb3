"""A node that was tampered with: it joins like any other, does its work, and sends something else in some rounds.

Called with the folder of its site and its images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fedprompt.core import wire
from fedprompt.core.messages import LocalUpdate
from fedprompt.deploy.folders import SiteFolder
from fedprompt.deploy.run_node import Connection
from fedprompt.engines.flower.supernode import attend
from fedprompt.engines.remote.node import Site
from fedprompt.engines.remote.protocol import Answer, Order

MIB = 2**20


def not_a_number(reply: LocalUpdate) -> LocalUpdate:
    first = next(iter(reply.upload))
    return replace(reply, upload={**reply.upload, first: torch.full_like(reply.upload[first], torch.nan)})


def another_shape(reply: LocalUpdate) -> LocalUpdate:
    first = next(iter(reply.upload))
    return replace(reply, upload={**reply.upload, first: reply.upload[first][..., :-1]})


def forged_weight(reply: LocalUpdate) -> LocalUpdate:
    return replace(reply, samples=10**12)


def one_tensor_more(reply: LocalUpdate) -> LocalUpdate:
    return replace(reply, upload={**reply.upload, "head.weight": torch.ones(5, 32)})


def oversize(reply: LocalUpdate) -> LocalUpdate:
    first = next(iter(reply.upload))
    return replace(reply, upload={**reply.upload, first: torch.ones(8 * MIB)})


def garbage(reply: LocalUpdate) -> None:
    return None


FIRST = 2  # the round of the first lie
LIES: tuple[tuple[Callable[[LocalUpdate], LocalUpdate | None], str], ...] = (
    (not_a_number, "finite"),
    (another_shape, "shapes"),
    (forged_weight, "samples"),
    (one_tensor_more, "keys"),
    (oversize, "bytes"),
    (garbage, "message"),
)  # what is sent in one round after another, and the rule by which it is refused


def tampered(order: Order, blob: bytes) -> bytes:
    """The answer to an order, or a lie in its place."""
    answer = Answer.from_bytes(blob)
    place = -1 if order.train is None else order.train - FIRST
    if not answer.packed or not 0 <= place < len(LIES):
        return blob
    lie = LIES[place][0](wire.unpack(answer.packed, MIB))
    return b"no answer at all" if lie is None else replace(answer, packed=wire.pack(lie)).to_bytes()


def main(folder: str, data: str) -> None:
    site = SiteFolder.load(Path(folder))
    honest = Site(site.name, data, site.path / "state")
    to = Connection.of(site)

    def work(blob: bytes) -> bytes:
        return tampered(Order.from_bytes(blob), honest.answer(blob))

    attend(str(to.address), work, to.ca_certificate, to.key)


if __name__ == "__main__":
    main(*sys.argv[1:])
