"""Byte-level vocabularies: each token stands for some bytes, whatever comes before or after it.

So a token's text is looked up, and only characters that are spread over several tokens have to be
put together. This holds for vocabularies whose decoder is tokenizers' `ByteLevel` (GPT-2's kind:
Llama 3, Qwen, SmolLM2 and many more); in others a token reads differently at the begin of a text.
"""

import codecs
from collections.abc import Set

from tokenizers import Tokenizer, decoders


class ByteTable:
    """The bytes of every token id, and their text where they are whole characters."""

    def __init__(self, tokenizer: Tokenizer, special_ids: Set[int]) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        self.bytes: list[bytes] = [b""] * size
        self.texts: list[str | None] = [""] * size
        """None: only a part of a character, or a broken one. Ids without a token have no text."""
        for token, token_id in vocabulary.items():
            raw = bytes_of(token)
            self.bytes[token_id] = raw
            self.texts[token_id] = _whole(raw)
        self.texts_without_special = list(self.texts)
        for token_id in special_ids:
            self.texts_without_special[token_id] = ""


def byte_table(tokenizer: Tokenizer, special_ids: Set[int]) -> ByteTable | None:
    """The table of a byte-level vocabulary; None for any other."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return ByteTable(tokenizer, special_ids)
    return None


class ByteDetokenizer:
    """Text of a growing list of byte-level tokens; the parts together are the text of the whole."""

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool = True) -> None:
        self._table = table
        self._texts = table.texts_without_special if skip_special_tokens else table.texts
        self._size = len(self._texts)
        self._characters: codecs.IncrementalDecoder | None = None
        """Holds the begin of a character, while there is one."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if not 0 <= token_id < self._size:
            return ""
        text = self._texts[token_id]
        if self._characters is None and text is not None:
            return text
        return "" if text == "" else self._join(self._table.bytes[token_id])

    def flush(self) -> str:
        """What is left at the end: a broken character, or nothing."""
        if self._characters is None:
            return ""
        left, self._characters = self._characters.decode(b"", final=True), None
        return left

    def _join(self, raw: bytes) -> str:
        if self._characters is None:
            self._characters = _utf8("replace")
        text = self._characters.decode(raw)
        if not self._characters.getstate()[0]:
            self._characters = None
        return text


_utf8 = codecs.getincrementaldecoder("utf-8")


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def bytes_of(token: str) -> bytes:
    """The bytes that a byte-level token stands for: an added token may be written as it reads."""
    values = [_BYTE_OF_CHARACTER.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of bytes in byte-level BPE vocabularies (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    return alphabet | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
