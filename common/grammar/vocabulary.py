"""What a model's tokens spell, as the grammar library wants to know it."""

from pathlib import Path

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from common.grammar.errors import GrammarError
from common.model_folder import end_token_ids, read_tokenizer


class Vocabulary:
    """Tokens of one model. Making it takes a quarter of a second for 50,000 of them."""

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: tuple[int, ...]) -> None:
        """`size` is that of the model's logits, which may be padded; `end_ids` end an output.

        Raises:
            GrammarError: nothing ends an output, or the tokenizer is of a kind that is not known.
        """
        if not end_ids:
            raise GrammarError("the model has no end-of-sequence token, so no grammar ever ends")
        self.size = size
        self.end_ids = end_ids
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            self.tokens = LLTokenizer(
                tokenizer.to_str(), n_vocab=max(size, known), eos_token=list(end_ids)
            )
        except ValueError as error:
            raise GrammarError(f"the tokenizer: {error}") from None


def load_vocabulary(folder: Path, size: int) -> Vocabulary:
    """That of the model in `folder`.

    Raises:
        GrammarError: there is no usable `tokenizer.json`, or nothing ends an output.
    """
    try:
        tokenizer = read_tokenizer(folder)
    except ValueError as error:
        raise GrammarError(f"tokenizer.json: {error}") from error
    if tokenizer is None:
        raise GrammarError("the model's folder has no tokenizer.json")
    return Vocabulary(tokenizer, size, end_token_ids(folder, tokenizer.token_to_id))
