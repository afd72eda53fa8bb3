"""pFedDC (arXiv 2506.21144): shared global and local prompts for both towers, fused by cross-attention.

For each modality, text and vision, client k has a global prompt G, a local prompt L_k and a cross-attention A_k, all
trained together:

    F_text   = L_text + A_text(L_text, G_text)           (m_t, d_t)      T_c = g([F_text, name c])
    F_vision = L_vision + A_vision(L_vision, G_vision)   (J, m_v, d_v)   I_b = f([image b, F_vision])
    local objective CE(scale * I T^T, y),   G <- sum_k p_k G_k for both modalities,   p_k = n_k / sum of the cohort's n

A is a pre-norm multi-head attention whose output map starts at zero (`modules/fusion.py` has the formulas, the other
directions and the kinds without attention). So before the first step F = L: the model has only local prompts. For the
same reason only local prompts and output maps have a gradient at the first step; global prompts and the other maps
follow at the second. A summary of the paper says that the attention starts at random: `attention_start: random`.

Which prompt is the query is not known either: `direction`. With `local_queries` the residual is local and global prompts
enter only through A; with `global_queries` it is the other way round, and clients predict with the global prompt until
their A has learned.

Vision prompts start as the tokens of a blank image at their block, with a little noise: they leave the features of an
image nearly as they were. With `vision_start: random` they start at N(0, 0.02^2). A transformer normalises every token,
so a random prompt, however short, is a token like any other, of a kind that the frozen blocks have never seen. With
`vision_start: patches` a client's local ones start as means of patch embeddings of its training images: token t of the
block is the mean over all its images and over the t-th part of the patches, at the input of that block; global ones are
then random.

`freeze_global` is the control that separates what sharing gives from what the attention's capacity gives: the same model,
but the global prompts stay at their common random start, so nothing that clients learn is shared.

The fused prompt does not depend on the image. (A summary of the paper says that the fusion depends on the image, but
both of its inputs are prompts.) It is computed once per step, and the text tower runs once per evaluation.

Vision prompts come after the image's tokens, have no position, and enter before CLIP's `ln_pre`. With `vision_depth` J
> 1 each of the first J blocks has its own prompts, which replace those of the block before; all of them use one
A_vision. Without vision prompts the image tower runs only once per image.

A client that never trained predicts with only the global prompts, since its own are still noise; so do all clients if
`federation.evaluate_at` is `global`. A held-out client starts from an untrained local prompt and attention, as a client
does in its first round.

Of the paper, text and vision prompts, cross-attention fusion, what is shared, SGD and the frozen CLIP ViT-B/16 are
known to us. Lengths, heads, direction, insertion and start are not: they are our choice, and settings. There is no
public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprompt.config import TrainConfig
from fedprompt.core.method import Batch, Client, Progress, Prompts, Seen, Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.errors import ConfigError, broken
from fedprompt.methods.bases.with_local import TRAINED
from fedprompt.methods.bases.with_text import WithText, check_room, precise, similarity
from fedprompt.modules.contexts import random_context
from fedprompt.modules.fusion import (
    Direction,
    Fused,
    Kind,
    Start,
    describe_attention,
    fuse_by_attention,
    fuse_plainly,
    needs_equal_lengths,
    new_attention,
    part,
)
from fedprompt.modules.insertion import TokenPrompt
from fedprompt.random_streams import Stream
from fedprompt.tensors import Tensors, prefixed, stripped


@register("pfeddc")
@dataclass(frozen=True)
class PFedDC(WithText):
    """Dual prompts with cross fusion. `context_tokens` is the length of the global text prompt."""

    local_tokens: Annotated[int, Field(ge=1)] | None = None
    """Words of the local text prompt, which is then drawn at random; null for the length of the global one."""
    vision_tokens: Annotated[int, Field(ge=0)] = 4
    """Tokens of the global vision prompt per prompted block; 0 for none."""
    local_vision_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the local vision prompt; null for the length of the global one."""
    vision_depth: Annotated[int, Field(ge=1)] | None = 1
    """Number of blocks with vision prompts, from the first; null for all."""
    fusion: Kind = "attention"
    """How global and local prompt are fused: attention, mean, sum, concat."""
    direction: Direction = "local_queries"
    """Queries and keys of the attention: local_queries, global_queries, bidirectional, concat_keys."""
    heads: Annotated[int, Field(ge=1)] = 8
    """Heads of each attention."""
    attention_start: Start = "zero"
    """Start of the attentions' output maps: zero (the fused prompt is the residual), or random like the other maps."""
    vision_start: Literal["blank", "random", "patches"] = "blank"
    """Start of vision prompts: tokens of a blank image, random, or random with local ones from the client's patches."""
    freeze_global: bool = False
    """Keep the global prompts at their start: a control in which clients share nothing that they learn."""
    measure_drift: bool = True
    """Report how far vision prompts move image features (`vision.drift`); needs one pass without prompts per image."""
    share_attention: bool = False
    """Average the attentions too, instead of keeping them local."""
    use_vision: bool = True
    """False for text prompts only."""
    use_local: bool = True
    """False for global prompts only."""
    use_global: bool = True
    """False for local prompts only, with nothing shared."""

    @property
    def modalities(self) -> tuple[str, ...]:
        return ("text", "vision") if self.use_vision and self.vision_tokens else ("text",)

    @property
    def fuses(self) -> bool:
        return self.use_local and self.use_global

    @property
    def needs(self) -> tuple[str, ...]:
        return ("image",) if self.measure_drift and "vision" in self.modalities else ()

    def check(self, world: World, train: TrainConfig) -> None:
        super().check(world, train)
        world.check_depth("method.vision_depth", self.vision_depth)
        if not (self.use_local or self.use_global):
            raise ConfigError(broken("method.use_local or method.use_global", "be true", False))
        if self.freeze_global and not self.fuses:
            raise ConfigError(
                broken("method.freeze_global", "be false unless global and local prompts are fused", True)
            )
        if self.vision_start == "patches" and self._local_vision > world.tokens - 1:
            rule = f"be at most the {world.tokens - 1} patches of an image with vision_start patches"
            raise ConfigError(broken("method.local_vision_tokens", rule, self._local_vision))
        self._check_text_room(world)
        if not self.fuses:
            return
        for modality in self.modalities:
            if self.fusion == "attention" and _width(modality, world) % self.heads:
                rule = f"divide the width {_width(modality, world)} of the {modality} tower"
                raise ConfigError(broken("method.heads", rule, self.heads))
        if needs_equal_lengths(self.fusion, self.direction):
            self._check_lengths(world)

    def init(self, world: World, generator: Stream) -> Roles:
        shared: Tensors = {}
        local: Tensors = {}
        for modality in self.modalities:
            if self.use_local:
                local[f"local_{modality}"] = self._new_local(modality, world, generator)
            if self.use_global:
                shared[f"global_{modality}"] = self._new_global(modality, world, generator)
        if self.fuses:
            local[TRAINED] = torch.zeros(())
        if self.fuses and self.fusion == "attention":
            for modality in self.modalities:
                drawn = new_attention(_width(modality, world), generator, self.attention_start)
                (shared if self.share_attention else local).update(prefixed(f"fusion.{modality}.", drawn))
        return Roles(world.placed(shared), world.placed(local))

    def enrol(self, world: World, client: Client) -> Tensors:
        """Local vision prompts (J, m, d) as means of patch embeddings, if they start so."""
        if (
            self.vision_start != "patches"
            or not self.use_local
            or "vision" not in self.modalities
            or not client.samples
        ):
            return {}
        rows, _ = client.features(f"block_inputs:{self.vision_depth or world.blocks}")  # (n, J, T, d)
        means = rows[:, :, int(world.has_cls) :].mean(0)
        parts = torch.tensor_split(means, self._local_vision, dim=1)
        return {"local_vision": torch.stack([part.mean(1) for part in parts], dim=1)}

    @property
    def _local_vision(self) -> int:
        return self.vision_tokens if self.local_vision_tokens is None else self.local_vision_tokens

    def personalise(self, world: World, client: Client, received: Tensors, local: Tensors) -> Tensors:
        held_out = client.index in world.newcomers
        if TRAINED in local and not local[TRAINED] and not held_out:
            return received
        return {**received, **local}

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        fixed = (TRAINED, "global_text", "global_vision") if self.freeze_global else (TRAINED,)
        names = tuple(name for name in (*world.roles.shared, *world.roles.local) if name not in fixed)
        return (Stage(self, names, train.epochs),)

    def prompts(self, world: World, params: Tensors, batch: Batch, noise: Tensors) -> Prompts:
        text = self.as_context(self.fused("text", params))
        if "vision" not in self.modalities:
            return Prompts(text={"context": text})
        vision = self.fused("vision", params)
        return Prompts(text={"context": text}, tokens=(TokenPrompt(vision, tuple(range(len(vision)))),))

    def fused(self, modality: str, params: Tensors) -> Tensor:
        """The prompt for the tower: the global and the local one fused, or the only one there is."""
        if not self._has_both(modality, params):
            return next(params[name] for name in (f"local_{modality}", f"global_{modality}") if name in params)
        if self.fusion == "attention":
            return self._attention(modality, params).tokens
        return fuse_plainly(self.fusion, params[f"global_{modality}"], params[f"local_{modality}"])

    def logits(self, world: World, params: Tensors, seen: Seen, batch: Batch, noise: Tensors) -> Tensor:
        return similarity(world, seen.image, seen.text["context"])

    def finish(
        self, world: World, client: Client, received: Tensors, params: Tensors, progress: Progress
    ) -> tuple[Tensors, Tensors]:
        upload, local = super().finish(world, client, received, params, progress)
        if TRAINED in local:
            local[TRAINED] = torch.ones_like(local[TRAINED])
        return upload, local

    def diagnostics(self, world: World, params: Tensors, seen: Seen, batch: Batch) -> dict[str, Tensor]:
        """By modality, the global share of the fused prompt, and statistics of its attention (`modules/fusion.py`).

        Without attention there is only `global_share`: |G| / (|G| + |L|). `vision.drift` is the distance of an image's
        feature from that without prompts; both have length 1, so unrelated ones are 1.4 apart.
        """
        found: Tensors = {}
        if self.needs:
            found["vision.drift"] = precise(seen.image - batch.features["image"]).norm(dim=-1)
        for modality in self.modalities:
            if not self._has_both(modality, params):
                continue
            both = params[f"global_{modality}"], params[f"local_{modality}"]
            if self.fusion == "attention":
                numbers = describe_attention(self.direction, self._attention(modality, params), *both)
            else:
                numbers = {"global_share": part(*both)}
            found |= prefixed(f"{modality}.", numbers)
        return found

    def _has_both(self, modality: str, params: Tensors) -> bool:
        return f"global_{modality}" in params and f"local_{modality}" in params

    def _attention(self, modality: str, params: Tensors) -> Fused:
        both = params[f"global_{modality}"], params[f"local_{modality}"]
        return fuse_by_attention(self.direction, stripped(f"fusion.{modality}.", params), *both, self.heads)

    def _new_global(self, modality: str, world: World, generator: Stream) -> Tensor:
        if modality == "text":
            return self.new_context(world, generator)
        return self._new_vision(self.vision_tokens, world, generator)

    def _new_vision(self, tokens: int, world: World, generator: Stream) -> Tensor:
        depth = self.vision_depth or world.blocks
        if self.vision_start == "blank":
            return world.initial_prompt("blank", range(depth), tokens, generator)
        return random_context(tokens, world.width, generator, depth)

    def _new_local(self, modality: str, world: World, generator: Stream) -> Tensor:
        if modality == "text" and self.local_tokens is not None:
            classes = world.classes if self.class_specific else None
            return random_context(self.local_tokens, world.text.width, generator, classes)
        if modality == "vision" and self.local_vision_tokens is not None:
            return self._new_vision(self.local_vision_tokens, world, generator)
        return self._new_global(modality, world, generator)

    def _check_text_room(self, world: World) -> None:
        """Check the local prompt, which may be longer, and the two together; the global one is checked already."""
        if not self.use_local:
            return
        words = self.context_length(world)
        local = words if self.local_tokens is None else self.local_tokens
        check_room(world, "local_tokens", local)
        if self.fuses and self.fusion == "concat":
            check_room(world, "fusion", words + local)

    def _check_lengths(self, world: World) -> None:
        lengths = {"local_tokens": (self.context_length(world), self.local_tokens)}
        if "vision" in self.modalities:
            lengths["local_vision_tokens"] = (self.vision_tokens, self.local_vision_tokens)
        how = self.fusion if self.fusion != "attention" else self.direction
        for name, (tokens, local_tokens) in lengths.items():
            if local_tokens not in (None, tokens):
                rule = f"be the {tokens} of the global prompt, or null, where tokens are added ({how})"
                raise ConfigError(broken(f"method.{name}", rule, local_tokens))


def _width(modality: str, world: World) -> int:
    return world.text.width if modality == "text" else world.width
