"""Head-Tune: a linear head on frozen features, nothing else.

Each client minimises CE(W f(x) + b) over (W, b), f(x) the CLS row after the final norm, without prompts; the server
averages (W, b) by sample count. No prompt can change f(x), so it is computed once per image. With `head="local"`
nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedprompt.core.method import World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.random_streams import Stream


@register("head_tune")
@dataclass(frozen=True)
class HeadTune(WithHead):
    """A linear head on frozen features."""

    head: Literal["local", "shared", "shared_then_finetune"] = "shared"
    """Where the head is kept."""

    def init(self, world: World, generator: Stream) -> Roles:
        return self.with_head(world, Roles())
