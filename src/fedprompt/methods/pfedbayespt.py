"""pFedBayesPT (arXiv 2508.19621): prompts for every image, drawn from a posterior that an encoder computes.

Beside a global prompt of K tokens per block, block i gets v instance tokens

    p_i = mu_i + sigma_i * eps,   (mu_i, log sigma_i^2) = G_i(masked f_i)      f_i: input of block i in the pass without prompts

G_i mixes tokens (see `modules/token_encoder.py`). Its random masks make the posterior semi-implicit: a Gaussian whose
parameters are themselves random. Training maximises the bound L_S^J (see `modules/semi_implicit.py`); prediction
averages the probabilities of V prompts p = mu, each with its own masks. The server averages the global prompt and the
encoder, and the head if it is shared.

- `pfedbayespt_d`: no masks, no noise, p = mu, cross-entropy only.
- `pfedbayespt_g`: no masks, a plain Gaussian posterior and its closed divergence from the prior.
- `pfedbayespt`: all of it.

The paper names neither a prior nor a weight for it. Here the prior is N(m0, s0^2) and its weight beta counts per latent
dimension, so that `kl_weight: 1` is the mean over dimensions; `kl_unit: total` gives the literal sum, which dominates
the likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Prompts, Seen, World, probabilities
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.core.search_space import FloatRange, SearchSpace
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_head import WithHead
from fedprompt.modules import semi_implicit, token_encoder
from fedprompt.modules.insertion import PromptStart, VisionPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

NORM = "encoder."
MEAN = "encoder.mean."
LOGVAR = "encoder.logvar."


@register("pfedbayespt_d")
@dataclass(frozen=True)
class PFedBayesPTD(WithHead):
    """Deterministic instance prompts beside a global one."""

    symbols: ClassVar[Mapping[str, str]] = {"v": "instance_tokens"}

    prompt_tokens: Annotated[int, Field(ge=0)] = 10
    """K, tokens of the global prompt per prompted block."""
    depth: Annotated[int, Field(ge=1)] | None = None
    """Number of blocks with a global prompt, from the first; null for all."""
    prompt_init: PromptStart = "blank"
    """Initial global prompt: tokens of a blank image, VPT's uniform ones, or zeros."""
    instance_tokens: Annotated[int, Field(ge=1)] = 1
    """v, tokens of the instance prompt per block."""
    instance_depth: Annotated[int, Field(ge=1)] | None = None
    """Blocks with an instance prompt, from the first; null for all."""
    encoder_hidden: Annotated[int, Field(ge=0)] = 64
    """Hidden units of the encoder's networks; 0 makes them linear."""
    mean_init: token_encoder.MeanStart = "default"
    """Initial output of a linear mean network: random, the CLS row, or the mean of all rows."""
    mean_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the rows that mean_init `cls` and `mean` start with."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self._features,)

    @property
    def _features(self) -> str:
        return f"block_inputs:{self.instance_depth}" if self.instance_depth else "block_inputs"

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_depth("method.depth", self.depth)
        world.check_depth("method.instance_depth", self.instance_depth)
        if self.mean_init != "default" and self.encoder_hidden:
            raise ConfigError(
                broken("method.mean_init", "be default unless method.encoder_hidden is 0", self.mean_init)
            )

    def init(self, world: World, generator: Stream) -> Roles:
        depth = self.depth or world.blocks
        shared = {
            "prompt": world.initial_prompt(self.prompt_init, range(depth), self.prompt_tokens, generator),
            **self.initial_encoder(world, generator),
        }
        return self.with_head(world, Roles(shared=world.placed(shared)))

    def initial_encoder(self, world: World, generator: Stream) -> Tensors:
        mean = token_encoder.linear_from(self.mean_init, self._network(world, generator), self.mean_scale)
        norm = token_encoder.initial_norm(self.instance_depth or world.blocks, world.width)
        return {**prefixed(NORM, norm), **prefixed(MEAN, mean)}

    def _network(self, world: World, generator: Stream) -> Tensors:
        blocks = self.instance_depth or world.blocks
        return token_encoder.initial_network(blocks, world.tokens, self.encoder_hidden, self.instance_tokens, generator)

    def masks(self, world: World, batch: Batch, noise: Tensors) -> Tensor:
        """No token is masked: (1, B, L, T) of ones."""
        features = batch.features[self._features]
        return features.new_ones(1, *features.shape[:-1])

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        networks = [stripped(MEAN, params)]
        (mean,) = self.encode(world, params, networks, batch, noise)
        return self.inserted(params, mean, {})

    def encode(
        self, world: World, params: Tensors, networks: list[Tensors], batch: Batch, noise: Tensors
    ) -> list[Tensor]:
        masks = self.masks(world, batch, noise)
        return token_encoder.encode(stripped(NORM, params), networks, batch.features[self._features], masks)

    def inserted(self, params: Tensors, instance: Tensor, extra: Tensors) -> Prompts:
        """The global prompt and instance prompts (draws, B, L, v, d), side by side."""
        everyones = VisionPrompt(params["prompt"], tuple(range(len(params["prompt"]))))
        own = VisionPrompt(instance.flatten(0, 1), tuple(range(instance.shape[2])))
        return Prompts(vision=(everyones, own), repeat=len(instance), extra=extra)


@register("pfedbayespt_g")
@dataclass(frozen=True)
class PFedBayesPTG(PFedBayesPTD):
    """Instance prompts with a Gaussian posterior."""

    search_space: ClassVar[SearchSpace] = {"method.kl_weight": FloatRange(1e-3, 10.0)}

    initial_std: Annotated[float, Field(gt=0)] = 0.05
    """Initial sigma; 1 would dominate the global prompt, whose tokens have norm 1."""
    prior_scale: Annotated[float, Field(gt=0)] = 1.0
    """S0, standard deviation of the prior."""
    prior_mean: Literal["zero", "cls"] = "zero"
    """M0: zero, or mean_scale times the normalised CLS row of the block's input."""
    kl_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of prior against posterior, in kl_unit."""
    kl_unit: Literal["dimension", "total"] = "dimension"
    """Beta = kl_weight / (L v d), or kl_weight itself."""
    kl_warmup: Annotated[int, Field(ge=0)] = 0
    """Rounds over which the weight grows linearly to its value."""

    def initial_encoder(self, world: World, generator: Stream) -> Tensors:
        with_mean = super().initial_encoder(world, generator)  # drawn first: all variants start from the same mean
        logvar = token_encoder.constant_network(self._network(world, generator), 2 * math.log(self.initial_std))
        return {**with_mean, **prefixed(LOGVAR, logvar)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        grown = min(client.round / self.kl_warmup, 1.0) if self.kl_warmup else 1.0
        scale = torch.tensor(grown, dtype=world.dtype, device=world.device)
        return {**super().begin(world, client, received, local), "kl_scale": scale}

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        return self._epsilon(world, 1, size, generator) if training else {}

    def _epsilon(self, world: World, draws: int, size: int, generator: Stream) -> Tensors:
        blocks = self.instance_depth or world.blocks
        shape = (draws, size, blocks, self.instance_tokens, world.width)
        return {"epsilon": generator.normal(*shape).to(world.dtype)}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        if "epsilon" not in noise:
            return super().prompts(world, params, batch, noise)
        networks = [stripped(MEAN, params), stripped(LOGVAR, params)]
        mean, logvar = self.encode(world, params, networks, batch, noise)
        drawn = len(noise["epsilon"])
        instance = mean[:drawn] + (0.5 * logvar[:drawn]).exp() * noise["epsilon"]
        return self.inserted(params, instance, {"mean": mean, "logvar": logvar})

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        plain = super().loss(world, params, logits, seen, batch, noise)
        mean, logvar = seen.extra["mean"], seen.extra["logvar"]
        divergence = semi_implicit.gaussian_divergence(mean, logvar, self.prior_centre(batch), self.prior_scale)
        return plain + self.beta(params, mean) * batch.mean(divergence.squeeze(0))

    def prior_centre(self, batch: Batch) -> Tensor | float:
        """m0, (B, L, 1, d) or 0."""
        if self.prior_mean == "zero":
            return 0.0
        return self.mean_scale * token_encoder.normalised(batch.features[self._features][..., :1, :])

    def beta(self, params: Tensors, mean: Tensor) -> Tensor:
        dimensions = mean.shape[-3] * mean.shape[-2] * mean.shape[-1]
        return params["kl_scale"] * (self.kl_weight / (dimensions if self.kl_unit == "dimension" else 1))


@register("pfedbayespt")
@dataclass(frozen=True)
class PFedBayesPT(PFedBayesPTG):
    """Instance prompts with a semi-implicit posterior."""

    symbols: ClassVar[Mapping[str, str]] = {"v": "instance_tokens", "V": "predict_draws"}

    keep_probability: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Pi, with which a token of the features stays unmasked; CLS always does."""
    draws: Annotated[int, Field(ge=1)] = 1
    """J, prompts drawn per image and step."""
    extra_samples: Annotated[int, Field(ge=0)] = 1
    """S, further posteriors per image that form the mixture."""
    predict_draws: Annotated[int, Field(ge=1)] = 5
    """V, prompts per image whose probabilities are averaged in a prediction."""
    omega: Literal["joint", "layerwise"] = "joint"
    """The mixture's density over all blocks at once, as in the paper, or block by block."""

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        blocks = self.instance_depth or world.blocks
        count = self.draws + self.extra_samples if training else self.predict_draws
        shape = (count, size, blocks, world.tokens)
        masks = token_encoder.draw_masks(shape, self.keep_probability, generator).to(world.dtype)
        return {"masks": masks, **(self._epsilon(world, self.draws, size, generator) if training else {})}

    def masks(self, world: World, batch: Batch, noise: Tensors) -> Tensor:
        return noise["masks"]

    def loss(self, world: World, params: Tensors, logits: Tensor, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        epsilon, mean, logvar = noise["epsilon"], seen.extra["mean"], seen.extra["logvar"]
        own = (epsilon, mean[: self.draws], logvar[: self.draws])
        others = (mean[self.draws :], logvar[self.draws :])
        prior = semi_implicit.prior_minus_posterior(*own, self.prior_centre(batch), self.prior_scale).sum(-1)
        mixture = semi_implicit.mixture_minus_posterior(
            semi_implicit.others_minus_posterior(*own, *others), layerwise=self.omega == "layerwise"
        )
        per_draw = logits.unflatten(0, (self.draws, -1))
        labels = batch.labels.expand(self.draws, -1)
        likelihood = -F.cross_entropy(per_draw.movedim(-1, 1), labels, reduction="none")
        bound = semi_implicit.surrogate_bound(likelihood, prior - mixture, self.beta(params, mean))
        return -batch.mean(bound)

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        logits = self.logits(world, params, seen, batch, noise)
        by_draw: Tensor = probabilities(logits).unflatten(0, (self.predict_draws, -1))
        return by_draw
