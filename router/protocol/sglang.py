"""Response bodies of SGLang's /generate."""

from typing import Any

from router.generation import ChoiceResult, Generation
from router.protocol.responses import LOWEST_LOGPROB
from router.text_stream import Finish, TokenRecord
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


def _finish_reason(result: ChoiceResult) -> dict[str, Any]:
    match result.finish:
        case Finish.STOP:
            return {"type": "stop", "matched": result.matched}
        case Finish.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        case Finish.ABORT:
            return {"type": "abort", "message": result.message}
