"""The tokenizer of a text tower, which can be saved as text and read again."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Words:
    """From a text to the numbers of its tokens, without start and end, however long it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def number(self, token: str) -> int | None:
        """Of one token, if it is a known one."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @classmethod
    def from_file(cls, path: Path) -> Words:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    @classmethod
    def from_json(cls, text: str) -> Words:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))


def letters() -> Words:
    """A tokenizer without a file: the letters a to z, at the beginning of a word and inside it, and BERT's special tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    alphabet = string.ascii_lowercase
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *alphabet, *(f"##{letter}" for letter in alphabet)]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Words(tokenizer)


def lower_case_words(path: Path, without_punctuation: bool) -> Words:
    """A `tokenizer.json` after the clean-up that SigLIP was trained with: lower case, and in its first version no punctuation.

    Some published files do it themselves and some leave it to a library; done twice it changes nothing.
    """
    from tokenizers import Regex, Tokenizer, normalizers

    tokenizer = Tokenizer.from_file(str(path))
    first: list[normalizers.Normalizer] = [normalizers.Lowercase()]
    if without_punctuation:
        marks = Regex(f"[{re.escape(string.punctuation)}]")
        spaces = Regex(r"\s+")
        first += [normalizers.Replace(marks, ""), normalizers.Replace(spaces, " "), normalizers.Strip()]
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*first, *own])
    return Words(tokenizer)
