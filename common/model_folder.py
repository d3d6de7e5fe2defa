"""What several processes read of a model's folder, each for itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) else {}


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `tokenizer.json`, which cuts off and pads nothing; None if there is none.

    Raises:
        ValueError: it is broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the tokens that `tokenizer_config.json` names, by their part."""
    config = read_json(folder / "tokenizer_config.json")
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def end_token_ids(folder: Path, token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Tokens that end an output: the configuration's, and the tokenizer's own.

    `token_id` gives the id of a special token's text.
    """
    config = read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    generation = read_json(folder / "generation_config.json")
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    named = special_tokens(folder).get("eos_token")
    own = None if named is None else token_id(named)
    return tuple(sorted(ids | (set() if own is None else {own})))
