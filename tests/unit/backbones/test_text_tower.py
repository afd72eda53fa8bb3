"""Text towers: equal to a naive encoder in values and gradients, in bounded memory, with CLIP's tokenizer layout."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from support import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unit.backbones.naive_text import naive_bert, naive_causal, naive_encode, naive_first, naive_padded

from fedprompt.backbones import text_tower
from fedprompt.backbones.clip import byte_tokenizer
from fedprompt.backbones.projection import Projection, projection
from fedprompt.backbones.random_weights import random_tensors
from fedprompt.backbones.text_tower import (
    BidirectionalTower,
    CausalTower,
    FirstTokenTower,
    PaddedTower,
    TextShape,
    TextTower,
    text_tensor_shapes,
)
from fedprompt.errors import BackboneError, ConfigError, ContractError
from fedprompt.modules.contexts import random_context

pytestmark = pytest.mark.unit

POSITIONS = ("end", "middle", "front")
NAMES = ("cat", "golden_retriever", "ox", "old (rare)", "emu")  # lengths in no order, and two alike
SHAPE = TextShape(width=16, depth=3, heads=2, mlp_width=24, vocabulary=514, positions=40, norm_eps=1e-5)
FEATURES = 12
READERS = {"clip": naive_causal, "bert": naive_bert, "first": naive_first, "padded": naive_padded}


def random_tower(kind: str = "clip", dtype: torch.dtype = torch.float64, **changes: Any) -> TextTower:
    shape = dataclasses.replace(SHAPE, **changes)
    sizes = text_tensor_shapes(shape, outer_norm="norm" if kind in ("clip", "padded") else "embedding_norm")
    tensors = random_tensors({**sizes, "into.weight": (FEATURES, shape.width)}, seed=3)
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    into = Projection({"linear.weight": weights.pop("into.weight")})
    if kind == "padded":
        words, _, end = byte_tokenizer()
        return PaddedTower(shape, weights, words, None, end, into, pad=7)
    towers = {"clip": CausalTower, "bert": BidirectionalTower, "first": FirstTokenTower}
    return towers[kind](shape, weights, *byte_tokenizer(), into)


def random_contexts(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*size, SHAPE.width, generator=generator).to(dtype).mul(0.5).requires_grad_()


def gradient(features: Tensor, contexts: Tensor) -> Tensor:
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(6)).to(features.dtype)
    return torch.autograd.grad((features * weights).sum(), contexts)[0]


def check_against_naive(tower: TextTower, kind: str, contexts: Tensor, position: str, tolerance: float) -> None:
    found = tower.encode(contexts, tower.names(NAMES), position)
    expected = naive_encode(tower, READERS[kind], tower.tokenise, contexts, NAMES, position)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    ours, theirs = gradient(found, contexts), gradient(expected, contexts)
    assert theirs.abs().amax(-1).min() > 1e-3  # every token of every context matters
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# equal to the naive way


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("specific", [False, True], ids=["generic", "class-specific"])
def test_values_and_gradients_equal_the_naive_ones(kind, tokens, position, specific):
    size = (2, len(NAMES), tokens) if specific else (2, tokens)
    check_against_naive(random_tower(kind), kind, random_contexts(*size), position, tolerance=1e-10)


@pytest.mark.parametrize("kind", ["clip", "bert"])
@pytest.mark.parametrize("position", POSITIONS)
def test_single_precision_holds_to_1e_5(kind, position):
    tower = random_tower(kind, torch.float32)
    check_against_naive(tower, kind, random_contexts(2, 4, dtype=torch.float32), position, tolerance=1e-5)


@pytest.mark.parametrize("kind", ["clip", "bert"])
@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_both_activations(kind, activation):
    tower = random_tower(kind, activation=activation)
    check_against_naive(tower, kind, random_contexts(1, 4), "end", tolerance=1e-10)


@pytest.mark.parametrize("kind", ["clip", "bert"])
@pytest.mark.parametrize("depth", [1, 2])
def test_towers_of_few_blocks(kind, depth):
    check_against_naive(random_tower(kind, depth=depth), kind, random_contexts(2, 3), "end", tolerance=1e-10)


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_a_sentence_may_fill_all_positions(kind):
    longest = 1 + 16 + len("golden retriever.") - 1 + 1
    check_against_naive(random_tower(kind, positions=longest), kind, random_contexts(1, 16), "end", tolerance=1e-10)


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_no_context_at_all_is_the_bare_name(kind):
    tower = random_tower(kind)
    found = tower.encode(random_contexts(1, 0).detach(), tower.names(NAMES))
    expected = naive_encode(tower, READERS[kind], tower.tokenise, torch.zeros(1, 0, SHAPE.width), NAMES, "end")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_one_context_for_all_is_the_same_context_for_each(kind):
    tower, contexts = random_tower(kind), random_contexts(2, 4)
    names = tower.names(NAMES)
    for position in POSITIONS:
        each = contexts[:, None].expand(-1, len(NAMES), -1, -1)
        torch.testing.assert_close(
            tower.encode(each, names, position), tower.encode(contexts, names, position), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_several_contexts_at_once_are_each_alone(kind):
    tower, contexts = random_tower(kind), random_contexts(3, 4)
    names = tower.names(NAMES)
    together = tower.encode(contexts, names)
    alone = torch.cat([tower.encode(context[None], names) for context in contexts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


def test_features_are_unit_vectors():
    tower = random_tower()
    found = tower.encode(random_contexts(2, 4), tower.names(NAMES))
    torch.testing.assert_close(found.norm(dim=-1), torch.ones_like(found[..., 0]))


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_a_perceptron_beside_the_linear_map(kind):
    sizes = {"linear.weight": (6, 16), "linear.bias": (6,), "hidden.weight": (9, 16), "hidden.bias": (9,)}
    sizes |= {"output.weight": (6, 9), "output.bias": (6,)}
    w = {name: tensor.double() for name, tensor in random_tensors(sizes, seed=4).items()}
    x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hidden = x @ w["hidden.weight"].T + w["hidden.bias"]
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    y = x @ w["linear.weight"].T + w["linear.bias"] + hidden @ w["output.weight"].T + w["output.bias"]
    found = projection({f"text.{name}": tensor for name, tensor in w.items()} | {"image.other": x}, "text.")(x)
    torch.testing.assert_close(found, y / y.norm(dim=-1, keepdim=True), rtol=0, atol=1e-12)


# chunks


@pytest.mark.parametrize("kind", ["clip", "bert"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("specific", [False, True], ids=["generic", "class-specific"])
@pytest.mark.parametrize("chunk", [1, 30, 75])
def test_chunks_change_nothing(monkeypatch, kind, position, specific, chunk):
    tower = random_tower(kind)
    contexts = random_contexts(2, len(NAMES), 4) if specific else random_contexts(2, 4)
    whole = tower.encode(contexts, tower.names(NAMES), position)
    again = []
    real = text_tower.checkpoint
    monkeypatch.setattr(text_tower, "checkpoint", lambda *a, **k: again.append(1) or real(*a, **k))
    monkeypatch.setattr(text_tower, "CHUNK_TOKENS", chunk)
    parts = tower.encode(contexts, tower.names(NAMES), position)
    assert again
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(parts, contexts), gradient(whole, contexts), rtol=0, atol=1e-11)
    with torch.no_grad():
        again.clear()
        torch.testing.assert_close(
            tower.encode(contexts, tower.names(NAMES), position), whole.detach(), rtol=0, atol=1e-12
        )
    assert not again  # without gradients nothing is computed again


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_no_more_tokens_than_a_chunk_go_through_together(monkeypatch, kind):
    tower, contexts, rows = random_tower(kind), random_contexts(2, 16), []
    real = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Tensor, *rest: Any, **named: Any) -> Tensor:
        rows.append(query.shape[0] * query.shape[2])
        return real(query, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(text_tower, "CHUNK_TOKENS", 100)
    tower.encode(contexts, tower.names([f"{number:03d}" for number in range(40)]))
    assert 50 < max(rows) <= 100


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made under it that are still alive, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_of_a_step(tower: TextTower, classes: int) -> int:
    names = tower.names([f"{number:04d}" for number in range(classes)])
    contexts = random_contexts(1, 4, dtype=torch.float32)
    tower.encode(contexts, names)  # the layout is made once
    with LiveBytes() as live:
        gradient(tower.encode(contexts, names), contexts)
    return live.peak


@pytest.mark.parametrize("kind", ["clip", "bert"])
def test_memory_does_not_grow_with_the_classes(monkeypatch, kind):
    tower = random_tower(kind, torch.float32)
    whole = {classes: peak_of_a_step(tower, classes) for classes in (100, 300)}
    assert whole[300] > 2.5 * whole[100]  # the count sees what is kept
    monkeypatch.setattr(text_tower, "CHUNK_TOKENS", 512)
    hundred, thousand = (peak_of_a_step(tower, classes) for classes in (100, 1000))
    assert thousand < 1.5 * hundred
    assert thousand < whole[100] * 1.2
    assert thousand < whole[300] / 2


# tokens


def letters(text: str) -> list[int]:
    """CLIP's layout without merges: the 256 bytes in the order of their characters, then the same at the end of a word."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    ids = []
    for word in text.split():
        numbers = [alphabet.index(letter) for letter in word]
        ids += [*numbers[:-1], numbers[-1] + 256]
    return ids


def test_the_byte_tokenizer_has_the_layout_of_clips():
    tokenise, start, end = byte_tokenizer()
    assert (start, end) == (512, 513)  # the largest ids, the end the very largest
    assert tokenise("a photo of a") == letters("a photo of a")
    assert tokenise("A Photo  of a") == letters("a photo of a")
    assert tokenise("cat.") == [*letters("cat"), *letters(".")]
    assert max(tokenise("grüße, 7 (x)!")) < start


def test_words_are_rows_of_the_embedding():
    tower = random_tower()
    table = tower.weights["token.weight"]
    assert torch.equal(tower.words("a photo"), torch.stack([table[number] for number in letters("a photo")]))
    assert tower.words("").shape == (0, SHAPE.width)


def test_words_are_a_context_like_any_other():
    tower = random_tower()
    said = tower.encode(tower.words("a photo of a")[None], tower.names(["cat"]))
    ids = torch.tensor([512, *letters("a photo of a cat ."), 513])
    torch.testing.assert_close(said[0, 0], naive_causal(tower, tower.weights["token.weight"][ids]), rtol=0, atol=1e-10)


def test_an_underscore_is_a_space():
    tower = random_tower()
    spaced, joined = tower.names(["golden retriever"]), tower.names(["golden_retriever"])
    assert spaced.ids == joined.ids == (tuple(letters("golden retriever")),)
    assert spaced.texts == joined.texts


def test_a_full_stop_is_tokenised_with_the_name_before_it():
    names = random_tower().names(["old (rare)", "cat"])
    tokenise = byte_tokenizer()[0]
    assert [name + stop for name, stop in zip(names.ids, names.stops, strict=True)] == [
        tuple(tokenise("old (rare).")),
        tuple(tokenise("cat.")),
    ]
    assert names.ids[0] != tuple(tokenise("old (rare)"))  # `)` ends no word there


def test_a_random_context_is_small():
    drawn = random_context(16, 512, seeded(), classes=3)
    assert drawn.shape == (3, 16, 512)
    assert drawn.std().item() == pytest.approx(0.02, rel=0.02)


# what is refused


@pytest.mark.parametrize("kind", ["clip", "bert"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_context_that_leaves_no_room_names_the_class(kind, position):
    tower = random_tower(kind, positions=20)
    names = tower.names(["ox", "golden_retriever"])
    rule = r"number of context tokens must leave room for the class name 'golden retriever' in 20 tokens, got 3"
    tower.encode(random_contexts(1, 2), names, position)
    with pytest.raises(ConfigError, match=rule):
        tower.encode(random_contexts(1, 3), names, position)


@pytest.mark.parametrize("name", ["", " ", "_", "__"])
def test_a_class_name_without_a_token_is_refused(name):
    with pytest.raises(ConfigError, match="class name must have at least one token"):
        random_tower().names(["cat", name])


def test_a_class_name_that_ends_the_sentence_is_refused():
    with pytest.raises(ConfigError, match="class name must not hold the token that ends a sentence, got 'c<"):
        random_tower().names(["c<|endoftext|>at"])


@pytest.mark.parametrize("size", [(), (2,), (2, 4, 4), (1, 2, 5, 4)])
def test_contexts_of_another_shape_are_refused(size):
    tower = random_tower()
    with pytest.raises(ContractError, match=r"contexts must be \(N, m, 16\) or \(N, 5, m, 16\), got"):
        tower.encode(torch.zeros(*size, SHAPE.width), tower.names(NAMES))


def test_contexts_of_another_width_are_refused():
    tower = random_tower()
    with pytest.raises(ContractError, match=r"contexts must be .* got \(1, 4, 17\)"):
        tower.encode(torch.zeros(1, 4, 17), tower.names(NAMES))


def test_a_tokenizer_of_another_tower_is_refused():
    tower = random_tower()
    foreign = dataclasses.replace(tower, tokenise=lambda text: [514])
    for encode_text in (foreign.words, lambda text: foreign.names([text])):
        with pytest.raises(BackboneError, match="tokenizer must be that of the text tower, which knows 514 tokens"):
            encode_text("cat")
    with pytest.raises(BackboneError, match="got token 600"):
        dataclasses.replace(tower, end=600)


def test_a_projection_of_another_width_is_refused():
    with pytest.raises(BackboneError, match="text projection must take 16 numbers, got one that takes 17"):
        dataclasses.replace(random_tower(), projection=Projection({"linear.weight": torch.zeros(4, 17)}))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"linear.bias": (4,)},
        {"linear.weight": (4,)},
        {"linear.weight": (4, 3, 2)},
        {"linear.weight": (4, 3), "linear.bias": (3,)},
        {"linear.weight": (4, 3), "unknown.weight": (4, 3)},
        {"linear.weight": (4, 3), "hidden.weight": (5, 3), "hidden.bias": (5,)},
        {"linear.weight": (4, 3), "hidden.weight": ()},
        {
            "linear.weight": (4, 3),
            "hidden.weight": (5, 3),
            "hidden.bias": (5,),
            "output.weight": (4, 6),
            "output.bias": (4,),
        },
    ],
)
def test_tensors_that_make_no_projection_are_refused(sizes):
    with pytest.raises(BackboneError, match="a projection must be one linear map, or one with a perceptron beside it"):
        Projection({name: torch.zeros(size) for name, size in sizes.items()})


def test_a_projection_that_is_not_finite_is_refused():
    with pytest.raises(BackboneError, match="a projection must be finite"):
        Projection({"linear.weight": torch.full((2, 2), float("nan"))})


def test_the_digest_tells_towers_apart():
    tower = random_tower()
    digests = {tower.digest(), random_tower("bert").digest(), random_tower(activation="quick_gelu").digest()}
    other = {**tower.weights, "token.weight": tower.weights["token.weight"] + 1e-9}
    digests |= {dataclasses.replace(tower, weights=other).digest()}
    turned = Projection({"linear.weight": tower.projection.weights["linear.weight"].flip(0)})
    digests |= {dataclasses.replace(tower, projection=turned).digest()}
    assert len(digests) == 5
    assert tower.digest() == random_tower().digest()
