"""Encoders of sentences: equal to `transformers` without prompts, and to one sentence at a time, without padding, with them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from fedprompt.assets import ASSETS
from fedprompt.backbones import load_backbone
from fedprompt.backbones.catalog import TEXT_TOWER
from fedprompt.backbones.sentence_encoder import READ_SIZE, SentenceEncoder
from fedprompt.backbones.tokenizer import letters
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError
from fedprompt.io.files import cache_directory
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

SENTENCES = ("a", "plums and pears", "what about owls or swans now")


def tiny(**settings: Any) -> SentenceEncoder:
    backbone = load_backbone(BackboneConfig(name="tiny-bert", **settings), Path("unused"))
    assert isinstance(backbone, SentenceEncoder)
    return backbone


def embedded(backbone: SentenceEncoder, sentences: tuple[str, ...] = SENTENCES) -> Tensor:
    return backbone.embed(torch.stack([torch.from_numpy(backbone.ids(sentence)) for sentence in sentences]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.BertConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=56,
        max_position_embeddings=40,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config.save_pretrained(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(letters().to_json())
    return tmp_path


@torch.no_grad()
def by_transformers(folder: Path, backbone: SentenceEncoder, pooling: str) -> Tensor:
    """One sentence at a time, so that nothing is padded."""
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager").eval()
    rows = []
    for sentence in SENTENCES:
        ids = torch.from_numpy(backbone.ids(sentence)).long()
        hidden = model(ids[ids >= 0].unsqueeze(0)).last_hidden_state[0]
        rows.append(hidden.mean(0) if pooling == "mean" else hidden[0])
    return torch.stack(rows)


def sized(rows: Tensor) -> Tensor:
    """At the size in which sentences are read."""
    return READ_SIZE * rows / rows.square().mean(-1, keepdim=True).sqrt()


def pooling_of(folder: Path, **modes: bool) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    stated = {"word_embedding_dimension": 24, **{f"pooling_mode_{mode}": used for mode, used in modes.items()}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("stem", [0, 2])
def test_a_folder_gives_what_transformers_gives(folder: Path, pooling: str, stem: int) -> None:
    pooling_of(folder, mean_tokens=pooling == "mean", cls_token=pooling == "cls")
    backbone = load_backbone(BackboneConfig(name=str(folder), max_tokens=36, stem=stem), folder)
    assert isinstance(backbone, SentenceEncoder)
    found = backbone.run(embedded(backbone))["cls"]
    torch.testing.assert_close(found, sized(by_transformers(folder, backbone, pooling)), rtol=0, atol=2e-5)


THINGS = ("a ripe pear", "juicy melons and plums", "the engine of a car", "a truck with new tyres")


def minilm(max_tokens: int) -> SentenceEncoder:
    cache = cache_directory()
    if not all((cache / ASSETS[name].file).is_file() for name in TEXT_TOWER):
        pytest.skip("MiniLM is not in the cache: run `make assets`")
    backbone = load_backbone(BackboneConfig(name="minilm", max_tokens=max_tokens), cache)
    assert isinstance(backbone, SentenceEncoder)
    return backbone


@pytest.mark.assets
def test_minilm_separates_things() -> None:
    backbone = minilm(max_tokens=16)
    rows = F.normalize(backbone.run(embedded(backbone, THINGS))["cls"], dim=1)
    alike = rows @ rows.T
    assert min(alike[0, 1], alike[2, 3]) > max(alike[0, 2], alike[0, 3], alike[1, 2], alike[1, 3]) + 0.1


def _of_block(weights: dict[str, Tensor], block: int, name: str) -> Tensor:
    return weights[f"blocks.{block}.{name}"]


def one_by_one(backbone: SentenceEncoder, sentence: str, prompts: Tensor) -> Tensor:
    """The naive pass of one sentence without padding; prompts (L, n, d) join at every block and are replaced at the next."""
    weights, heads = backbone.weights, backbone.shape.heads
    ids = torch.from_numpy(backbone.ids(sentence)).long()
    ids = ids[ids >= 0]
    x = weights["token.weight"][ids] + weights["position.weight"][: len(ids)]
    x = F.layer_norm(x, x.shape[-1:], weights["embedding_norm.weight"], weights["embedding_norm.bias"], 1e-12)
    count = len(ids)
    for block in range(backbone.depth):
        get = partial(_of_block, weights, block)
        x = torch.cat([x[:count], prompts[block]])
        query, key, value = F.linear(x, get("attention.in.weight"), get("attention.in.bias")).chunk(3, dim=-1)
        split = [each.unflatten(-1, (heads, -1)).transpose(0, 1) for each in (query, key, value)]
        scores = (split[0] @ split[1].mT / split[0].shape[-1] ** 0.5).softmax(-1)
        mixed = (scores @ split[2]).transpose(0, 1).flatten(1)
        x = x + F.linear(mixed, get("attention.out.weight"), get("attention.out.bias"))
        x = F.layer_norm(x, x.shape[-1:], get("norm1.weight"), get("norm1.bias"), 1e-12)
        hidden = F.gelu(F.linear(x, get("mlp.in.weight"), get("mlp.in.bias")))
        x = x + F.linear(hidden, get("mlp.out.weight"), get("mlp.out.bias"))
        x = F.layer_norm(x, x.shape[-1:], get("norm2.weight"), get("norm2.bias"), 1e-12)
    return x[:count].mean(0)


@pytest.mark.parametrize("kind", ["random", "zero"])
def test_prompts_at_every_block_equal_the_pass_of_one_sentence_without_padding(kind: str) -> None:
    backbone = tiny()
    drawn = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))
    prompts = (drawn if kind == "random" else torch.zeros_like(drawn)).requires_grad_()  # zeros are no padding
    found = backbone.run(embedded(backbone), [TokenPrompt(prompts, (0, 1, 2))])["cls"]
    naive = sized(torch.stack([one_by_one(backbone, sentence, prompts) for sentence in SENTENCES]))
    torch.testing.assert_close(found, naive, rtol=0, atol=1e-5)
    (got,) = torch.autograd.grad(found[:, 0].sum(), prompts)
    (wanted,) = torch.autograd.grad(naive[:, 0].sum(), prompts)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert got.abs().max() > 1e-3


def test_padding_changes_nothing() -> None:
    short, long = tiny(max_tokens=28), tiny(max_tokens=32)
    prompt = TokenPrompt(torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2)), (0, 1))
    reads = ("cls", "patches", "prompts", "prompt_attention")
    few, many = (each.run(embedded(each), [prompt], reads) for each in (short, long))
    torch.testing.assert_close(few["cls"], many["cls"], rtol=0, atol=1e-5)
    torch.testing.assert_close(few["patches"], many["patches"][:, :28], rtol=0, atol=1e-5)
    torch.testing.assert_close(few["prompts"], many["prompts"], rtol=0, atol=1e-5)
    torch.testing.assert_close(few["prompt_attention"], many["prompt_attention"], rtol=0, atol=1e-5)
    assert not many["patches"][0, 3:].any()  # behind "[CLS] a [SEP]"


def test_rows_of_blocks_are_those_of_the_pass() -> None:
    backbone = tiny()
    tokens = embedded(backbone)
    inputs = backbone.block_inputs(tokens)
    whole = backbone.run(tokens)["cls"]
    for block in range(3):
        torch.testing.assert_close(backbone.run(inputs[block], start=block)["cls"], whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(backbone.read_early(tokens, 3), whole, rtol=0, atol=1e-5)


def test_blank_tokens_are_the_mean_row_of_words_from_all_over_the_vocabulary() -> None:
    backbone = tiny()
    blank, known = backbone.blank_tokens(), len(backbone.weights["token.weight"])
    sentences = [[backbone.start, *range(first, first + 28), backbone.end] for first in range(known - 27)]
    inputs = backbone.block_inputs(backbone.embed(torch.tensor(sentences)))
    everything = torch.stack([rows.mean((0, 1)) for rows in inputs])
    assert blank.shape == everything.shape
    assert F.cosine_similarity(blank, everything).min() > 0.9


@pytest.mark.assets
@torch.no_grad()
def test_ten_blank_prompts_at_every_block_leave_what_minilm_reads() -> None:
    backbone = minilm(max_tokens=32)
    tokens = embedded(backbone, tuple(" and ".join(THINGS[i:] + THINGS[:i]) for i in range(4)))
    plain = backbone.run(tokens)["cls"]
    empty = torch.from_numpy(backbone.ids("")).unsqueeze(0)
    no_words = torch.stack([rows[0, :2].mean(0) for rows in backbone.block_inputs(backbone.embed(empty))])
    found = {}
    for name, start in (("words", backbone.blank_tokens()), ("no words", no_words)):
        prompt = TokenPrompt(start.unsqueeze(1).expand(-1, 10, -1), tuple(range(6)))
        seen = backbone.run(tokens, [prompt], ("cls", "prompt_attention"))
        found[name] = F.cosine_similarity(seen["cls"], plain).mean(), seen["prompt_attention"].mean()
    assert found["words"][0] > 0.97 > 0.9 > found["no words"][0]
    assert found["words"][1] < found["no words"][1] / 2


@pytest.mark.parametrize("reads", ["cls", "patches"])
def test_what_is_read_has_the_size_for_which_rates_were_chosen(reads: str) -> None:
    backbone = tiny()
    tokens = embedded(backbone, ("what about owls or swans now",))
    words = 2 + len(backbone.tokenise("what about owls or swans now"))
    rows = backbone.run(tokens, reads=(reads,))[reads][0]
    size = (rows if reads == "cls" else rows[:words]).square().mean(-1).sqrt()
    torch.testing.assert_close(size, torch.full_like(size, READ_SIZE), rtol=1e-4, atol=0)
    for blocks in range(4):
        size = backbone.read_early(tokens, blocks).square().mean().sqrt()
        assert float(size) == pytest.approx(READ_SIZE, rel=1e-4)


def test_long_sentences_are_cut_and_keep_their_end() -> None:
    ids = tiny(max_tokens=6).ids("abcdefgh")
    assert ids.tolist()[:1] + ids.tolist()[5:] == [2, 3]
    assert (tiny(max_tokens=6).ids("a")[3:] == -1).all()


def test_the_digest_covers_weights_length_and_words() -> None:
    first, again, shorter = tiny(), tiny(), tiny(max_tokens=8)
    assert first.digest() == again.digest() != shorter.digest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 2}, "backbone.max_tokens must be in 3..32"),
        ({"max_tokens": 99}, "backbone.max_tokens must be in 3..32"),
        ({"image_size": 32}, "backbone.image_size must be absent for an encoder of sentences"),
        ({"stem": 3}, "backbone.stem must be below the 3 blocks"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        tiny(**settings)


def test_a_pooling_that_is_not_known_is_refused(folder: Path) -> None:
    pooling_of(folder, max_tokens=True)
    with pytest.raises(BackboneError, match="be that of the start token or the mean"):
        load_backbone(BackboneConfig(name=str(folder)), folder)


def test_a_folder_without_its_words_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BackboneError, match=r"must hold a tokenizer\.json"):
        load_backbone(BackboneConfig(name=str(folder)), folder)


def test_a_backbone_of_images_has_no_longest_sentence(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"backbone\.max_tokens must be absent for a backbone of images, got 30"):
        load_backbone(BackboneConfig(name="tiny", max_tokens=30), tmp_path)
