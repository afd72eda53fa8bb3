"""PEP-FedPT with CCMP (Yashwanth et al., 2026, arXiv 2510.25372): one mixed class prompt per image.

Known of the paper: shared prompts before the first block, prompts for every class, one mixed prompt per image whose
soft weights come from global class prototypes and the client's class prior, and plain federated averaging of all
prompts. We know no code and no further text, so the rest is our definition, and each part is a setting:

    query       z(x) in R^d    CLS of the pass without prompts, after the final norm ("frozen_cls"), or the CLS row
                               that enters the first class block of the prompted pass ("inline"); of length one, and
                               no gradient flows through it
    prototype   mu_c    = sum_k S_kc / sum_k n_kc         S_kc: sum of z over the n_kc training images of class c that client k holds
    prior       pi_k(c) = (n_kc + a) / (n_k + a C)        uniform for held-out clients
    weights     s_c(x)  = softmax_c(sim(z, mu_c) / tau + kappa log pi_k(c))   over the classes that have a prototype
    mixed       m(x)    = sum_c s_c(x) P_c                enters before the class block(s); shared prompts enter before block 0

This is E[P_c | x] if z given c is normal around mu_c with variance tau and pi_k is the prior: sim = -|z - mu_c|^2 / 2,
which for vectors of length one is the cosine up to a constant. Where no class has both a prototype and a prior, the
prior alone decides; without a prior, all classes count the same.

A frozen query makes the prototypes constants: every client sends its sums and counts once, before round 1. An inline
query changes with the prompts: the prototypes start from the initial prompts, and after each round mu_c <- rho mu_c +
(1 - rho) (mean over the cohort), for the classes the cohort holds. Prototypes are sent with every download, because the
server does not record which clients have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Mixture, Prompts, Seen, Server, Stage, Upload, World, shares
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules.insertion import VisionPrompt, initial_prompt
from fedprompt.modules.prompt_keys import cosine
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

Block = Annotated[int, Field(ge=0)]
Finite = Field(ge=0, allow_inf_nan=False)


@register("pep_fedpt")
@dataclass(frozen=True)
class PEPFedPT(WithHead):
    """Shared prompts, and a per-image mixture of class prompts."""

    search_space: ClassVar[SearchSpace] = {"method.temperature": FloatRange(0.01, 1.0)}

    head: Literal["shared", "shared_then_finetune"] = "shared"
    """Always shared; optionally tuned on a copy before an evaluation."""
    shared_tokens: Annotated[int, Field(ge=0)] = 10
    """N_s, shared tokens before block 0, carried through all blocks."""
    class_tokens: Annotated[int, Field(ge=0)] = 1
    """N_c, tokens of each class."""
    class_blocks: tuple[Block, ...] = (1,)
    """Blocks, from 0, that get their own class prompts; the last ones are kept until the end."""
    prompt_init: Literal["random", "zero"] = "random"
    """VPT's uniform initialisation of the shared prompts, or zeros."""
    class_prompt_init: Literal["random", "zero"] = "random"
    """The same for the class prompts."""
    query: Literal["frozen_cls", "inline"] = "frozen_cls"
    """Feature that is compared with the prototypes."""
    normalise_query: bool = True
    """Scale the query to length one."""
    detach_query: bool = True
    """No gradient through the weights; only query inline could have one."""
    similarity: Literal["cosine", "neg_sq_dist"] = "cosine"
    """Similarity of query and prototype: cosine, or -|z - mu|^2 / 2."""
    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = 0.1
    """Tau, temperature of the similarity."""
    kappa: Annotated[float, Finite] = 1.0
    """Weight of the log prior; 0 ignores the prior."""
    prior: Literal["own", "uniform"] = "own"
    """Class prior of a client: from its training images, or uniform."""
    newcomer_prior: Literal["uniform", "own"] = "uniform"
    """The same for held-out clients."""
    smoothing: Annotated[float, Finite] = 0.0
    """a, added to every class count of the client's prior."""
    prototype_momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Rho, share of the old prototypes in the new ones (inline)."""
    class_prompt_weighting: Literal["samples", "class_counts"] = "samples"
    """Average class prompts by all images, or by images of the class."""
    minimum_count: Annotated[int, Field(ge=1)] = 1
    """A client does not send sums and counts of classes with fewer images."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",) if self.query == "frozen_cls" else ()

    def check(self, world: World, train: TrainConfig) -> None:
        blocks = list(self.class_blocks)
        if not blocks or blocks != sorted(set(blocks)) or blocks[-1] >= world.blocks:
            raise ConfigError(
                broken("method.class_blocks", f"be increasing and in 0..{world.blocks - 1}, one at least", blocks)
            )
        if self.query == "inline" and blocks[0] == 0:
            raise ConfigError(
                broken("method.class_blocks", "start behind block 0 with query inline, as CLS has seen nothing", blocks)
            )

    @property
    def sums_suffice(self) -> bool:
        return self.class_prompt_weighting != "class_counts"

    def init(self, world: World, generator: Stream) -> Roles:
        classes, width, patch = world.classes, world.width, world.patch
        shared = initial_prompt(self.prompt_init, 1, self.shared_tokens, width, patch, generator)
        rows = classes * len(self.class_blocks)
        of_classes = initial_prompt(self.class_prompt_init, rows, self.class_tokens, width, patch, generator)
        prompts = {"shared_prompt": shared, "class_prompts": of_classes.unflatten(0, (classes, -1))}
        server = {"prototypes": torch.zeros(classes, width), "known": torch.zeros(classes)}
        roles = Roles(
            shared=world.placed(prompts),
            local={"prior": torch.zeros(classes, dtype=world.dtype, device=world.device)},
            server=world.placed(server),
            stat=self._declared(classes, width),
        )
        return self.with_head(world, roles)

    def _declared(self, classes: int, width: int) -> dict[str, Statistic]:
        """Sums and counts at the start; in every round counts if they are weights, and sums if prototypes change."""
        sums = Statistic((classes, width), "start", "start.counts", self.minimum_count)
        found = {"start.sums": sums, "start.counts": replace(sums, shape=(classes,))}
        again = replace(sums, when="round", count="round.counts")
        if self.query == "inline":
            found["round.sums"] = again
        if self.query == "inline" or self.class_prompt_weighting == "class_counts":
            found["round.counts"] = replace(again, shape=(classes,))
        return found

    def statistics(self, world: World, params: Tensors, batch: Batch, forward: Callable[[], Seen]) -> Tensors:
        member = F.one_hot(batch.labels, world.classes).float()
        if batch.weights is not None:
            member = member * batch.weights.unsqueeze(-1)
        query = forward().extra["query"] if self.query == "inline" else self.queries(batch.features["cls"])
        found = {"sums": member.T @ query.float(), "counts": member.sum(0)}
        return {f"{when}.{name}": value for when in ("start", "round") for name, value in found.items()}

    def survey(self, world: World, server: Server, uploads: Sequence[Upload]) -> Server:
        return self._with_prototypes(server, uploads, "start")

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**server.shared, "sent.prototypes": server.own["prototypes"], "sent.known": server.own["known"]}

    def enrol(self, world: World, client: Client) -> Tensors:
        policy = self.newcomer_prior if client.index in world.newcomers else self.prior
        counts = client.class_counts.to(world.device, world.dtype)
        counts = counts + self.smoothing if policy == "own" else torch.ones_like(counts)
        return {"prior": F.normalize(counts, p=1, dim=0)}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        own = sorted(set(world.roles.local) - {"prior"})
        if own:
            raise ConfigError(broken("variant.name", "leave pep_fedpt nothing local to train", ", ".join(own)))
        return (Stage(self, tuple(world.roles.shared), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        shared = VisionPrompt(params["shared_prompt"], (0,))
        if self.query == "inline":
            return Prompts(vision=(shared,), pause=self.class_blocks[0])
        mixed = self._mixed(params, batch.features["cls"])
        return replace(mixed, vision=(shared, *mixed.vision))

    def later(self, world: World, params: Tensors, cls: Tensor, batch: Batch, noise: Tensors) -> Prompts:
        return self._mixed(params, cls)

    def queries(self, cls: Tensor) -> Tensor:
        cls = cls.detach() if self.detach_query else cls
        return F.normalize(cls, dim=-1) if self.normalise_query else cls

    def class_weights(self, query: Tensor, prototypes: Tensor, known: Tensor, prior: Tensor) -> Tensor:
        """s (B, C) of queries (B, d), given prototypes (C, d), which of them are known and the client's prior (C,)."""
        allowed = prior > 0 if self.kappa else torch.ones_like(prior, dtype=torch.bool)
        usable = allowed & (known > 0)
        alone = torch.where(allowed.any(), allowed, True)
        likeness = self._likeness(query, prototypes) / self.temperature
        bias = self.kappa * torch.where(prior > 0, prior, 1.0).log()
        score = torch.where(usable.any(), likeness, 0.0) + bias
        return torch.where(torch.where(usable.any(), usable, alone), score, -torch.inf).softmax(-1)

    def _likeness(self, query: Tensor, prototypes: Tensor) -> Tensor:
        if self.similarity == "cosine":
            return cosine(query, prototypes)
        lengths = query.square().sum(-1, keepdim=True) + prototypes.square().sum(-1)
        return query @ prototypes.T - lengths / 2

    def _mixed(self, params: Tensors, cls: Tensor) -> Prompts:
        query = self.queries(cls)
        weights = self.class_weights(query, params["sent.prototypes"], params["sent.known"], params["prior"])
        mixed = torch.einsum("bc,clnd->blnd", weights, params["class_prompts"])
        return Prompts(vision=(VisionPrompt(mixed, self.class_blocks),), extra={"query": query, "weights": weights})

    def mixtures(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> tuple[Mixture, ...]:
        return (Mixture("class prompts", world.class_names, seen.extra["weights"]),)

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        after = super().aggregate(world, server, uploads, combine)
        if self.class_prompt_weighting == "class_counts":
            rows = self._by_class(server.shared["class_prompts"], uploads, combine)
            after = replace(after, shared={**after.shared, "class_prompts": rows})
        return self._with_prototypes(after, uploads, "round") if self.query == "inline" else after

    def _by_class(self, before: Tensor, uploads: Sequence[Upload], combine: Combine) -> Tensor:
        """The prompts of each class, averaged by images of it; unchanged if the cohort has none."""
        rows = list(before)
        for number in range(len(rows)):
            counts = [float(upload.tensors["round.counts"][number]) for upload in uploads]
            holders = [(upload, count) for upload, count in zip(uploads, counts, strict=True) if count]
            if holders:
                parts = [{"class_prompts": upload.tensors["class_prompts"][number]} for upload, _ in holders]
                weights, around = shares([count for _, count in holders]), {"class_prompts": before[number]}
                rows[number] = combine(parts, weights, around)["class_prompts"]
        return torch.stack(rows)

    def _with_prototypes(self, server: Server, uploads: Sequence[Upload], when: str) -> Server:
        """Means over all images the uploads were made from; old prototypes move towards them, new ones are set."""
        old, known = server.own["prototypes"], server.own["known"] > 0
        sums, counts = (self.pooled(uploads, f"{when}.{name}").to(old.device) for name in ("sums", "counts"))
        present = counts > 0
        stays = torch.where(known, self.prototype_momentum, 0.0)[:, None]
        moved = stays * old + (1 - stays) * sums / counts.clamp_min(1)[:, None]
        prototypes = torch.where(present[:, None], moved.to(old.dtype), old)
        return replace(server, own={**server.own, "prototypes": prototypes, "known": (known | present).to(old.dtype)})

    def pooled(self, uploads: Sequence[Upload], name: str) -> Tensor:
        """A statistic over all clients. The server uses only this sum, so a secure sum may replace it."""
        parts = [upload.tensors[name].to("cpu", torch.float64) for upload in uploads]
        return torch.stack(parts).sum(0).float()
