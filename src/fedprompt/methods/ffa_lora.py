"""FFA-LoRA: low-rank adaptation with one factor frozen (Sun et al., ICLR 2024, arXiv 2403.12313).

As FedLoRA, but A keeps its random initial values, which are the same for every client, and only B is trained and
averaged. Then the average is exact, (sum_k p_k B_k) A = sum_k p_k B_k A, and half as many values are sent.

A follows from the seed of the run: every client draws it and keeps it as a local tensor that no stage trains, so it is
never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedprompt.config import TrainConfig
from fedprompt.core.method import Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.fedlora import FedLoRA
from fedprompt.random_streams import Stream
from fedprompt.tensors import pick


@register("ffa_lora")
@dataclass(frozen=True)
class FFALoRA(FedLoRA):
    """Low-rank changes of which only the left factor is trained, sent and averaged."""

    def init(self, world: World, generator: Stream) -> Roles:
        factors = self.factors(world, self.rank, generator)
        return self.with_head(world, Roles(shared=pick(factors, ["lora.b"]), local=pick(factors, ["lora.a"])))

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, trainable=tuple(name for name in stage.trainable if name != "lora.a"))
            for stage in super().stages(world, train)
        )
