"""SigLIP folders give what `transformers` gives for the same weights, plain and with prompts and contexts."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from naive import as_tensor
from safetensors.torch import load_file, save_file
from support import throwaway_cache
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from fedprompt.backbones import load_backbone, weight_cache
from fedprompt.backbones.dual_encoder import DualEncoder
from fedprompt.backbones.image_sizes import own_sides
from fedprompt.backbones.vit import READS, ViT
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, ConfigError
from fedprompt.inference.attention_maps import watch_plain
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

HALF = (0.5, 0.5, 0.5)
NAMES = ("cat", "golden_retriever", "OX")
PIECES = ["a", "photo", "of", "cat", "golden", "retrie", "ver", "ox"]
TOWER = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
VISION = {**TOWER, "hidden_size": 24, "patch_size": 4}
TEXT = {**TOWER, "hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 32, "projection_size": 24}
KINDS = ("siglip", "siglip with gemma's words", "siglip2")


def first_words() -> Tokenizer:
    """As SigLIP's: the most probable pieces; a word begins with a mark, and punctuation is left out."""
    letters = [(letter, -9.0) for letter in "▁" + string.ascii_lowercase]
    pieces = [("<unk>", -9.0), ("</s>", 0.0), *((f"▁{piece}", -2.0) for piece in PIECES), ("ver", -2.0), *letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def gemma_words() -> Tokenizer:
    """As Gemma's: byte pairs; a mark for a space, so that a word at the beginning differs from one inside."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "▁", "."])}
    vocabulary |= {letter: 6 + number for number, letter in enumerate(string.ascii_lowercase)}
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat"), ("o", "f"), ("▁", "of"), ("▁", "a"), ("o", "x")]
    vocabulary |= {a + b: 32 + number for number, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def tokenised(kind: str, sentence: str, length: int = TEXT["max_position_embeddings"]) -> list[int]:
    """A whole sentence as the library's own classes do it: cleaned up, with its end, padded."""
    sentence = sentence.lower()
    if kind == "siglip":
        sentence = sentence.translate(str.maketrans("", "", string.punctuation))
        ids, pad = [*first_words().encode(sentence).ids, 1], 1
    else:
        ids, pad = [*gemma_words().encode(sentence).ids, 1], 0
    return ids + [pad] * (length - len(ids))


def random_siglip(kind: str, **vision: Any) -> Any:
    if kind == "siglip2":
        config = transformers.Siglip2Config(vision_config={**VISION, "num_patches": 16, **vision}, text_config=TEXT)
        model = transformers.Siglip2Model(config)
    else:
        config = transformers.SiglipConfig(vision_config={**VISION, "image_size": 16, **vision}, text_config=TEXT)
        model = transformers.SiglipModel(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
        model.logit_scale.fill_(math.log(37.0))
        model.logit_bias.fill_(-12.5)
    return model.eval()


def saved(model: Any, folder: Path, kind: str = "siglip") -> Path:
    model.save_pretrained(folder)
    first = kind == "siglip"
    (first_words() if first else gemma_words()).save(str(folder / "tokenizer.json"))
    ends = {"eos_token": "</s>", "pad_token": {"content": "</s>"}}
    ends = ends if first else {"eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": HALF, "image_std": HALF}))
    return folder


def loaded(folder: Path, **settings: Any) -> DualEncoder:
    found = load_backbone(BackboneConfig(name=str(folder), **settings), throwaway_cache())
    assert isinstance(found, DualEncoder)
    return found


def random_images(size: int = 16, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def pixels(kind: str, images: Tensor) -> dict[str, Any]:
    """What the model of the library reads; SigLIP 2 gets the patches one by one."""
    if kind != "siglip2":
        return {"pixel_values": images, "interpolate_pos_encoding": True}
    batch, side = len(images), images.shape[-1] // 4
    patches = images.reshape(batch, 3, side, 4, side, 4).permute(0, 2, 4, 3, 5, 1).reshape(batch, side * side, 48)
    shapes = torch.tensor([[side, side]] * batch)
    mask = torch.ones(batch, side * side, dtype=torch.int32)
    return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}


@pytest.mark.parametrize("size", [16, 8, 28])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_equals_transformers_at_every_resolution(tmp_path, kind, size):
    model = random_siglip(kind)
    ours = loaded(saved(model, tmp_path, kind), image_size=size)
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    tokens = torch.tensor([tokenised(kind, sentence) for sentence in sentences])
    images = random_images(size)
    with torch.no_grad():
        expected = model(input_ids=tokens, **pixels(kind, images))
    language = ours.language(NAMES)
    said = language.encode_words("a photo of a")
    image = ours.run(ours.embed(images), reads=("image",))["image"]
    torch.testing.assert_close(said, expected.text_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(image, expected.image_embeds, rtol=0, atol=1e-5)
    logits = language.scale * image @ said.T + language.bias
    torch.testing.assert_close(logits, expected.logits_per_image, rtol=1e-5, atol=1e-4)
    assert logits.std() > 0.5
    assert language.bias == -12.5
    torch.testing.assert_close(logits.softmax(-1), (logits - language.bias).softmax(-1))  # the bias cancels


@pytest.mark.parametrize("position", ["end", "middle"])
def test_a_learnt_context_equals_transformers_own_layers(tmp_path, position):
    """The library takes no embeddings for words, so the context is written into rows of its table that no name uses."""
    model = random_siglip("siglip")
    ours = loaded(saved(model, tmp_path))
    context = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    free = [60, 61, 62, 63]
    with torch.no_grad():
        model.text_model.embeddings.token_embedding.weight[free] = context
        before = {"end": 4, "middle": 2}[position]
        rows = []
        for name in NAMES:
            own = tokenised("siglip", name.replace("_", " "))
            row = [*free[:before], *own[: own.index(1)], *free[before:]]
            rows.append(row + [1] * (32 - len(row)))
        expected = model.get_text_features(torch.tensor(rows)).pooler_output
    found = ours.language(NAMES).encode(context[None], position)[0]
    torch.testing.assert_close(found, expected / expected.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("blocks", [(0,), (0, 1, 2), (1, 2)])
def test_prompts_equal_rows_put_into_transformers_own_layers(tmp_path, blocks):
    """Prompts that remain after the last block are pooled together with the patches."""
    model = random_siglip("siglip")
    ours = loaded(saved(model, tmp_path), dtype="float64", image_size=28)
    tokens = torch.randn(len(blocks), 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    images, tower = random_images(28).double(), model.vision_model.double()
    with torch.no_grad():
        rows, held = tower.embeddings(images, interpolate_pos_encoding=True), 0
        for block, layer in enumerate(tower.encoder.layers):
            if block in blocks:
                rows = torch.cat([tokens[blocks.index(block)].expand(3, -1, -1), rows[:, held:]], dim=1)
                held = 2
            rows = as_tensor(layer(rows, attention_mask=None))
        rows = tower.post_layernorm(rows)
        expected = tower.head(rows)
        alone = tower.head(rows[:, held:].flatten(0, 1).unsqueeze(1)).unflatten(0, (3, 49))
    found = ours.run(ours.embed(images), [TokenPrompt(tokens, blocks)], (*READS, "image", "image_patches"))
    torch.testing.assert_close(found["cls"], expected, rtol=0, atol=1e-6)  # positions are resampled in float32
    torch.testing.assert_close(found["patches"], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(found["prompts"], rows[:, :held], rtol=0, atol=1e-6)
    for name, vectors in (("image", expected), ("image_patches", alone)):
        torch.testing.assert_close(found[name], vectors / vectors.norm(dim=-1, keepdim=True), rtol=0, atol=1e-6)


def test_an_early_exit_pools_the_rows_of_that_block(tmp_path):
    model = random_siglip("siglip")
    ours = loaded(saved(model, tmp_path))
    with torch.no_grad():
        seen = model.vision_model(random_images(), output_hidden_states=True)
        expected = model.vision_model.head(model.vision_model.post_layernorm(seen.hidden_states[2]))
    tokens = ours.embed(random_images())
    torch.testing.assert_close(ours.read_early(tokens, 2), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.read_early(tokens, 3), seen.pooler_output, rtol=1e-5, atol=1e-5)


def test_a_pause_sees_the_mean_of_the_patches(tmp_path):
    ours = loaded(saved(random_siglip("siglip"), tmp_path))
    tokens, given = ours.embed(random_images()), []
    ours.run(tokens, pause=(1, lambda summary: given.append(summary) or ()))
    torch.testing.assert_close(given[0], ours.block_inputs(tokens, [1])[0].mean(1), rtol=0, atol=0)


def test_a_kept_one_is_the_assembled_one(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 0)
    folder = saved(random_siglip("siglip"), tmp_path / "model")
    config = BackboneConfig(name=str(folder))
    made = loaded(folder)
    for _ in range(2):
        opened = load_backbone(config, tmp_path / "cache")
        assert isinstance(opened, DualEncoder)
        assert (opened.digest(), opened.bias) == (made.digest(), -12.5)
        words = (each.language(NAMES).encode_words("a photo of a") for each in (opened, made))
        assert torch.equal(*words)
    assert len(list((tmp_path / "cache" / "backbones").glob("*.safetensors"))) == 1


def test_the_side_of_a_siglip_2_follows_from_its_patches(tmp_path):
    assert own_sides(BackboneConfig(name=str(saved(random_siglip("siglip2"), tmp_path)))) == (4, 16)


# what is refused


def test_a_number_of_patches_that_makes_no_square_is_refused(tmp_path):
    with pytest.raises(BackboneError, match=r"num_patches in config\.json must be a square number, got 15"):
        loaded(saved(random_siglip("siglip2", num_patches=15), tmp_path))


@pytest.mark.parametrize("name", ["logit_scale", "logit_bias"])
def test_a_missing_scale_or_bias_is_told(tmp_path, name):
    file = saved(random_siglip("siglip"), tmp_path) / "model.safetensors"
    save_file({each: tensor for each, tensor in load_file(file).items() if each != name}, file)
    with pytest.raises(BackboneError, match=f"must be those of a whole SigLIP, got no '{name}'"):
        loaded(tmp_path)


def test_a_tokenizer_that_only_sentencepiece_reads_is_refused(tmp_path):
    folder = saved(random_siglip("siglip"), tmp_path)
    (folder / "tokenizer.json").rename(folder / "spiece.model")
    with pytest.raises(BackboneError, match=r"must hold its tokenizer as tokenizer\.json .* got only spiece\.model"):
        loaded(folder)


def test_a_tokenizer_without_its_end_is_refused(tmp_path):
    folder = saved(random_siglip("siglip"), tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "</s>"}))
    with pytest.raises(BackboneError, match="does not know the tokens '<end>' and '</s>'"):
        loaded(folder)


def test_attention_of_a_cls_token_cannot_be_shown_where_there_is_none(tmp_path):
    ours: ViT = loaded(saved(random_siglip("siglip"), tmp_path))
    with pytest.raises(ConfigError, match=r"backbone\.name must have a CLS token, whose attention is shown"):
        watch_plain(ours, random_images())
