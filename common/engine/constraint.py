"""A request's grammar as the sampler needs it: a mask over the vocabulary, then the token drawn."""

import torch
from torch import Tensor

from common.grammar.errors import GrammarError
from common.grammar.store import GrammarStore
from common.plan import SlotInit


class Constraint:
    """Where one slot's output stands in its grammar, rebuilt from the output itself.

    A grammar that cannot go on, or whose limits are used up, concerns this request only: it is
    remembered, and said when the next mask is asked for.
    """

    def __init__(self, init: SlotInit, store: GrammarStore, device: torch.device) -> None:
        grammar = init.sampling.grammar
        assert grammar is not None
        self._device = device
        self._problem: str | None = None
        try:
            self._matcher = store.matcher(grammar, tuple(init.output_ids))
        except GrammarError as error:
            self._problem = str(error)

    def forbidden(self) -> Tensor:
        """[vocab_size]: which tokens may not come next; at least one may.

        Raises:
            GrammarError: nothing can be drawn any more.
        """
        if self._problem is not None:
            raise GrammarError(self._problem)
        return torch.from_numpy(~self._matcher.allowed()).to(self._device)

    def record(self, token_id: int) -> None:
        """A token was drawn."""
        try:
            self._matcher.consume(token_id)
        except GrammarError as error:
            self._problem = str(error)
