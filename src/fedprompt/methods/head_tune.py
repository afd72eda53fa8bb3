"""Head-Tune: a linear head on frozen features, nothing else.

Each client minimises CE(W f(x) + b) over (W, b), f(x) the final-norm CLS of the un-prompted backbone; the server averages (W, b) by sample
count. No prompt can change f(x), so it is computed once per image. With `head="local"` nothing is shared and every client is on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedprompt.method import Batch, Method, Seen, World
from fedprompt.prompts.heads import read_head, zero_head
from fedprompt.registry import register
from fedprompt.roles import Roles, Tensors


@register("head_tune")
@dataclass(frozen=True)
class HeadTune(Method):
    """A linear head on frozen features."""

    head: Literal["local", "shared"] = "shared"  #: who owns the head

    def init(self, world: World, generator: torch.Generator) -> Roles:
        head = zero_head(world.classes, world.width, world.dtype, world.device)
        return Roles(shared=head) if self.head == "shared" else Roles(local=head)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return read_head(params, seen.cls)
