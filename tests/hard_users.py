"""Small stand-ins for the hardest future users of the contract. Each is what its family needs and nothing more.

They are not registered: tests hand them to an experiment directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Method, Progress, Prompts, Seen, Server, Stage, Upload, World
from fedprompt.core.roles import Roles, Statistic
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules.heads import NAMES, read_head, zero_head
from fedprompt.modules.insertion import TokenPrompt, vpt_init
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, pick


def _head(world: World) -> Tensors:
    return zero_head(world.classes, world.width, world.dtype, world.device)


@dataclass(frozen=True)
class HypernetworkUser(Method):
    """pFedPG's shape: the server generates each client's prompt from a descriptor and learns through the chain rule."""

    tokens: int = 2
    server_lr: float = 0.1

    def init(self, world: World, generator: Stream) -> Roles:
        base = vpt_init(1, self.tokens, world.width, world.patch, generator)
        server = {
            "generator": generator.normal(world.width, world.width) * 0.05,
            "descriptors": generator.normal(world.clients, world.width),
            "base": base,
        }
        return Roles(shared={"prompt": base.clone()}, local={**_head(world), "own_prompt": base.clone()}, server=server)

    def generate(self, own: Tensors, client: int) -> Tensor:
        return own["base"] + own["descriptors"][client] @ own["generator"]

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {"prompt": self.generate(server.own, client)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("prompt", *NAMES), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        return Prompts(tokens=(TokenPrompt(params["prompt"], (0,)),))

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return read_head(params, seen.cls)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        return pick(params, ["prompt"]), {**pick(params, NAMES), "own_prompt": params["prompt"]}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**local, "prompt": local["own_prompt"]}

    @property
    def sums_suffice(self) -> bool:
        return False

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        own = {name: tensor.detach().requires_grad_() for name, tensor in server.own.items()}
        pull = torch.stack(
            [
                (
                    self.generate(own, upload.client)
                    * (upload.tensors["prompt"] - self.generate(server.own, upload.client))
                ).sum()
                for upload in uploads
            ]
        ).sum()
        grads = torch.autograd.grad(pull, list(own.values()))
        moved = {name: (own[name] + self.server_lr * grad).detach() for name, grad in zip(own, grads, strict=True)}
        return replace(server, own=moved)


@dataclass(frozen=True)
class PerSampleUser(Method):
    """pFedBayesPT's shape: every image gets prompts of its own, drawn at random from its un-prompted features, several draws at once."""

    draws: int = 2
    keep: float = 0.9

    @property
    def needs(self) -> tuple[str, ...]:
        return ("block_inputs",)

    def init(self, world: World, generator: Stream) -> Roles:
        encoder = generator.normal(world.blocks, world.tokens) / world.tokens**0.5
        return Roles(shared={"encoder": encoder, "log_std": torch.full((world.blocks,), -3.0)}, local=_head(world))

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        mask = generator.uniform(self.draws, size, world.blocks, world.tokens) < self.keep
        mask[..., 0] = True
        epsilon = generator.normal(self.draws, size, world.blocks, 1, world.width)
        return {"mask": mask.to(world.dtype), "epsilon": epsilon * float(training)}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        masked = batch.features["block_inputs"] * noise["mask"][..., None]  # (J, B, L, T, d)
        mean = torch.einsum("jbltd,lt->jbld", F.layer_norm(masked, masked.shape[-1:]), params["encoder"]).unsqueeze(-2)
        tokens = mean + params["log_std"].exp()[:, None, None] * noise["epsilon"]
        slot = TokenPrompt(tokens.flatten(0, 1), tuple(range(world.blocks)))
        return Prompts(tokens=(slot,), repeat=self.draws, extra={"mean": mean})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return read_head(params, seen.cls).unflatten(0, (self.draws, -1))

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        likelihood = -F.cross_entropy(logits.flatten(0, 1), batch.labels.repeat(self.draws), reduction="none")
        bound = likelihood.unflatten(0, (self.draws, -1)).logsumexp(0)
        return -batch.mean(bound) + 1e-3 * seen.extra["mean"].square().mean()

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return self.logits(world, params, seen, batch, noise).softmax(-1)


@dataclass(frozen=True)
class TwoStageUser(FedVPT):
    """SGPT's shape: first the shared prompt with selection off, then a group token with selection on, read out with it."""

    selection: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        return ("cls", "prompts") if self.selection else ("cls",)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",)

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        groups = vpt_init(3, 1, world.width, world.patch, generator)
        keys = generator.normal(3, world.width)
        return Roles(shared={**roles.shared, "groups": groups, "keys": keys}, local=roles.local)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        first = Stage(replace(self, selection=False), ("prompt", *NAMES), train.epochs, "shared")
        return (first, Stage(self, ("groups", "keys", *NAMES), train.epochs, "groups"))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        given = super().prompts(world, params, batch, noise)
        if not self.selection:
            return given
        likeness = F.normalize(batch.features["cls"], dim=-1) @ F.normalize(params["keys"], dim=-1).T  # (B, G)
        chosen = likeness.argmax(-1)
        slot = TokenPrompt(params["groups"][chosen].unsqueeze(1), (1,), mode="append")
        picked = likeness.gather(-1, chosen[:, None]).squeeze(-1)
        return Prompts(tokens=(*given.tokens, slot), extra={"likeness": picked})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if seen.prompts is None:
            return read_head(params, seen.cls)
        return read_head(params, (seen.cls + seen.prompts[:, -1]) / 2)

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain - batch.mean(seen.extra["likeness"]) if self.selection else plain


@dataclass(frozen=True)
class ExpertsUser(FedVPT):
    """pFedMoAP's shape: a pool on the server that grows, and each client gets its nearest neighbours as fixed experts."""

    experts: int = 2

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        gate = torch.zeros(self.experts + 1)
        return Roles(shared=roles.shared, local={**roles.local, "gate": gate, "last_prompt": roles.shared["prompt"]})

    def download(self, world: World, server: Server, client: int) -> Tensors:
        pool = {int(name.removeprefix("pool.")): tensor for name, tensor in server.own.items()}
        own = pool.pop(client, None)
        found: list[Tensor] = []
        if own is not None:
            nearest = sorted(pool, key=lambda other: (float((pool[other] - own).norm()), other))
            found = [pool[other] for other in nearest[: self.experts]]
        experts = torch.stack([*found, *[server.shared["prompt"]] * (self.experts - len(found))])
        return {**server.shared, "experts": experts}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        candidates = torch.cat([params["prompt"].unsqueeze(0), params["experts"]])
        mixed = torch.einsum("e,e...->...", params["gate"].softmax(0), candidates)
        return Prompts(tokens=(TokenPrompt(mixed, (0,)),))

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, ("prompt", "gate", *NAMES), train.epochs),)

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        return pick(params, ["prompt"]), {**pick(params, (*NAMES, "gate")), "last_prompt": params["prompt"]}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        return {**received, **local, "prompt": local["last_prompt"]}

    @property
    def sums_suffice(self) -> bool:
        return False

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        pool = {f"pool.{upload.client}": upload.tensors["prompt"] for upload in uploads}
        return replace(averaged, own={**server.own, **pool})


@dataclass(frozen=True)
class StatisticsUser(Method):
    """PEP-FedPT's shape: pooled class prototypes from uploaded sums and counts, a client prior, one mixed prompt per image."""

    minimum: int = 1
    temperature: float = 0.1

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",)

    def init(self, world: World, generator: Stream) -> Roles:
        classes, width = world.classes, world.width
        return Roles(
            shared={
                "class_prompts": vpt_init(classes, 1, width, world.patch, generator),
                **_head(world),
            },
            local={"prior": torch.zeros(classes)},
            server={"prototypes": torch.zeros(classes, width), "known": torch.zeros(classes)},
            stat={
                "sums": Statistic((classes, width), "start", count="counts", minimum=self.minimum),
                "counts": Statistic((classes,), "start"),
            },
        )

    def statistics(self, world: World, params: Tensors, batch: Batch, forward: Callable[[], Seen]) -> Tensors:
        member = F.one_hot(batch.labels, world.classes).to(world.dtype)
        return {"sums": member.T @ F.normalize(batch.features["cls"], dim=-1), "counts": member.sum(0)}

    def survey(self, world: World, server: Server, uploads: Sequence[Upload]) -> Server:
        sums = torch.stack([upload.tensors["sums"] for upload in uploads]).sum(0)
        counts = torch.stack([upload.tensors["counts"] for upload in uploads]).sum(0)
        return replace(server, own={"prototypes": sums / counts.clamp_min(1)[:, None], "known": (counts > 0).float()})

    def download(self, world: World, server: Server, client: int) -> Tensors:
        sent = {"sent.prototypes": server.own["prototypes"], "sent.known": server.own["known"]}
        return {**server.shared, **sent}

    def enrol(self, world: World, client: Client) -> Tensors:
        return {"prior": client.class_counts / client.samples}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return (Stage(self, tuple(world.roles.shared), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        query = F.normalize(batch.features["cls"], dim=-1)
        score = query @ F.normalize(params["sent.prototypes"], dim=-1).T / self.temperature
        score = score + params["prior"].log() + params["sent.known"].log()
        mixed = torch.einsum("bc,cnd->bnd", score.softmax(-1), params["class_prompts"])
        return Prompts(tokens=(TokenPrompt(mixed.unsqueeze(1), (1,)),), extra={"score": score})

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return read_head(params, seen.cls)


HARD_USERS: dict[str, Method] = {
    "hypernetwork": HypernetworkUser(),
    "per_sample": PerSampleUser(),
    "two_stage": TwoStageUser(prompt_tokens=2),
    "experts": ExpertsUser(prompt_tokens=2),
    "statistics": StatisticsUser(),
}
