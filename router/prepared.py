"""A client's request once it is checked: what is dispatched, choice by choice. Pure data."""

import msgspec

from common.messages import Adapter, SamplingParams
from router.text_stream import TextOptions


class ChoiceSpec(msgspec.Struct, frozen=True):
    """One choice to be dispatched."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    adapter: Adapter | None = None
    """None: the base model."""

    @property
    def num_scores(self) -> int:
        """Logprobs of prompt tokens that its answer holds, alternatives included."""
        wish = self.sampling.prompt_logprobs
        return 0 if wish is None else len(self.prompt_ids) * (1 + wish)


class Prepared(msgspec.Struct, frozen=True):
    """A checked request. Choices of one prompt are neighbours."""

    choices: tuple[ChoiceSpec, ...]
    num_prompts: int
    prompt_texts: tuple[str, ...] = ()
    """Of each prompt, where it is to be echoed."""
    num_kept: int | None = None
    """The best so many choices of each prompt are the answer; None where all are."""

    @property
    def n(self) -> int:
        """Choices that are drawn for a prompt."""
        return len(self.choices) // self.num_prompts

    @property
    def num_scores(self) -> int:
        """Logprobs of prompt tokens that the answer holds."""
        return sum(choice.num_scores for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(choice.prompt_ids) for choice in self.choices[:: self.n])
