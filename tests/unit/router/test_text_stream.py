"""A choice from tokens to what the client gets of it."""

from common.messages import StopReason, TokenLogprob
from router.requests import NewTokens
from router.text_stream import Delta, Finish, TextOptions, TextStream
from router.tokens import TextCodec
from router.tools.formats import Hermes
from router.tools.options import CallOptions


def stream(codec: TextCodec, **options: object) -> TextStream:
    return TextStream(0, codec, TextOptions(**options))  # type: ignore[arg-type]


def feed(
    text: TextStream, codec: TextCodec, string: str, finish: StopReason | None = None
) -> Delta:
    return text.feed(NewTokens(tuple(codec.encode_now(string)), None, finish))


def test_a_stop_string_inside_a_batch_cuts_text_and_count(codec: TextCodec) -> None:
    text = stream(codec, stops=("X",))
    delta = feed(text, codec, "abXcd")
    assert (delta.text, delta.finish, delta.matched) == ("ab", Finish.STOP, "X")
    assert text.num_tokens == 3
    assert len(delta.token_ids) == 3


def test_min_tokens_shields_from_stop_strings(codec: TextCodec) -> None:
    text = stream(codec, stops=("X",), min_tokens=3)
    assert feed(text, codec, "aXb").text == "aXb"
    assert feed(text, codec, "cX").text == "c"


def test_a_stop_token_has_no_text_unless_asked(codec: TextCodec) -> None:
    (id_,) = codec.encode_now("Z")
    delta = feed(stream(codec), codec, "aZ", StopReason.STOP)
    assert (delta.text, delta.matched, len(delta.token_ids)) == ("a", id_, 2)
    assert feed(stream(codec, include_stop=True), codec, "aZ", StopReason.STOP).text == "aZ"


def test_held_text_comes_out_at_the_end(codec: TextCodec) -> None:
    text = stream(codec, stops=("END",))
    assert feed(text, codec, "aE").text == "a"
    assert feed(text, codec, "N", StopReason.LENGTH).text == "EN"
    text = stream(codec, stops=("END",))
    feed(text, codec, "aE")
    assert text.abort("why").text == "E"


def test_the_end_may_come_without_tokens(codec: TextCodec) -> None:
    text = stream(codec)
    feed(text, codec, "a")
    delta = text.feed(NewTokens((), None, StopReason.LENGTH))
    assert (delta.text, delta.finish) == ("", Finish.LENGTH)


def test_special_tokens_are_skipped_or_shown(codec: TextCodec) -> None:
    ids = (1, *codec.encode_now("a"))
    assert stream(codec).feed(NewTokens(ids)).text == "a"
    shown = stream(codec, skip_special_tokens=False).feed(NewTokens(ids))
    assert shown.text == "<|im_start|>a"


def test_logprobs_know_where_their_text_begins(codec: TextCodec) -> None:
    ids = tuple(codec.encode_now("xy👍z"))
    logprobs = tuple(TokenLogprob(-float(i)) for i in range(len(ids)))
    delta = stream(codec).feed(NewTokens(ids, logprobs))
    assert [record.offset for record in delta.logprobs] == [0, 1, 2, 2, 2, 2, 3]
    assert [record.token_id for record in delta.logprobs] == list(ids)


# ---------------------------------------------------------------- calls of functions


def calls(**options: object) -> CallOptions:
    settings = {"parser": Hermes, "names": frozenset({"add"}), "make_id": lambda: "id"}
    return CallOptions(**(settings | options))  # type: ignore[arg-type]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_calls_are_taken_out_of_the_text(codec: TextCodec) -> None:
    text = stream(codec, calls=calls())
    first = feed(text, codec, f"Look: {CALL[:50]}")
    assert (first.text, first.calls[0].name) == ("Look:", "add")
    last = feed(text, codec, CALL[50:] + "Z", StopReason.STOP)
    assert (last.text, last.finish) == ("", Finish.TOOL_CALLS)


def test_only_an_answer_that_ended_by_itself_says_that_it_called(codec: TextCodec) -> None:
    cut_off = feed(stream(codec, calls=calls()), codec, CALL[:50], StopReason.LENGTH)
    assert (cut_off.finish, cut_off.calls[0].arguments) == (Finish.LENGTH, '{"a": 1}')
    no_call = feed(stream(codec, calls=calls()), codec, "<tool_call>no Z", StopReason.STOP)
    assert (no_call.finish, no_call.text) == (Finish.STOP, "<tool_call>no ")
    named = feed(stream(codec, calls=calls(by_name=True)), codec, CALL + "Z", StopReason.STOP)
    assert (named.finish, len(named.calls)) == (Finish.STOP, 1)
    stopped = feed(stream(codec, calls=calls(), stops=("END",)), codec, CALL + "END, more")
    assert (stopped.finish, stopped.text) == (Finish.TOOL_CALLS, "")
    text = stream(codec, calls=calls())
    feed(text, codec, "Look: <tool_")
    aborted = text.abort("why")
    assert (aborted.finish, aborted.text) == (Finish.ABORT, " <tool_")


def test_one_call_may_be_all_that_is_wanted(codec: TextCodec) -> None:
    text = stream(codec, calls=calls(max_calls=1))
    delta = feed(text, codec, CALL + CALL)
    assert (delta.finish, len(delta.calls), text.finish) == (Finish.TOOL_CALLS, 1, delta.finish)
    limit = feed(stream(codec, calls=calls(max_calls=1)), codec, CALL, StopReason.LENGTH)
    assert limit.finish is Finish.TOOL_CALLS


def test_a_special_token_that_marks_calls_reaches_the_parser_alone(codec: TextCodec) -> None:
    payload = codec.encode_now('{"name": "add"}')
    hidden = stream(codec, calls=calls(markers={1: "<tool_call>"}))
    delta = hidden.feed(
        NewTokens((*codec.encode_now("a"), 0, 1, *payload), None, StopReason.LENGTH)
    )
    assert (delta.text, [call.name for call in delta.calls]) == ("a", ["add"])
    shown = stream(codec, calls=calls(markers={1: "<tool_call>"}), skip_special_tokens=False)
    delta = shown.feed(NewTokens((1, *payload), None, StopReason.LENGTH))
    assert (delta.text, delta.calls) == ('<|im_start|>{"name": "add"}', [])
