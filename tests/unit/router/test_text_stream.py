"""A choice from tokens to what the client gets of it."""

from common.messages import StopReason, TokenLogprob
from router.requests import NewTokens
from router.text_stream import Delta, Finish, TextOptions, TextStream
from router.tokens import TextCodec


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
