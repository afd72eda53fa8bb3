"""pFedMoAP with `transformers`: contexts of the nearest clients as experts, mixed by an attention that stays with its client.

The maths is in the docstring of `fedprompt.methods.pfedmoap`. Of every context in the pool the text features are computed
once a round; the client's own context and both towers run in every step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from federated import Params, Program, job
from text_side import text_side
from torch import Tensor

own = job()
side = text_side(own)
SETTINGS = own.settings["method"]
WIDTH, HEADS, OTHERS = SETTINGS["width"], SETTINGS["heads"], SETTINGS["others"]
pool: list[Tensor] = []  # of every client, after the first round
spoken_pool: list[Tensor] = []
used_gate: set[int] = set()


def experts(client: int) -> Tensor:
    """Text features (K, C, D) of the contexts nearest to the client's own."""
    far = torch.stack([(each - pool[client]).norm() for each in pool])
    far[client] = torch.inf
    return torch.stack([spoken_pool[int(each)] for each in far.argsort()[:OTHERS]])


def before_training(client: int, params: Params) -> Params:
    if not pool:
        return {}
    used_gate.add(client)
    return {"experts": experts(client)}


def before_test(client: int, params: Params) -> Params:
    mine = {"context": pool[client]}  # what it has trained last
    return {**mine, "experts": experts(client)} if client in used_gate else mine


def after_round(uploads: list[Params]) -> None:
    pool[:] = [each["context"] for each in uploads]
    with torch.no_grad():
        spoken_pool[:] = [side.spoken(context) for context in pool]


def pooled(x: Tensor) -> Tensor:
    return x.unflatten(-1, (WIDTH, -1))[..., 0]


def by_head(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1))


def logits(params: Params, images: Tensor) -> Tensor:
    scale, image, text = own.settings["scale"], side.seen(images), side.spoken(params["context"])
    plain = scale * image @ text.T
    if "experts" not in params:
        return plain

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, params[f"gate.{name}.weight"], params[f"gate.{name}.bias"])

    asked, texts = pooled(image), pooled(torch.cat([text[None], params["experts"]]))  # (B, w), (E, C, w)
    query, key, value = by_head(linear("query", asked)), by_head(linear("key", texts)), by_head(linear("value", texts))
    weights = (SETTINGS["scaling"] * torch.einsum("bhx,echx->bche", query, key)).softmax(-1)
    mixed = linear("output", torch.einsum("bche,echx->bchx", weights, value).flatten(-2))  # (B, C, w)
    return scale * (asked[:, None] * mixed).sum(-1) + SETTINGS["local_weight"] * plain


own.run(
    Program(
        loss=lambda params, images, labels: F.cross_entropy(logits(params, images), labels),
        predict=lambda params, images: logits(params, images).softmax(-1),
        before_training=before_training,
        before_test=before_test,
        after_round=after_round,
    )
)
