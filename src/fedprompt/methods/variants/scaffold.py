"""SCAFFOLD (Karimireddy et al., 2020): control variates against client drift.

    local step     y <- y - eta (g - c_k + c)
    after K steps  c_k+ = c_k - c + (x - y) / (K eta)        K eta: the sum of the step sizes actually taken
    server         x <- x + eta_s (mean(y) - x),   c <- c + (1/N) sum_k (c_k+ - c_k)   over the participants, N all that are not held out

c and c_k start at zero, so the first round is federated averaging. The correction is the gradient of <c - c_k, y>,
added to the loss: the reported loss contains it. The formula for c_k+ holds for plain SGD only, so momentum, gradient
clipping and methods that correct their steps (FedPR, Per-FedAvg) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Method, Progress, Seen, Server, Upload, World
from fedprompt.core.recipe import PLAIN_SGD, Recipe
from fedprompt.core.registry import register_variant
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.variants.wrapper import Variant, require_shared
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

CONTROL = "scaffold.control."  # c, the server's own
SENT = "scaffold.sent."  # a copy of c on its way down
OWN = "scaffold.own."  # c_k, the client's own
CHANGE = "scaffold.change."  # c_k+ - c_k, on its way up


@register_variant("scaffold")
@dataclass(frozen=True)
class Scaffold(Variant):
    """Correct every local step by the drift of this client."""

    prefix: ClassVar[str] = "scaffold."
    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """Eta_s."""

    @property
    def recipe(self) -> Recipe:
        """Plain SGD: the formula of the controls divides by the sum of its rates."""
        return PLAIN_SGD

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if type(self.inner).after_step is not Method.after_step:
            raise ConfigError(
                broken("variant.name", "be used with a method that takes plain steps", f"scaffold with {self.inner}")
            )
        if not self.inner.starts_as_received:
            rule = "be used with a method that trains on from the shared tensors it received"
            raise ConfigError(broken("variant.name", rule, f"scaffold with {self.inner}"))
        if train.optimizer != "sgd":
            raise ConfigError(broken("train.optimizer", "be sgd with variant scaffold", train.optimizer))
        if train.momentum:
            raise ConfigError(broken("train.momentum", "be 0 with variant scaffold", train.momentum))
        if train.clip_norm is not None:
            raise ConfigError(broken("train.clip_norm", "be absent with variant scaffold", train.clip_norm))

    def init(self, world: World, generator: Stream) -> Roles:
        roles = self.inner.init(world, generator)
        require_shared(roles, "scaffold")
        zeros = {name: torch.zeros_like(tensor) for name, tensor in roles.shared.items()}
        return Roles(
            shared=roles.shared,
            local={**roles.local, **prefixed(OWN, zeros)},
            server={**roles.server, **prefixed(CONTROL, zeros)},
            stat={**roles.stat, **{CHANGE + name: Statistic(tuple(tensor.shape)) for name, tensor in zeros.items()}},
        )

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**super().download(world, server, client), **prefixed(SENT, stripped(CONTROL, server.own))}

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        control, own = stripped(SENT, params), stripped(OWN, params)
        drift = (((control[name] - own[name]).detach() * params[name]).sum() for name in control)
        return sum(drift, plain)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        control, own = stripped(SENT, received), stripped(OWN, params)
        change = {}
        for name in control:
            size = progress.step_sizes.get(name, 0.0)
            change[name] = (
                (received[name] - params[name]) / size - control[name] if size else torch.zeros_like(control[name])
            )
        renewed = {name: own[name] + change[name] for name in own}
        return {**upload, **prefixed(CHANGE, change)}, {**local, **prefixed(OWN, renewed)}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        shared = {name: old + self.server_lr * (averaged.shared[name] - old) for name, old in server.shared.items()}
        own = dict(averaged.own)
        for name in shared:
            total = torch.stack([upload.tensors[CHANGE + name] for upload in uploads]).sum(0)
            own[CONTROL + name] = own[CONTROL + name] + total / (world.clients - len(world.newcomers))
        return replace(averaged, shared=shared if self.server_lr != 1 else averaged.shared, own=own)

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        controls = {name: tensor for name, tensor in {**received, **local}.items() if name.startswith(self.prefix)}
        return {**super().begin(world, client, received, local), **controls}
