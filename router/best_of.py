"""Which of several choices are the best: OpenAI's `best_of`. Pure."""

import math
from collections.abc import Sequence

from router.generation import ChoiceResult


def best_of(results: Sequence[ChoiceResult], per_prompt: int, kept: int) -> list[ChoiceResult]:
    """Of each prompt's `per_prompt` neighbours the `kept` with the highest log probability per
    token, best first; of equals the one drawn first."""
    best: list[ChoiceResult] = []
    for first in range(0, len(results), per_prompt):
        of_prompt = results[first : first + per_prompt]
        best += sorted(of_prompt, key=_mean_logprob, reverse=True)[:kept]
    return best


def _mean_logprob(result: ChoiceResult) -> float:
    records = result.logprobs
    if not records:
        return -math.inf
    return math.fsum(record.logprob.logprob for record in records) / len(records)
