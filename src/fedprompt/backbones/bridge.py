"""An image tower joined to the MiniLM text tower by projections that this project trained (see benchmarks/bridge).

A stand-in for CLIP where no CLIP text tower can be downloaded, and not CLIP: it was trained on images of about two
thousand names, CLIP on hundreds of millions of captions.
"""

from __future__ import annotations

from pathlib import Path

from fedprompt.assets import prepare
from fedprompt.backbones.clip import joined
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.minilm import minilm
from fedprompt.backbones.projection import projection
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_files import read_file


def bridge_file(name: str) -> Path:
    """Where the package keeps the projections of that dual encoder."""
    return Path(__file__).parent / "bridges" / f"{name}.safetensors"


def bridged(vision: ViT, cache: Path) -> DualEncoder:
    """The dual encoder of that name, given its image tower."""
    stored = read_file(bridge_file(vision.name))
    scale = float(stored.pop("scale"))
    tensors = {name: tensor.to(vision.device, vision.dtype) for name, tensor in stored.items()}
    text = minilm(
        read_file(prepare("minilm-weights", cache)),
        prepare("minilm-tokenizer", cache),
        projection(tensors, "text."),
        vision.device,
        vision.dtype,
    )
    return joined(vision, text, projection(tensors, "image."), scale)
