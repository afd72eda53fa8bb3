"""PromptSRC (Khattak et al., ICCV 2023, arXiv 2307.06948), averaged: prompts in both towers that regulate themselves.

Text context P and vision prompts V_j before the first J blocks are independent, as in `fedmaple` with coupling
`independent`. I0_b and T0_c are the features without prompts, T0_c the mean over some templates, of unit length again:

    loss = CE(logits, y) + w_t * mean |T - T0| + w_i * mean |I - I0| + w_l * KL
    KL   = 1 / (B C) * sum_bc p0_bc (log p0_bc - log p_bc),    p0, p the softmax of scale * I0 T0^T and of the logits

Means are over all numbers, as in the authors' code; w_t = 25, w_i = 10, w_l = 1.

Gaussian aggregation. The paper averages the prompts after every epoch e with weights that are a Gaussian in e: early
prompts are immature, late ones specialised. Here epochs are rounds, and the server does it to its averages P_r:

    w_r = exp(-(r - mu)^2 / (2 sigma^2)),   P = sum_r w_r P_r / sum_r w_r,   mu = 0.75 R, sigma = 0.05 R

of R rounds: the paper's 15 and 1 of 20 epochs. Clients train from P_r and predict with P, of the rounds so far.
`gaussian: false` predicts with P_r. With all three weights 0 and `gaussian: false` this is `fedmaple` with coupling
independent.

MaPLe's and PromptSRC's deep prompts of the text tower are left out, as in `fedmaple`. The authors' templates are 60
sentences; ours are `templates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Combine, Seen, Server, Upload, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_text import check_words, precise, similarity
from fedprompt.methods.fedmaple import FedMaPLe
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

ANCHOR = "anchor"  # T0
MEAN = "mean."  # the shared tensors, averaged over rounds, at the server
SENT = "averaged."  # and at a client
LOG_WEIGHT = "log_weight"  # of all rounds in that average
NOTHING = -1e30  # the logarithm of no weight at all


@register("fedpromptsrc")
@dataclass(frozen=True)
class FedPromptSRC(FedMaPLe):
    """Averaged prompts of both towers that stay near the model without prompts."""

    coupling: Literal["independent"] = "independent"
    """Each tower has its own prompts."""
    text_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 25.0
    """Weight of the distance of class features to those without a context."""
    image_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Weight of the distance of image features to those without prompts."""
    logit_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Weight of the divergence from zero-shot predictions."""
    templates: Annotated[tuple[str, ...], Field(min_length=1)] = ("a photo of a", "a picture of a", "an image of a")
    """Words before the class names of the model without prompts; several are averaged."""
    gaussian: bool = True
    """Predict with the average of the rounds so far, weighted by a Gaussian."""
    gaussian_mean: Annotated[float, Field(ge=0, le=1)] = 0.75
    """Mu: the round of the largest weight, as a share of all rounds."""
    gaussian_deviation: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05
    """Sigma, as a share of all rounds."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",)

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.vision_tokens == 0:
            raise ConfigError(broken("method.vision_tokens", "be at least 1, or null for the context's length", 0))
        for words in self.templates:
            check_words(world, "templates", words)

    def init(self, world: World, generator: Stream) -> Roles:
        shared = super().init(world, generator).shared
        if not self.gaussian:
            return Roles(shared=shared)
        own = {name: tensor.clone() for name, tensor in shared.items()}
        return Roles(shared=shared, server={**prefixed(MEAN, own), LOG_WEIGHT: torch.tensor(NOTHING)})

    def download(self, world: World, server: Server, client: int) -> Tensors:
        return {**server.shared, **prefixed(SENT, stripped(MEAN, server.own))}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        shared = {name: tensor for name, tensor in received.items() if not name.startswith(SENT)}
        return {**shared, **local, ANCHOR: plain_features(world, self.templates)}

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        params = self.begin(world, client, received, local)
        return {**params, **stripped(SENT, received)}

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        if not batch.training:
            return plain
        image, text = precise(batch.features["image"]), precise(params[ANCHOR])
        by_text = (precise(seen.text["context"]) - text).abs().mean()
        by_image = batch.mean((precise(seen.image) - image).abs().mean(-1))
        apart = batch.mean(divergence(similarity(world, image, text), logits) / world.classes)
        return plain + self.text_weight * by_text + self.image_weight * by_image + self.logit_weight * apart

    def aggregate(self, world: World, server: Server, uploads: Sequence[Upload], combine: Combine) -> Server:
        averaged = super().aggregate(world, server, uploads, combine)
        if not self.gaussian:
            return averaged
        before = server.own[LOG_WEIGHT]
        now = before.new_tensor(self.log_weight(server.round + 1, world.rounds))
        share = torch.sigmoid(now - before)  # of this round in the average so far
        mean = {name: torch.lerp(old, averaged.shared[name], share.to(old)) for name, old in _mean(server).items()}
        own = {**prefixed(MEAN, mean), LOG_WEIGHT: torch.logaddexp(before, now)}
        return replace(averaged, own={**server.own, **own})

    def log_weight(self, round: int, rounds: int) -> float:
        """log w_r."""
        away = (round - self.gaussian_mean * rounds) / (self.gaussian_deviation * rounds)
        return -0.5 * away * away


def _mean(server: Server) -> Tensors:
    return stripped(MEAN, server.own)


def plain_features(world: World, templates: Sequence[str]) -> Tensor:
    """T0 (C, D): the mean over templates, of unit length."""
    said = torch.stack([precise(world.text.encode_words(words)) for words in templates])
    return F.normalize(said.mean(0), dim=-1)


def divergence(before: Tensor, now: Tensor) -> Tensor:
    """KL (B,) of the predictions before from those now, both as logits (B, C)."""
    known, found = before.log_softmax(-1), now.log_softmax(-1)
    return (known.exp() * (known - found)).sum(-1)
