"""A prompt's logprobs as each API tells them: a place for every prompt token, the first without.

Nodes tell of tokens 1, 2, ...; nothing comes before token 0, so it has no probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.messages import TokenLogprob
from router.detokenizer import make_detokenizer
from router.tokens import TextCodec

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """For JSON."""
    return max(logprob, LOWEST_LOGPROB)


@dataclass(slots=True)
class TokenTexts:
    """Texts of single tokens; a prompt's alternatives name the same few again and again."""

    codec: TextCodec
    _known: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self.codec.decode([token_id])
        return text


def as_vllm(
    prompt_ids: Sequence[int], scores: Sequence[TokenLogprob], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token by id the token itself, then the most probable."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts[token_id]}

    answer: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(prompt_ids[1:], scores, strict=True):
        places = {str(token_id): entry(token_id, score.logprob, score.rank)}
        for rank, (other, logprob) in enumerate(score.top, 1):
            places.setdefault(str(other), entry(other, logprob, rank))
        answer.append(places)
    return answer


def as_openai(
    prompt_ids: Sequence[int],
    scores: Sequence[TokenLogprob],
    num_top: int,
    echo: str,
    texts: TokenTexts,
) -> dict[str, list[Any]]:
    """The prompt's part of a completion's `logprobs`; `echo` is the prompt as it is echoed."""
    tops: list[dict[str, float] | None] = [None]
    for token_id, score in zip(prompt_ids[1:], scores, strict=True):
        pairs = (*score.top[:num_top], (token_id, score.logprob))
        tops.append({texts[id_]: finite(logprob) for id_, logprob in pairs})
    return {
        "tokens": [texts[token_id] for token_id in prompt_ids],
        "token_logprobs": [None, *(finite(score.logprob) for score in scores)],
        "top_logprobs": tops,
        "text_offset": _offsets(prompt_ids, echo, texts),
    }


def as_sglang(
    prompt_ids: Sequence[int],
    scores: Sequence[TokenLogprob],
    start: int,
    num_top: int,
    texts: TokenTexts | None,
) -> tuple[list[list[Any]], list[list[list[Any]] | None]]:
    """SGLang's `input_token_logprobs` and `input_top_logprobs` of the tokens from `start` on.

    The first of them has none there, wherever it stands. Without `texts` entries have no text.
    """

    def entry(token_id: int, logprob: float | None) -> list[Any]:
        text = None if texts is None else texts[token_id]
        return [None if logprob is None else finite(logprob), token_id, text]

    if start >= len(prompt_ids):
        return [], []
    tokens = [entry(prompt_ids[start], None)]
    tops: list[list[list[Any]] | None] = [None]
    for token_id, score in zip(prompt_ids[start + 1 :], scores[start:], strict=True):
        tokens.append(entry(token_id, score.logprob))
        tops.append([entry(*pair) for pair in score.top[:num_top]])
    return tokens, tops


def _offsets(prompt_ids: Sequence[int], echo: str, texts: TokenTexts) -> list[int]:
    """Where each token's text begins in `echo`; a token that was put before it has none there."""
    detokenizer = make_detokenizer(texts.codec, skip_special_tokens=False)
    offsets, place = [], 0
    for position, token_id in enumerate(prompt_ids):
        offsets.append(place)
        text = detokenizer.feed(token_id)
        if position == 0 and not echo.startswith(text):
            text = ""
        place += len(text)
    return offsets
