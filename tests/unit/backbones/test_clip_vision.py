"""CLIP's vision tower: equal to `transformers`, plain and prompted; and the real one out of its wheel."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
from conftest import SHARED
from naive import as_tensor
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedprompt.assets import prepare
from fedprompt.backbones import load_backbone
from fedprompt.backbones.assemble import assemble
from fedprompt.backbones.key_mapping import canonical
from fedprompt.backbones.model_folder import folder_shape
from fedprompt.backbones.vit import READS, ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, StorageError
from fedprompt.io.files import cache_directory
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

HALF = (0.5, 0.5, 0.5)
DEPTH, WIDTH, BATCH, ROWS = 3, 32, 3, 2
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 8,
}
TEXT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 20,
    "bos_token_id": 18,
    "eos_token_id": 19,
    "projection_dim": 8,
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter matters: the initial ones have unit norms, zero biases and nearly uniform attention."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    return model.eval()


def random_tower(**settings: object) -> torch.nn.Module:
    config = transformers.CLIPVisionConfig(**(VISION | settings))
    return randomised(transformers.CLIPVisionModelWithProjection(config))


def random_clip() -> torch.nn.Module:
    return randomised(
        transformers.CLIPModel(transformers.CLIPConfig(vision_config=VISION, text_config=TEXT, projection_dim=8))
    )


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": HALF, "image_std": HALF}))
    return folder


def loaded(folder: Path, **settings: object) -> ViT:
    return load_backbone(BackboneConfig(name=str(folder), **settings), folder)


def random_images(size: int = 16, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


# without prompts


@pytest.mark.parametrize("size", [16, 8, 28])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_features_equal_those_of_transformers_at_every_resolution(tmp_path, activation, size):
    model = random_tower(hidden_act=activation)
    vit = loaded(saved(model, tmp_path), image_size=size)
    images = random_images(size)
    with torch.no_grad():
        seen = model.vision_model(images, interpolate_pos_encoding=True)
        patches = model.vision_model.post_layernorm(seen.last_hidden_state[:, 1:])
        embeds = model(images, interpolate_pos_encoding=True).image_embeds
    found = vit.run(vit.embed(images), reads=("cls", "patches"))
    torch.testing.assert_close(found["cls"], seen.pooler_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["patches"], patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["cls"] @ model.visual_projection.weight.T, embeds, rtol=1e-5, atol=1e-5)


def test_block_inputs_equal_the_hidden_states_of_transformers(tmp_path):
    model = random_tower()
    vit = loaded(saved(model, tmp_path))
    with torch.no_grad():
        hidden = model.vision_model(random_images(), output_hidden_states=True).hidden_states
    for ours, theirs in zip(vit.block_inputs(vit.embed(random_images())), hidden[:DEPTH], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_tower_without_projection_is_the_same_tower(tmp_path):
    model = random_tower()
    bare = transformers.CLIPVisionModel(model.config)
    bare.load_state_dict(
        {
            name.removeprefix("vision_model."): tensor
            for name, tensor in model.state_dict().items()
            if name.startswith("vision_model.")
        }
    )
    assert loaded(saved(bare, tmp_path / "bare")).digest() == loaded(saved(model, tmp_path / "projected")).digest()


def test_of_a_whole_clip_the_vision_tower_is_taken(tmp_path):
    """Its file also holds the text tower, the projections, the logit scale and, in older ones, position numbers."""
    model = random_clip()
    folder = saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert {"logit_scale", "text_projection.weight", "visual_projection.weight"} <= tensors.keys()
    for tower in ("vision_model", "text_model"):
        tensors[f"{tower}.embeddings.position_ids"] = torch.arange(17)[None]
    vit = assemble(canonical(tensors), folder_shape(folder), HALF, HALF, BackboneConfig(name="clip"))
    with torch.no_grad():
        expected = model.vision_model(random_images()).pooler_output
    torch.testing.assert_close(vit.run(vit.embed(random_images()))["cls"], expected, rtol=1e-5, atol=1e-5)


def test_the_shape_tells_the_norm_before_the_blocks(tmp_path):
    shape = folder_shape(saved(random_tower(), tmp_path))
    assert (shape.ln_pre, shape.activation, shape.norm_eps, shape.layer_scale) == (True, "quick_gelu", 1e-5, False)
    assert (shape.width, shape.depth, shape.mlp_width, shape.grid) == (WIDTH, DEPTH, 48, 4)


# with prompts


def naive_pass(model: torch.nn.Module, images: Tensor, tokens: Tensor, blocks: tuple[int, ...]) -> dict[str, Tensor]:
    """Prompt rows behind CLS, as modules of `transformers` see them: those of block 0 come in before `pre_layrnorm`."""
    tower = model.vision_model
    fresh = tokens if tokens.ndim == 4 else torch.stack([tokens] * len(images))
    rows, held = tower.embeddings(images), 0
    for block, layer in enumerate(tower.encoder.layers):
        if block in blocks:
            rows = torch.cat([rows[:, :1], fresh[:, blocks.index(block)], rows[:, 1 + held :]], dim=1)
            held = fresh.shape[2]
        if block == 0:
            rows = tower.pre_layrnorm(rows)
        rows = as_tensor(layer(rows, attention_mask=None))
    rows = tower.post_layernorm(rows)
    return {"cls": rows[:, 0], "prompts": rows[:, 1 : 1 + held], "patches": rows[:, 1 + held :]}


def random_tokens(blocks: int, per_sample: bool = False) -> Tensor:
    lead = (BATCH,) if per_sample else ()
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*lead, blocks, ROWS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def gradient(seen: dict[str, Tensor], tokens: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for name in READS:
        loss = loss + (seen[name] * torch.linspace(-1, 1, seen[name].numel()).view_as(seen[name])).sum()
    return torch.autograd.grad(loss, tokens)[0]


@pytest.fixture
def double(tmp_path: Path) -> tuple[torch.nn.Module, ViT]:
    """The same random tower in double precision: theirs and ours."""
    model = random_tower()
    return model.double(), loaded(saved(model, tmp_path), dtype="float64")


@pytest.mark.parametrize("per_sample", [False, True], ids=["shared", "per sample"])
@pytest.mark.parametrize("blocks", [(0,), (0, 1, 2), (0, 1), (1, 2), (2,)])
def test_prompts_of_block_0_join_before_the_first_norm_and_later_ones_do_not(double, blocks, per_sample):
    model, vit = double
    tokens, images = random_tokens(len(blocks), per_sample), random_images().double()
    found = vit.run(vit.embed(images), [TokenPrompt(tokens, blocks)], READS)
    expected = naive_pass(model, images, tokens, blocks)
    for name in READS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)
    ours, theirs = gradient(found, tokens), gradient(expected, tokens)
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_prompted_features_hold_in_single_precision_to_1e_5(tmp_path):
    model = random_tower()
    vit = loaded(saved(model, tmp_path))
    tokens, blocks = random_tokens(DEPTH).detach().float(), tuple(range(DEPTH))
    with torch.no_grad():
        expected = naive_pass(model, random_images(), tokens, blocks)["cls"]
    found = vit.run(vit.embed(random_images()), [TokenPrompt(tokens, blocks)])["cls"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_tower_of_one_block_takes_its_prompts_before_the_first_norm(tmp_path):
    model = random_tower(num_hidden_layers=1)
    vit = loaded(saved(model, tmp_path), dtype="float64")
    tokens, images = random_tokens(1), random_images().double()
    expected = naive_pass(model.double(), images, tokens, (0,))
    found = vit.run(vit.embed(images), [TokenPrompt(tokens, (0,))], READS)
    for name in READS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", ["appended", "joined at a pause"])
def test_every_way_into_block_0_leads_through_the_first_norm(double, way):
    model, vit = double
    tokens, images = random_tokens(1), random_images().double()
    prompt = TokenPrompt(tokens, (0,), mode="append" if way == "appended" else "replace")
    given = {"prompts": [prompt]} if way == "appended" else {"pause": (0, lambda cls: [prompt])}
    found = vit.run(vit.embed(images), reads=READS, **given)
    expected = naive_pass(model, images, tokens, (0,))
    for name in READS:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


def test_behind_a_stem_no_prompt_passes_the_first_norm(double):
    _, vit = double
    tokens, images = random_tokens(1), random_images().double()
    behind = dataclasses.replace(vit, stem=1)
    found = behind.run(behind.embed(images), [TokenPrompt(tokens, (0,))])["cls"]
    expected = vit.run(vit.embed(images), [TokenPrompt(tokens, (1,))])["cls"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# what is refused


def test_a_bare_clip_file_is_refused_because_it_does_not_tell_its_activation(tmp_path):
    file = saved(random_tower(), tmp_path) / "model.safetensors"
    with pytest.raises(BackboneError, match=r"bare CLIP weight file does not say its activation.*use a folder"):
        load_backbone(BackboneConfig(name=str(file), mean=HALF, std=HALF), tmp_path)


def test_a_clip_that_lacks_its_first_norm_is_refused(tmp_path):
    file = saved(random_tower(), tmp_path) / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "pre_layrnorm" not in name}, file)
    with pytest.raises(BackboneError, match=r"they lack 'ln_pre\.bias'"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["logit_bias", "vision_model.encoder.layers.0.self_attn.q_norm.weight"])
def test_a_tensor_clip_does_not_have_is_refused(tmp_path, name):
    tensors = load_file(saved(random_tower(), tmp_path) / "model.safetensors")
    with pytest.raises(BackboneError, match=rf"got 1 unknown tensors such as '.*{name.rsplit('.', 2)[-1]}"):
        canonical(tensors | {name: torch.ones(1)})


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("hidden_act", "relu", "hidden_act must be one of gelu, quick_gelu, gelu_pytorch_tanh, got 'relu'"),
        ("num_channels", 1, "num_channels must be 3, got 1"),
        ("image_size", None, "image_size must be one side in pixels, or two equal ones, got None"),
        ("image_size", [16, 8], "image_size must be one side in pixels, or two equal ones, got"),
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["clip", "clip_vision_model"])
def test_an_architecture_out_of_reach_is_refused(tmp_path, field, value, complaint, whole):
    path = saved(random_clip() if whole else random_tower(), tmp_path) / "config.json"
    config = json.loads(path.read_text())
    (config["vision_config"] if whole else config)[field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(BackboneError, match=complaint):
        folder_shape(tmp_path)


# the real tower out of its wheel

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
REAL = transformers.CLIPVisionConfig(patch_size=16, projection_dim=512)  # all else is that of a ViT-B
PHOTOS = SHARED / "data" / "office_caltech10.parquet"


@pytest.fixture(scope="module")
def asset() -> Path:
    try:
        return prepare("clip-b16-image", cache_directory())
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the asset clip-b16-image cannot be had here: {error}")


@pytest.fixture(scope="module")
def real(asset: Path) -> torch.nn.Module:
    """`transformers`' own tower with the converted tensors; a missing, unknown or misshapen one is an error."""
    model = transformers.CLIPVisionModelWithProjection(REAL).eval()
    model.load_state_dict(load_file(asset), strict=True)
    return model


@pytest.fixture
def real_folder(asset: Path, tmp_path: Path) -> Path:
    REAL.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(asset)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": CLIP_MEAN, "image_std": CLIP_STD}))
    return tmp_path


def photos(size: int, per_class: int) -> tuple[Tensor, Tensor]:
    """Normalised photos spread over a set of ten classes from four kinds of cameras and shops, and their classes."""
    table = pyarrow.parquet.read_table(PHOTOS, columns=["image", "label"])
    labels = table["label"].to_numpy()
    chosen: list[int] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen += rows[np.linspace(0, len(rows) - 1, per_class).astype(int)].tolist()
    pixels = []
    for row in chosen:
        image = Image.open(io.BytesIO(table["image"][row].as_py())).convert("RGB").resize((size, size), Image.BICUBIC)
        pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
    mean, std = torch.tensor(CLIP_MEAN).view(3, 1, 1), torch.tensor(CLIP_STD).view(3, 1, 1)
    return (torch.stack(pixels) - mean) / std, torch.tensor(labels[chosen], dtype=torch.int64)


@pytest.mark.assets
def test_the_converted_tower_fills_a_clip_of_transformers_and_ours_alike(real, real_folder):
    assert sum(parameter.numel() for parameter in real.parameters()) == 86_192_640  # as published
    vit = loaded(real_folder, image_size=64)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = real.vision_model(images, interpolate_pos_encoding=True).pooler_output
    found = vit.run(vit.embed(images))["cls"]
    assert (found - expected).norm() / expected.norm() < 1e-5


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.shared
@pytest.mark.skipif(not PHOTOS.is_file(), reason="the photos are not beside the project")
def test_the_converted_tower_tells_classes_apart(real, real_folder):
    """Each photo is given the class whose mean over the *other* photos is nearest by angle: chance is 10 %."""
    vit = loaded(real_folder, image_size=112)
    images, labels = photos(112, per_class=8)
    cls = torch.cat([vit.run(vit.embed(part))["cls"] for part in images.split(20)])
    features = torch.nn.functional.normalize(cls @ real.visual_projection.weight.detach().T, dim=1)
    members = torch.nn.functional.one_hot(labels).to(features.dtype)  # (N, 10)
    sums = members.T @ features
    right = 0
    for row, label in enumerate(labels.tolist()):
        others = sums - members[row][:, None] * features[row]
        right += int((torch.nn.functional.normalize(others, dim=1) @ features[row]).argmax()) == label
    accuracy = right / len(labels)
    print(f"class means of the CLIP tower, 112 pixels, {len(labels)} photos: {accuracy:.1%}")
    assert accuracy > 0.7
