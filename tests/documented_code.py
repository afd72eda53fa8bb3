"""The code that docs/export.md shows, run as it stands there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/export.md").read_text()
PLAIN = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]


def documented_logits(folder: Path, image: Image.Image, code: str = PLAIN) -> Tensor:
    """Logits (C,) of an image by the code of the page, which finds `exported/` and `image.png` where it is run."""
    image.save(folder / "image.png")
    names: dict[str, Any] = {}
    before, path = Path.cwd(), [*sys.path]
    os.chdir(folder)
    sys.modules.pop("load_client", None)
    try:
        exec(code, names)
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.modules.pop("load_client", None)
    logits: Tensor = names["logits"][0]
    return logits


def outcomes() -> dict[str, str]:
    """What the page's table says of every method: exact, approximate or refused. Variants have the same beginning."""
    rows = re.findall(r"^\| (.*) \| (exact|approximate|refused)[^|]*\|$", PAGE, flags=re.MULTILINE)
    said = {}
    for methods, outcome in rows:
        for name, kin in re.findall(r"`(\w+)`( and its variants)?", methods):
            said[name + ("*" if kin else "")] = outcome
    return said


def outcome_of(method: str) -> str | None:
    """What the table says of a method; None where it has no row yet."""
    said = outcomes()
    kin = [name for name in said if name.endswith("*") and method.startswith(name[:-1])]
    return said[method] if method in said else said[kin[0]] if kin else None
