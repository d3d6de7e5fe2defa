"""Response bodies of OpenAI's APIs, as plain objects for the JSON encoder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from router.generation import ChoiceResult, Generation
from router.text_stream import Delta, TokenRecord
from router.tokens import TextCodec

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all bodies of a request share."""

    id: str
    created: int
    model: str
    eos_token_ids: frozenset[int]

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def stop_reason(self, matched: str | int | None) -> str | int | None:
        """vLLM's extra field: what stopped it, but null for the model's own end."""
        return None if matched in self.eos_token_ids else matched


def usage(generation: Generation) -> dict[str, Any]:
    """Tokens so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(generation.cached_tokens, prompt)},
    }


class CompletionBodies:
    """/v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, head: Head, codec: TextCodec, echo: Sequence[str] = (), n: int = 1) -> None:
        self.head = head
        self._codec = codec
        self._echo = {i * n + j: text for i, text in enumerate(echo) for j in range(n)}

    def choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echo.get(index, "") + result.text,
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": result.finish.value,
            "stop_reason": self.head.stop_reason(result.matched),
        }

    def chunk_choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        echo = self._echo.get(delta.choice, "") if first else ""
        return {
            "index": delta.choice,
            "text": echo + delta.text,
            "logprobs": self._logprobs(delta.logprobs, len(self._echo.get(delta.choice, ""))),
            "finish_reason": delta.finish.value if delta.finish else None,
            "stop_reason": self.head.stop_reason(delta.matched),
        }

    def _logprobs(self, records: Sequence[TokenRecord], shift: int = 0) -> dict[str, Any] | None:
        if not records:
            return None
        return {
            "tokens": [self._codec.decode([record.token_id]) for record in records],
            "token_logprobs": [_finite(record.logprob.logprob) for record in records],
            "top_logprobs": [self._top(record) for record in records],
            "text_offset": [record.offset + shift for record in records],
        }

    def _top(self, record: TokenRecord) -> dict[str, float]:
        pairs = (*record.logprob.top, (record.token_id, record.logprob.logprob))
        return {self._codec.decode([token_id]): _finite(value) for token_id, value in pairs}


class ChatBodies:
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, codec: TextCodec) -> None:
        self.head = head
        self._codec = codec

    def choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text},
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": result.finish.value,
            "stop_reason": self.head.stop_reason(result.matched),
        }

    def chunk_choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text or first else {}
        return {
            "index": delta.choice,
            "delta": {"role": "assistant", **content} if first else content,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish.value if delta.finish else None,
            "stop_reason": self.head.stop_reason(delta.matched),
        }

    def _logprobs(self, records: Iterable[TokenRecord]) -> dict[str, Any] | None:
        content = [
            {
                **self._token(record.token_id, record.logprob.logprob),
                "top_logprobs": [self._token(*pair) for pair in record.logprob.top],
            }
            for record in records
        ]
        return {"content": content} if content else None

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        return {
            "token": self._codec.decode([token_id]),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }


Bodies = CompletionBodies | ChatBodies


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
