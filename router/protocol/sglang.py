"""Response bodies of SGLang's /generate."""

from collections.abc import Sequence
from typing import Any

from router.generation import ChoiceResult, Generation
from router.prepared import Prepared
from router.protocol.prompt_scores import TokenTexts, as_sglang, finite
from router.protocol.sglang_wishes import LogprobWish
from router.sse import data_line
from router.text_stream import Delta, Finish, TokenRecord
from router.tokens import TextCodec


class GenerateBodies:
    """Bodies of one /generate request."""

    def __init__(
        self,
        codec: TextCodec,
        prepared: Prepared,
        wishes: Sequence[LogprobWish],
        *,
        logprob_texts: bool,
    ) -> None:
        """`wishes` of each prompt."""
        self._prepared = prepared
        self._wishes = wishes
        self._texts = TokenTexts(codec) if logprob_texts else None

    def body(
        self,
        generation: Generation,
        rid: str,
        choice: int,
        result: ChoiceResult,
        *,
        ended: bool,
        with_prompt: bool = True,
    ) -> dict[str, Any]:
        """A choice so far: text and ids are cumulative. `with_prompt`: and what was asked of the
        prompt's tokens."""
        prompt_tokens, completion_tokens, cached_tokens = generation.tokens_of(choice)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": _finish_reason(result) if ended else None,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
        }
        wish = self._wishes[choice // self._prepared.n]
        if wish.wanted:
            meta |= self._logprobs(wish, choice, result, with_prompt=with_prompt)
        return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta}

    def _logprobs(
        self, wish: LogprobWish, choice: int, result: ChoiceResult, *, with_prompt: bool
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"input_token_logprobs": []}
        tops: Sequence[Any] = ()
        if wish.start is not None and with_prompt:
            prompt_ids, scores = self._prepared.choices[choice].prompt_ids, result.prompt_logprobs
            told["input_token_logprobs"], tops = as_sglang(
                prompt_ids, scores, wish.start, wish.num_top, self._texts
            )
        told["output_token_logprobs"] = [self._token(record) for record in result.logprobs]
        if wish.num_top:
            told["input_top_logprobs"] = tops
            told["output_top_logprobs"] = [self._top_of(record) for record in result.logprobs]
        return told

    def _token(self, record: TokenRecord) -> list[Any]:
        return self._entry(record.token_id, record.logprob.logprob)

    def _top_of(self, record: TokenRecord) -> list[list[Any]]:
        return [self._entry(token_id, value) for token_id, value in record.logprob.top]

    def _entry(self, token_id: int, logprob: float) -> list[Any]:
        text = self._texts[token_id] if self._texts is not None else None
        return [finite(logprob), token_id, text]


class GenerateChunks:
    """A streamed answer: each choice's text so far, whenever it has grown. What is told of the
    prompt, which may be much, comes with a choice's first chunk and with its last."""

    def __init__(
        self, bodies: GenerateBodies, generation: Generation, rids: Sequence[str], *, single: bool
    ) -> None:
        self._bodies = bodies
        self._generation = generation
        self._rids = rids
        self._single = single
        self._results = [ChoiceResult() for _ in rids]
        self._begun: set[int] = set()

    def lines(self, batch: Sequence[Delta]) -> bytes:
        """Of each choice that has grown, one."""
        chunks: dict[int, dict[str, Any]] = {}
        for delta in batch:
            choice, ended = delta.choice, delta.finish is not None
            result = self._results[choice]
            result.add(delta)
            if not delta.text and not ended:
                continue
            with_prompt = ended or choice not in self._begun
            self._begun.add(choice)
            chunk = self._bodies.body(
                self._generation,
                self._rids[choice],
                choice,
                result,
                ended=ended,
                with_prompt=with_prompt,
            )
            chunks[choice] = chunk if self._single else {**chunk, "index": choice}
        return b"".join(map(data_line, chunks.values()))

    def last(self) -> bytes:
        """Nothing: the chunks themselves say how much it was."""
        return b""


def _finish_reason(result: ChoiceResult) -> dict[str, Any]:
    match result.finish:
        case Finish.STOP | Finish.TOOL_CALLS:
            return {"type": "stop", "matched": result.matched}
        case Finish.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        case Finish.ABORT:
            return {"type": "abort", "message": result.message}
