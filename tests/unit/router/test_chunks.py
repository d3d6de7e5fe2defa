"""Streamed chunks: the spliced ones are those that would have been encoded whole."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import SamplingParams, TokenLogprob
from router.generation import Generation
from router.prepared import ChoiceSpec, Prepared
from router.protocol.chunks import _MARK, OpenAIChunks
from router.protocol.requests import ChatRequest, CompletionRequest, StreamOptions
from router.protocol.responses import Bodies, ChatBodies, CompletionBodies, Head
from router.sse import data_line
from router.text_stream import Delta, Finish, TextOptions, TokenRecord
from router.tokens import TextCodec

USED = SimpleNamespace(prompt_tokens=3, completion_tokens=5, cached_tokens=1)


def bodies(codec: TextCodec, *, chat: bool, model: str = "m") -> Bodies:
    head = Head("id", 1, model, frozenset({2}))
    spec = ChoiceSpec([5, 6], SamplingParams(max_tokens=9, seed=1), TextOptions())
    prepared = Prepared((spec,), 1, () if chat else ("echo",))
    if chat:
        return ChatBodies(head, codec, ChatRequest(messages=[], logprobs=True), prepared)
    request = CompletionRequest(prompt="echo", logprobs=0)
    return CompletionBodies(head, codec, request, prepared)


def chunks(of: Bodies, **options: bool) -> OpenAIChunks:
    return OpenAIChunks(of, cast(Generation, USED), StreamOptions(**options))


def encoded(of: Bodies, delta: Delta, *, first: bool) -> bytes:
    return data_line(of.head.body(of.chunk_kind, [of.chunk_choice(delta, first=first)]))


@pytest.mark.parametrize("chat", [False, True])
@given(
    texts=st.lists(st.text(min_size=1), min_size=1, max_size=4), model=st.text() | st.just(_MARK)
)
def test_a_spliced_chunk_is_the_encoded_one(
    codec: TextCodec, chat: bool, texts: list[str], model: str
) -> None:
    of = bodies(codec, chat=chat, model=model)
    written = chunks(of)
    for i, text in enumerate([*texts, _MARK]):
        expected = encoded(of, Delta(0, text), first=i == 0)
        assert written.lines([Delta(0, text)]) == expected
    end = Delta(0, "end", finish=Finish.STOP, matched=7)
    assert written.lines([end]) == encoded(of, end, first=False)


def test_choices_begin_each_for_itself_and_a_batch_is_one_write(codec: TextCodec) -> None:
    of = bodies(codec, chat=True)
    lines = chunks(of).lines([Delta(0, "a"), Delta(1, "b"), Delta(0, "c"), Delta(1, "")])
    found = [json.loads(line.removeprefix(b"data: ")) for line in lines.split(b"\n\n")[:-1]]
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"]) for c in found]
    assert deltas == [
        (0, {"role": "assistant", "content": "a"}),
        (1, {"role": "assistant", "content": "b"}),
        (0, {"content": "c"}),
    ]


def test_logprobs_wait_for_the_text_that_they_become_a_part_of(codec: TextCodec) -> None:
    of = bodies(codec, chat=False)
    records = [TokenRecord(40 + i, TokenLogprob(-1.0), 0) for i in range(3)]
    written = chunks(of)
    written.lines([Delta(0, "a")])
    assert written.lines([Delta(0, "", logprobs=records[:1])]) == b""
    assert written.lines([Delta(0, "", logprobs=records[1:2])]) == b""
    whole = Delta(0, "b", logprobs=records)
    assert written.lines([Delta(0, "b", logprobs=records[2:])]) == encoded(of, whole, first=False)
    plain = Delta(0, "c")
    assert written.lines([plain]) == encoded(of, plain, first=False)


def test_usage_comes_where_it_was_asked_for(codec: TextCodec) -> None:
    def last_object(lines: bytes) -> Any:
        return json.loads(lines.removeprefix(b"data: "))

    of = bodies(codec, chat=False)
    assert chunks(of).last() == b""
    assert last_object(chunks(of, include_usage=True).last())["choices"] == []
    running = chunks(of, include_usage=True, continuous_usage_stats=True)
    for text in ("a", "b"):
        assert last_object(running.lines([Delta(0, text)]))["usage"]["total_tokens"] == 8
