"""FOCoOp (Liao et al., ICML 2025, arXiv 2506.16218): global, local and outside prompts, trained against the worst features
nearby, so that a client knows its classes and knows what is none of them.

A client's context is P = (1 - w) L + w G: L (m, d) its own, G averaged. U outside contexts O_u stand with U words that name
no class. With T_c = g([P, c]), O'_u = g([O_u, word u]) and z = scale * I [T ; O']^T over C + U columns:

    each_b = CE(z_b, y_b) + v * ( log sum_u exp z_bu - mean_u z_bu )          the second part is over the outside alone
    loss   = tau * log mean_b exp(each_b / tau)

The first part keeps an image with its class and away from the outside, the second spreads what is left evenly over the
outside, and the mean counts hard images more. It is taken at features T + D and O' + E, the worst nearby: D, then E, begin at
0 and go up the penalised mean of the batch by S steps of length eta for each class,

    D_c <- D_c + eta * r / ||r||,   r = d/dT_c ( mean_b CE_b - gamma mean_c ||D_c|| ),   and E_u of both parts alike

Prediction: argmax_c <I, T_c>. The share of the outside in softmax(z) says how little an image is like any class
(`diagnostics`).

The server averages G and calibrates. Costs M are squared distances of all uploaded outside contexts from the columns of G,
divided by the largest; pi minimises <pi, M> + 0.1 KL(pi 1 | even) + 0.1 KL(pi^T 1 | even). The mass of an outside context
says how near it is to the classes, and two means divide the masses:

    near   G <- e G + (1 - e) * (their mean weighted by pi)                   they seem to be classes of other clients
    far    the U of the least mass are the outside contexts of the next round, in the order of the uploads; if there are fewer
           than U, again from the first

w = 1, U = 0, S = 0 and `tau: null` is PromptFL, w = 0 with them CoOp. A client that never took part predicts with G.

Where we depart from the authors' code: its steps are 1 long, as long as the features themselves; gamma changes in the course
of a training; the penalty on E is of D; it does not divide the weighted means by their mass, which makes G shorter; its
switches are off by default. Its outside words are the 100 of WordNet that are least like the class names; ours are a list of
everyday words, or yours. It has a context for each class where it calibrates, `class_specific: true` here. The paper's
transport holds the masses of G fast, its code and ours relax both sides. Uploads ten times as far as the median from what
`aggregation.rule` makes of them are left out of the calibration, so that a robust rule protects it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Combine, Prompts, Seen, Server, Upload, World, cross_entropy
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_local import WithLocalContext
from fedprompt.methods.bases.with_text import RATES, precise, similarity
from fedprompt.modules.contexts import APART, TextContext
from fedprompt.modules.optimal_transport import unbalanced_plan
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors

OUTSIDE = "outside"
REACH = 10.0
RELAXATION = 0.1  # weight of both penalties of the transport, as in the authors' code
WORDS = (
    *("cloud", "river", "mountain", "beach", "forest", "road", "bridge", "tower", "window", "door", "wall", "floor"),
    *("paper", "glass", "metal", "wood", "stone", "sand", "snow", "rain", "fire", "smoke", "shadow", "mirror"),
    *("letter", "number", "map", "flag", "coin", "button", "rope", "wheel", "engine", "ladder", "fence", "basket"),
    *("shirt", "shoe", "hat", "blanket", "pillow", "carpet", "spoon", "plate", "bread", "cheese", "soup", "egg"),
)


@register("focoop")
@dataclass(frozen=True)
class FOCoOp(WithLocalContext):
    """Global, local and outside contexts, trained against the worst features nearby."""

    rates: ClassVar[Mapping[str, float | str]] = {**RATES, OUTSIDE: "80%"}

    global_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """w, share of the global context in a client's."""
    outside: Annotated[int, Field(ge=0)] = 20
    """U, outside contexts; the authors have 100."""
    outside_words: tuple[Annotated[str, Field(min_length=1)], ...] = WORDS
    """Words behind the outside contexts; the first U that name no class are used."""
    outside_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """V, weight of an even spread over the outside."""
    ascent_steps: Annotated[int, Field(ge=0)] = 4
    """S, steps towards the worst features; 0 for the features as they are."""
    ascent_size: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """Eta, length of such a step; features have length 1."""
    ascent_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Gamma, weight of the distance from the features as they are."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Tau: the smaller, the more hard images count; null for a plain mean."""
    calibration: Annotated[float, Field(ge=0, le=1)] = 0.5
    """1 - e, how far the global context moves to outside ones that seem to be classes."""

    @property
    def sums_suffice(self) -> bool:
        return not self.outside

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        words = self.words(world)
        if len(words) < self.outside:
            rule = f"have at least {self.outside} words that name no class"
            raise ConfigError(broken("method.outside_words", rule, len(words)))
        room = world.text.with_names(words).room
        if room is not None and self.context_length(world) > room:
            longest = max(words, key=len)
            raise ConfigError(broken("method.outside_words", "fit into the text tower behind the context", longest))

    def words(self, world: World) -> tuple[str, ...]:
        """The words of the outside."""
        classes = {name.replace("_", " ").lower() for name in world.class_names}
        return tuple(word for word in self.outside_words if word.lower() not in classes)[: self.outside]

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        if not self.outside:
            return roles
        one = replace(self, class_specific=False).new_context(world, generator)
        drawn = APART * generator.normal(self.outside, *one.shape)
        return replace(roles, shared={**roles.shared, OUTSIDE: one + drawn.to(one)})

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        text = {"own": self.as_context(torch.lerp(params["local_context"], params["context"], self.global_share))}
        if self.outside:
            text[OUTSIDE] = TextContext(params[OUTSIDE], self.class_position, names=self.words(world))
        return Prompts(text=text)

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["own"])

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        if not batch.training:
            return super().loss(world, params, logits, seen, batch, noise)
        text, classes = self.features(seen), world.classes
        worse = text + self.worst(world, seen.image, text, batch).detach()
        each = self.by_image(similarity(world, seen.image, worse), batch.labels, classes)
        if self.temperature is None:
            return batch.mean(each)
        hardest = each.detach().amax()
        return hardest + self.temperature * batch.mean(((each - hardest) / self.temperature).exp()).log()

    def features(self, seen: Seen) -> Tensor:
        """T and O', (C + U, D)."""
        return torch.cat([precise(seen.text[name]) for name in ("own", OUTSIDE) if name in seen.text])

    def by_image(self, logits: Tensor, labels: Tensor, classes: int) -> Tensor:
        """each (B,) of logits (B, C + U)."""
        found = cross_entropy(logits, labels)
        if not self.outside:
            return found
        outside = logits[:, classes:]
        return found + self.outside_weight * (outside.logsumexp(-1) - outside.mean(-1))

    def worst(self, world: World, image: Tensor, text: Tensor, batch: Batch) -> Tensor:
        """D and E, (C + U, D): first the classes are moved, then the outside."""
        image, text = precise(image).detach(), text.detach()
        weights = torch.ones_like(batch.labels, dtype=image.dtype) if batch.weights is None else batch.weights
        counted = world.text.scale * image * (weights / weights.sum()).unsqueeze(-1)  # (B, D)
        inside = torch.arange(len(text), device=text.device) < world.classes
        right = batch.labels.unsqueeze(-1) == torch.arange(len(text), device=text.device)
        moved = torch.zeros_like(text)
        for part in (inside, ~inside)[: 1 + bool(self.outside)]:
            size = part.sum()
            for _ in range(self.ascent_steps):
                logits = similarity(world, image, text + moved)
                slope = logits.softmax(-1) - right.to(logits)  # of the cross-entropy, by logits
                if part is not inside:
                    spread = logits.masked_fill(inside, -torch.inf).softmax(-1) - (~inside).to(logits) / size
                    slope = slope + self.outside_weight * spread
                uphill = slope.mT @ counted - self.ascent_penalty * unit(moved) / size
                moved = moved + self.ascent_size * unit(uphill) * part.unsqueeze(-1)
        return moved

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        taking_part = [upload.tensors[OUTSIDE] for upload in uploads if upload.weight > 0] if self.outside else []
        if not taking_part:
            return averaged
        context, outside = averaged.shared["context"], torch.cat(within_reach(taking_part, averaged.shared[OUTSIDE]))
        calibrated, far = calibrate(context, outside, self.outside, self.calibration)
        return replace(averaged, shared={**averaged.shared, "context": calibrated, OUTSIDE: far})

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        if not self.outside:
            return {}
        shares = similarity(world, seen.image, self.features(seen)).softmax(-1)
        return {"share of the outside": shares[:, world.classes :].sum(-1)}


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1; zeros stay zeros."""
    return F.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)


def within_reach(uploads: Sequence[Tensor], centre: Tensor) -> list[Tensor]:
    """Those that are at most `REACH` times as far as the median from what the rule of aggregation made of them: the farthest
    contexts are sent on, so a rule that withstands a wild client must be asked first.
    """
    apart = torch.stack([(precise(upload) - precise(centre)).norm() for upload in uploads])
    return [upload for upload, far in zip(uploads, apart <= REACH * apart.median(), strict=True) if far]


def calibrate(context: Tensor, outside: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """The global context, moved to the outside contexts (N, m, d) that seem to be classes, and the `count` of the others that
    seem so the least.
    """
    columns = context.double().reshape(-1, outside[0].numel())  # (C, m d), or (1, m d)
    rows = outside.double().flatten(1)
    near, far, plan = choose(rows, columns, count)
    kept = outside[far.repeat(-(-count // len(far)))[:count]]
    if not near.any():
        return context, kept
    some = plan[near]
    means = (some.mT @ rows[near]) / some.sum(0).unsqueeze(-1).clamp_min(torch.finfo(plan.dtype).tiny)
    return torch.lerp(context, means.reshape(context.shape).to(context), share), kept


def choose(rows: Tensor, columns: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows are near (N,), the numbers of at most `count` of the others with the least mass, in rising order, and the plan.

    In double precision: uploads that were rounded differently leave the same masses to five digits, where a thousand steps in
    single precision leave three. Which contexts are kept is then the only choice; their order is not one.
    """
    costs = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").square()
    plan = unbalanced_plan(costs / costs.amax().clamp_min(torch.finfo(costs.dtype).tiny), RELAXATION)
    mass = plan.sum(-1)
    near = upper(mass)
    order = mass.argsort(stable=True)
    return near, order[~near[order]][:count].sort().values, plan


def upper(values: Tensor) -> Tensor:
    """Which of the values (N,) belong to the larger of two means; none where all are equal."""
    ordered = values.double().sort().values
    if len(ordered) < 2 or float(ordered[-1] - ordered[0]) <= 1e-6 * float(ordered[-1].abs()):
        return torch.zeros_like(values, dtype=torch.bool)
    sizes = torch.arange(1, len(ordered), device=values.device)
    lower = ordered.cumsum(0)[:-1]
    upper_sum = ordered.sum() - lower
    between = lower.square() / sizes + upper_sum.square() / (len(ordered) - sizes)  # largest: least within
    return values.double() > ordered[int(between.argmax())]
