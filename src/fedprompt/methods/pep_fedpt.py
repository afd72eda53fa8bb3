"""PEP-FedPT with CCMP (Yashwanth et al., 2026, arXiv 2510.25372): one mixed class prompt per image.

Known of the paper: shared prompts before the first block, prompts for every class, one mixed prompt per image whose
soft weights come from global class prototypes and the client's class prior, and plain federated averaging of all
prompts. We know no code and no further text, so the rest is our definition, and each part is a setting:

    query       z(x) in R^d    CLS of the pass without prompts, after the final norm ("frozen_cls"), or the CLS row
                               that enters the first class block of the prompted pass ("inline"); of length one, and
                               no gradient flows through it
    prototype   mu_c    = sum_k S_kc / sum_k n_kc         S_kc: sum of z over the n_kc training images of class c that client k holds
    prior       pi_k(c) = (n_kc + a) / (n_k + a C)        of held-out clients too
    weights     s_c(x)  = softmax_c(sim(z, mu_c) / tau + kappa log pi_k(c))   over the classes that have a prototype
    mixed       m(x)    = sum_c s_c(x) P_c                enters before the class block(s); shared prompts enter before block 0

This is E[P_c | x] if z given c is normal around mu_c with variance tau and pi_k is the prior: sim = -|z - mu_c|^2 / 2,
which for vectors of length one is the cosine up to a constant. Where no class has both a prototype and a prior, the
prior alone decides; without a prior, all classes count the same.

**The temperature follows the data** (`temperature: auto`), from the sums and counts that the server has anyway. Queries
have length one, so the variance of a query around the prototype of its class, pooled over classes, is

    w = sum_c (n_c - |S_c|^2 / n_c) / (n - C) * (1 + C / n)        n images of C classes; the second factor: prototypes are estimates

That is the variance of all directions together; of pretrained features it lies in about 25 of them (8 to 36, measured
with the best temperature for images that are left out of their prototype, on four sets and two backbones). So tau =
w / 25 for the distance and w / (25 sqrt(1 - w)) for the cosine, whose prototypes are scaled to length one. On DINOv2-S
this gives 0.03 to 0.05 and 1.5 to 2.2 times the weight of the true class that 0.1 gives (docs/discussion.md). Prompts are
mixed twice as softly (`softness`, up to 0.1): where priors are equal, weights as sharp as the posterior cost accuracy, and
where clients differ in their classes the prior tells them apart in both cases.
Centring queries and prototypes does nothing to the distance, and little to the cosine once the temperature fits.

**Where, and how fast.** Class prompts enter before the last quarter of the blocks and learn twenty times as fast as shared
ones. They start as nearly equal tokens of a blank image, so features of images stay what they are, but a mixture says
nothing of the class, nor of the client's prior, until they differ; at the common rate ten rounds did not get there. A
random start tells classes apart at once and costs accuracy where priors are equal (docs/discussion.md).

**An image does not count in its own prototype.** In training, the weights of an image of the client use, for its own
class, the mean of the n_c - 1 other images, (n_c mu_c - z) / (n_c - 1), as a test image finds it. Otherwise training
images look nearer to their class than test images will, and the head trusts the mixture too much. That needs the counts
n_c, which go down with the prototypes; a class of one image keeps its prototype, and so do prototypes that move.

**Control.** The prior alone already helps: p(y|x, k) ~ pi_k(y) p(x|y). With `logit_prior: 1` the log prior is added to
the logits, in training and in tests; with no tokens at all that is a shared head with logit adjustment, which shows
what the prompts add.

A frozen query makes the prototypes constants: every client sends its sums and counts once, before round 1. An inline
query changes with the prompts: the prototypes start from the initial prompts, and after each round mu_c <- rho mu_c +
(1 - rho) (mean over the cohort), for the classes the cohort holds. Prototypes are sent with every download, because the
server does not record which clients have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Mixture, Prompts, Seen, Server, Stage, Upload, World, shares
from fedprompt.core.recipe import Recipe
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles, Statistic
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules.insertion import PromptStart, TokenPrompt
from fedprompt.modules.prompt_keys import cosine
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed

Block = Annotated[int, Field(ge=0)]
Finite = Field(ge=0, allow_inf_nan=False)
DIRECTIONS = 25  # in which features of one class differ
SHARPEST, WIDEST = 0.01, 0.1  # temperatures that `auto` may find, also from sums with noise
RAREST = 1e-3  # prior of a class without images, where its logarithm is added to a logit


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
    class_blocks: tuple[Block, ...] | None = None
    """Blocks, from 0, that get their own class prompts; the last ones are kept until the end. Null for the last quarter."""
    prompt_init: PromptStart = "blank"
    """Initial shared prompts: tokens of a blank image, VPT's uniform ones, or zeros."""
    class_prompt_init: PromptStart = "blank"
    """The same for the class prompts."""
    query: Literal["frozen_cls", "inline"] = "frozen_cls"
    """Feature that is compared with the prototypes."""
    normalise_query: bool = True
    """Scale the query to length one."""
    detach_query: bool = True
    """No gradient through the weights; only query inline could have one."""
    similarity: Literal["cosine", "neg_sq_dist"] = "cosine"
    """Similarity of query and prototype: cosine, or -|z - mu|^2 / 2."""
    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """Tau, temperature of the similarity, or from the variance of the queries around their prototypes."""
    softness: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Factor on the temperature that `auto` finds; 1 is that of the posterior. The result is at most 0.1."""
    kappa: Annotated[float, Finite] = 1.0
    """Weight of the log prior; 0 ignores the prior."""
    prior: Literal["own", "uniform"] = "own"
    """Class prior of a client: from its training images, or uniform."""
    newcomer_prior: Literal["uniform", "own"] = "own"
    """The same for held-out clients."""
    logit_prior: Annotated[float, Finite] = 0.0
    """Weight of the log prior in the logits. A control: with no tokens it is logit adjustment alone."""
    smoothing: Annotated[float, Finite] = 0.0
    """a, added to every class count of the client's prior."""
    prototype_momentum: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Rho, share of the old prototypes in the new ones (inline)."""
    class_prompt_weighting: Literal["samples", "class_counts"] = "samples"
    """Average class prompts by all images, or by images of the class."""
    minimum_count: Annotated[int, Field(ge=1)] = 1
    """A client does not send sums and counts of classes with fewer images."""

    @property
    def recipe(self) -> Recipe:
        """Class prompts start nearly equal and say nothing of the class until they differ."""
        return replace(super().recipe, lrs={"class_prompts": 0.06})

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cls",) if self.query == "frozen_cls" else ()

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_blocks()
        blocks = list(self.blocks_of_classes(world))
        if not blocks or blocks != sorted(set(blocks)) or blocks[-1] >= world.blocks:
            raise ConfigError(
                broken("method.class_blocks", f"be increasing and in 0..{world.blocks - 1}, one at least", blocks)
            )
        if self.temperature == "auto" and not self.normalise_query:
            raise ConfigError(broken("method.temperature", "be a number if method.normalise_query is false", "auto"))
        if self.query == "inline" and blocks[0] == 0:
            raise ConfigError(
                broken("method.class_blocks", "start behind block 0 with query inline, as CLS has seen nothing", blocks)
            )

    def blocks_of_classes(self, world: World) -> tuple[int, ...]:
        """The blocks that get class prompts."""
        last = range(world.blocks - max(1, world.blocks // 4), world.blocks)
        return tuple(last) if self.class_blocks is None else self.class_blocks

    @property
    def sums_suffice(self) -> bool:
        return self.class_prompt_weighting != "class_counts"

    def init(self, world: World, generator: Stream) -> Roles:
        classes, width = world.classes, world.width
        shared = world.initial_prompt(self.prompt_init, [0], self.shared_tokens, generator)
        blocks = [*self.blocks_of_classes(world)] * classes
        of_classes = world.initial_prompt(self.class_prompt_init, blocks, self.class_tokens, generator)
        prompts = {"shared_prompt": shared, "class_prompts": of_classes.unflatten(0, (classes, -1))}
        server = {"prototypes": torch.zeros(classes, width), "known": torch.zeros(classes)}
        if self.temperature == "auto":
            server["temperature"] = torch.tensor(WIDEST)
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
        return {**server.shared, **prefixed("sent.", server.own)}

    def enrol(self, world: World, client: Client) -> Tensors:
        policy = self.newcomer_prior if client.index in world.newcomers else self.prior
        counts = client.class_counts.to(world.device, world.dtype)
        counts = counts + self.smoothing if policy == "own" else torch.ones_like(counts)
        return {"prior": F.normalize(counts, p=1, dim=0)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        """With `counted` (C,): the classes whose prototypes hold this client's training images."""
        counts = client.class_counts.to(world.device)
        sent = self.query == "frozen_cls" and client.index not in world.newcomers
        counted = (counts >= self.minimum_count) & sent
        return {**super().begin(world, client, received, local), "counted": counted.to(world.dtype)}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        """Without `counted` if no head is fitted: a prediction then opens no training image."""
        fits = self.head == "shared_then_finetune"
        return self.begin(world, client, received, local) if fits else super().begin(world, client, received, local)

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        own = sorted(set(world.roles.local) - {"prior"})
        if own:
            raise ConfigError(broken("variant.name", "leave pep_fedpt nothing local to train", ", ".join(own)))
        return (Stage(self, tuple(world.roles.shared), train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        shared = TokenPrompt(params["shared_prompt"], (0,))
        if self.query == "inline":
            return Prompts(tokens=(shared,), pause=self.blocks_of_classes(world)[0])
        mixed = self._mixed(world, params, batch.features["cls"], batch)
        return replace(mixed, tokens=(shared, *mixed.tokens))

    def later(self, world: World, params: Tensors, cls: Tensor, batch: Batch, noise: Tensors) -> Prompts:
        return self._mixed(world, params, cls, batch)

    def queries(self, cls: Tensor) -> Tensor:
        cls = cls.detach() if self.detach_query else cls
        return F.normalize(cls, dim=-1) if self.normalise_query else cls

    def class_weights(
        self,
        query: Tensor,
        prototypes: Tensor,
        known: Tensor,
        prior: Tensor,
        temperature: Tensor | float = WIDEST,
        own: Tensor | None = None,
    ) -> Tensor:
        """s (B, C) of queries (B, d), given prototypes (C, d), the images they are means of (0: none) and the client's prior (C,).

        `own` (B, C) is above 0 where a query is one of these images: there the prototype is that of the others.
        """
        allowed = prior > 0 if self.kappa else torch.ones_like(prior, dtype=torch.bool)
        usable = allowed & (known > 0)
        alone = torch.where(allowed.any(), allowed, True)
        likeness = self._likeness(query, prototypes)
        if own is not None:
            others = self._likeness_of_others(query, prototypes, known)
            likeness = torch.where((own > 0) & (known >= 2), others, likeness)
        likeness = likeness / temperature
        bias = self.kappa * torch.where(prior > 0, prior, 1.0).log()
        score = torch.where(usable.any(), likeness, 0.0) + bias
        return torch.where(torch.where(usable.any(), usable, alone), score, -torch.inf).softmax(-1)

    def _likeness(self, query: Tensor, prototypes: Tensor) -> Tensor:
        if self.similarity == "cosine":
            return cosine(query, prototypes)
        lengths = query.square().sum(-1, keepdim=True) + prototypes.square().sum(-1)
        return query @ prototypes.T - lengths / 2

    def _likeness_of_others(self, query: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
        """The same with (n mu - z) / (n - 1), the mean of the n - 1 images that are not the query, for every class (B, C)."""
        rest = (known - 1).clamp_min(1)
        product, square = query @ prototypes.T, query.square().sum(-1, keepdim=True)
        inner = (known * product - square) / rest
        length = (known**2 * prototypes.square().sum(-1) - 2 * known * product + square) / rest**2
        if self.similarity == "cosine":
            return inner * torch.rsqrt((square * length).clamp_min(1e-12))
        return inner - (length + square) / 2

    def _mixed(self, world: World, params: Tensors, cls: Tensor, batch: Batch) -> Prompts:
        query = self.queries(cls)
        temperature = params["sent.temperature"] if self.temperature == "auto" else self.temperature
        sent = (params["sent.prototypes"], params["sent.known"])
        counted = params.get("counted") if batch.training else None
        own = None if counted is None else counted * F.one_hot(batch.labels, len(counted))
        weights = self.class_weights(query, *sent, params["prior"], temperature, own)
        mixed = torch.einsum("bc,clnd->blnd", weights, params["class_prompts"])
        return Prompts(
            tokens=(TokenPrompt(mixed, self.blocks_of_classes(world)),), extra={"query": query, "weights": weights}
        )

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().logits(world, params, seen, batch, noise)
        return plain + self.logit_prior * params["prior"].clamp_min(RAREST).log() if self.logit_prior else plain

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """Entropy of the weights as a share of the largest one, and the weight of the class an image belongs to."""
        weights = seen.extra["weights"]
        entropy = -(weights * weights.clamp_min(1e-12).log()).sum(-1) / math.log(max(2, world.classes))
        right = weights.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
        return {"class_weights.entropy": entropy, "class_weights.true_class": right}

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
        own = {**server.own, "prototypes": prototypes, "known": self._known(server.own["known"], counts)}
        if self.temperature == "auto":
            found = fitting_temperature(sums[present], counts[present], self.similarity, self.softness)
            old_share = self.prototype_momentum if known.any() else 0.0
            own["temperature"] = old_share * own["temperature"] + (1 - old_share) * found.to(old)
        return replace(server, own=own)

    def _known(self, before: Tensor, counts: Tensor) -> Tensor:
        """How many images a prototype is the mean of. One that moves is no mean of certain images: 1."""
        known = counts if self.query == "frozen_cls" else torch.maximum(before, (counts > 0).to(before))
        return known.clamp_min(0).to(before.dtype)

    def pooled(self, uploads: Sequence[Upload], name: str) -> Tensor:
        """A statistic over all clients. The server uses only this sum, so a secure sum may replace it."""
        parts = [upload.tensors[name].to("cpu", torch.float64) for upload in uploads]
        return torch.stack(parts).sum(0).float()


def fitting_temperature(
    sums: Tensor, counts: Tensor, similarity: Literal["cosine", "neg_sq_dist"], softness: float = 1.0
) -> Tensor:
    """Tau of queries of length one, from their sums (C, d) and counts (C,) by class; see the module's docstring."""
    images, classes = counts.sum(), len(counts)
    if images <= classes:
        return torch.tensor(WIDEST)
    around = (counts - sums.square().sum(-1) / counts).sum() / (images - classes) * (1 + classes / images)
    around = around.clamp(0.0, 0.99)
    scale = (1 - around).sqrt() if similarity == "cosine" else 1.0
    return (softness * around / (DIRECTIONS * scale)).clamp(SHARPEST, WIDEST)
