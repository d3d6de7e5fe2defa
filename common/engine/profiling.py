"""The largest batch that a node may have to compute, to learn how much memory it works with."""

from common.messages import SamplingParams
from common.plan import Batch, Row, SlotInit

PROFILED_PAGES = 1
"""What a pool must hold to run it: what is in the pages does not matter, so all rows share one."""
NUM_LOGPROBS = 20
"""As many as an API's client may ask for."""

_SAMPLING = SamplingParams(
    max_tokens=2, seed=0, temperature=1.0, top_p=0.9, logprobs=NUM_LOGPROBS,
    repetition_penalty=1.1, frequency_penalty=0.1,
)  # fmt: skip
"""What takes most: penalties keep a vector over the vocabulary, a nucleus looks at all of it."""


def largest_batch(
    *, chunk_size: int, max_running_requests: int, max_model_len: int, page_size: int
) -> Batch:
    """As many prompt tokens as a step takes, then one token of every other slot, all at the very
    end of a context as long as the model allows, and all drawing.

    Every page of every slot is page 0. One chunk has its prompt scored as well.
    """
    pages = [0] * -(-max_model_len // page_size)
    init = SlotInit(_SAMPLING, [0] * max_model_len, [])
    rows: list[Row] = []
    tokens_left = chunk_size
    for slot in range(max_running_requests):
        count = max(1, min(tokens_left, max_model_len))
        tokens_left -= count
        scores = slot == 0
        tokens = [0] * count
        rows.append(
            Row(
                slot=slot,
                start=max_model_len - count,
                token_ids=tokens,
                new_pages=pages,
                sample_index=0,
                init=init,
                prompt_logprobs=NUM_LOGPROBS if scores else None,
                next_ids=tokens if scores else (),
            )
        )
    return Batch(tuple(rows))
