"""The tokenizer of a text tower, which can be saved as text and read again."""

from __future__ import annotations

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

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    @classmethod
    def from_json(cls, text: str) -> Words:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))
