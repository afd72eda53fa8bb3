"""Dual encoders: a CLIP folder equals `transformers`, MiniLM equals BERT, and runs compute nothing twice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import experiment, throwaway_cache
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from fedprompt.assets import prepare
from fedprompt.backbones import bridge, load_backbone
from fedprompt.backbones.clip import joined
from fedprompt.backbones.dual_encoder import DualEncoder, Memory
from fedprompt.backbones.minilm import SHAPE, minilm
from fedprompt.backbones.projection import Projection
from fedprompt.backbones.random_weights import TINY_FEATURES, random_tensors, random_vit
from fedprompt.backbones.text_tower import BidirectionalTower, CausalTower, TextTower
from fedprompt.backbones.vit import ViT
from fedprompt.client.runtime import ClientRuntime
from fedprompt.client.step import encode_text
from fedprompt.config import BackboneConfig
from fedprompt.errors import BackboneError, StorageError
from fedprompt.features import feature_rows
from fedprompt.features.compute import MULTIPLE
from fedprompt.io.files import cache_directory
from fedprompt.modules.contexts import TextContext
from fedprompt.modules.insertion import TokenPrompt

pytestmark = pytest.mark.unit

HALF = (0.5, 0.5, 0.5)
NAMES = ("cat", "golden_retriever", "ox", "Old (rare)", "photo cat")
MERGES = [("c", "a"), ("ca", "t</w>"), ("p", "h"), ("ph", "o"), ("o", "x</w>"), (")", ".</w>")]


# a CLIP folder


def clip_tokenizer() -> Any:
    """A real CLIPTokenizer with a few merges, laid out as the published one: bytes, bytes that end a word, merges, start, end."""
    letters = sorted(ByteLevel.alphabet())
    merged = ["".join(pair) for pair in MERGES]
    tokens = [*letters, *(letter + "</w>" for letter in letters), *merged, "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=MERGES)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name.lower() and name.endswith("weight") else noise)
    return model.eval()


def random_clip(activation: str = "quick_gelu", legacy: bool = False) -> Any:
    """`legacy`: the ids 0 and 2 for start and end that the first published configs state, and that no tokenizer has."""
    tokenizer = clip_tokenizer()
    tower = {"num_hidden_layers": 3, "intermediate_size": 48, "hidden_act": activation}
    ends = {"bos_token_id": 0, "eos_token_id": 2} if legacy else {}
    ends = ends or {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = {**tower, "hidden_size": 24, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    text = {**tower, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": len(tokenizer), **ends}
    config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=20)
    model = randomised(transformers.CLIPModel(config))
    with torch.no_grad():
        model.logit_scale.fill_(math.log(37.0))
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": HALF, "image_std": HALF}))
    return folder


def loaded(folder: Path | str, **settings: Any) -> DualEncoder:
    found = load_backbone(BackboneConfig(name=str(folder), **settings), throwaway_cache())
    assert isinstance(found, DualEncoder)
    return found


def random_images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("legacy", [False, True], ids=["right ids", "legacy ids"])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_a_clip_folder_equals_transformers(tmp_path, activation, legacy):
    model = random_clip(activation, legacy)
    clip = loaded(saved(model, tmp_path))
    sentences = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(sentences, padding="max_length", max_length=77, return_tensors="pt")
    images = random_images()
    with torch.no_grad():
        expected = model(pixel_values=images, **tokens)
    language = clip.language(NAMES)
    said = language.encode_words("a photo of a")
    seen = clip.run(clip.embed(images), reads=("image", "image_patches"))
    torch.testing.assert_close(said, expected.text_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["image"], expected.image_embeds, rtol=0, atol=1e-5)
    assert language.scale == pytest.approx(model.logit_scale.exp().item(), rel=1e-6)
    logits = language.scale * seen["image"] @ said.T
    torch.testing.assert_close(logits, expected.logits_per_image, rtol=1e-5, atol=1e-4)
    assert logits.std() > 1
    with torch.no_grad():
        hidden = model.vision_model(images).last_hidden_state[:, 1:]
        patches = model.visual_projection(model.vision_model.post_layernorm(hidden))
    torch.testing.assert_close(seen["image_patches"], patches / patches.norm(dim=-1, keepdim=True), rtol=0, atol=1e-5)


def test_a_learnt_context_equals_transformers_own_layers(tmp_path):
    """The library takes no embeddings for words, so the context is written into rows of its table that no name uses."""
    model = random_clip()
    clip = loaded(saved(model, tmp_path))
    context = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    table, free = model.text_model.embeddings.token_embedding.weight, [200, 201, 202, 203]
    with torch.no_grad():
        table[free] = context
    tokenizer = clip_tokenizer()
    names = [name.replace("_", " ") for name in NAMES]
    rows = [tokenizer(name + ".", add_special_tokens=False)["input_ids"] for name in names]
    ids = [[tokenizer.bos_token_id, *free, *row, tokenizer.eos_token_id] for row in rows]
    assert not {token for row in rows for token in row} & set(free)
    padded = torch.tensor([row + [tokenizer.eos_token_id] * (77 - len(row)) for row in ids])
    with torch.no_grad():
        expected = model(pixel_values=random_images(), input_ids=padded).text_embeds
    found = clip.language(NAMES).encode(context[None], "end")[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_two_files_of_older_tokenizers_serve_too(tmp_path):
    folder = saved(random_clip(), tmp_path)
    said = loaded(folder).language(NAMES).encode_words("a photo of a")
    (folder / "tokenizer.json").unlink()
    tokenizer = clip_tokenizer()
    (folder / "vocab.json").write_text(json.dumps(tokenizer.get_vocab()))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    assert torch.equal(loaded(folder).language(NAMES).encode_words("a photo of a"), said)


def test_double_precision_and_other_resolutions(tmp_path):
    model = random_clip()
    clip = loaded(saved(model, tmp_path), dtype="float64", image_size=24)
    assert clip.text.weights["token.weight"].dtype == clip.image_projection.weights["linear.weight"].dtype == clip.dtype
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        hidden = model.double().vision_model(images, interpolate_pos_encoding=True).pooler_output
        expected = torch.nn.functional.normalize(model.visual_projection(hidden), dim=-1)
    torch.testing.assert_close(clip.run(clip.embed(images), reads=("image",))["image"], expected, rtol=0, atol=1e-6)


def test_vision_prompts_reach_the_image_and_its_patches(tmp_path):
    clip = loaded(saved(random_clip(), tmp_path), dtype="float64")
    tokens = clip.embed(random_images().double())
    prompt = torch.randn(1, 2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = clip.run(tokens, [TokenPrompt(prompt, (0,))], reads=("cls", "image", "image_patches"))
    assert found.keys() == {"cls", "image", "image_patches"}
    rows = ViT.run(clip, tokens, [TokenPrompt(prompt, (0,))], reads=("cls", "patches"))
    into = clip.image_projection.weights["linear.weight"]
    for name, seen in (("image", rows["cls"]), ("image_patches", rows["patches"])):
        expected = seen @ into.T
        expected = expected / expected.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)
    assert not torch.allclose(found["image"], clip.run(tokens, reads=("image",))["image"], atol=1e-3)


# what a folder may lack


def without(folder: Path, *words: str) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not any(word in name for word in words)}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def replaced(folder: Path, name: str, tensor: Tensor) -> Path:
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["visual_projection.weight", "text_projection.weight", "logit_scale"])
def test_a_missing_projection_or_scale_is_told(tmp_path, name):
    with pytest.raises(BackboneError, match=f"must be those of a whole CLIP, got no '{name}'"):
        loaded(without(saved(random_clip(), tmp_path), name))


def test_half_a_clip_is_refused(tmp_path):
    with pytest.raises(BackboneError, match="they lack 'blocks"):
        loaded(without(saved(random_clip(), tmp_path / "no text"), "text_model."))
    with pytest.raises(BackboneError, match="must hold a CLS token and position embeddings"):
        loaded(without(saved(random_clip(), tmp_path / "no vision"), "vision_model."))
    with pytest.raises(BackboneError, match=r"they lack 'blocks\.1\.mlp\.out\.bias'"):
        loaded(without(saved(random_clip(), tmp_path / "one bias"), "text_model.encoder.layers.1.mlp.fc2.bias"))


def test_an_unknown_tensor_of_the_text_tower_is_refused(tmp_path):
    folder = replaced(saved(random_clip(), tmp_path), "text_model.extra_norm.weight", torch.ones(32))
    with pytest.raises(BackboneError, match=r"a CLIP, got 1 unknown tensors such as 'extra_norm\.weight'"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("text_projection.weight", torch.ones(20, 31), "text projection must take 32 numbers, got one that takes 31"),
        ("visual_projection.weight", torch.ones(20, 72), "must take 24 or 48 numbers, got one that takes 72"),
        ("visual_projection.weight", torch.ones(19, 24), "lead into one space, got 19 and 20 dimensions"),
        ("text_projection.weight", torch.full((20, 32), math.nan), "a projection must be finite"),
        ("text_model.final_layer_norm.weight", torch.ones(31), r"'norm\.weight' must have shape \(32,\), got \(31,\)"),
        ("text_model.final_layer_norm.weight", torch.full((32,), math.inf), r"'norm\.weight' must be finite"),
        ("logit_scale", torch.tensor(math.nan), "logit scale of .* must be positive and finite, got nan"),
        ("logit_scale", torch.tensor(1000.0), "logit scale of .* must be positive and finite, got inf"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, name, tensor, complaint):
    with pytest.raises(BackboneError, match=complaint):
        loaded(replaced(saved(random_clip(), tmp_path), name, tensor))


def test_a_missing_tokenizer_is_told_and_not_made_up(tmp_path):
    folder = saved(random_clip(), tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        BackboneError, match=r"must hold its tokenizer \(tokenizer.json, or vocab.json and merges.txt\)"
    ):
        loaded(folder)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(BackboneError, match="must hold its tokenizer"):
        loaded(folder)


@pytest.mark.parametrize("content", ["", "{}", "no json"])
def test_a_broken_tokenizer_is_told(tmp_path, content):
    folder = saved(random_clip(), tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(BackboneError, match="must hold its tokenizer"):
        loaded(folder)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path):
    model = random_clip()
    model.text_model.embeddings.token_embedding.weight.data = model.text_model.embeddings.token_embedding.weight[:400]
    model.config.text_config.vocab_size = 400
    with pytest.raises(BackboneError, match="tokenizer must be that of the text tower, which knows 400 tokens"):
        loaded(saved(model, tmp_path))


def test_an_activation_out_of_reach_is_refused(tmp_path):
    path = saved(random_clip(), tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["hidden_act"] = "relu"
    path.write_text(json.dumps(config))
    with pytest.raises(BackboneError, match="hidden_act of the text tower must be gelu or quick_gelu, got 'relu'"):
        loaded(tmp_path)


# BERT


BERT = transformers.BertConfig(
    hidden_size=SHAPE.width,
    num_hidden_layers=SHAPE.depth,
    num_attention_heads=SHAPE.heads,
    intermediate_size=SHAPE.mlp_width,
    vocab_size=SHAPE.vocabulary,
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "golden", "retrie", "##ver", "ox", "old", "."]
IDENTITY = Projection({"linear.weight": torch.eye(SHAPE.width)})
IDENTITY_64 = Projection({"linear.weight": torch.eye(SHAPE.width, dtype=torch.float64)})


def word_pieces(path: Path) -> Path:
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(3)  # as the published one has both, and neither may have an effect
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def bert() -> Any:
    torch.manual_seed(0)
    model = transformers.BertModel(BERT)  # with its pooler, which is left out
    return randomised(model).double()


def tower_of(model: Any, folder: Path) -> BidirectionalTower:
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors["embeddings.position_ids"] = torch.arange(512)[None]
    return minilm(tensors, word_pieces(folder / "tokenizer.json"), IDENTITY_64, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("position", ["end", "middle", "front"])
def test_the_minilm_tower_equals_berts_with_soft_words(bert, tmp_path, position):
    tower = tower_of(bert, tmp_path)
    names = {"cat": [7], "golden_retriever": [8, 9, 10], "ox": [11]}
    context = torch.randn(4, 384, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    found = tower.encode(context[None], tower.names(list(names)), position)[0]
    table = bert.embeddings.word_embeddings.weight
    before = {"end": 4, "middle": 2, "front": 0}[position]
    rows = []
    for ids in names.values():
        words = torch.cat([table[[2]], context[:before], table[ids], context[before:], table[[13, 3]]])
        mean = bert(inputs_embeds=words[None]).last_hidden_state[0].mean(0)
        rows.append(mean / mean.norm())
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-10)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).double()
    ours, theirs = (torch.autograd.grad((x * weights).sum(), context)[0] for x in (found, torch.stack(rows)))
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_tokenizer_without_ends_is_refused(bert, tmp_path):
    Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1}, unk_token="[UNK]")).save(str(tmp_path / "other.json"))
    with pytest.raises(BackboneError, match=r"other.json' must know the tokens \[CLS\] and \[SEP\]"):
        minilm(bert.state_dict(), tmp_path / "other.json", IDENTITY, torch.device("cpu"), torch.float32)


@pytest.mark.assets
def test_the_real_minilm_equals_transformers_mean_pooling():
    try:
        weights, words = (prepare(f"minilm-{part}", cache_directory()) for part in ("weights", "tokenizer"))
    except (BackboneError, StorageError) as error:
        pytest.skip(f"the MiniLM assets cannot be had here: {error}")
    tensors = load_file(weights)
    model = transformers.BertModel(BERT).eval()
    stored = {name: tensor for name, tensor in tensors.items() if not name.endswith("position_ids")}
    model.load_state_dict(stored, strict=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(words), pad_token="[PAD]")
    names = ["cat", "Abyssinian", "golden_retriever", "ox", "wheelchair", "dollar bill", "sunflower", "fire lily"]
    names += ["Boeing 737-200", "crème brûlée"]
    spoken = [f"a photo of a {name.replace('_', ' ')}." for name in names]
    given = tokenizer(spoken, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1)
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    tower = minilm(tensors, words, IDENTITY, torch.device("cpu"), torch.float32)
    found = tower.encode(tower.words("a photo of a")[None], tower.names(names))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected @ expected.T - torch.eye(10)).max() < 0.9  # and they say different things


# bridges


def bridge_tensors(image_width: int, hidden: int = 9) -> dict[str, Tensor]:
    sizes = {"image.linear.weight": (20, image_width), "image.linear.bias": (20,), "text.linear.weight": (20, 384)}
    sizes |= {"image.hidden.weight": (hidden, image_width), "image.hidden.bias": (hidden,)}
    sizes |= {"image.output.weight": (20, hidden), "image.output.bias": (20,)}
    return {**random_tensors(sizes, seed=8), "scale": torch.tensor(50.0)}


@pytest.fixture
def bridged(bert: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Tensor]], DualEncoder]:
    """Our bridging of a tiny vision tower and a random BERT by given tensors."""

    def make(tensors: dict[str, Tensor]) -> DualEncoder:
        (tmp_path / "bridges").mkdir()
        save_file(tensors, tmp_path / "bridges" / "tiny.safetensors")
        assets = {"minilm-weights": tmp_path / "minilm.safetensors"}
        save_file(bert.state_dict(), assets["minilm-weights"])
        assets["minilm-tokenizer"] = word_pieces(tmp_path / "tokenizer.json")
        monkeypatch.setattr(bridge, "prepare", lambda name, cache: assets[name])
        monkeypatch.setattr(bridge, "bridge_file", lambda name: tmp_path / "bridges" / f"{name}.safetensors")
        return bridge.bridged(random_vit(), tmp_path)

    return make


@pytest.mark.parametrize("twice", [False, True], ids=["CLS", "CLS and mean patch"])
def test_a_bridge_maps_cls_or_cls_and_the_mean_patch(bridged, twice):
    tensors = bridge_tensors(64 if twice else 32)
    dual = bridged(tensors)
    tokens = dual.embed(random_images())
    seen = dual.run(tokens, reads=("image", "image_patches"))
    rows = random_vit().run(tokens, reads=("cls", "patches"))

    def mapped(x: Tensor) -> Tensor:
        hidden = x @ tensors["image.hidden.weight"].T + tensors["image.hidden.bias"]
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
        y = x @ tensors["image.linear.weight"].T + tensors["image.linear.bias"]
        y = y + hidden @ tensors["image.output.weight"].T + tensors["image.output.bias"]
        return y / y.norm(dim=-1, keepdim=True)

    cls, patches = rows["cls"], rows["patches"]
    whole = torch.cat([cls, patches.mean(1)], dim=-1) if twice else cls
    torch.testing.assert_close(seen["image"], mapped(whole), rtol=0, atol=1e-5)
    for number in range(patches.shape[1]):
        part = torch.cat([cls, patches[:, number]], dim=-1) if twice else patches[:, number]
        torch.testing.assert_close(seen["image_patches"][:, number], mapped(part), rtol=0, atol=1e-5)
    assert (dual.scale, dual.features, dual.averages_patches) == (50.0, 20, twice)
    assert dual.reads["image"] == 20
    assert dual.reads["image_patches"] == 16 * 20
    assert isinstance(dual.text, BidirectionalTower)


def test_a_bridge_that_is_too_wide_is_refused(bridged):
    with pytest.raises(BackboneError, match="'tiny' must take 32 or 64 numbers, got one that takes 96"):
        bridged(bridge_tensors(96))


def test_a_bridge_without_a_text_side_is_refused(bridged):
    tensors = {name: tensor for name, tensor in bridge_tensors(32).items() if not name.startswith("text.")}
    with pytest.raises(BackboneError, match="a projection must be one linear map"):
        bridged(tensors)


# the tiny one, and what a run computes


def test_tiny_clip_has_clips_layout():
    clip = loaded("tiny-clip")
    assert isinstance(clip.text, CausalTower)
    assert (clip.text.start, clip.text.end, clip.text.shape.vocabulary) == (512, 513, 514)
    assert (clip.text.shape.positions, clip.features, clip.shape.ln_pre) == (77, TINY_FEATURES, True)
    assert clip.language(["a_cat"]).words("a photo of a").shape == (9, clip.text.shape.width)


def test_the_digest_covers_both_towers():
    clip = loaded("tiny-clip")
    text, image = clip.text, clip.image_projection
    flipped = Projection({"linear.weight": image.weights["linear.weight"].flip(0)})
    vision = random_vit()
    digests = {
        clip.digest(),
        joined(clip, text, flipped, clip.scale).digest(),
        joined(clip, text, image, 31.0).digest(),
        joined(vision, text, image, clip.scale).digest(),
        joined(
            clip, CausalTower(text.shape, text.weights, text.tokenise, 511, 513, text.projection), image, 30.0
        ).digest(),
    }
    assert len(digests) == 5
    assert loaded("tiny-clip").digest() == clip.digest()


class Calls:
    """What the towers were asked for while clients trained and were evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[tuple[str, int, int]] = []  # (train or evaluate, client, images)
        self.texts: list[tuple[str, int]] = []
        self.participations: list[tuple[str, int]] = []
        self._now = ("start", -1)
        real_run, real_encode = ViT.run, TextTower.encode

        def run_images(vit: ViT, tokens: Tensor, *rest: Any, **named: Any) -> dict[str, Tensor]:
            self.images.append((*self._now, len(tokens)))
            return real_run(vit, tokens, *rest, **named)

        def encode(tower: TextTower, *rest: Any, **named: Any) -> Tensor:
            self.texts.append(self._now)
            return real_encode(tower, *rest, **named)

        monkeypatch.setattr(ViT, "run", run_images)
        monkeypatch.setattr(TextTower, "encode", encode)
        for part in ("train", "evaluate"):
            together = f"{part}_together"
            monkeypatch.setattr(ClientRuntime, together, self._wrapped(part, getattr(ClientRuntime, together)))

    def _wrapped(self, part: str, real: Any) -> Any:
        def call(runtime: ClientRuntime, round: int, received: Any) -> Any:
            (client,) = received
            self._now = (part, client)
            self.participations.append(self._now)
            try:
                return real(runtime, round, received)
            finally:
                self._now = ("between", -1)

        return call


def test_training_a_context_sees_every_image_once_and_evaluating_speaks_once(settings, monkeypatch):
    feature_rows.MEMORY.clear()  # rows outlive the run they were computed for
    calls = Calls(monkeypatch)
    rounds, passes = 3, 2
    made = experiment(
        settings(
            method={"name": "promptfl", "context_tokens": 2},
            backbone={"name": "tiny-clip"},
            train={"batch_size": 4, "epochs": passes},
            federation={"rounds": rounds, "evaluation_batch": 3},
            engine={"cohort": 1},
        )
    )
    clients = made.factory.prepare()[1].clients
    made.run()
    for number, client in enumerate(clients):
        assert len(client.train) > 4  # several batches
        assert len(client.test) > 3  # several evaluation batches
        seen = [size for part, other, size in calls.images if (part, other) == ("train", number)]
        assert seen == [filled_up(len(client.train))]  # in the first of all rounds, and never again
        assert calls.texts.count(("train", number)) == rounds * passes * math.ceil(len(client.train) / 4)
        assert calls.participations.count(("evaluate", number)) == rounds
    # all clients predict with the one shared context: whoever is first has it encoded, in each round
    assert [part for part, _ in calls.texts].count("evaluate") == rounds
    tested = sum(size for part, _, size in calls.images if part != "train")
    assert tested == filled_up(sum(len(client.test) for client in clients))  # before round 1, to check the labels


def filled_up(images: int) -> int:
    """How many images a pass has that computes features of so many."""
    return -(-images // MULTIPLE) * MULTIPLE


class FakeWorld:
    """Only what `encode_text` asks of a world."""

    def __init__(self) -> None:
        self.text = loaded("tiny-clip").language(["cat", "ox"])


def said(world: Any, contexts: dict[str, TextContext]) -> dict[str, Tensor]:
    """What one client's contexts become."""
    stacked = {name: context.tokens[None] for name, context in contexts.items()}
    return {name: features[0] for name, features in encode_text(world, contexts, stacked).items()}


def test_contexts_of_one_shape_are_spoken_together_and_without_gradients_remembered(monkeypatch):
    world: Any = FakeWorld()
    calls = []
    real = TextTower.encode
    monkeypatch.setattr(TextTower, "encode", lambda *a, **k: calls.append(a[1].shape[0]) or real(*a, **k))
    drawn = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(0))
    contexts = {
        "a": TextContext(drawn[0]),
        "b": TextContext(drawn[1]),
        "c": TextContext(drawn[2], "front"),
        "d": TextContext(drawn[:2]),
    }
    together = said(world, contexts)
    assert calls == [2, 1, 1]
    for name, context in contexts.items():
        alone = world.text.encode(context.tokens[None], context.position)[0]
        torch.testing.assert_close(together[name], alone, rtol=0, atol=1e-6)
    calls.clear()
    with torch.no_grad():
        first = said(world, contexts)
        again = said(world, {name: TextContext(c.tokens.clone(), c.position) for name, c in contexts.items()})
        assert calls == [1, 1, 1, 1]
        assert all(torch.equal(again[name], first[name]) for name in contexts)
        changed = said(world, {**contexts, "b": TextContext(drawn[3]), "c": TextContext(drawn[2], "end")})
        assert calls == [1, 1, 1, 1, 1, 1]
        together = first
    assert not torch.allclose(changed["b"], together["b"])
    assert not torch.allclose(changed["c"], together["c"])
    assert torch.equal(changed["a"], together["a"])


def test_what_was_asked_for_longest_ago_is_forgotten_first():
    asked = []

    def encode(context: Tensor) -> Tensor:
        asked.append(float(context[0, 0]))
        return context.repeat(4, 1)

    memory = Memory(capacity=2 * 4 * 8 * 4)
    contexts = [torch.full((1, 8), float(number)) for number in range(3)]
    for number in (0, 1, 0, 2, 0, 1):
        torch.testing.assert_close(memory.get("end", contexts[number], encode)[0], contexts[number][0])
    assert asked == [0, 1, 2, 1]
    memory.get("front", contexts[0], encode)
    assert asked[-1] == 0


def test_a_result_too_large_to_keep_is_still_given():
    memory = Memory(capacity=1)
    context = torch.ones(1, 8)
    assert memory.get("end", context, lambda given: given + 1).eq(2).all()


@pytest.mark.parametrize("position", ["end", "middle", "front"])
def test_classes_can_be_encoded_without_a_world(position):
    clip, names = loaded("tiny-clip"), ["cat", "old_ox", "a b c"]
    context = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = clip.encode_classes(context, names, position)
    torch.testing.assert_close(found, clip.language(names).encode(context[None], position)[0])
    alone = clip.encode_classes(context, names[1:2], position)
    torch.testing.assert_close(found[1:2], alone, atol=1e-6, rtol=0)
    (slope,) = torch.autograd.grad(found.sum(), context)
    assert slope.abs().sum() > 0
