"""Folders in the layout of open_clip: towers equal to those of `transformers` whose weights are stored under its names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import throwaway_cache
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from unit.backbones.test_dual_encoder import HALF, MERGES, NAMES, clip_tokenizer, random_clip, randomised

from fedprompt.backbones import load_backbone
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.image_sizes import own_sides
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError

pytestmark = pytest.mark.unit

CLIP_NAMES = {
    r"logit_scale": "logit_scale",
    r"visual_projection\.weight": "visual.proj",
    r"text_projection\.weight": "text_projection",
    r"vision_model\.embeddings\.class_embedding": "visual.class_embedding",
    r"vision_model\.embeddings\.patch_embedding\.weight": "visual.conv1.weight",
    r"vision_model\.embeddings\.position_embedding\.weight": "visual.positional_embedding",
    r"vision_model\.pre_layrnorm\.(.*)": r"visual.ln_pre.\1",
    r"vision_model\.post_layernorm\.(.*)": r"visual.ln_post.\1",
    r"text_model\.embeddings\.token_embedding\.weight": "token_embedding.weight",
    r"text_model\.embeddings\.position_embedding\.weight": "positional_embedding",
    r"text_model\.final_layer_norm\.(.*)": r"ln_final.\1",
    r"vision_model\.encoder\.layers\.(.*)": r"visual.transformer.resblocks.\1",
    r"text_model\.encoder\.layers\.(.*)": r"transformer.resblocks.\1",
}
IN_BLOCK = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def renamed(state: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        pattern = next(pattern for pattern in table if re.fullmatch(pattern, name))
        found[re.fullmatch(pattern, name).expand(table[pattern])] = tensor.detach().clone()
    return found


def stacked(state: dict[str, Tensor], parts: tuple[str, str, str], whole: str) -> dict[str, Tensor]:
    """Query, key and value as one tensor under the name `whole`, in which {} is weight or bias."""
    found = dict(state)
    for name in state:
        for kind in ("weight", "bias"):
            if name.endswith(f"{parts[0]}.{kind}"):
                prefix = name.removesuffix(f"{parts[0]}.{kind}")
                pieces = [found.pop(f"{prefix}{part}.{kind}") for part in parts]
                found[prefix + whole.format(kind)] = torch.cat(pieces)
    return found


def open_clip_tensors(model: Any) -> dict[str, Tensor]:
    """A CLIP of `transformers` under the names of open_clip."""
    found = renamed(dict(model.state_dict()), CLIP_NAMES)
    for theirs, ours in IN_BLOCK.items():
        found = {name.replace(theirs, ours): tensor for name, tensor in found.items()}
    found = stacked(found, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attn.in_proj_{}")
    for name in ("visual.proj", "text_projection"):
        found[name] = found[name].T.contiguous()
    return found


def written(folder: Path, tensors: dict[str, Tensor], model: dict[str, Any], tokenizer: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "open_clip_model.safetensors")
    images = {"mean": HALF, "std": HALF, "resize_mode": "shortest"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": images}))
    if tokenizer:
        clip_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def clip_config(model: Any, activation: str = "gelu") -> dict[str, Any]:
    vision = {"image_size": 16, "layers": 3, "width": 24, "head_width": 12, "patch_size": 4, "mlp_ratio": 2}
    words = {"context_length": 77, "vocab_size": model.config.text_config.vocab_size}
    text = {**words, "width": 32, "heads": 4, "layers": 3, "mlp_ratio": 1.5}
    return {"embed_dim": 20, "quick_gelu": activation == "quick_gelu", "vision_cfg": vision, "text_cfg": text}


def loaded(folder: Path, **settings: Any) -> DualEncoder:
    found = load_backbone(BackboneConfig(name=str(folder), **settings), throwaway_cache())
    assert isinstance(found, DualEncoder)
    return found


def random_images(size: int = 16) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


# OpenAI and LAION


@pytest.mark.parametrize("custom", [False, True], ids=["clip", "custom text"])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clips_own_towers_equal_transformers(tmp_path, activation, custom):
    model = random_clip(activation)
    tensors = open_clip_tensors(model)
    if custom:  # newer files keep the text tower apart
        inner = ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection")
        tensors = {f"text.{name}" if name.startswith(inner) else name: tensor for name, tensor in tensors.items()}
    ours = loaded(written(tmp_path, tensors, clip_config(model, activation)), image_size=24)
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    tokens = clip_tokenizer()(sentences, padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        expected = model(pixel_values=random_images(24), interpolate_pos_encoding=True, **tokens)
    said = ours.language(NAMES).encode_words("a photo of a")
    image = ours.run(ours.embed(random_images(24)), reads=("image",))["image"]
    torch.testing.assert_close(said, expected.text_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(image, expected.image_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.scale * image @ said.T, expected.logits_per_image, rtol=1e-5, atol=1e-4)


def test_both_layouts_of_one_model_are_one_backbone(tmp_path):
    """A folder may hold both; then the layout of transformers is read, of which there is nothing to guess."""
    model = random_clip("gelu")
    there = loaded(written(tmp_path / "open", open_clip_tensors(model), clip_config(model)))
    model.save_pretrained(tmp_path / "open")
    clip_tokenizer().save_pretrained(tmp_path / "open")
    (tmp_path / "open" / "preprocessor_config.json").write_text(json.dumps({"image_mean": HALF, "image_std": HALF}))
    (tmp_path / "open" / "open_clip_model.safetensors").unlink()
    assert loaded(tmp_path / "open").digest() == there.digest()


def test_the_two_files_of_older_tokenizers_serve_too(tmp_path):
    model = random_clip("gelu")
    folder = written(tmp_path, open_clip_tensors(model), clip_config(model))
    said = loaded(folder).language(NAMES).encode_words("a photo of a")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(clip_tokenizer().get_vocab()))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    assert torch.equal(loaded(folder).language(NAMES).encode_words("a photo of a"), said)


# BiomedCLIP: a ViT of timm and a BERT

VIT = transformers.ViTConfig(
    hidden_size=192,
    num_hidden_layers=1,
    num_attention_heads=3,
    intermediate_size=96,
    image_size=32,
    patch_size=16,
    layer_norm_eps=1e-6,
)
BERT = transformers.BertConfig(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=96,
    vocab_size=14,
    max_position_embeddings=40,
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "golden", "retrie", "##ver", "ox", "old", "."]
SAID = {"cat": [7], "golden_retriever": [8, 9, 10], "ox": [11]}


def timm_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {
        name.replace("embeddings.cls_token", "cls_token")
        .replace("embeddings.position_embeddings", "pos_embed")
        .replace("embeddings.patch_embeddings.projection", "patch_embed.proj")
        .replace("encoder.layer.", "blocks.")
        .replace("layers.", "blocks.")
        .replace("layernorm_before", "norm1")
        .replace("layernorm_after", "norm2")
        .replace("layernorm", "norm")
        .replace("attention.o_proj", "attn.proj"): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith("pooler")
    }
    return stacked(found, ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attn.qkv.{}")


def biomed(pooler: str = "cls_last_hidden_state_pooler", projection: str = "mlp") -> tuple[Any, Any, dict[str, Tensor]]:
    vit, bert = randomised(transformers.ViTModel(VIT)), randomised(transformers.BertModel(BERT))
    generator = torch.Generator().manual_seed(4)
    sizes = (
        {"proj.0.weight": (60, 128), "proj.2.weight": (20, 60)} if projection == "mlp" else {"proj.weight": (20, 128)}
    )
    tensors = {f"text.{name}": 0.2 * torch.randn(size, generator=generator) for name, size in sizes.items()}
    tensors["visual.head.proj.weight"] = 0.2 * torch.randn(20, 192, generator=generator)
    tensors["logit_scale"] = torch.tensor(math.log(37.0))
    tensors |= {f"visual.trunk.{name}": tensor for name, tensor in timm_tensors(vit).items()}
    tensors |= {f"text.transformer.{name}": tensor.detach().clone() for name, tensor in bert.state_dict().items()}
    return vit, bert, tensors


def biomed_folder(folder: Path, tensors: dict[str, Tensor], **text: Any) -> Path:
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_pool": "", "timm_proj": "linear", "image_size": 32}
    words = {
        "hf_model_name": "some-bert",
        "hf_tokenizer_name": "some-bert",
        "context_length": 24,
        "hf_proj_type": "mlp",
    }
    words |= {"hf_pooler_type": "cls_last_hidden_state_pooler", **text}
    written(folder, tensors, {"embed_dim": 20, "vision_cfg": vision, "text_cfg": words}, tokenizer=False)
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("pooler", ["cls_last_hidden_state_pooler", "mean_pooler"])
@pytest.mark.parametrize("projection", ["mlp", "linear"])
def test_a_timm_tower_and_a_bert_equal_transformers(tmp_path, pooler, projection):
    vit, bert, tensors = biomed(pooler, projection)
    ours = loaded(biomed_folder(tmp_path, tensors, hf_pooler_type=pooler, hf_proj_type=projection))
    assert (ours.text.shape.heads, ours.text.shape.positions, ours.scale) == (2, 24, pytest.approx(37.0))
    images = random_images(32)
    with torch.no_grad():
        cls = vit(images).last_hidden_state[:, 0] @ tensors["visual.head.proj.weight"].T
        rows = []
        for ids in SAID.values():
            hidden = bert(torch.tensor([[2, 4, 5, 6, 4, *ids, 13, 3]])).last_hidden_state[0]
            read = hidden.mean(0) if pooler == "mean_pooler" else hidden[0]
            if projection == "mlp":
                read = torch.nn.functional.gelu(tensors["text.proj.0.weight"] @ read)
                rows.append(tensors["text.proj.2.weight"] @ read)
            else:
                rows.append(tensors["text.proj.weight"] @ read)
    for found, expected in (
        (ours.run(ours.embed(images), reads=("image",))["image"], cls),
        (ours.language(list(SAID)).encode_words("a photo of a"), torch.stack(rows)),
    ):
        torch.testing.assert_close(found, expected / expected.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)


def test_its_side_is_known_without_its_weights(tmp_path):
    model = random_clip("gelu")
    assert own_sides(BackboneConfig(name=str(written(tmp_path, open_clip_tensors(model), clip_config(model))))) == (
        4,
        16,
    )


# what is refused


@pytest.mark.parametrize(
    ("part", "key", "value", "complaint"),
    [
        ("vision_cfg", "attentional_pool", True, "attentional_pool in open_clip_config.json must be absent"),
        ("vision_cfg", "ls_init_value", 0.1, "ls_init_value in open_clip_config.json must be absent"),
        ("vision_cfg", "pool_type", "avg", "pool_type in open_clip_config.json must be one of 'tok', got 'avg'"),
        ("vision_cfg", "layers", "12", "layers in open_clip_config.json must be a whole number"),
        ("text_cfg", "no_causal_mask", "yes", "no_causal_mask in open_clip_config.json must be one of True, False"),
        ("text_cfg", "embed_cls", True, "embed_cls in open_clip_config.json must be absent"),
        ("text_cfg", "pool_type", "last", "pool_type in open_clip_config.json must be one of 'argmax', got 'last'"),
        ("text_cfg", "hf_model_name", "some-bert", "hf_pooler_type in open_clip_config.json must be one of"),
        ("vision_cfg", "timm_model_name", "fastvit_sa12", "must be a plain vision transformer, got 'fastvit_sa12'"),
    ],
)
def test_an_architecture_out_of_reach_is_refused(tmp_path, part, key, value, complaint):
    model = random_clip("gelu")
    config = clip_config(model)
    config[part][key] = value
    with pytest.raises(BackboneError, match=re.escape(complaint)):
        loaded(written(tmp_path, open_clip_tensors(model), config))


def test_a_roberta_is_refused_because_its_positions_begin_at_two(tmp_path):
    _, _, tensors = biomed()
    name = "text.transformer.embeddings.token_type_embeddings.weight"
    tensors[name] = tensors[name][:1].clone()
    with pytest.raises(BackboneError, match=r"a BERT, as 'some-bert' has to be, with embeddings of .* two kinds"):
        loaded(biomed_folder(tmp_path, tensors))


@pytest.mark.parametrize("name", ["logit_scale", "visual.proj", "text_projection"])
def test_a_missing_projection_or_scale_is_told(tmp_path, name):
    model = random_clip("gelu")
    tensors = {each: tensor for each, tensor in open_clip_tensors(model).items() if each != name}
    with pytest.raises(BackboneError, match=f"must be those of a whole CLIP, got no '{name.removeprefix('visual.')}'"):
        loaded(written(tmp_path, tensors, clip_config(model)))


def test_an_unknown_tensor_is_refused(tmp_path):
    model = random_clip("gelu")
    tensors = open_clip_tensors(model) | {"visual.transformer.resblocks.0.ls_1.gamma": torch.ones(24)}
    with pytest.raises(BackboneError, match=r"got 1 unknown tensors such as 'blocks\.0\.ls_1\.gamma'"):
        loaded(written(tmp_path, tensors, clip_config(model)))


def test_a_folder_with_nothing_but_a_pickle_is_told_how_to_convert_it(tmp_path):
    model = random_clip("gelu")
    folder = written(tmp_path, open_clip_tensors(model), clip_config(model))
    (folder / "open_clip_model.safetensors").rename(folder / "open_clip_pytorch_model.bin")
    with pytest.raises(
        BackboneError, match=r"must hold open_clip_model\.safetensors, got none\. A pickle is never opened"
    ):
        loaded(folder)


def test_a_missing_tokenizer_is_told(tmp_path):
    model = random_clip("gelu")
    with pytest.raises(BackboneError, match="must hold CLIP's tokenizer"):
        loaded(written(tmp_path, open_clip_tensors(model), clip_config(model), tokenizer=False))


def test_a_config_without_its_parts_is_told(tmp_path):
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"vision_cfg": {}}}))
    with pytest.raises(BackboneError, match="must state model_cfg with vision_cfg and text_cfg"):
        loaded(tmp_path)


def test_preprocessing_that_is_not_stated_has_to_be_given(tmp_path):
    model = random_clip("gelu")
    folder = written(tmp_path, open_clip_tensors(model), clip_config(model))
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": clip_config(model)}))
    with pytest.raises(BackboneError, match=r"backbone\.mean must be given"):
        loaded(folder)
    assert loaded(folder, mean=HALF, std=HALF).mean == HALF
