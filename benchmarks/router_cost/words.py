"""Words that are one token each and can be told apart in an answer."""

from pathlib import Path

from benchmarks.router_cost.stamps import NUM_WORDS
from router.tokens import TextCodec, load_codec


def find_words(folder: Path) -> list[tuple[int, str]]:
    """(token id, text) of plain words: a space and some letters.

    Raises:
        ValueError: the vocabulary has too few.
    """
    codec = load_codec(folder)
    found = []
    for token_id in range(1000, codec.vocab_size):
        text = codec.decode([token_id])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and len(text) > 3:
            found.append((token_id, text))
        if len(found) == NUM_WORDS:
            return found
    raise ValueError(f"{folder}: the tokenizer has too few plain words")


def make_prompt(folder: Path, num_tokens: int) -> str:
    """A text of about so many tokens."""
    codec: TextCodec = load_codec(folder)
    sentence = "The quick brown fox jumps over the lazy dog, and 7 wizards (all of them) agree. "
    text = sentence * (num_tokens // 8)
    return codec.decode(codec.encode_now(text)[:num_tokens])
