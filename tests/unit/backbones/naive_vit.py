"""The forward pass written the slow and obvious way, as an independent check of `fedprompt.backbones.vit`.

Every row of the sequence [CLS, slots, extra tokens, patches] goes through every part of every block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedprompt.backbones.vit import ViT
from fedprompt.modules.insertion import TokenPrompt


def naive_block(vit: ViT, index: int, x: Tensor) -> Tensor:
    w = {key.split(".", 2)[2]: value for key, value in vit.weights.items() if key.startswith(f"blocks.{index}.")}
    batch, rows, width = x.shape
    heads = vit.shape.heads

    def norm(name: str, value: Tensor) -> Tensor:
        centred = value - value.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + vit.shape.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    projected = norm("norm1", x) @ w["attention.in.weight"].T + w["attention.in.bias"]
    q, k, v = (part.reshape(batch, rows, heads, -1).transpose(1, 2) for part in projected.chunk(3, dim=-1))
    if vit.shape.rope_base is not None:
        q, k = turned(vit, q), turned(vit, k)
    attention = torch.softmax(q @ k.transpose(2, 3) / (width // heads) ** 0.5, dim=-1)
    mixed = (attention @ v).transpose(1, 2).reshape(batch, rows, width)
    x = x + (mixed @ w["attention.out.weight"].T + w["attention.out.bias"]) * w.get("scale1", 1.0)
    hidden = norm("norm2", x) @ w["mlp.in.weight"].T + w["mlp.in.bias"]
    if vit.shape.mlp == "swiglu":
        gate, value = hidden.chunk(2, dim=-1)
        hidden = gate * torch.sigmoid(gate) * value
    elif vit.shape.activation == "quick_gelu":
        hidden = hidden * torch.sigmoid(1.702 * hidden)
    else:
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    return x + (hidden @ w["mlp.out.weight"].T + w["mlp.out.bias"]) * w.get("scale2", 1.0)


def turned(vit: ViT, rows: Tensor) -> Tensor:
    """The patches are the last rows of (B, h, R, d / h); a number of the first half and its partner turn as a complex number."""
    others, patches = rows[:, :, : -vit.shape.patches], rows[:, :, -vit.shape.patches :]
    cosine, sine = vit.weights["rotation"][:, -vit.shape.patches :].chunk(2, dim=-1)[0]
    complex_rows = torch.complex(*patches.chunk(2, dim=-1)) * torch.complex(cosine, sine)
    return torch.cat([others, torch.cat([complex_rows.real, complex_rows.imag], dim=-1)], dim=2)


def naive_pool(vit: ViT, rows: Tensor) -> Tensor:
    """One vector per image through torch's own attention."""
    w, (width, hidden) = vit.weights, (vit.shape.width, vit.shape.mlp_width)
    attention = torch.nn.MultiheadAttention(width, vit.shape.heads, batch_first=True, dtype=rows.dtype)
    names = {"in_proj_weight": "in.weight", "in_proj_bias": "in.bias"}
    names |= {"out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}
    attention.load_state_dict({theirs: w[f"pool.attention.{ours}"] for theirs, ours in names.items()})
    x = attention(w["pool.probe"].expand(len(rows), 1, -1), rows, rows)[0][:, 0]
    inside = torch.nn.functional.layer_norm(x, (width,), w["pool.norm.weight"], w["pool.norm.bias"], vit.shape.norm_eps)
    inside = inside @ w["pool.mlp.in.weight"].T + w["pool.mlp.in.bias"]
    assert inside.shape[-1] == hidden
    inside = 0.5 * inside * (1 + torch.erf(inside / 2**0.5))
    return x + inside @ w["pool.mlp.out.weight"].T + w["pool.mlp.out.bias"]


def naive_run(vit: ViT, tokens: Tensor, prompts: list[TokenPrompt]) -> tuple[dict[str, Tensor], list[int]]:
    """All reads, and the sequence length at every block."""
    batch, _, width = tokens.shape
    ahead = 1 if vit.shape.has_cls else 0
    cls, rest = tokens[:, :ahead], tokens[:, ahead:]
    slots = [tokens.new_zeros(batch, 0, width) for _ in prompts]
    lengths = []
    for block in range(vit.shape.depth):
        for number, prompt in enumerate(prompts):
            listed = list(prompt.blocks)
            if prompt.after == "drop" and block > listed[-1]:
                slots[number] = slots[number][:, :0]
            if block in listed:
                per_sample = prompt.tokens if prompt.tokens.ndim == 4 else torch.stack([prompt.tokens] * batch)
                fresh = per_sample[:, listed.index(block)]
                if vit.shape.ln_pre and block == 0:  # as the image's own rows did
                    first = (vit.weights["ln_pre.weight"], vit.weights["ln_pre.bias"], vit.shape.norm_eps)
                    fresh = torch.nn.functional.layer_norm(fresh, (width,), *first)
                slots[number] = fresh if prompt.mode == "replace" else torch.cat([slots[number], fresh], 1)
        x = torch.cat([cls, *slots, rest], dim=1)
        lengths.append(x.shape[1])
        x = naive_block(vit, block, x)
        cls, *slots, rest = x.split([ahead, *(slot.shape[1] for slot in slots), rest.shape[1]], dim=1)
    slots = [s[:, :0] if p.after == "drop" else s for s, p in zip(slots, prompts, strict=True)]
    norm = torch.nn.functional.layer_norm
    final = (vit.weights["norm.weight"], vit.weights["norm.bias"], vit.shape.norm_eps)
    rows = {"cls": cls, "patches": rest[:, vit.shape.extra_tokens :], "prompts": torch.cat([cls[:, :0], *slots], 1)}
    seen = {name: norm(value, (width,), *final) for name, value in rows.items()}
    if vit.shape.has_cls:
        return seen | {"cls": seen["cls"][:, 0]}, lengths
    alone = [naive_pool(vit, seen["patches"][:, m : m + 1]) for m in range(vit.shape.patches)]
    whole = naive_pool(vit, torch.cat([seen["patches"], seen["prompts"]], 1))
    return seen | {"cls": whole, "patches": torch.stack(alone, 1)}, lengths
