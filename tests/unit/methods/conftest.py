"""What tests against an independent implementation share."""

from __future__ import annotations

from pathlib import Path

import pytest
from naive import naive_vit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ViT as `transformers` saves it."""
    path = tmp_path_factory.mktemp("vit")
    naive_vit(width=32, depth=3, heads=2, mlp=64, patch=4, image=16, seed=0).save_pretrained(path)
    return path
