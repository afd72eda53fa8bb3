"""FLoRA: low-rank adaptation whose factors are stacked, not averaged (Wang et al., NeurIPS 2024, arXiv 2409.05976).

Each round every client starts from the same new pair (A random, B zero), trains it on top of what was merged before and
sends it up. The server stacks the pairs of the cohort, [p_1 A_1; p_2 A_2; ...] along the rows and [s_1 B_1, s_2 B_2,
...] along the columns with s_k = alpha / r_k, and merges their product into the weights:

    merged <- merged + sum_k p_k s_k B_k A_k        exact, of rank up to sum_k r_k

The stack is no `combine`: a combination of tensors has the shape of each of them, whereas the product needs every
client's own pair. Nor are the factors shared tensors: those of two rounds have different random coordinates, so no
variant may compare or mix them.

Clients may have different ranks (`ranks`). Their factors are padded with zeros to the largest rank, and a mask keeps
the padding out of the product, hence without a gradient; the server cuts the padding off. The padding is sent, so it
counts as traffic.

The method was called `flora` here before; configs and run files with that name are still read. There is another FLORA,
which tunes the prompts of CLIP: `flora_clip`.

Traffic: here a client keeps only its head, so it receives the whole merged change, d x d values per changed projection
(14.2 million for a ViT-B with q and v in 12 blocks), and the new A. Clients that take part in every round and keep the
merged change could instead receive the stack of the round, 2 d sum_k r_k values per projection: less while sum_k r_k <
d / 2 (fewer than 48 clients of rank 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Progress, Prompts, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.fedlora import FedLoRA
from fedprompt.modules import heads
from fedprompt.modules.lora import attention_changes, product, stacked
from fedprompt.random_streams import SERVER, Stream, stream
from fedprompt.tensors import Tensors, pick

FACTORS = ("lora.a", "lora.b")
Rank = Annotated[int, Field(ge=1)]


@register("flora_stacked", formerly="flora")
@dataclass(frozen=True)
class FLoRA(FedLoRA):
    """Low-rank changes that are merged exactly and restarted every round; the rank may differ by client."""

    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)] | None = None
    """Ranks that the clients use in turn; null: all `rank`."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.largest_rank > world.width:
            raise ConfigError(
                broken("method.ranks", f"be at most the width {world.width} of the backbone", list(self.ranks or ()))
            )

    @property
    def largest_rank(self) -> int:
        return max(self.ranks or (self.rank,))

    def rank_of(self, client: int) -> int:
        return self.ranks[client % len(self.ranks)] if self.ranks else self.rank

    @property
    def sums_suffice(self) -> bool:
        return False  # stacks the factors of every client

    def init(self, world: World, generator: Stream) -> Roles:
        pair = self.factors(world, self.largest_rank, generator)
        precise = torch.promote_types(world.dtype, torch.float32)  # a small change would vanish in bfloat16
        roles = Roles(
            server={
                "merged": torch.zeros_like(product(pair["lora.a"], pair["lora.b"]), dtype=precise),
                "seed": torch.tensor(generator.integer(2**62)),
            },
            stat={name: Statistic(tuple(tensor.shape)) for name, tensor in pair.items()},
        )
        return self.with_head(world, roles)

    def download(self, world: World, server: Server, client: int) -> Tensors:
        generator = stream(int(server.own["seed"]), server.round, SERVER, "lora")
        new = self.factors(world, self.largest_rank, generator)
        return {**server.shared, "sent.a": new["lora.a"], "sent.merged": server.own["merged"].to(world.dtype)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        """A new pair, unless the client evaluates the one it has just trained."""
        mask = torch.arange(self.largest_rank, device=world.device) < self.rank_of(client.index)
        a = received["sent.a"] * mask[:, None]
        new = {"lora.a": a, "lora.b": torch.zeros_like(a.mT)}
        return {**new, **received, **local, "rank_mask": mask.to(world.dtype)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, (*FACTORS, *heads.NAMES), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        mask = params["rank_mask"]
        change = self.alpha / mask.sum() * product(params["lora.a"] * mask[:, None], params["lora.b"])
        return Prompts(weights=attention_changes(params["sent.merged"] + change, self.targets))

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        return {**upload, **pick(params, FACTORS)}, local

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        pair = stacked([self._cut(upload) for upload in uploads], [upload.weight for upload in uploads])
        merged = server.own["merged"]
        merged = (merged.to("cpu", torch.float64) + product(*pair)).to(merged.device, merged.dtype)
        return replace(averaged, own={**server.own, "merged": merged})

    def _cut(self, upload: Upload) -> tuple[Tensor, Tensor]:
        """A client's factors at its own rank, B scaled."""
        rank = self.rank_of(upload.client)
        a, b = (upload.tensors[name].to("cpu", torch.float64) for name in FACTORS)
        return a[..., :rank, :], self.alpha / rank * b[..., :rank]
