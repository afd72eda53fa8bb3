"""A client's model as a constant one: fixed tokens at fixed places of the backbone, and one linear classifier.

This can be used without fedprompt. For most methods it is exactly the model. Prompts that depend on the image are
replaced by their mean over reference images; a classifier that is not linear in its features is replaced by its tangent
at their mean. Replacements are recorded, and their cost is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.layers import ADAPTER
from fedprompt.backbones.vit import ATTENTION, ViT
from fedprompt.client.step import encode_text, first_block, inserted
from fedprompt.core.method import Batch, Prompts, Seen
from fedprompt.errors import ConfigError
from fedprompt.features.image_bank import Images
from fedprompt.inference.trained_client import TrainedClient
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.tensors import Tensors

SAME = 1e-4  # largest difference between two equal probabilities
FEATURES = {
    ("cls",): "CLS",
    ("cls", "prompts"): "CLS and prompts",
    ("image",): "image",
    ("image_raw",): "image before it is normalised",
}  # what can be read


@dataclass(frozen=True)
class Constant:
    """Fixed prompts, and logits = weight f + bias of the feature f."""

    slots: tuple[TokenPrompt, ...]
    """Tokens (blocks, n, d) for every image."""
    changes: Tensors
    """Added to weights of the backbone."""
    reads: tuple[str, ...]
    weight: Tensor
    """(C, F)."""
    bias: Tensor
    """(C,)."""
    replaced: tuple[str, ...]
    """Differences from the client's own model, in words; empty if exact."""

    def feature(self, images: Images, positions: Tensor) -> Tensor:
        """f (B, F): rows after the final norm, concatenated, or the unit vector of the shared space."""
        start = first_block(Prompts(tokens=self.slots, weights=self.changes))
        backbone = images.backbone.with_added(self.changes) if self.changes else images.backbone
        seen = backbone.run(images.tokens(positions, start), self.slots, self.reads, start)
        return joined(seen, self.reads)

    def probabilities(self, images: Images) -> Tensor:
        """(B, C) in float64."""
        feature = self.feature(images, torch.arange(len(images)))
        return F.linear(feature, self.weight, self.bias).double().softmax(-1).cpu()


def joined(seen: Tensors, reads: tuple[str, ...]) -> Tensor:
    return torch.cat([seen[name].flatten(1) for name in reads], dim=-1)


def constant(client: TrainedClient, reference: np.ndarray) -> Constant:
    """The constant model of a client; means are over reference images (B, S, S, 3)."""
    reads = tuple(name for name in client.method.reads if name != ATTENTION)  # only a diagnostic
    if reads not in FEATURES:
        read = ", ".join(reads)
        raise ConfigError(
            f"{client.config.label} cannot be exported: it reads {read} of the backbone and weights them differently for every image, "
            "which a fixed classifier cannot do; use `fedprompt predict`"
        )
    if client.method.mixes_passes:
        raise ConfigError(
            f"{client.config.label} cannot be exported: it joins several passes over every image, which a folder with one set of "
            "prompts cannot do; use `fedprompt predict`"
        )
    with torch.no_grad():
        plans = [_plan(client, part) for part in _parts(client, reference)]
        if any(ADAPTER in name for name in plans[0].given.weights):
            raise ConfigError(
                f"{client.config.label} cannot be exported: it has adapters beside the blocks of the image tower, which "
                "`transformers` has not; use `fedprompt predict`"
            )
        if plans[0].given.factors or plans[0].given.pixels is not None:
            what = (
                "scales and shifts outputs inside the tower" if plans[0].given.factors else "adds pixels to every image"
            )
            raise ConfigError(
                f"{client.config.label} cannot be exported: it {what}, which the folder's script does not do; use `fedprompt predict`"
            )
        slots, varies = _mean_slots([plan.given for plan in plans])
        first = plans[0]
        varies = varies or any(context.per_image for context in first.given.text.values())
        replaced = [f"prompts are the mean over {len(reference)} images of the client"] if varies else []
        fixed = Constant(slots, first.given.weights, reads, torch.empty(0), torch.empty(0), ())
        features = torch.cat([fixed.feature(plan.images, torch.arange(len(plan.images))) for plan in plans])
        read_out = _read_out(client, plans, fixed.slots)
    weight, bias, linear = tangent(read_out, features)
    if not linear:
        replaced.append("the classifier is the tangent of the client's at the mean image")
    return replace(fixed, weight=weight, bias=bias, replaced=tuple(replaced))


@dataclass(frozen=True)
class _Plan:
    """The prompts of a method for some images."""

    images: Images
    batch: Batch
    given: Prompts
    """Including those of `later`."""


def _parts(client: TrainedClient, pixels: np.ndarray) -> list[np.ndarray]:
    size = client.batch_size
    return [pixels[start : start + size] for start in range(0, len(pixels), size)]


def _plan(client: TrainedClient, pixels: np.ndarray) -> _Plan:
    images = client.images(pixels)
    batch, noise = client.batch(images), client.noise(len(images))
    method, world, params = client.method, client.world, client.params
    given = method.prompts(world, params, batch, noise)
    if given.pause is None:
        return _Plan(images, batch, given)
    joining: list[Prompts] = []

    def later(cls: Tensor) -> tuple[TokenPrompt, ...]:
        joining.append(method.later(world, params, cls, batch, noise))
        return inserted(joining[-1].tokens)

    start = first_block(given)
    tokens = images.tokens(torch.arange(len(images)), start).repeat(given.repeat, 1, 1)
    images.backbone.run(tokens, inserted(given.tokens), ("cls",), start, (given.pause, later))
    (more,) = joining
    given = replace(given, tokens=(*given.tokens, *more.tokens), extra={**given.extra, **more.extra})
    return _Plan(images, batch, given)


def _mean_slots(plans: list[Prompts]) -> tuple[tuple[TokenPrompt, ...], bool]:
    """The slots with tokens for all images, and whether any differed by image."""
    found, varies = [], False
    for same in zip(*(inserted(plan.tokens) for plan in plans), strict=True):
        slot = same[0]
        if slot.tokens.ndim == 4:
            tokens = torch.cat([each.tokens for each in same])
            mean = tokens.mean(0)
            varies = varies or bool((tokens - mean).abs().max() > 1e-6 * mean.abs().max())
            slot = replace(slot, tokens=mean)
        found.append(slot)
    return tuple(found), varies


def _mean_context(same: list[TextContext]) -> TextContext:
    """The context of all images: of contexts per image the mean."""
    if not same[0].per_image:
        return same[0]
    return replace(same[0], tokens=torch.cat([each.tokens for each in same]).mean(0), per_image=False)


def _read_out(client: TrainedClient, plans: list[_Plan], slots: tuple[TokenPrompt, ...]) -> Callable[[Tensor], Tensor]:
    """Logits (N, C) as a function of features (N, F), with everything else at its mean over the reference images."""
    method, world, given, batch = client.method, client.world, plans[0].given, plans[0].batch
    fixed = {name: _mean_context([plan.given.text[name] for plan in plans]) for name in given.text}
    contexts = {name: context.tokens.unsqueeze(0) for name, context in fixed.items()}
    text = {name: features[0] for name, features in encode_text(world, fixed, contexts, given.text_weights).items()}
    by_image = {name for name, context in given.text.items() if context.per_image}
    extras = [{name: _by_image(value, plan) for name, value in plan.given.extra.items()} for plan in plans]
    means = {name: torch.cat([each[name] for each in extras]).mean(0) for name in given.extra}
    needed = {name: torch.cat([plan.batch.features[name] for plan in plans]).mean(0) for name in method.needs}
    untouched = not slots and not given.weights  # then the feature without prompts is the one that is read
    width = client.backbone.shape.width

    def logits(feature: Tensor) -> Tensor:
        count = len(feature)
        rows = {method.reads[0]: feature[:, :width] if method.reads[0] == "cls" else feature}
        if "prompts" in method.reads:
            rows["prompts"] = feature[:, width:].unflatten(-1, (-1, width))
        everyone = {name: value.expand(count, *value.shape) for name, value in needed.items()}
        if untouched:
            everyone |= {name: rows[name] for name in everyone if name in rows}
        said = {name: each.expand(count, *each.shape) if name in by_image else each for name, each in text.items()}
        seen = Seen(**rows, text=said, extra={name: value.expand(count, *value.shape) for name, value in means.items()})
        expanded = replace(batch, labels=batch.labels[:1].expand(count), features=everyone)
        return method.logits(world, client.params, seen, expanded, {})

    return logits


def _by_image(value: Tensor, plan: _Plan) -> Tensor:
    """A tensor by image, repeated if it is the same for all images."""
    count = len(plan.images)
    if value.dim() and len(value) in (count, count * plan.given.repeat):
        return value
    return value.expand(count, *value.shape)


def tangent(function: Callable[[Tensor], Tensor], features: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Weight (C, F) and bias (C,) of the tangent to a function (N, F) -> (N, C) at the mean of some features (N, F),
    and whether it equals the function, tested at these features and at points far from them.
    """
    centre = features.mean(0)
    jacobian = torch.autograd.functional.jacobian(lambda x: function(x.unsqueeze(0))[0], centre)
    assert isinstance(jacobian, Tensor)
    weight = jacobian.detach()
    with torch.no_grad():
        bias = function(centre.unsqueeze(0))[0] - weight @ centre
        probes = torch.cat([features, 2 * features[:8].flip(-1), torch.zeros_like(features[:1])])
        exact, approximate = function(probes), F.linear(probes, weight, bias)
        linear = bool((exact - approximate).abs().max() <= 1e-4 * exact.abs().max().clamp_min(1))
    return weight, bias, linear


@dataclass(frozen=True)
class Agreement:
    """How a constant model compares with the client's own on some images."""

    on: str
    """Which images."""
    images: int
    largest_difference: float
    """Between two probabilities."""
    same_class: float
    """Share of images that both put into the same class."""
    accuracy: float | None
    """Of the constant model, if there are labels."""
    own_accuracy: float | None
    """Of the client's own model."""

    @classmethod
    def measured(
        cls, client: TrainedClient, fixed: Constant, pixels: np.ndarray, labels: Tensor | None, on: str
    ) -> Agreement:
        own = client.predict(pixels).probabilities
        with torch.no_grad():
            found = torch.cat([fixed.probabilities(client.images(part)) for part in _parts(client, pixels)])
        right = (
            None if labels is None else [float((each.argmax(-1) == labels).double().mean()) for each in (found, own)]
        )
        return cls(
            on,
            len(pixels),
            float((found - own).abs().max()),
            float((found.argmax(-1) == own.argmax(-1)).double().mean()),
            None if right is None else right[0],
            None if right is None else right[1],
        )


def projection_of(backbone: ViT, reads: tuple[str, ...] = ("image",)) -> Tensors:
    """The map into the shared space of a dual encoder; empty for other backbones."""
    if not isinstance(backbone, DualEncoder):
        return {}
    scale = backbone.raw_scale if "image_raw" in reads else 1.0
    weights = backbone.image_projection.weights
    return {name: tensor if name.startswith("hidden") else scale * tensor for name, tensor in weights.items()}
