"""pFedPT (Li et al., 2023, arXiv 2303.08678), as tokens: a prompt that knows its client, and a classifier for all.

    logits = head(CLS of [CLS, P_k, patches]),    P_k (K, d) local,    head averaged

    round    the head arrives; P_k is trained with the head fixed; then the head is trained with P_k fixed, and sent

The paper's prompt is a frame of pixels around the image, and what is averaged is a whole network that is trained. Here the
network is a frozen transformer, a method never sees pixels, and the prompt enters as tokens before the first block, as in
visual prompt tuning; of the network only the head is trained. So this keeps the paper's division and its order of
training, and neither its place of the prompt nor its size of what travels.

The model is FedVPT's; only the roles are exchanged: there the prompt is shared and the head may be local. With
`prompt_epochs: 0` the prompt stays at its common start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedprompt.config import TrainConfig
from fedprompt.core.method import Stage, World
from fedprompt.core.registry import register
from fedprompt.core.roles import Roles
from fedprompt.methods.fedvpt import FedVPT
from fedprompt.modules import heads
from fedprompt.random_streams import Stream


@register("pfedpt")
@dataclass(frozen=True)
class PFedPT(FedVPT):
    """A local prompt that tells a shared head about its client."""

    head: Literal["shared", "shared_then_finetune"] = "shared"
    """The head is shared; it may be tuned before an evaluation."""
    prompt_epochs: Annotated[int, Field(ge=0)] | None = None
    """Epochs on the prompt in a round, before those on the head; null for train.epochs."""

    def init(self, world: World, generator: Stream) -> Roles:
        roles = super().init(world, generator)
        head = {name: roles.shared[name] for name in heads.NAMES}
        return Roles(shared=head, local={"prompt": roles.shared["prompt"]})

    def stages(self, world: World, train: TrainConfig) -> tuple[Stage, ...]:
        epochs = train.epochs if self.prompt_epochs is None else self.prompt_epochs
        prompt = (Stage(self, ("prompt",), epochs, "prompt"),) if epochs else ()
        return (*prompt, Stage(self, heads.NAMES, train.epochs))

    def newcomer(self, world: World, train: TrainConfig, epochs: int) -> tuple[Stage, ...]:
        """A new client gets the head and trains its own prompt."""
        return (Stage(self, ("prompt",), epochs, "newcomer"),)
