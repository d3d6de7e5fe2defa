"""Response bodies of SGLang's /generate."""

from collections.abc import Sequence
from typing import Any

from router.generation import ChoiceResult, Generation
from router.protocol.responses import LOWEST_LOGPROB
from router.sse import data_line
from router.text_stream import Delta, Finish, TokenRecord
from router.tokens import TextCodec


class GenerateBodies:
    """Bodies of one /generate request."""

    def __init__(self, codec: TextCodec, *, logprobs: bool, top: bool, logprob_texts: bool) -> None:
        self._codec = codec
        self._logprobs = logprobs
        self._top = top
        self._texts = logprob_texts

    def body(
        self, generation: Generation, rid: str, choice: int, result: ChoiceResult, *, ended: bool
    ) -> dict[str, Any]:
        """A choice so far: text and ids are cumulative."""
        prompt_tokens, completion_tokens, cached_tokens = generation.tokens_of(choice)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": _finish_reason(result) if ended else None,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [self._token(record) for record in result.logprobs]
            if self._top:
                meta["output_top_logprobs"] = [self._top_of(record) for record in result.logprobs]
        return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta}

    def _token(self, record: TokenRecord) -> list[Any]:
        return self._entry(record.token_id, record.logprob.logprob)

    def _top_of(self, record: TokenRecord) -> list[list[Any]]:
        return [self._entry(token_id, value) for token_id, value in record.logprob.top]

    def _entry(self, token_id: int, logprob: float) -> list[Any]:
        text = self._codec.decode([token_id]) if self._texts else None
        return [max(logprob, LOWEST_LOGPROB), token_id, text]


class GenerateChunks:
    """A streamed answer: each choice's text so far, whenever it has grown."""

    def __init__(
        self, bodies: GenerateBodies, generation: Generation, rids: Sequence[str], *, single: bool
    ) -> None:
        self._bodies = bodies
        self._generation = generation
        self._rids = rids
        self._single = single
        self._results = [ChoiceResult() for _ in rids]

    def lines(self, batch: Sequence[Delta]) -> bytes:
        """Of each choice that has grown, one."""
        chunks: dict[int, dict[str, Any]] = {}
        for delta in batch:
            choice, ended = delta.choice, delta.finish is not None
            result = self._results[choice]
            result.add(delta)
            if not delta.text and not ended:
                continue
            chunk = self._bodies.body(
                self._generation, self._rids[choice], choice, result, ended=ended
            )
            chunks[choice] = chunk if self._single else {**chunk, "index": choice}
        return b"".join(map(data_line, chunks.values()))

    def last(self) -> bytes:
        """Nothing: the chunks themselves say how much it was."""
        return b""


def _finish_reason(result: ChoiceResult) -> dict[str, Any]:
    match result.finish:
        case Finish.STOP:
            return {"type": "stop", "matched": result.matched}
        case Finish.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        case Finish.ABORT:
            return {"type": "abort", "message": result.message}
