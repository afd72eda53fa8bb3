"""One training step of one client, in the order a method describes it: prompts, the frozen backbone, logits, loss, SGD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.engines.images import Images
from fedprompt.method import Batch, Method, Seen, World
from fedprompt.prompts.contexts import Position, TextContext
from fedprompt.prompts.insertion import VisionPrompt
from fedprompt.roles import Tensors


def speak(world: World, contexts: Mapping[str, TextContext]) -> Tensors:
    """The frozen text tower: features (C, D) of every context. Contexts of one shape run together."""
    alike: dict[tuple[torch.Size, Position], list[str]] = {}
    for name, context in contexts.items():
        alike.setdefault((context.tokens.shape, context.position), []).append(name)
    found: Tensors = {}
    for (_, position), names in alike.items():
        features = world.text.encode(torch.stack([contexts[name].tokens for name in names]), position)
        found |= dict(zip(names, features, strict=True))
    return found


def look(
    method: Method,
    world: World,
    params: Tensors,
    images: Images,
    positions: Tensor,
    batch: Batch,
    noise: Tensors,
) -> Seen:
    """The frozen backbone between `prompts` and `logits`. Images without prompts are not run again: cached features are read instead."""
    given = method.prompts(world, params, batch, noise)
    extra = dict(given.extra)
    text = speak(world, given.text)
    if given.vision or given.weights or given.pause is not None:
        tokens = images.tokens(positions)
        if given.repeat > 1:
            tokens = tokens.repeat(given.repeat, 1, 1)

        def later(cls: Tensor) -> tuple[VisionPrompt, ...]:
            more = method.later(world, params, cls, batch, noise)
            extra.update(more.extra)
            return more.vision

        backbone = images.backbone.with_added(given.weights) if given.weights else images.backbone
        pause = None if given.pause is None else (given.pause, later)
        return Seen(**backbone.run(tokens, given.vision, method.reads, pause=pause), text=text, extra=extra)
    found = {name: images.features(name, positions) for name in method.reads if name != "prompts"}
    repeated = {name: value.repeat(given.repeat, *[1] * (value.dim() - 1)) for name, value in found.items()}
    return Seen(**repeated, text=text, extra=extra)


def make_batch(method: Method, images: Images, positions: Tensor, training: bool) -> Batch:
    features = {name: images.features(name, positions) for name in method.needs}
    return Batch(images.labels[positions.to(images.labels.device)], features, training=training)


def step_loss(
    method: Method,
    world: World,
    params: Tensors,
    images: Images,
    positions: Tensor,
    noise: Tensors,
) -> Tensor:
    """One step's loss, from prompts to the number."""
    batch = make_batch(method, images, positions, training=True)
    seen = look(method, world, params, images, positions, batch, noise)
    logits = method.logits(world, params, seen, batch, noise)
    return method.loss(world, params, logits, seen, batch, noise)


def learning_rate(train: TrainConfig, name: str, round: int, rounds: int) -> float:
    """The rate of one tensor in one round: its group's, or the general one, on the schedule."""
    parts = name.split(".")
    tails = [
        ".".join(parts[start:]) for start in range(len(parts))
    ]  # `head.*` is also the head inside `ditto.personal.head.bias`
    matching = (rate for pattern, rate in train.lrs.items() if any(fnmatchcase(tail, pattern) for tail in tails))
    base = next(matching, train.lr)
    if train.schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * (round - 1) / rounds))
    return base


def sgd_step(
    params: Tensors, grads: Tensors, velocity: Tensors, rates: dict[str, float], train: TrainConfig
) -> Tensors:
    """SGD with weight decay and heavy-ball momentum; `velocity` is updated in place."""
    if train.clip_norm is not None:
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        scale = (train.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = {name: grad * scale for name, grad in grads.items()}
    stepped = {}
    for name, grad in grads.items():
        grad = grad + train.weight_decay * params[name]
        velocity[name] = grad if name not in velocity else train.momentum * velocity[name] + grad
        stepped[name] = params[name] - rates[name] * velocity[name]
    return stepped
