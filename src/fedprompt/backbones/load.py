"""From a config to a frozen backbone: a built-in name, a safetensors file, a `transformers` folder or a hub id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from fedprompt.assets import ASSETS, prepare
from fedprompt.backbones.assemble import assemble, infer_shape
from fedprompt.backbones.bridge import bridge_file, bridged
from fedprompt.backbones.catalog import (
    B16,
    DINOV2_SMALL,
    FAMILIES,
    MINI,
    MINILM,
    TINY,
    TINY_BERT,
    TINY_CLIP,
    Named,
    Triple,
)
from fedprompt.backbones.hub_download import hub_folder, is_hub_id
from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.model_folder import folder_kind
from fedprompt.backbones.preprocessing import preprocessing
from fedprompt.backbones.random_weights import TINY_CLIP_SHAPE, TINY_SHAPE, tiny_bert, tiny_clip, tiny_vit
from fedprompt.backbones.sentence_encoder import SentenceEncoder, minilm_encoder
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weight_cache import kept
from fedprompt.backbones.weight_files import PICKLES, read_file
from fedprompt.config import BackboneConfig
from fedprompt.config.plugin_options import arguments
from fedprompt.config.registries import BACKBONES
from fedprompt.errors import BackboneError, ConfigError, ContractError, broken, did_you_mean

_EPSILON = (
    1e-6  # of the norms in a bare file: what timm and DINO use; below float32 noise next to the 1e-12 of other ViTs
)

CLIP_B16_SHAPE = ViTShape(
    width=768,
    depth=12,
    heads=12,
    mlp_width=3072,
    patch=16,
    image_size=224,
    norm_eps=1e-5,
    activation="quick_gelu",
    ln_pre=True,
)


Builder = Callable[..., ViT]
Given = TypeVar("Given", bound=Builder)


def register_backbone(name: str) -> Callable[[Given], Given]:
    """Make a family of backbones known under a name: `backbone: {name: NAME}` or `{name: "NAME:which"}` in a config.

    It is called with the section `backbone` and the folder for caches, and gives a `ViT` (or a `DualEncoder`, which is
    one). Keyword-only parameters are its settings: those of the section come from there, all others from its `options`.
    """
    return BACKBONES.registrar(name)


def load_backbone(config: BackboneConfig, cache: Path) -> ViT:
    """The frozen backbone of a config, at its resolution, precision and device."""
    build = builder(config)
    backbone = _elsewhere(config, cache) if build is None else build(config, cache)
    if not isinstance(backbone, ViT):
        raise ContractError(broken(f"backbone.name {config.name!r}", "give a fedprompt.backbones.vit.ViT", backbone))
    if config.max_tokens is not None and not isinstance(backbone, SentenceEncoder):
        raise BackboneError(broken("backbone.max_tokens", "be absent for a backbone of images", config.max_tokens))
    return backbone.autocasting() if config.autocast else backbone


def builder(config: BackboneConfig) -> Builder | None:
    """The registered function for `backbone.name`; None for a path or a hub id."""
    family = config.name if config.name in BACKBONES else config.name.partition(":")[0]
    if family not in (BACKBONES if family == config.name else BACKBONES.others()):  # built-in names are not families
        if config.options:
            raise ConfigError(
                broken("backbone.options", "be given with a backbone.name they belong to", config.options)
            )
        return None
    found: Builder = BACKBONES.get(family)
    return partial(found, **arguments(config, "backbone", family, found))


@register_backbone(TINY.name)
def _tiny_vit(config: BackboneConfig, cache: Path) -> ViT:
    return _tiny(config, TINY_SHAPE)


@register_backbone(TINY_CLIP.name)
def _tiny_clip(config: BackboneConfig, cache: Path) -> ViT:
    return tiny_clip(_tiny(config, TINY_CLIP_SHAPE))


@register_backbone(DINOV2_SMALL.name)
def _dinov2(config: BackboneConfig, cache: Path) -> ViT:
    return kept(config, _assets(cache, DINOV2_SMALL), cache, lambda: _dinov2_small(config, cache))


@register_backbone(MINI.name)
def _mini(config: BackboneConfig, cache: Path) -> ViT:
    sources = [*_assets(cache, MINI), bridge_file(MINI.name)]
    return kept(config, sources, cache, lambda: bridged(_dinov2_small(_at_own_size(config, MINI), cache), cache))


@register_backbone(B16.name)
def _b16(config: BackboneConfig, cache: Path) -> ViT:
    sources = [*_assets(cache, B16), bridge_file(B16.name)]
    return kept(config, sources, cache, lambda: bridged(_clip_b16_image(_at_own_size(config, B16), cache), cache))


@register_backbone(MINILM.name)
def _minilm(config: BackboneConfig, cache: Path) -> ViT:
    weights, _ = _asset("minilm-weights", config, cache)
    return minilm_encoder(read_file(weights), prepare("minilm-tokenizer", cache), config)


@register_backbone(TINY_BERT.name)
def _tiny_bert(config: BackboneConfig, cache: Path) -> ViT:
    return tiny_bert(config)


def _assets(cache: Path, named: Named) -> list[Path]:
    return [cache / ASSETS[name].file for name in named.assets]


def _elsewhere(config: BackboneConfig, cache: Path) -> ViT:
    """The backbone of a folder, a file or a hub id."""
    path = Path(config.name).expanduser()
    if path.is_dir():
        return kept(config, _files(path), cache, lambda: _folder(path, config))
    if path.suffix == ".safetensors" or path.suffix in PICKLES:
        return kept(config, [path], cache, lambda: _file(path, config, own=None))
    if is_hub_id(config.name):
        folder = hub_folder(config.name, config.revision)
        return kept(config, _files(folder), cache, lambda: _folder(folder, config))
    choices = f"{BACKBONES.rule()}, an existing folder, a .safetensors file or a hub id owner/model"
    raise BackboneError(broken("backbone.name", choices, config.name) + did_you_mean(config.name, BACKBONES.names()))


def _files(folder: Path) -> list[Path]:
    """The files of a model folder with its weights, architecture, preprocessing or tokenizer."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".txt"))


def _tiny(config: BackboneConfig, shape: ViTShape) -> ViT:
    if config.sha256 is not None:
        raise BackboneError(f"backbone.sha256 must not be given for {config.name}, which has no weight file")
    return tiny_vit(config, shape, *preprocessing(config, (TINY.mean, TINY.std)))


def _dinov2_small(config: BackboneConfig, cache: Path) -> ViT:
    path, unchecked = _asset(DINOV2_SMALL.name, config, cache)
    return _file(path, unchecked, own=(DINOV2_SMALL.mean, DINOV2_SMALL.std))


def _at_own_size(config: BackboneConfig, named: Named) -> BackboneConfig:
    """A bridge has the size it was trained at, which is not that of its image tower."""
    return config if config.image_size else config.model_copy(update={"image_size": named.image_size})


def _clip_b16_image(config: BackboneConfig, cache: Path) -> ViT:
    path, unchecked = _asset("clip-b16-image", config, cache)
    tensors = canonical(read_file(path))
    return assemble(tensors, CLIP_B16_SHAPE, *preprocessing(unchecked, (B16.mean, B16.std)), unchecked)


def _asset(name: str, config: BackboneConfig, cache: Path) -> tuple[Path, BackboneConfig]:
    """The checked file of an asset, and the config without the checksum that need not be taken twice."""
    expected = ASSETS[name].sha256
    if config.sha256 not in (None, expected):
        raise BackboneError(f"backbone.sha256 of {config.name} must be {expected}, got {config.sha256}")
    return prepare(name, cache), config.model_copy(update={"sha256": None})


def _file(path: Path, config: BackboneConfig, own: tuple[Triple, Triple] | None) -> ViT:
    with _must_fit(path):
        tensors = canonical(read_file(path, config.sha256))
        shape = infer_shape(tensors, _EPSILON)
        return assemble(tensors, shape, *preprocessing(config, own), config)


def _folder(folder: Path, config: BackboneConfig) -> ViT:
    family = import_module(FAMILIES[folder_kind(folder)])
    with _must_fit(folder):
        built: ViT = family.from_folder(folder, config)
        return built


@contextmanager
def _must_fit(path: Path) -> Iterator[None]:
    """Tensors of odd shapes cannot be fused or reshaped: torch says so in errors of its own."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        reason = str(error).splitlines()[0]
        raise BackboneError(f"the weights in {str(path)!r} do not fit their architecture: {reason}") from error
