"""Response bodies of OpenAI's APIs, as plain objects for the JSON encoder."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from common.messages import TokenLogprob
from router.generation import ChoiceResult, Generation
from router.prepared import Prepared
from router.protocol.prompt_scores import TokenTexts, as_openai, as_vllm, finite
from router.protocol.requests import ChatRequest, CompletionRequest
from router.text_stream import Delta, TokenRecord
from router.tokens import TextCodec
from router.tools.calls import CallDelta


class Head(msgspec.Struct, frozen=True):
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

    def __init__(
        self, head: Head, codec: TextCodec, request: CompletionRequest, prepared: Prepared
    ) -> None:
        self.head = head
        self._texts = TokenTexts(codec)
        self._logprobs_wanted = request.logprobs
        self._scores_wanted = request.prompt_logprobs is not None
        per_prompt = prepared.num_kept or prepared.n
        self._prompts = [
            choice.prompt_ids
            for choice in prepared.choices[:: prepared.n]
            for _ in range(per_prompt)
        ]
        self._echo = [text for text in prepared.prompt_texts for _ in range(per_prompt)]

    def choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        echo = self._echo[index] if self._echo else ""
        scores = result.prompt_logprobs
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + result.text,
            "logprobs": self._logprobs(result.logprobs, index, scores if self._echo else None),
            "finish_reason": result.finish.value,
            "stop_reason": self.head.stop_reason(result.matched),
        }
        if self._scores_wanted:
            choice["prompt_logprobs"] = as_vllm(self._prompts[index], scores, self._texts)
        return choice

    def chunk_choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        echo = self._echo[delta.choice] if self._echo and first else ""
        return {
            "index": delta.choice,
            "text": echo + delta.text,
            "logprobs": self._logprobs(delta.logprobs, delta.choice, delta.prompt_logprobs),
            "finish_reason": delta.finish.value if delta.finish else None,
            "stop_reason": self.head.stop_reason(delta.matched),
        }

    def extras(self, _results: Sequence[ChoiceResult]) -> dict[str, Any]:
        """What the answer holds beside its choices."""
        return {}

    def _logprobs(
        self,
        records: Sequence[TokenRecord],
        index: int,
        scores: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any] | None:
        """Of the prompt, where `scores` are given, and of output tokens."""
        num_top = self._logprobs_wanted
        if num_top is None or not (records or scores is not None):
            return None
        echo = self._echo[index] if self._echo else ""
        outputs: dict[str, list[Any]] = {
            "tokens": [self._texts[record.token_id] for record in records],
            "token_logprobs": [finite(record.logprob.logprob) for record in records],
            "top_logprobs": [self._top(record) for record in records],
            "text_offset": [record.offset + len(echo) for record in records],
        }
        if scores is None:
            return outputs
        prompt = as_openai(self._prompts[index], scores, num_top, echo, self._texts)
        return {name: prompt[name] + values for name, values in outputs.items()}

    def _top(self, record: TokenRecord) -> dict[str, float]:
        pairs = (*record.logprob.top, (record.token_id, record.logprob.logprob))
        return {self._texts[token_id]: finite(value) for token_id, value in pairs}


class ChatBodies:
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, head: Head, codec: TextCodec, request: ChatRequest, prepared: Prepared
    ) -> None:
        self.head = head
        self._codec = codec
        self._logprobs_wanted = bool(request.logprobs)
        self._texts = TokenTexts(codec)
        self._scores_wanted = request.prompt_logprobs is not None
        self._prompt_ids = prepared.choices[0].prompt_ids

    def choice(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.calls:
            message["content"] = result.text or None
            message["tool_calls"] = [_call(call) for call in result.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": result.finish.value,
            "stop_reason": self.head.stop_reason(result.matched),
        }

    def chunk_choice(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.text or first:
            said["content"] = delta.text or (None if delta.calls else "")
        if delta.calls:
            said["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
        return {
            "index": delta.choice,
            "delta": said,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish.value if delta.finish else None,
            "stop_reason": self.head.stop_reason(delta.matched),
        }

    def extras(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        """What the answer holds beside its choices: as in vLLM the prompt's logprobs, once."""
        if not self._scores_wanted:
            return {}
        scores = results[0].prompt_logprobs
        return {"prompt_logprobs": as_vllm(self._prompt_ids, scores, self._texts)}

    def _logprobs(self, records: Iterable[TokenRecord]) -> dict[str, Any] | None:
        if not self._logprobs_wanted:
            return None
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
            "token": self._texts[token_id],
            "logprob": finite(logprob),
            "bytes": list(raw),
        }


Bodies = CompletionBodies | ChatBodies


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or what is new of one: only what begins it has a name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
