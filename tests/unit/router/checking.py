"""A checker of grammars without a process of its own: for tests of what comes before and after."""

from pathlib import Path

from common.grammar.errors import GrammarError
from common.grammar.matcher import try_out
from common.grammar.vocabulary import load_vocabulary
from common.messages import Grammar
from router.errors import invalid
from tests.tiny_models import VOCAB_SIZE


class ChecksHere:
    """Compiles in this very process."""

    def __init__(self, folder: Path) -> None:
        self._vocabulary = load_vocabulary(folder, VOCAB_SIZE)

    async def checked(self, grammar: Grammar, field: str) -> Grammar:
        try:
            return try_out(grammar, self._vocabulary)
        except GrammarError as error:
            raise invalid(f"{field}: {error}", field, "invalid_grammar") from None
