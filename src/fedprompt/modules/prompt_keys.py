"""Keys by which an image picks prompts: its query against each of them, by cosine."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprompt.random_streams import Stream


def cosine(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, d) and (G, d) to (B, G); the lengths of queries and keys do not matter."""
    return F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T


def orthonormal_keys(count: int, width: int, generator: Stream) -> Tensor:
    """Rows of a Xavier-uniform matrix (count, width), made orthonormal one after the other (Gram-Schmidt); count <= width."""
    rows: list[Tensor] = []
    for row in (generator.uniform(count, width) * 2 - 1) * math.sqrt(6 / (count + width)):
        for earlier in rows:
            row = row - (row @ earlier) * earlier
        rows.append(row / row.norm())
    return torch.stack(rows)
