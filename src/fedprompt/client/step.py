"""The loss of one training step of one client, in the order a method describes it: prompts, the frozen backbone, logits, loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.core.method import Batch, Method, Prompts, Seen, World
from fedprompt.features.image_bank import Images, LoadedImages
from fedprompt.modules.contexts import Language, Position, TextContext
from fedprompt.modules.insertion import TokenPrompt, spread
from fedprompt.tensors import Tensors


def encode_text(
    world: World, plan: Mapping[str, TextContext], contexts: Tensors, changes: Mapping[str, Tensor] | None = None
) -> Tensors:
    """The frozen text tower: features (N, C, D) of the contexts (N, ...) of N clients. Those of one shape run together.

    Contexts per image (N, B, m, d) have features (N, B, C, D). With `changes` of the tower's weights nothing is stored.
    """
    kinds: dict[tuple[torch.Size, Position, tuple[str, ...]], list[str]] = {}
    found: Tensors = {}
    for name, context in plan.items():
        if context.per_image:
            found[name] = _encode_per_image(world.text.with_names(context.names), contexts[name], context.position)
        else:
            kinds.setdefault((contexts[name].shape, context.position, context.names), []).append(name)
    for (_, position, spoken), names in kinds.items():
        together, text = torch.cat([contexts[name] for name in names]), world.text.with_names(spoken)
        features = _encode_unstored(text, together, position, changes) if changes else text.encode(together, position)
        found |= dict(zip(names, features.unflatten(0, (len(names), -1)), strict=True))
    return found


def _encode_per_image(text: Language, contexts: Tensor, position: Position) -> Tensor:
    return torch.unflatten(_encode_unstored(text, contexts.flatten(0, 1), position, {}), 0, list(contexts.shape[:2]))


def _encode_unstored(text: Language, contexts: Tensor, position: Position, changes: Mapping[str, Tensor]) -> Tensor:
    assert text.encode_unstored is not None
    return text.encode_unstored(contexts, position, changes)


def inserted(slots: Sequence[TokenPrompt]) -> tuple[TokenPrompt, ...]:
    """The slots that hold a token at all."""
    return tuple(slot for slot in slots if slot.tokens.shape[-2])


def changes_images(given: Prompts, reads: Collection[str]) -> bool:
    """Whether the images have to go through the backbone again, or what it makes of them without prompts will do."""
    changed = given.weights or given.factors or given.pixels is not None
    return bool(inserted(given.tokens) or changed or given.pause is not None or "prompts" in reads)


def first_block(given: Prompts) -> int:
    """The first block whose input or weights the prompts touch: what lies below never changes."""
    if given.weights or given.factors or given.pixels is not None:
        return 0
    first = [slot.blocks[0] for slot in inserted(given.tokens)]
    return min([*first, *([] if given.pause is None else [given.pause])], default=0)


def rows_of(given: Prompts) -> Tensors:
    """What `ViT.modulated` takes: a row for each image of a pass, and the pixels of one client."""
    rows = dict(given.factors)
    return rows if given.pixels is None else {**rows, "pixels": given.pixels.unsqueeze(0)}


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
    text = {
        name: features[0] for name, features in encode_text(world, given.text, contexts, given.text_weights).items()
    }
    if not changes_images(given, method.reads):
        found = {name: images.features(name, positions) for name in method.reads}
        repeated = {name: value.repeat(given.repeat, *[1] * (value.dim() - 1)) for name, value in found.items()}
        return Seen(**repeated, text=text, extra=extra)
    start = first_block(given)

    def later(cls: Tensor) -> tuple[TokenPrompt, ...]:
        more = method.later(world, params, cls, batch, noise)
        extra.update(more.extra)
        return inserted(more.tokens)

    backbone = images.backbone.with_added(given.weights) if given.weights else images.backbone
    rows = rows_of(given)
    backbone = backbone.modulated(rows) if rows else backbone
    pause = None if given.pause is None else (given.pause, later)
    tokens, slots = images.tokens(positions, start), inserted(given.tokens)
    seen = run_repeated(backbone, tokens, slots, method.reads, start, pause, given.repeat)
    return Seen(**seen, text=text, extra=extra)


Later = Callable[[Tensor], Sequence[TokenPrompt]]


def run_repeated(
    backbone: ViT,
    tokens: Tensor,
    prompts: Sequence[TokenPrompt],
    reads: Collection[str],
    start: int,
    pause: tuple[int, Later] | None,
    repeat: int,
    clients: int = 1,
) -> Tensors:
    """A pass over images (N * B, T, d) of N clients, with samples (N, repeat, B) in what is inserted and in what is seen.

    The backbone gets samples of one image side by side, so it can compute once what they have in common.
    """
    if repeat == 1:
        return backbone.run(tokens, prompts, reads, start, pause)
    given, inside = (clients, repeat, -1), (clients, -1, repeat)
    samples = len(tokens) * repeat

    def by_image(slot: TokenPrompt) -> TokenPrompt:
        if slot.tokens.dim() == 3 or len(slot.tokens) <= clients:
            return slot  # the same for all samples of a client
        each = spread(slot.tokens, samples).unflatten(0, given).transpose(1, 2).flatten(0, 2)
        return replace(slot, tokens=each)

    def by_draw(rows: Tensor) -> Tensor:
        found: Tensor = spread(rows, samples).unflatten(0, inside).transpose(1, 2).flatten(0, 2)
        return found

    def joining(cls: Tensor) -> list[TokenPrompt]:
        assert pause is not None
        return [by_image(slot) for slot in pause[1](by_draw(cls))]

    ordered = [by_image(slot) for slot in prompts]
    seen = backbone.run(tokens, ordered, reads, start, None if pause is None else (pause[0], joining), repeat)
    return {name: by_draw(rows) for name, rows in seen.items()}


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
