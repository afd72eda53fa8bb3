"""Operations that all towers share, on a flat dictionary of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.errors import ContractError
from fedprompt.modules.insertion import spread

Weights = Mapping[str, Tensor]


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


FACTOR, SHIFT = ".factor", ".shift"  # (B, width), a scale and a shift behind an operation for each image


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return scaled(weights, name, F.linear(x, weights[name + ".weight"], weights[name + ".bias"]))


def norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return scaled(weights, name, F.layer_norm(x, x.shape[-1:], weights[name + ".weight"], weights[name + ".bias"], eps))


def scaled(weights: Weights, name: str, x: Tensor, columns: slice = slice(None)) -> Tensor:
    """The output (B, R, columns) of an operation, scaled and shifted image by image where that is asked for; B may count
    several samples of each image, side by side.
    """
    if name + FACTOR not in weights:
        return x
    factor, shift = (spread(weights[name + end], len(x))[:, None, columns] for end in (FACTOR, SHIFT))
    return x * factor + shift


def by_image(weights: Weights) -> bool:
    """Whether a block scales and shifts anything image by image."""
    return any(name.endswith(FACTOR) for name in weights)


class _SplitHeads(torch.autograd.Function):
    """Views for the forward pass; the backward pass writes every gradient to its place; autograd would copy it twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
        return projected.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor, int, int], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.stack([gradient.transpose(1, 2) for gradient in gradients], dim=2).flatten(2), None, None


def split_heads(projected: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """(B, R, parts * d) to one (B, heads, R, d / heads) for each part."""
    return _SplitHeads.apply(projected, heads, parts)  # type: ignore[no-untyped-call]


LARGEST_LOOK = 1024 * 1024  # scores of one head of one image, up to which they are stored


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention (B, h, R, d / h); the mask is true for rows that are looked at.

    In bfloat16 on a processor it is written out as two products and a softmax in float32: the backward pass of torch's own
    takes five to ten times as long there.
    """
    rows, seen = query.shape[-2], key.shape[-2]
    if query.device.type != "cpu" or not _in_bfloat16(query) or rows * seen > LARGEST_LOOK:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype) @ value


def _in_bfloat16(rows: Tensor) -> bool:
    """Whether a product of these rows, on a processor, is in bfloat16."""
    here = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else rows.dtype
    return here == torch.bfloat16


def precision(autocast: bool, device: torch.device) -> AbstractContextManager[object]:
    """Optionally compute matrix products and convolutions in bfloat16; sums and norms keep their precision."""
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if autocast else nullcontext()


def activate(kind: str, hidden: Tensor) -> Tensor:
    """`gelu`, its approximation by tanh, or CLIP's cheaper `quick_gelu`."""
    if kind == "quick_gelu":
        return hidden * torch.sigmoid(1.702 * hidden)
    return F.gelu(hidden, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")


ADAPTER = "adapter."  # tensors of a bottleneck beside a block, which no released tower has
ADAPTER_TENSORS = tuple(f"{ADAPTER}{map}.{part}" for map in ("down", "middle", "up") for part in ("weight", "bias"))


def with_adapter(weights: Weights, output: Tensor, given: Callable[[], Tensor], prefix: str = "") -> Tensor:
    """The output of a block, plus up(relu(middle(relu(down(given))))) where the block has a bottleneck beside it."""
    name = prefix + ADAPTER
    if name + "down.weight" not in weights:
        return output
    hidden = F.relu(linear(weights, name + "middle", F.relu(linear(weights, name + "down", given()))))
    return output + linear(weights, name + "up", hidden)


def with_changes(
    weights: Weights, changes: Mapping[str, Tensor], places: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The weights with something added to some of them. Tensors of adapters are new ones and taken as they are.

    `places` are the names of the weights, where they differ from those of the changes.
    """
    found = dict(weights)
    for name, change in changes.items():
        place = name if places is None else places[name]
        block, is_adapter, part = place.partition(ADAPTER)
        if is_adapter and ADAPTER + part in ADAPTER_TENSORS and block + "norm1.weight" in weights:
            found[place] = change
        elif place in weights and weights[place].shape == change.shape:
            found[place] = weights[place] + change
        else:
            raise ContractError(f"added weights must fit the backbone, got {name!r} of shape {tuple(change.shape)}")
    return found


def update_digest(sha: _Hash, weights: Weights) -> None:
    """Add every byte of every weight, in the order of their names."""
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        sha.update(tensor.view(torch.uint8).numpy().data)
