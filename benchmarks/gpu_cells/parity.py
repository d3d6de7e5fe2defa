"""What a cluster answers beside what the torch backend does with the same weights.

In float32 greedy tokens are equal. In 16 bits two right answers may differ where two tokens are
almost equally good; what is asked there is that no served token is worse than the best by more than
rounding explains, when the torch backend is led along the served tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.engine.loader import DtypeName, LoadedModel, load_model
from common.engine.runner import ModelRunner
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, Row, Sample, SlotInit

PAGE_SIZE = 16
WORST_SHORTFALL = 1.0
"""Nats that a served token may be worse than the best. Rounding to bfloat16 moves log probabilities
by some tenths; a token that comes of wrong KV is worse by as much as tokens differ, 15 and more."""


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: list[int]
    output: list[int]


class TorchOracle:
    """One model with the torch backend, on any device."""

    def __init__(
        self, folder: Path, dtype: DtypeName, device: torch.device, max_model_len: int
    ) -> None:
        self._model: LoadedModel = load_model(folder, dtype, device)
        spec = self._model.spec
        self._pages = list(range(-(-max_model_len // PAGE_SIZE)))
        cache = PagedKVCache(
            num_pages=len(self._pages),
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=PAGE_SIZE,
            head_dim=spec.head_dim,
            dtype=self._model.dtype,
            device=device,
        )
        self._runner = ModelRunner(self._model, cache, 1, max_model_len)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens after `prompt`."""
        sampling = SamplingParams(max_tokens=count, seed=0, temperature=0.0)
        row = Row(0, 0, prompt, self._pages, 0, SlotInit(sampling, prompt, []))
        output = [self._drawn(row)]
        while len(output) < count:
            start = len(prompt) + len(output) - 1
            output.append(self._drawn(Row(0, start, output[-1:], (), len(output))))
        return output

    def _drawn(self, row: Row) -> int:
        (sample,) = self._runner.launch(Batch((row,))).result().samples
        assert isinstance(sample, Sample), sample
        return sample.token_id

    def shortfalls(self, answer: Answer) -> list[float]:
        """Of each served token: by how much its log probability is below the best one's, given the
        tokens before it. 0 where it is the best."""
        tokens = [*answer.prompt, *answer.output]
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        row = Row(
            0, 0, tokens[:-1], self._pages, None, SlotInit(sampling, tokens[:-1], []),
            prompt_logprobs=1, next_ids=tokens[1:],
        )  # fmt: skip
        result = self._runner.launch(Batch((row,))).result()
        scores = result.prompt_logprobs[0][len(answer.prompt) - 1 :]
        assert len(scores) == len(answer.output)
        return [score.top[0][1] - score.logprob for score in scores]
