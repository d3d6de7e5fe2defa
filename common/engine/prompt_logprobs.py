"""Log probabilities of prompt tokens: what the model thought of each, given those before it.

From raw logits, like a drawn token's. Logits of a whole chunk would be its tokens times the
vocabulary, 300 MB for 512 tokens of 150,000 entries in float32; so they are made and used up in
slices of `SLICE_TOKENS`. A slice holds at most three copies at once: the product, its float32 form
and what `logsumexp` takes, 12 bytes for each of SLICE_TOKENS x vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.messages import TokenLogprob
from common.plan import Row

SLICE_TOKENS = 64
"""Logits held at once; enough that the product reads the head's weights rarely."""


def prompt_logprobs(
    rows: Sequence[Row], hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """What each row asked for; empty when none of them did.

    `hidden` [tokens, hidden_size] are the last layer's outputs of all rows, one after the other;
    `head` makes logits of some of them.
    """
    if all(row.prompt_logprobs is None for row in rows):
        return ()
    answers: list[list[TokenLogprob]] = [[] for _ in rows]
    for number, next_ids, part in _slices(rows, hidden):
        num_top = rows[number].prompt_logprobs
        assert num_top is not None
        answers[number] += _of_slice(head(part).float(), next_ids, num_top)
    return tuple(tuple(answer) for answer in answers)


def join_products(rows: Sequence[Row], hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """What a rank does that scores nothing: its part of each product of `prompt_logprobs`."""
    for _, _, part in _slices(rows, hidden):
        head(part)


def _slices(rows: Sequence[Row], hidden: Tensor) -> Iterator[tuple[int, Sequence[int], Tensor]]:
    """Number of a row, tokens to be scored, and the part of `hidden` that scores them."""
    end = 0
    for number, row in enumerate(rows):
        begin, end = end, end + len(row.token_ids)
        if row.prompt_logprobs is None:
            continue
        for first in range(0, len(row.next_ids), SLICE_TOKENS):
            next_ids = row.next_ids[first : first + SLICE_TOKENS]
            yield number, next_ids, hidden[begin + first : begin + first + len(next_ids)]


def _of_slice(logits: Tensor, next_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """`logits` [tokens, vocab_size] float32 tell what follows each token; `next_ids` did."""
    ids = torch.tensor(next_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1)
    chosen = logits.gather(-1, ids)
    ranks = (logits > chosen).sum(dim=-1) + 1
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    values, tops = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprob(logprob, tuple(zip(top_ids, top_values, strict=True)), rank)
        for logprob, rank, top_ids, top_values in zip(
            (chosen - normaliser).squeeze(-1).tolist(),
            ranks.tolist(),
            tops.tolist(),
            (values - normaliser).tolist(),
            strict=True,
        )
    ]
