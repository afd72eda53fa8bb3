"""SGPT (Deng et al., CVPR 2024, arXiv 2310.18285): shared prompts, and prompts for groups of images.

Shared tokens enter at the first blocks, one token of the image's group at each of the next blocks. Tokens are appended
and stay, so the sequence grows. The head reads CLS. In the paper it reads, with the group on, the mean of CLS and the
group tokens' outputs after the final norm (`group_readout`).

    query        q = relu(CLS of the pass without prompts), after the last block or after the first `query_block` blocks
    similarity   c_g = cos(q, key_g); keys are normalised on use, so their lengths do not matter
    test         g = argmax c_g
    training     g = argmin (1 - c_g) (freq_g + 5e-4),   freq = counts / their sum (0 while there are none)
    key loss     - mean c_g of the chosen groups, added to the cross-entropy in the first key_epochs epochs of stage 2

Each round a client trains two blocks of coordinates one after the other, with a new optimiser:

    1. shared prompts and head, groups off
    2. group prompts, keys and head, groups on

The server averages shared prompts, group prompts (and the head, if shared) by sample count, and key g with weights n_kg
/ sum_k n_kg, or 1/|S| if the cohort chose g no more than `minimum_group` times; each image chooses once in every epoch
of stage 2. Then group prompts and keys are updated with momentum m: new = m old + (1 - m) average. The choices n_kg are
added to `counts`, which never decay and which go down as a copy.

From the official code: it compares the key loss's limit with the *local* epoch, counted from 0 in every round
(`epoch <= 5`, so six epochs; with E = 5 the key loss is always on), and adds up choices over all epochs of stage 2.
Blocks there: shared 0-3 and group 4-6 for CIFAR-100 with few classes, which are the defaults on a ViT-B; shared 0-4 and
group 5-6 for Office, DomainNet and CIFAR-100 with 50 classes.

Our choices where the source states nothing:

- n_kg counts each training image of client k once, with its trained keys, by the training rule without the batch's
  vote, and stands for the same choice in every epoch. Counts do not depend on how batches are cut.
- freq is a share, not a raw count: the 5e-4 then weighs the same in every round.
- Where the key loss ends before stage 2 does, the rest of stage 2 starts with a new optimiser.
- All prompts start as tokens of a blank image (`prompt_init`), as in the other methods: random group tokens, which stay in
  the sequence, cost accuracy before training begins. `random` is the paper's start.
- The head reads CLS in both stages. With `group_readout` one head has to fit two kinds of rows in turns, and the outputs of
  group tokens outweigh CLS three to one (docs/discussion.md).
- The vote of a batch (`batch_vote`) and the balancing are only for training. Before an evaluation, heads are tuned with
  groups chosen as at test.
- A client does 2 E epochs. With `equal_compute` it does E in all: stage 1 gets the larger half of the epochs. A single
  epoch is cut by images instead: each stage sees one half of them, the same half every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Combine, Mixture, Prompts, Seen, Server, Stage, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules import heads
from fedprompt.modules.insertion import PromptStart, TokenPrompt
from fedprompt.modules.prompt_keys import cosine, orthonormal_keys
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Blocks = Annotated[tuple[int, ...], Field(min_length=1)]
UNSEEN = 5e-4  # added to every frequency, so that groups without choices still compete by similarity


@dataclass(frozen=True)
class SharedPrompts(WithHead):
    """The first stage: shared tokens, appended, and a head on CLS."""

    shared_blocks: Blocks | None = None
    """Blocks that append a shared token; null for the first third."""
    first_tokens: Annotated[int, Field(ge=1)] = 1
    """Shared tokens at the first of these blocks; the others append one."""

    def blocks_of_shared(self, world: World) -> tuple[int, ...]:
        return self.shared_blocks or tuple(range(max(1, world.blocks // 3)))

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        tokens, blocks, first = params["shared_prompts"], self.blocks_of_shared(world), self.first_tokens
        slots = (
            TokenPrompt(tokens[:first].unsqueeze(0), blocks[:1], mode="append"),
            TokenPrompt(tokens[first:].unsqueeze(1), blocks[1:], mode="append"),
        )
        return Prompts(tokens=tuple(slot for slot in slots if slot.blocks))


@register("sgpt")
@dataclass(frozen=True)
class SGPT(SharedPrompts):
    """Shared prompts, and group prompts that every image picks by key, trained in turns."""

    retired: ClassVar[Mapping[str, str]] = {
        "key_rounds": "be left out: the key loss now lasts `key_epochs` local epochs of every round, as in the official code"
    }

    groups: Annotated[int, Field(ge=1)] = 20
    """G, sets of group prompts and keys."""
    group_blocks: Blocks | None = None
    """Blocks that append a group token; null for the quarter after the first third."""
    query_block: Annotated[int, Field(ge=1)] | None = None
    """Blocks before the query is read; null for all."""
    balanced: bool = True
    """In training, prefer groups that were chosen less often so far."""
    batch_vote: bool = False
    """In training, use the most chosen group of a batch for the whole batch."""
    key_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the key loss."""
    key_epochs: Annotated[int, Field(ge=0)] = 6
    """Epochs of every stage 2 with a key loss, from its first."""
    minimum_group: Annotated[int, Field(ge=0)] = 50
    """Keys chosen at most so often, in all epochs of stage 2 together, are averaged uniformly."""
    group_momentum: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the old group prompts in the new ones."""
    key_momentum: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the old keys in the new ones."""
    equal_compute: bool = False
    """Divide the local epochs between the stages instead of giving them to each."""
    group_readout: bool = False
    """With groups, read the mean of CLS and the group tokens' outputs, as in the paper, instead of CLS."""
    prompt_init: PromptStart = "blank"
    """Initial group prompts: tokens of a blank image, VPT's uniform ones, or zeros. Shared ones: blank too, or zeros."""

    @property
    def query(self) -> str:
        return "cls" if self.query_block is None else f"cls:{self.query_block}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("cls", "prompts") if self.group_readout else ("cls",)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.query,)

    def blocks_of_groups(self, world: World) -> tuple[int, ...]:
        start = min(max(1, world.blocks // 3), world.blocks - 1)
        return self.group_blocks or tuple(range(start, start + max(1, world.blocks // 4)))

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_blocks()
        for field, blocks in (
            ("shared_blocks", self.blocks_of_shared(world)),
            ("group_blocks", self.blocks_of_groups(world)),
        ):
            if list(blocks) != sorted(set(blocks)) or blocks[0] < 0 or blocks[-1] >= world.blocks:
                rule = f"be increasing and in 0..{world.blocks - 1}"
                raise ConfigError(broken(f"method.{field}", rule, list(blocks)))
        if self.groups > world.width:
            rule = f"be at most the backbone's width of {world.width}, for the keys start orthogonal"
            raise ConfigError(broken("method.groups", rule, self.groups))
        if self.query_block is not None and self.query_block > world.blocks:
            rule = f"be at most the {world.blocks} blocks of the backbone"
            raise ConfigError(broken("method.query_block", rule, self.query_block))

    @property
    def sums_suffice(self) -> bool:
        return False  # weighs clients by their choices

    def init(self, world: World, generator: Stream) -> Roles:
        group_blocks, (first, *rest) = self.blocks_of_groups(world), self.blocks_of_shared(world)
        group_prompts = world.initial_prompt(self.prompt_init, group_blocks * self.groups, 1, generator)
        shared_init: PromptStart = "blank" if self.prompt_init == "blank" else "zero"
        shared_blocks = [first] * self.first_tokens + rest
        shared = {
            "shared_prompts": world.initial_prompt(shared_init, shared_blocks, 1, generator).squeeze(1),
            "group_prompts": group_prompts.unflatten(0, (self.groups, len(group_blocks))),
            "keys": orthonormal_keys(self.groups, world.width, generator),
        }
        roles = Roles(
            shared=world.placed(shared),
            server={"counts": torch.zeros(self.groups, device=world.device)},
            stat={"choices": Statistic((self.groups,), choice=True)},
        )
        return self.with_head(world, roles)

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**server.shared, "sent.counts": server.own["counts"]}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        first = second = train.epochs
        middle = None
        if self.equal_compute and train.epochs == 1:
            middle = 0.5
        elif self.equal_compute:
            first, second = train.epochs - train.epochs // 2, train.epochs // 2
        with_keys = min(second, self.key_epochs)
        step = SharedPrompts(self.head, self.finetune_epochs, self.shared_blocks, self.first_tokens)
        trained = ("group_prompts", "keys", *heads.NAMES)
        shared = Stage(step, ("shared_prompts", *heads.NAMES), first, "shared", share=(0.0, middle or 1.0))
        groups = Stage(self, trained, with_keys, "groups", share=(middle or 0.0, 1.0))
        rest = replace(groups, step=replace(self, key_weight=0.0), epochs=second - with_keys, name="groups.rest")
        return tuple(stage for stage in (shared, groups, rest) if stage.epochs)

    def visits(self, epochs: int) -> float:
        """How often stage 2 sees an image in a round of that many local epochs."""
        return (epochs // 2 or 0.5) if self.equal_compute else epochs

    def likeness(self, params: Tensors, batch: Batch) -> Tensor:
        """Cosine of every query and every key, (B, G)."""
        return cosine(batch.features[self.query].relu(), params["keys"])

    def choose(self, params: Tensors, likeness: Tensor) -> Tensor:
        """The group (B,) of each training image."""
        if not self.balanced:
            return likeness.argmax(-1)
        counts = params["sent.counts"].to(likeness.dtype)
        return ((1 - likeness) * (counts / counts.sum().clamp_min(1) + UNSEEN)).argmin(-1)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        likeness = self.likeness(params, batch)
        chosen = self.choose(params, likeness) if batch.training else likeness.argmax(-1)
        if batch.training and self.batch_vote:
            chosen = _members(chosen, self.groups, batch.weights).sum(0).argmax().expand(chosen.shape)
        group = TokenPrompt(params["group_prompts"][chosen], self.blocks_of_groups(world), mode="append")
        shared = super().prompts(world, params, batch, noise).tokens
        return Prompts(
            tokens=(group, *shared),  # rows come back slot by slot, so the group's are the first
            extra={"likeness": likeness.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)},
        )

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if not self.group_readout:
            return super().logits(world, params, seen, batch, noise)
        assert seen.prompts is not None
        rows = seen.prompts[:, : len(self.blocks_of_groups(world))]
        return heads.read_head(params, torch.cat([seen.cls.unsqueeze(1), rows], dim=1).mean(1))

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        return plain - self.key_weight * batch.mean(seen.extra["likeness"])

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        likeness = self.likeness(params, batch)
        chosen = likeness.argmax(-1, keepdim=True)
        used = torch.zeros_like(likeness, dtype=torch.bool).scatter(-1, chosen, True)
        names = tuple(f"group {number}" for number in range(self.groups))
        return (Mixture("groups", names, likeness, "cosine of query and key", used),)

    def statistics(self, world: World, params: Tensors, batch: Batch, forward: Callable[[], Seen]) -> Tensors:
        chosen = self.choose(params, self.likeness(params, batch))
        return {"choices": _members(chosen, self.groups, batch.weights).sum(0)}

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        choices = torch.stack([upload.tensors["choices"] for upload in uploads])  # (S, G)
        rows = []
        minimum = self.minimum_group / self.visits(world.epochs)
        for group, weights in enumerate(group_shares(choices, minimum).T.tolist()):
            keys, before = [{"key": upload.tensors["keys"][group]} for upload in uploads], server.shared["keys"][group]
            rows.append(combine(keys, weights, {"key": before})["key"])
        shared = {**averaged.shared, "keys": torch.stack(rows)}
        for name, momentum in (("group_prompts", self.group_momentum), ("keys", self.key_momentum)):
            shared[name] = momentum * server.shared[name] + (1 - momentum) * shared[name]
        counts = server.own["counts"]
        return replace(averaged, shared=shared, own={**averaged.own, "counts": counts + choices.sum(0).to(counts)})

    def adaptation(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        return self._as_tested(super().adaptation(world, train))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        return self._as_tested(super().newcomer(world, train, epochs))

    def _as_tested(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The same stages with groups chosen as at test."""
        step = replace(self, balanced=False, batch_vote=False)
        return tuple(replace(stage, step=step) for stage in stages)


def group_shares(choices: Tensor, minimum: float) -> Tensor:
    """Each client's share (S, G) in every group by its choices (S, G); equal shares where too few chose the group."""
    choices = choices.double()
    totals = choices.sum(0)
    return torch.where(totals > minimum, choices / totals.clamp_min(1), 1 / len(choices))


def _members(chosen: Tensor, groups: int, weights: Tensor | None) -> Tensor:
    """(B, G), 1 where an image chose a group; padded images choose none."""
    members = (chosen.unsqueeze(-1) == torch.arange(groups, device=chosen.device)).float()
    return members if weights is None else members * weights.unsqueeze(-1)
