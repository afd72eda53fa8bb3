"""Names as the MiniLM text tower reads them, behind words or behind random vectors.

What goes into a bridge is the mean over all tokens of the last hidden state of "[CLS] prefix name . [SEP]".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertModel

from fedprompt.assets import prepare

WIDTH = 384
SOFT_SPREAD = 0.02  # of a soft prompt at its beginning
SOFT_LENGTHS = (4, 16)
BATCH = 256


class TextEncoder:
    """all-MiniLM-L6-v2 out of the project's own assets."""

    def __init__(self, cache: Path) -> None:
        config = BertConfig(hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self._model = BertModel(config, add_pooling_layer=False).eval()
        weights = load_file(prepare("minilm-weights", cache))
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
        kept.pop("embeddings.position_ids", None)
        self._model.load_state_dict(kept)
        self._tokenizer = Tokenizer.from_file(str(prepare("minilm-tokenizer", cache)))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.words: Tensor = self._model.embeddings.word_embeddings.weight.detach()

    def pieces(self, name: str) -> int:
        """Word pieces of a name: rare words fall into many."""
        return len(self._tokenizer.encode(name, add_special_tokens=False).ids)

    @torch.no_grad()
    def __call__(self, names: Sequence[str], context: str | Tensor) -> Tensor:
        """Pooled states (len(names), 384) of the names behind a context: words, or vectors (m, 384)."""
        words = context if isinstance(context, str) else ""
        soft = context if isinstance(context, Tensor) else torch.zeros(0, WIDTH)
        ids = [self._tokenizer.encode(f"{words} {name}.".strip()).ids for name in names]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))  # neighbours need little padding
        pooled = torch.zeros(len(ids), WIDTH)
        for first in range(0, len(order), BATCH):
            part = order[first : first + BATCH]
            pooled[part] = self._pooled([ids[index] for index in part], soft)
        return pooled

    def _pooled(self, ids: list[list[int]], soft: Tensor) -> Tensor:
        longest = max(map(len, ids)) + len(soft)
        states, mask = torch.zeros(len(ids), longest, WIDTH), torch.zeros(len(ids), longest)
        for row, sentence in enumerate(ids):
            embedded = self.words[torch.tensor(sentence)]
            states[row, : len(sentence) + len(soft)] = torch.cat([embedded[:1], soft, embedded[1:]])
            mask[row, : len(sentence) + len(soft)] = 1
        hidden = self._model(inputs_embeds=states, attention_mask=mask).last_hidden_state
        return torch.as_tensor((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def soft_contexts(length: int, count: int, seed: int) -> list[Tensor]:
    """Soft prompts as a run begins with: N(0, 0.02^2)."""
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return [torch.randn(length, WIDTH, generator=generator) * SOFT_SPREAD for _ in range(count)]


def training_contexts(encoder: TextEncoder, prefixes: Sequence[str], seed: int) -> list[str | Tensor]:
    """What names are read behind while the bridge is fitted: words, soft prompts, and words drawn at random."""
    contexts: list[str | Tensor] = list(prefixes)
    for length in SOFT_LENGTHS:
        contexts += soft_contexts(length, 2, seed)
    for length in (3, 5):
        generator = torch.Generator().manual_seed(length)
        contexts.append(encoder.words[torch.randint(2000, 20000, (length,), generator=generator)])
    return contexts
