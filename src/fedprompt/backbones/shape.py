"""The numbers that describe a vision transformer, and the tensors they imply.

Every checkpoint family is translated to the same *canonical* tensor names, so that there is one forward pass for all:

| name | shape | what |
|---|---|---|
| `patch.weight`, `patch.bias` | (d, 3, p, p), (d) | the patch embedding |
| `lead` | (1 + extra, d) | CLS and extra tokens with their positions already added; no rows without CLS |
| `position` | (M, d) | positions of the patches at the chosen resolution |
| `ln_pre.weight`, `ln_pre.bias` | (d) | only where a family normalises before block 0 (CLIP) |
| `blocks.i.norm1.*`, `blocks.i.norm2.*` | (d) | pre-norms |
| `blocks.i.attention.in.weight`, `.bias` | (3d, d), (3d) | query, key, value, stacked |
| `blocks.i.attention.out.weight`, `.bias` | (d, d), (d) | |
| `blocks.i.mlp.in.weight`, `.bias` | (h, d), (h) | twice h rows for SwiGLU: the gate, then the value |
| `blocks.i.mlp.out.weight`, `.bias` | (d, h), (d) | |
| `blocks.i.scale1`, `blocks.i.scale2` | (d) | only with LayerScale |
| `norm.weight`, `norm.bias` | (d) | the final norm |
| `rotation` | (2, T, d / h) | only with rotary positions: cosines and sines by which queries and keys are turned |
| `pool.*` | | only with attention pooling ([`pooling.py`](pooling.py)) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

Activation = Literal["gelu", "quick_gelu", "gelu_pytorch_tanh"]

CHANNELS = 3  # colour images only; a grey image is repeated by the data side


@dataclass(frozen=True)
class ViTShape:
    """A pre-norm vision transformer at one resolution."""

    width: int
    depth: int
    heads: int
    mlp_width: int
    """Hidden units; of the gated half for SwiGLU."""
    patch: int
    """Side of a patch in pixels."""
    image_size: int
    """Side of an image in pixels, as chosen, not as trained."""
    extra_tokens: int = 0
    """Registers or a distillation token, between CLS and the patches."""
    norm_eps: float = 1e-6
    activation: Activation = "gelu"
    layer_scale: bool = False
    ln_pre: bool = False
    """Normalised before block 0 (CLIP)."""
    mlp: Literal["plain", "swiglu"] = "plain"
    rope_base: float | None = None
    """Longest period of rotary positions, which patches have in every block instead of an embedding (DINOv3)."""
    pooling: Literal["cls", "attention", "mean"] = "cls"
    """What the feature of an image is: the CLS row, or without a CLS row an attention over all rows (SigLIP) or their mean (of
    sentences)."""

    @property
    def has_cls(self) -> bool:
        return self.pooling == "cls"

    @property
    def lead(self) -> int:
        """Rows before the patches."""
        return self.has_cls + self.extra_tokens

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch

    @property
    def patches(self) -> int:
        return self.grid * self.grid

    @property
    def tokens(self) -> int:
        """Rows of a sequence without prompts: CLS, extra tokens, patches."""
        return self.lead + self.patches

    def described(self) -> dict[str, Any]:
        """What a digest covers: not `ln_pre`, which the names of the weights show, and younger fields only where used."""
        defaults = {field.name: field.default for field in fields(self) if field.name in ("rope_base", "pooling")}
        unused = {name for name, default in defaults.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name != "ln_pre" and name not in unused}


def tensor_shapes(shape: ViTShape) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor such a transformer has."""
    width = shape.width
    shapes: dict[str, tuple[int, ...]] = {
        "patch.weight": (width, CHANNELS, shape.patch, shape.patch),
        "patch.bias": (width,),
        "lead": (shape.lead, width),
        "position": (shape.patches, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if shape.ln_pre:
        shapes |= {"ln_pre.weight": (width,), "ln_pre.bias": (width,)}
    if shape.rope_base is not None:
        shapes["rotation"] = (2, shape.tokens, width // shape.heads)
    if shape.pooling == "attention":
        shapes |= _pool_tensors(shape)
    block = block_tensors(shape)
    return shapes | {f"blocks.{i}.{name}": size for i in range(shape.depth) for name, size in block.items()}


def _pool_tensors(shape: ViTShape) -> dict[str, tuple[int, ...]]:
    width, hidden = shape.width, shape.mlp_width
    return {
        "pool.probe": (width,),
        "pool.attention.in.weight": (3 * width, width),
        "pool.attention.in.bias": (3 * width,),
        "pool.attention.out.weight": (width, width),
        "pool.attention.out.bias": (width,),
        "pool.norm.weight": (width,),
        "pool.norm.bias": (width,),
        "pool.mlp.in.weight": (hidden, width),
        "pool.mlp.in.bias": (hidden,),
        "pool.mlp.out.weight": (width, hidden),
        "pool.mlp.out.bias": (width,),
    }


OPERATIONS = ("norm1", "attention.in", "attention.out", "norm2", "mlp.in", "mlp.out")  # of a block


@cache
def block_tensors(shape: ViTShape) -> Mapping[str, tuple[int, ...]]:
    """The tensors of one block."""
    width, hidden = shape.width, shape.mlp_width
    block: dict[str, tuple[int, ...]] = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attention.in.weight": (3 * width, width),
        "attention.in.bias": (3 * width,),
        "attention.out.weight": (width, width),
        "attention.out.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.in.weight": (hidden * (2 if shape.mlp == "swiglu" else 1), width),
        "mlp.in.bias": (hidden * (2 if shape.mlp == "swiglu" else 1),),
        "mlp.out.weight": (width, hidden),
        "mlp.out.bias": (width,),
    }
    if shape.layer_scale:
        block |= {"scale1": (width,), "scale2": (width,)}
    return block
