"""Maps from the width of a tower to the space that images and texts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.backbones import layers
from fedprompt.errors import BackboneError


@dataclass(frozen=True, eq=False)
class Projection:
    """y = W x [+ b], plus an optional perceptron: [+ output(gelu(hidden(x)))]."""

    weights: dict[str, Tensor]

    def __post_init__(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        features, width = (*shapes.get("linear.weight", ()), 0, 0)[:2]
        hidden = (*shapes.get("hidden.weight", ()), 0)[0]
        expected = {"linear.weight": (features, width), "linear.bias": (features,)}
        if hidden:
            expected |= {
                "hidden.weight": (hidden, width),
                "hidden.bias": (hidden,),
                "output.weight": (features, hidden),
                "output.bias": (features,),
            }
        missing = set(expected) - set(shapes) - {"linear.bias"}
        wrong = [name for name, shape in shapes.items() if expected.get(name) != shape]
        if missing or wrong:
            raise BackboneError(
                f"a projection must be one linear map, or one with a perceptron beside it, got tensors {shapes}"
            )
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.weights.values()):
            raise BackboneError("a projection must be finite, got infinite values or not-a-number: the file is damaged")

    @property
    def width(self) -> int:
        """Of what goes in."""
        return int(self.weights["linear.weight"].shape[1])

    @property
    def features(self) -> int:
        """Of what comes out."""
        return int(self.weights["linear.weight"].shape[0])

    def raw(self, x: Tensor) -> Tensor:
        """Vectors of the shared space before they are normalised."""
        y = F.linear(x, self.weights["linear.weight"], self.weights.get("linear.bias"))
        if "hidden.weight" in self.weights:
            y = y + layers.linear(self.weights, "output", F.gelu(layers.linear(self.weights, "hidden", x)))
        return y

    def __call__(self, x: Tensor) -> Tensor:
        """Unit vectors of the shared space."""
        return unit(self.raw(x))


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1, computed in at least float32: in bfloat16 lengths are off by up to 0.3 per cent, and so are logits."""
    precise = torch.promote_types(vectors.dtype, torch.float32)
    return F.normalize(vectors.to(precise), dim=-1).to(vectors.dtype)


def projection(tensors: Mapping[str, Tensor], prefix: str) -> Projection:
    """The projection whose tensors begin with a prefix."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return Projection(found)
