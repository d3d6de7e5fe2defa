"""Outputs drawn at random under a grammar, as a model without any sense would write them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from common.grammar.matcher import CompiledGrammar, Matcher
from common.grammar.vocabulary import Vocabulary
from common.messages import Grammar, GrammarKind

END = 2


def schema(content: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


class Writer:
    """Encodes and decodes, and lets outputs be written."""

    def __init__(self, folder: Path, vocabulary: Vocabulary) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._vocabulary = vocabulary

    def start(self, grammar: Grammar) -> Matcher:
        return CompiledGrammar(grammar, self._vocabulary).start()

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether a model may write exactly this and end there."""
        matcher = self.start(grammar)
        for token_id in self.ids(text):
            if not matcher.allowed()[token_id]:
                return False
            matcher.consume(token_id)
        return bool(matcher.allowed()[END])

    def write(self, grammar: Grammar, chance: random.Random, most: int = 400) -> list[int] | None:
        """Tokens drawn uniformly from those allowed, up to the end; None if it does not come.

        The end is preferred to going on, as many a grammar would let an output grow for ever.
        """
        matcher = self.start(grammar)
        ids: list[int] = []
        for _ in range(most):
            allowed = np.flatnonzero(matcher.allowed()).tolist()
            if END in allowed:
                return ids
            ids.append(chance.choice(allowed))
            matcher.consume(ids[-1])
        return None
