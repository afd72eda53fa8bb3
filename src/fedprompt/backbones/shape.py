"""The numbers that describe a vision transformer, and the tensors they imply.

Every checkpoint family is translated to the same *canonical* tensor names, so that there is one forward pass for all:

| name | shape | what |
|---|---|---|
| `patch.weight`, `patch.bias` | (d, 3, p, p), (d) | the patch embedding |
| `lead` | (1 + extra, d) | CLS and extra tokens with their positions already added |
| `position` | (M, d) | positions of the patches at the chosen resolution |
| `ln_pre.weight`, `ln_pre.bias` | (d) | only where a family normalises before block 0 (CLIP) |
| `blocks.i.norm1.*`, `blocks.i.norm2.*` | (d) | pre-norms |
| `blocks.i.attention.in.weight`, `.bias` | (3d, d), (3d) | query, key, value, stacked |
| `blocks.i.attention.out.weight`, `.bias` | (d, d), (d) | |
| `blocks.i.mlp.in.weight`, `.bias` | (h, d), (h) | twice h rows for SwiGLU: the gate, then the value |
| `blocks.i.mlp.out.weight`, `.bias` | (d, h), (d) | |
| `blocks.i.scale1`, `blocks.i.scale2` | (d) | only with LayerScale |
| `norm.weight`, `norm.bias` | (d) | the final norm |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

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
    activation: Literal["gelu", "quick_gelu"] = "gelu"
    layer_scale: bool = False
    ln_pre: bool = False
    """Normalised before block 0 (CLIP)."""
    mlp: Literal["plain", "swiglu"] = "plain"

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
        return 1 + self.extra_tokens + self.patches


def tensor_shapes(shape: ViTShape) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor such a transformer has."""
    width = shape.width
    shapes: dict[str, tuple[int, ...]] = {
        "patch.weight": (width, CHANNELS, shape.patch, shape.patch),
        "patch.bias": (width,),
        "lead": (1 + shape.extra_tokens, width),
        "position": (shape.patches, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    if shape.ln_pre:
        shapes |= {"ln_pre.weight": (width,), "ln_pre.bias": (width,)}
    block = block_tensors(shape)
    return shapes | {f"blocks.{i}.{name}": size for i in range(shape.depth) for name, size in block.items()}


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
