"""A compiled grammar, and how far one output has come in it."""

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from common.grammar.errors import GrammarError
from common.grammar.source import as_lark, library_source
from common.grammar.vocabulary import Vocabulary
from common.messages import Grammar

MAX_MESSAGE = 300


def parser_limits() -> LLParserLimits:
    """Bounds of the library's own work. One mask takes 0.1 ms as a rule and 20 ms at the worst;
    a request whose grammar needs more for one token fails."""
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Matcher:
    """Where one output stands. Used by one thread.

    An end-of-sequence token is allowed where the grammar accepts, and is the only one allowed once
    nothing else can follow. Other special tokens are allowed only where the grammar names them.
    """

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, by id; at least one may.

        Raises:
            GrammarError: the limits of one step are used up.
        """
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        _raise_if_broken(self._inner)
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if not mask.any():
            raise GrammarError("the grammar leaves no token to go on with")
        return mask

    def consume(self, *token_ids: int) -> None:
        """The output has grown by these.

        Raises:
            GrammarError: they do not obey, or the limits are used up.
        """
        if token_ids and not self._inner.consume_tokens(list(token_ids)):
            _raise_if_broken(self._inner)
            raise GrammarError("the output does not obey its grammar")


class CompiledGrammar:
    """Makes matchers. Compiling drops the interpreter's lock."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        """
        Raises:
            GrammarError: it cannot be compiled within the limits.
        """
        source = library_source(grammar)
        self._first = LLMatcher(vocabulary.tokens, source, limits=parser_limits(), log_level=0)
        _raise_if_broken(self._first)
        self._vocab_size = vocabulary.size

    def start(self) -> Matcher:
        """For a new output. May be called by any one thread at a time."""
        return Matcher(self._first.deep_copy(), self._vocab_size)


def try_out(grammar: Grammar, vocabulary: Vocabulary) -> Grammar:
    """Compile a grammar as a user wrote it and make its first mask; gives it as nodes take it.

    Raises:
        GrammarError: it cannot be used.
    """
    lark = as_lark(grammar)
    first = CompiledGrammar(lark, vocabulary).start().allowed()
    first[list(vocabulary.end_ids)] = False
    if not first.any():
        raise GrammarError("it allows nothing but an empty output")
    return lark


def _raise_if_broken(inner: LLMatcher) -> None:
    if inner.is_error():
        lines = inner.get_error().strip().splitlines()
        raise GrammarError((lines or ["the grammar cannot be used"])[0][:MAX_MESSAGE])
