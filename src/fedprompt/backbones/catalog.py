"""The named backbones, and how to give others. Does not import torch: the command line lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedprompt.config.registries import BACKBONES
from fedprompt.extensions import summary

Triple = tuple[float, float, float]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
HALF: Triple = (0.5, 0.5, 0.5)

TEXT_TOWER = ("minilm-weights", "minilm-tokenizer")


@dataclass(frozen=True)
class Named:
    """A backbone with built-in weights and preprocessing."""

    name: str
    what: str
    source: str
    image_size: int
    """Native side in pixels; positions are interpolated to any other multiple of the patch."""
    patch: int
    mean: Triple
    std: Triple
    assets: tuple[str, ...] = ()
    """Files that it is made of; see `fedprompt assets`."""
    text: bool = False
    """Whether it has a text tower."""
    sentences: bool = False
    """Whether it reads sentences and not images."""


DINOV2_SMALL = Named(
    name="dinov2-small",
    what="DINOv2 ViT-S/14, 12 blocks, width 384, 22 M parameters",
    source="asset dinov2-small, taken out of a published wheel (see `fedprompt assets`)",
    image_size=518,
    patch=14,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    assets=("dinov2-small",),
)
TINY = Named(
    name="tiny",
    what="random ViT with patches of 4 pixels, 3 blocks, width 32; for tests and dry runs",
    source="built in memory from a fixed seed",
    image_size=16,
    patch=4,
    mean=HALF,
    std=HALF,
)
TINY_CLIP = Named(
    name="tiny-clip",
    what="random CLIP with patches of 4 pixels, 3 blocks, widths 32, 77 text positions; for tests and dry runs",
    source="built in memory from a fixed seed",
    image_size=16,
    patch=4,
    mean=HALF,
    std=HALF,
    text=True,
)
MINI = Named(
    name="mini",
    what="DINOv2 ViT-S/14 and the all-MiniLM-L6-v2 text tower, joined by a bridge of our own; a stand-in for CLIP",
    source="assets dinov2-small, minilm-weights, minilm-tokenizer; the bridge is in the package",
    image_size=98,
    patch=14,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    assets=("dinov2-small", *TEXT_TOWER),
    text=True,
)
B16 = Named(
    name="b16",
    what="CLIP's own ViT-B/16 image tower and the all-MiniLM-L6-v2 text tower, joined by a bridge of our own",
    source="assets clip-b16-image, minilm-weights, minilm-tokenizer; the bridge is in the package",
    image_size=112,
    patch=16,
    mean=CLIP_MEAN,
    std=CLIP_STD,
    assets=("clip-b16-image", *TEXT_TOWER),
    text=True,
)
MINILM = Named(
    name="minilm",
    what="all-MiniLM-L6-v2 as an encoder of sentences, 6 blocks, width 384; classifies texts, not images",
    source="assets minilm-weights, minilm-tokenizer",
    image_size=0,
    patch=0,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    assets=TEXT_TOWER,
    sentences=True,
)
TINY_BERT = Named(
    name="tiny-bert",
    what="random encoder of sentences, 3 blocks, width 32, letters as tokens; for tests and dry runs",
    source="built in memory from a fixed seed",
    image_size=0,
    patch=0,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    sentences=True,
)
NAMED = {named.name: named for named in (DINOV2_SMALL, MINI, B16, MINILM, TINY, TINY_CLIP, TINY_BERT)}

# what reads a model folder, by `model_type` in its config.json: a module with a function `from_folder`
FAMILIES = {
    **dict.fromkeys(
        ("vit", "deit", "dinov2", "dinov2_with_registers", "clip_vision_model"), "fedprompt.backbones.image_tower"
    ),
    "clip": "fedprompt.backbones.clip",
    "dinov3_vit": "fedprompt.backbones.dinov3",
    **dict.fromkeys(("siglip", "siglip2"), "fedprompt.backbones.siglip"),
    "bert": "fedprompt.backbones.sentence_encoder",
    "open_clip": "fedprompt.backbones.open_clip",  # which has an open_clip_config.json
}


def catalog() -> list[dict[str, Any]]:
    """Rows for `fedprompt backbones`: the named backbones, then the three other ways to give one."""
    own = {"image_size": None, "mean": None, "std": None}
    rows: list[dict[str, Any]] = [
        {
            "name": named.name,
            "what": named.what,
            "source": named.source,
            **(own if named.sentences else {"image_size": named.image_size, "mean": named.mean, "std": named.std}),
        }
        for named in NAMED.values()
    ]
    families = ", ".join(FAMILIES)
    return [
        *rows,
        *(
            {"name": name, "what": summary(builder), "source": "another package or a plugin", **own}
            for name, builder in BACKBONES.others().items()
        ),
        {
            "name": "<folder>",
            "what": f"a transformers model of type {families}",
            "source": "config.json, model.safetensors, preprocessor_config.json",
            **own,
        },
        {
            "name": "<file>.safetensors",
            "what": "timm, DINOv2 or transformers tensor names",
            "source": "needs backbone.mean and backbone.std",
            **own,
        },
        {
            "name": "<owner>/<model>",
            "what": f"a hub model of type {families}",
            "source": "downloaded once by huggingface_hub; backbone.revision pins it",
            **own,
        },
    ]
