"""Compiled grammars of one node, by their text: requests of one application share theirs."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from common.grammar.errors import GrammarError
from common.grammar.limits import MAX_COMPILED
from common.grammar.matcher import CompiledGrammar, Matcher
from common.grammar.vocabulary import Vocabulary
from common.messages import Grammar


class GrammarStore:
    """Filled by the compiler's thread, read by the engine's."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """`load` is called once, by whoever needs the vocabulary first."""
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._problem: str | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def load(self) -> None:
        """Have the vocabulary ready.

        Raises:
            GrammarError: no grammar can be used with this model.
        """
        if self._vocabulary is None and self._problem is None:
            try:
                self._vocabulary = self._load()
            except GrammarError as error:
                self._problem = str(error)
        if self._problem is not None:
            raise GrammarError(self._problem)

    def has(self, grammar: Grammar) -> bool:
        """Whether it is compiled already."""
        with self._lock:
            return grammar in self._compiled

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Compiled before, or now.

        Raises:
            GrammarError: it cannot be compiled.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        self.load()
        assert self._vocabulary is not None
        fresh = CompiledGrammar(grammar, self._vocabulary)
        with self._lock:
            self._compiled[grammar] = fresh
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return fresh

    def matcher(self, grammar: Grammar, output_ids: tuple[int, ...]) -> Matcher:
        """Where an output that begins with `output_ids` stands. For the engine's thread.

        Raises:
            GrammarError: it cannot be compiled, or the output does not obey it.
        """
        matcher = self.compiled(grammar).start()
        matcher.consume(*output_ids)
        return matcher
