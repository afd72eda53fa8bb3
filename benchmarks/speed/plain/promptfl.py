"""PromptFL with `transformers`: one text context in front of the class names, averaged; both towers run in every step."""

from __future__ import annotations

import torch.nn.functional as F
from federated import Params, Program, job
from text_side import text_side
from torch import Tensor

own = job()
side = text_side(own)


def logits(params: Params, images: Tensor) -> Tensor:
    return own.settings["scale"] * side.seen(images) @ side.spoken(params["context"]).T


own.run(
    Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
    )
)
