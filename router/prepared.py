"""A client's request once it is checked: what is dispatched, choice by choice. Pure data."""

from dataclasses import dataclass

from common.messages import Adapter, SamplingParams
from router.text_stream import TextOptions


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice to be dispatched."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    adapter: Adapter | None = None
    """None: the base model."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request. Choices of one prompt are neighbours."""

    choices: tuple[ChoiceSpec, ...]
    num_prompts: int
    prompt_texts: tuple[str, ...] = ()
    """Of each prompt, where it is to be echoed."""

    @property
    def n(self) -> int:
        return len(self.choices) // self.num_prompts

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(choice.prompt_ids) for choice in self.choices[:: self.n])
