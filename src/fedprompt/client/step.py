"""One training step of one client, in the order a method describes it: prompts, the frozen backbone, logits, loss, SGD."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Method, Prompts, Seen, World
from fedprompt.features.image_bank import Images, LoadedImages
from fedprompt.modules.contexts import Position, TextContext
from fedprompt.modules.insertion import VisionPrompt
from fedprompt.tensors import Tensors


def encode_text(world: World, plan: Mapping[str, TextContext], contexts: Tensors) -> Tensors:
    """The frozen text tower: features (N, C, D) of the contexts (N, ...) of N clients. Those of one shape run together."""
    kinds: dict[tuple[torch.Size, Position], list[str]] = {}
    for name, context in plan.items():
        kinds.setdefault((contexts[name].shape, context.position), []).append(name)
    found: Tensors = {}
    for (_, position), names in kinds.items():
        features = world.text.encode(torch.cat([contexts[name] for name in names]), position)
        found |= dict(zip(names, features.unflatten(0, (len(names), -1)), strict=True))
    return found


def inserted(slots: Sequence[VisionPrompt]) -> tuple[VisionPrompt, ...]:
    """The slots that hold a token at all."""
    return tuple(slot for slot in slots if slot.tokens.shape[-2])


def changes_images(given: Prompts, reads: Collection[str]) -> bool:
    """Whether the images have to go through the backbone again, or what it makes of them without prompts will do."""
    return bool(inserted(given.vision) or given.weights or given.pause is not None or "prompts" in reads)


def first_block(given: Prompts) -> int:
    """The first block whose input or weights the prompts touch: what lies below is the same for ever."""
    if given.weights:
        return 0
    first = [slot.blocks[0] for slot in inserted(given.vision)]
    return min([*first, *([] if given.pause is None else [given.pause])], default=0)


def forward(
    method: Method,
    world: World,
    params: Tensors,
    images: Images | LoadedImages,
    positions: Tensor,
    batch: Batch,
    noise: Tensors,
) -> Seen:
    """The frozen backbone between `prompts` and `logits`. Images without prompts are not run again: cached features are read instead."""
    given = method.prompts(world, params, batch, noise)
    extra = dict(given.extra)
    contexts = {name: context.tokens.unsqueeze(0) for name, context in given.text.items()}
    text = {name: features[0] for name, features in encode_text(world, given.text, contexts).items()}
    if not changes_images(given, method.reads):
        found = {name: images.features(name, positions) for name in method.reads}
        repeated = {name: value.repeat(given.repeat, *[1] * (value.dim() - 1)) for name, value in found.items()}
        return Seen(**repeated, text=text, extra=extra)
    start = first_block(given)
    tokens = images.tokens(positions, start)
    if given.repeat > 1:
        tokens = tokens.repeat(given.repeat, 1, 1)

    def later(cls: Tensor) -> tuple[VisionPrompt, ...]:
        more = method.later(world, params, cls, batch, noise)
        extra.update(more.extra)
        return inserted(more.vision)

    backbone = images.backbone.with_added(given.weights) if given.weights else images.backbone
    pause = None if given.pause is None else (given.pause, later)
    seen = backbone.run(tokens, inserted(given.vision), method.reads, start, pause)
    return Seen(**seen, text=text, extra=extra)


def make_batch(method: Method, images: Images | LoadedImages, positions: Tensor, training: bool) -> Batch:
    features = {name: images.features(name, positions) for name in method.needs}
    return Batch(images.labels[positions.to(images.labels.device)], features, training=training)


def step_loss(
    method: Method,
    world: World,
    params: Tensors,
    images: Images | LoadedImages,
    positions: Tensor,
    noise: Tensors,
) -> Tensor:
    """One step's loss, from prompts to the number."""
    batch = make_batch(method, images, positions, training=True)
    seen = forward(method, world, params, images, positions, batch, noise)
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


def local_factor(train: TrainConfig, step: int, steps: int) -> float:
    """What becomes of a client's rates in one of its own steps."""
    return 0.5 * (1 + math.cos(math.pi * step / steps)) if train.schedule == "local_cosine" else 1.0


def sgd_step(
    params: Tensors,
    grads: Tensors,
    velocity: Tensors,
    rates: Mapping[str, float],
    train: TrainConfig,
    factors: Tensor | None = None,
) -> tuple[Tensors, Tensors]:
    """SGD with weight decay and heavy-ball momentum for N clients at once, (N, ...) each: stepped tensors and velocities.

    `factors` (N,) on the rates are the clients' own.
    """
    if train.clip_norm is not None:
        squares = [grad.reshape(len(grad), -1).square().sum(1) for grad in grads.values()]
        scale = (train.clip_norm / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        grads = {name: _by_client(scale, grad) for name, grad in grads.items()}
    stepped, moving = {}, {}
    for name, grad in grads.items():
        if train.weight_decay:
            grad = grad + train.weight_decay * params[name]
        if train.momentum:
            grad = torch.add(grad, velocity[name], alpha=train.momentum) if name in velocity else grad
            moving[name] = grad
        stepped[name] = params[name] - rates[name] * (grad if factors is None else _by_client(factors, grad))
    return stepped, moving


def _by_client(factors: Tensor, tensor: Tensor) -> Tensor:
    """A factor (N,) for each client on its part of a tensor (N, ...)."""
    return tensor * factors.to(tensor).view(-1, *[1] * (tensor.dim() - 1))
