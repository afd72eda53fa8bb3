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
the likelihood. The paper's Algorithm 1 (line 19) averages the head with the rest, `head: shared` here; the default is
`local`, as its tables suggest (docs/discussion.md).

**Parametrisation.** A block normalises its input rows, so the length of a token is lost and what counts for learning is
gradient over length. In the paper's form (`parametrisation: literal`) that is smaller for the encoder than for global
tokens, by a factor of ten for its row weights and of a thousand for gain and shift (DINOv2-S, PACS): at equal rates
instance prompts do nothing, and at 17 times the rate four prompted blocks went to NaN in half of the runs. So by default
(`normalised`), with |p| the length of the block's global tokens at their start, d channels and T rows,

    h_i = W_i LayerNorm(masked f_i)        gain 1 + c g_i, shift c b_i, W_i = k w_i;   c = sqrt(d) / |p|,  k = 20 / (|p| sqrt(T))
    mu_i = h_i / rms(h_i)                  token = rms(f_i) (mu_i + sigma_i eps)

What is trained is g, b and w, so that a step of the same rate turns an instance token by the same order as a global one
(a test measures it). The 20 in k was chosen among about nine variants on validation images of PACS, seeds 0 to 2. mu has
root mean square 1 for every W, which keeps training finite, fits a prior N(0, 1) and makes sigma relative; the
log-variance network reads the rows without gain and shift. W starts as the mean of all rows: images differ in it
(their mean rows have a cosine of 0.77 on DINOv2-S, their CLS rows one of 0.97), masks change it, and
it is no copy of CLS. The bias of the paper's mean network is the same for all channels, so the block's LayerNorm removes
it; there is none here. The scale rms(f_i) is that of the block's own tokens; it matters only to tokens that are carried
on to a block without own ones, and is not learned.

**Bounds.** In the literal form mu and log sigma are sums over rows and their gradients sums over channels: with
`kl_unit: total` one step moved log sigma^2 by hundreds, and its exponential was infinite. Now |mu| <= 1000 and sigma
lies in 1e-6..100 wherever they are used; gradients pass as if uncut, so a value outside comes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from fedprompt.modules.insertion import PromptStart, TokenPrompt, vpt_bound
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped

NORM = "encoder."
MEAN = "encoder.mean."
LOGVAR = "encoder.logvar."
ROWS = 20  # chosen on validation images of PACS with DINOv2-S, see above
MOVING = {
    "prompt": "prompt",
    "encoder.mean.out.weight": "encoder.rows",
    "encoder.norm.weight": "encoder.gain",
    "encoder.norm.bias": "encoder.shift",
}
CONTROLS = ("accuracy", "accuracy_mean_prompt", "accuracy_other_prompt")  # with `diagnose`, in the order of draws
LARGEST_MEAN = 1e3
LEAST_STD, LARGEST_STD = 1e-6, 1e2


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
    parametrisation: Literal["normalised", "literal"] = "normalised"
    """Instance tokens of a fixed length that learn as fast as global ones, or the paper's form."""
    encoder_hidden: Annotated[int, Field(ge=0)] = 0
    """Hidden units of the encoder's networks (`literal` only); 0 makes them linear."""
    mean_init: token_encoder.MeanStart = "mean"
    """Initial output of a linear mean network: random, the CLS row, or the mean of all rows."""
    mean_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the rows that mean_init `cls` and `mean` start with (`literal` only)."""
    diagnose: bool = False
    """In evaluations, also test with instance prompts of other images and with their mean, and say how much attention of
    CLS goes to each kind of prompt. Three times the work."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "prompt_attention") if self.diagnose else super().reads

    @property
    def needs(self) -> tuple[str, ...]:
        return (self._features,)

    @property
    def _features(self) -> str:
        return f"block_inputs:{self.instance_depth}" if self.instance_depth else "block_inputs"

    def check(self, world: World, train: TrainConfig) -> None:
        world.check_depth("method.depth", self.depth)
        world.check_depth("method.instance_depth", self.instance_depth)
        if self.encoder_hidden and self.parametrisation == "normalised":
            raise ConfigError(
                broken("method.encoder_hidden", "be 0 unless method.parametrisation is literal", self.encoder_hidden)
            )
        if self.mean_init != "default" and self.encoder_hidden:
            raise ConfigError(
                broken("method.mean_init", "be default unless method.encoder_hidden is 0", self.mean_init)
            )

    def init(self, world: World, generator: Stream) -> Roles:
        depth = self.depth or world.blocks
        prompt = world.initial_prompt(self.prompt_init, range(depth), self.prompt_tokens, generator)
        encoder = self.initial_encoder(replace(world, roles=Roles(shared={"prompt": prompt})), generator)
        return self.with_head(world, Roles(shared=world.placed({"prompt": prompt, **encoder})))

    def initial_encoder(self, world: World, generator: Stream) -> Tensors:
        literal = self.parametrisation == "literal"
        mean = token_encoder.linear_from(
            self.mean_init, self._network(world, generator), self.mean_scale if literal else 1.0
        )
        norm = token_encoder.initial_norm(self.instance_depth or world.blocks, world.width)
        if not literal:
            norm = {name: torch.zeros_like(tensor) for name, tensor in norm.items()}
            mean = {"out.weight": mean["out.weight"] / self._factors(world)[1].cpu()}
        return {**prefixed(NORM, norm), **prefixed(MEAN, mean)}

    def _factors(self, world: World) -> tuple[Tensor, Tensor]:
        """c and k of the module's docstring for every block with an instance prompt, (L, 1, 1)."""
        blocks, usual = (
            self.instance_depth or world.blocks,
            vpt_bound(world.patch, world.width) * math.sqrt(world.width / 3),
        )
        start = world.roles.shared.get("prompt", torch.empty(0, 0, world.width))[:blocks]
        if not start.numel():
            start = torch.zeros(1, 1, world.width)
        found = start.to(world.device).float().norm(dim=-1).mean(-1)  # of tensors alone: a step must not wait for them
        found = torch.where(found > 0, found, usual)
        length = torch.cat([found, found[-1:].expand(blocks - len(found))]).to(world.dtype)[:, None, None]
        return math.sqrt(world.width) / length, ROWS / (length * math.sqrt(world.tokens))

    def _network(self, world: World, generator: Stream) -> Tensors:
        blocks = self.instance_depth or world.blocks
        return token_encoder.initial_network(blocks, world.tokens, self.encoder_hidden, self.instance_tokens, generator)

    def masks(self, world: World, batch: Batch, noise: Tensors) -> Tensor:
        """No token is masked: (1, B, L, T) of ones."""
        features = batch.features[self._features]
        return features.new_ones(1, *features.shape[:-1])

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        (mean,) = self.encode(world, params, batch, noise)
        return self.inserted(params, mean, batch, {})

    def encode(
        self, world: World, params: Tensors, batch: Batch, noise: Tensors, more: tuple[Tensors, ...] = ()
    ) -> list[Tensor]:
        """Mean (K, B, L, v, d) of the instance prompts under K masks, and the outputs of further networks."""
        masks, features = self.masks(world, batch, noise), batch.features[self._features]
        norm, network = stripped(NORM, params), stripped(MEAN, params)
        if self.parametrisation == "literal":
            mean, *others = token_encoder.encode(norm, [network, *more], features, masks)
            return [token_encoder.within(mean, -LARGEST_MEAN, LARGEST_MEAN), *others]
        channels, rows = self._factors(world)
        weight = rows * network["out.weight"]
        network = {"out.weight": weight, "out.bias": torch.zeros_like(weight[..., 0])}
        plain = {"norm.weight": torch.ones_like(norm["norm.weight"]), "norm.bias": torch.zeros_like(norm["norm.bias"])}
        mixed, *others = token_encoder.encode(plain, [network, *more], features, masks)
        gain, shift = (channels * norm[name].unsqueeze(-2) for name in ("norm.weight", "norm.bias"))
        return [token_encoder.unit_length((1 + gain) * mixed + weight.sum(-1, keepdim=True) * shift), *others]

    def inserted(self, params: Tensors, instance: Tensor, batch: Batch, extra: Tensors) -> Prompts:
        """The global prompt and instance prompts (draws, B, L, v, d), side by side."""
        if self.parametrisation == "normalised":
            features = batch.features[self._features]
            instance = instance * features.square().mean((-2, -1))[..., None, None].sqrt()
        if self.diagnose and not batch.training:
            other = instance.roll(instance.shape[1] // 2, dims=1)
            instance = torch.cat([instance, instance.mean(1, keepdim=True).expand_as(instance), other])
        everyones = TokenPrompt(params["prompt"], tuple(range(len(params["prompt"]))))
        own = TokenPrompt(instance.flatten(0, 1), tuple(range(instance.shape[2])))
        return Prompts(tokens=(everyones, own), repeat=len(instance), extra=extra)

    def predict(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        found = probabilities(self.logits(world, params, seen, batch, noise))
        by_draw: Tensor = found.unflatten(0, (-1, len(batch.labels)))
        return by_draw[: len(by_draw) // len(CONTROLS)] if self.diagnose else by_draw

    @property
    def mixed_batches(self) -> bool:
        return self.diagnose

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """How far prompt and encoder have moved; with `diagnose`, the accuracy with instance prompts as they are, with
        their mean over a batch and with those of other images, the share of the attention of CLS that goes to them and
        to the global prompt (mean over the blocks that have them), and what `prompts` has found out of the posterior.
        """
        found = {f"{short}.moved": moved(world, params, name) for name, short in MOVING.items() if name in params}
        if not self.diagnose:
            return found
        logits = self.logits(world, params, seen, batch, {})
        by_control = probabilities(logits).unflatten(0, (len(CONTROLS), -1, len(batch.labels))).mean(1)
        right = (by_control.argmax(-1) == batch.labels).to(logits.dtype)
        accuracies = {f"instance.{name}": each for name, each in zip(CONTROLS, right, strict=True)}
        assert seen.prompt_attention is not None
        shares = seen.prompt_attention.unflatten(0, (len(CONTROLS), -1, len(batch.labels)))[0].mean(0).unbind(-1)
        kinds = ("instance.attention", "prompt.attention")
        found |= dict(zip(kinds, reversed(shares), strict=False))  # a global prompt of no tokens has no slot
        return {**found, **accuracies, **{f"posterior.{name}": each for name, each in seen.extra.items()}}


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
    kl_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of prior against posterior, in kl_unit."""
    kl_unit: Literal["dimension", "total"] = "dimension"
    """Beta = kl_weight / (L v d), or kl_weight itself."""
    kl_warmup: Annotated[int, Field(ge=0)] = 0
    """Rounds over which the weight grows linearly to its value."""
    predict_with_noise: bool = False
    """Predict with mu + sigma eps, as in training, instead of mu."""

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        if self.prior_mean == "cls" and not world.has_cls:
            raise ConfigError(
                broken("method.prior_mean", "be zero for a backbone without a CLS token", self.prior_mean)
            )

    def initial_encoder(self, world: World, generator: Stream) -> Tensors:
        with_mean = super().initial_encoder(world, generator)  # drawn first: all variants start from the same mean
        logvar = token_encoder.constant_network(self._network(world, generator), 2 * math.log(self.initial_std))
        return {**with_mean, **prefixed(LOGVAR, logvar)}

    def begin(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        grown = min(client.round / self.kl_warmup, 1.0) if self.kl_warmup else 1.0
        scale = torch.tensor(grown, dtype=world.dtype, device=world.device)
        return {**super().begin(world, client, received, local), "kl_scale": scale}

    def noise(self, world: World, size: int, training: bool, generator: Stream) -> Tensors:
        return self._epsilon(world, 1, size, generator) if training or self.predict_with_noise else {}

    def _epsilon(self, world: World, draws: int, size: int, generator: Stream) -> Tensors:
        blocks = self.instance_depth or world.blocks
        shape = (draws, size, blocks, self.instance_tokens, world.width)
        return {"epsilon": generator.normal(*shape).to(world.dtype)}

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        asked = self.diagnose and not batch.training
        if "epsilon" not in noise and not asked:
            return super().prompts(world, params, batch, noise)
        mean, logvar = self.encode(world, params, batch, noise, (stripped(LOGVAR, params),))
        logvar = token_encoder.within(logvar, 2 * math.log(LEAST_STD), 2 * math.log(LARGEST_STD))
        instance = mean
        if "epsilon" in noise:
            drawn = len(noise["epsilon"])
            instance = mean[:drawn] + (0.5 * logvar[:drawn]).exp() * noise["epsilon"]
        extra = self.posterior(batch, mean, logvar, noise) if asked else {"mean": mean, "logvar": logvar}
        return self.inserted(params, instance, batch, extra)

    def posterior(self, batch: Batch, mean: Tensor, logvar: Tensor, noise: Tensors) -> Tensors:
        """By image (B,): the divergence from the prior per dimension, and sigma."""
        divergence = semi_implicit.gaussian_divergence(mean, logvar, self.prior_centre(batch), self.prior_scale)
        per_dimension = divergence.mean(0) / mean[0, 0].numel()
        return {"kl": per_dimension, "std": (0.5 * logvar).exp().mean((0, 2, 3, 4))}

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
        if training:
            return {"masks": masks, **self._epsilon(world, self.draws, size, generator)}
        drawn = self._epsilon(world, self.predict_draws, size, generator) if self.predict_with_noise else {}
        probe = self._epsilon(world, 1, size, generator) if self.diagnose else {}
        return {"masks": masks, **drawn, **prefixed("probe.", probe)}

    def posterior(self, batch: Batch, mean: Tensor, logvar: Tensor, noise: Tensors) -> Tensors:
        """The same, and A_S, what the mixture of all masks adds to the bound: log q - log Omega, between 0 and log V."""
        others = semi_implicit.others_minus_posterior(
            noise["probe.epsilon"], mean[:1], logvar[:1], mean[1:], logvar[1:]
        )
        gain = -semi_implicit.mixture_minus_posterior(others, layerwise=self.omega == "layerwise").squeeze(0)
        return {**super().posterior(batch, mean, logvar, noise), "a_s": gain}

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


def moved(world: World, params: Tensors, name: str) -> Tensor:
    """How far a tensor is from its start, as a share of the start's length; of the length of ones where it starts at 0."""
    start = world.roles.shared.get(name, params[name])
    length = start.norm()
    distance: Tensor = (params[name] - start).norm()
    return distance / torch.where(length > 0, length, math.sqrt(start.numel()))
