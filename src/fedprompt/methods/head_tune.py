"""Head-Tune: a linear head on frozen features, nothing else.

Each client minimises CE(W f(x) + b) over (W, b), f(x) the final-norm CLS of the un-prompted backbone; the server averages (W, b) by sample
count. No prompt can change f(x), so it is computed once per image. With `head="local"` nothing is shared and every client is on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedprompt.method import World
from fedprompt.methods.with_head import WithHead
from fedprompt.registry import register
from fedprompt.roles import Roles


@register("head_tune")
@dataclass(frozen=True)
class HeadTune(WithHead):
    """A linear head on frozen features."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"  #: who owns the head

    def init(self, world: World, generator: torch.Generator) -> Roles:
        return self.with_head(world, Roles())
