"""From a config to a frozen backbone: a name of ours, a safetensors file, a `transformers` folder or a hub id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedprompt.assets import ASSETS, prepare
from fedprompt.backbones.assemble import assemble, infer_shape
from fedprompt.backbones.bridge import bridge_file, bridged
from fedprompt.backbones.catalog import B16, DINOV2_SMALL, MINI, NAMED, TINY, TINY_CLIP, Named, Triple
from fedprompt.backbones.clip import clip_from_folder, is_clip
from fedprompt.backbones.folder import folder_preprocessing, folder_shape
from fedprompt.backbones.hub import hub_folder, is_hub_id
from fedprompt.backbones.kept import kept
from fedprompt.backbones.names import canonical
from fedprompt.backbones.shape import ViTShape
from fedprompt.backbones.tiny import TINY_CLIP_SHAPE, TINY_SHAPE, tiny_clip, tiny_vit
from fedprompt.backbones.vit import ViT
from fedprompt.backbones.weights import PICKLES, read_file, read_folder
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, broken

_EPSILON = (
    1e-6  #: of the norms in a bare file: what timm and DINO use; below float32 noise next to the 1e-12 of other ViTs
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

_TEXT = ("minilm-weights", "minilm-tokenizer")
_MADE_OF = {
    DINOV2_SMALL.name: ("dinov2-small",),
    MINI.name: ("dinov2-small", *_TEXT),
    B16.name: ("clip-b16-image", *_TEXT),
}  #: assets behind the backbones that have a name


def load_backbone(config: BackboneConfig, cache: Path) -> ViT:
    """The frozen backbone a config asks for, at the resolution, precision and device it asks for."""
    backbone = _stored(config, cache)
    return backbone.autocasting() if config.autocast else backbone


def _stored(config: BackboneConfig, cache: Path) -> ViT:
    """The backbone as its weights and shape describe it."""
    path = Path(config.name).expanduser()
    if config.name == TINY.name:
        return _tiny(config, TINY_SHAPE)
    if config.name == TINY_CLIP.name:
        return tiny_clip(_tiny(config, TINY_CLIP_SHAPE))
    if config.name in _MADE_OF:
        sources = [cache / ASSETS[asset].file for asset in _MADE_OF[config.name]]
        sources += [bridge_file(config.name)] if config.name in (MINI.name, B16.name) else []
        return kept(config, sources, cache, lambda: _named(config, cache))
    if path.is_dir():
        return kept(config, _files(path), cache, lambda: _folder(path, config))
    if path.suffix == ".safetensors" or path.suffix in PICKLES:
        return kept(config, [path], cache, lambda: _file(path, config, own=None))
    if is_hub_id(config.name):
        folder = hub_folder(config.name, config.revision)
        return kept(config, _files(folder), cache, lambda: _folder(folder, config))
    choices = f"be one of {', '.join(NAMED)}, an existing folder, a .safetensors file or a hub id owner/model"
    raise BackboneError(broken("backbone.name", choices, config.name))


def preprocessing(config: BackboneConfig, own: tuple[Triple, Triple] | None) -> tuple[Triple, Triple]:
    """Mean and standard deviation: the backbone's own, with which configured ones must agree, else the configured."""
    mean, std = (
        _agreed(f"backbone.{field}", given, own and own[index])
        for index, (field, given) in enumerate((("mean", config.mean), ("std", config.std)))
    )
    if min(std) <= 0:
        raise BackboneError(broken("backbone.std", "be positive", std))
    return mean, std


def _agreed(field: str, given: Triple | None, own: Triple | None) -> Triple:
    if given is None and own is None:
        raise BackboneError(
            f"{field} must be given for weights that carry no preprocessing, got none "
            "(often 0.5 0.5 0.5 for ViT, ImageNet's for DeiT and DINO; a wrong guess costs accuracy silently)"
        )
    if given is not None and own is not None and any(abs(a - b) > 1e-4 for a, b in zip(given, own, strict=True)):
        raise BackboneError(f"{field} must be the backbone's own {own}, got {given}")
    result = own if own is not None else given
    assert result is not None
    return result


def _files(folder: Path) -> list[Path]:
    """Whatever in a model folder its weights, architecture, preprocessing or tokenizer may be read from."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".txt"))


def _named(config: BackboneConfig, cache: Path) -> ViT:
    if config.name == MINI.name:
        return bridged(_dinov2_small(_at_own_size(config, MINI), cache), cache)
    if config.name == B16.name:
        return bridged(_clip_b16_image(_at_own_size(config, B16), cache), cache)
    return _dinov2_small(config, cache)


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
    shape = folder_shape(folder)  # first, so that a model of another type is called that and not a list of odd tensors
    mean, std = preprocessing(config, folder_preprocessing(folder))
    tensors = read_folder(folder, config.sha256)
    with _must_fit(folder):
        vision = assemble(canonical(tensors), shape, mean, std, config)
        return clip_from_folder(folder, tensors, vision) if is_clip(folder) else vision


@contextmanager
def _must_fit(path: Path) -> Iterator[None]:
    """Tensors of odd shapes cannot be fused or reshaped: torch says so in errors of its own."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
        reason = str(error).splitlines()[0]
        raise BackboneError(f"the weights in {str(path)!r} do not fit their architecture: {reason}") from error
