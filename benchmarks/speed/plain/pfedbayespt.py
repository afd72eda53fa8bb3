"""pFedBayesPT with `transformers`: instance prompts from a semi-implicit posterior beside global ones, V draws in a prediction.

The maths is in the docstring of `fedprompt.methods.pfedbayespt`; here J = S = 1. The pass without prompts is done for
every batch, and once for all draws of a prediction.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from federated import Params, Program, job, prompted_cls
from torch import Tensor

own = job()
KEEP, PRIOR, WEIGHT, DRAWS = (own.settings["method"][name] for name in ("keep", "prior", "kl_weight", "draws"))
START = own.shared["prompt"].norm(dim=-1).mean(-1)[:, None, None]  # (L, 1, 1)


def without_prompts(images: Tensor) -> Tensor:
    """Inputs (B, L, T, d) of all blocks."""
    with torch.no_grad():
        return torch.stack(own.model(pixel_values=images, output_hidden_states=True).hidden_states[:-1], dim=1)


def masks(count: int, rows: Tensor) -> Tensor:
    drawn = (torch.rand(count, *rows.shape[:-1]) < KEEP).float()
    drawn[..., 0] = 1
    return drawn


def encoded(params: Params, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-variances (K, B, L, v, d) under masks (K, B, L, T)."""
    width, tokens = rows.shape[-1], rows.shape[-2]
    normal = F.layer_norm(rows, (width,), eps=1e-6)
    weight = 20 / (START * math.sqrt(tokens)) * params["encoder.mean.out.weight"]
    spread = params["encoder.logvar.out.weight"]
    mixed = torch.einsum("lvt,kblt,bltd->kblvd", weight, mask, normal)
    logvar = torch.einsum("lvt,kblt,bltd->kblvd", spread, mask, normal)
    channels = math.sqrt(width) / START
    gain = channels * params["encoder.norm.weight"][:, None]
    shift = channels * params["encoder.norm.bias"][:, None]
    mean = (1 + gain) * mixed + weight.sum(-1, keepdim=True) * shift
    mean = mean / (mean.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return mean, logvar + params["encoder.logvar.out.bias"][..., None]


def logits(params: Params, images: Tensor, rows: Tensor, instance: Tensor) -> Tensor:
    """Of images with instance prompts (B, L, v, d)."""
    instance = instance * rows.square().mean((-2, -1))[..., None, None].sqrt()

    def prompts(block: int, before: Tensor) -> Tensor:
        return torch.cat([params["prompt"][block].expand(len(images), -1, -1), instance[:, block]], dim=1)

    return F.linear(prompted_cls(own.model, images, prompts), params["head.weight"], params["head.bias"])


def loss(params: Params, images: Tensor, labels: Tensor) -> Tensor:
    rows = without_prompts(images)
    mean, logvar = encoded(params, rows, masks(2, rows))
    epsilon = torch.randn_like(mean[0])
    drawn = mean[0] + (0.5 * logvar[0]).exp() * epsilon
    inside = (-3, -2, -1)
    prior = 0.5 * (logvar[0] - 2 * math.log(PRIOR) + epsilon.square() - drawn.square() / PRIOR**2).sum(inside)
    offset = (drawn - mean[1]).square() * (-logvar[1]).exp()
    other = 0.5 * (logvar[0] - logvar[1] + epsilon.square() - offset).sum(inside)
    mixture = torch.stack([torch.zeros_like(other), other]).logsumexp(0) - math.log(2)
    beta = WEIGHT / mean[0, 0].numel()
    likelihood = -F.cross_entropy(logits(params, images, rows, drawn), labels, reduction="none")
    return -(likelihood + beta * (prior - mixture)).mean()


def predict(params: Params, images: Tensor) -> Tensor:
    rows = without_prompts(images)
    mean, _ = encoded(params, rows, masks(DRAWS, rows))
    return torch.stack([logits(params, images, rows, each).softmax(-1) for each in mean]).mean(0)


own.run(Program(loss, predict))
