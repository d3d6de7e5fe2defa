"""Text while it comes: whole characters only, and together the text of all tokens."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.byte_tokens import ByteDetokenizer
from router.detokenizer import (
    BROKEN,
    MAX_WINDOW,
    StopMatcher,
    WindowDetokenizer,
    make_detokenizer,
)
from router.tokens import TextCodec, load_codec
from tests.tiny_models import VOCAB_SIZE

TEXTS = st.text(
    st.sampled_from("ab é€ß中文字 한글 👍🏽👨‍👩‍👧🇩🇪 \n\ufffd\u200d") | st.characters(codec="utf-8"),
    max_size=40,
)


def pieces(codec: TextCodec, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    """What the table gives; the window, which serves all other vocabularies, gives the same."""
    detokenizer = make_detokenizer(codec, skip_special_tokens=skip_special_tokens)
    assert isinstance(detokenizer, ByteDetokenizer)
    parts = [*(detokenizer.feed(id_) for id_ in ids), detokenizer.flush()]
    window = WindowDetokenizer(codec, skip_special_tokens=skip_special_tokens)
    assert "".join([*(window.feed(id_) for id_ in ids), window.flush()]) == "".join(parts)
    return parts


@given(text=TEXTS)
@settings(deadline=None)
def test_text_comes_back_in_whole_characters(codec: TextCodec, text: str) -> None:
    parts = pieces(codec, codec.encode_now(text))
    assert "".join(parts) == text
    if BROKEN not in text:
        assert not any(BROKEN in part for part in parts)


@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=60), skip=st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_tokens_give_the_text_of_the_whole(
    codec: TextCodec, ids: list[int], skip: bool
) -> None:
    whole = codec.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(codec, ids, skip)) == whole


@given(text=TEXTS, ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(deadline=None, max_examples=60)
def test_the_default_models_tokenizer_too(default_folder: Path, text: str, ids: list[int]) -> None:
    codec = _default_codec(default_folder)
    for tokens in (ids, codec.encode_now(text)):  # its vocabulary lacks some bytes: text may differ
        assert "".join(pieces(codec, tokens)) == codec.decode(tokens, skip_special_tokens=True)


_codecs: dict[Path, TextCodec] = {}


def _default_codec(folder: Path) -> TextCodec:
    if folder not in _codecs:
        _codecs[folder] = load_codec(folder)
    return _codecs[folder]


def test_an_emoji_comes_with_its_last_byte(codec: TextCodec) -> None:
    ids = codec.encode_now("👍")
    assert len(ids) == 4
    assert pieces(codec, ids) == ["", "", "", "👍", ""]


@pytest.mark.parametrize("unit", [b"\x80", b"\xe2", b"\xf0\x9f", b"\xe2\x82"])
def test_long_runs_of_broken_bytes_stay_exact_and_cheap(codec: TextCodec, unit: bytes) -> None:
    token_of = {codec.token_bytes(id_): id_ for id_ in range(3, 259)}
    ids = [token_of[bytes([byte])] for byte in unit] * 300
    detokenizer = WindowDetokenizer(codec)
    text = ""
    for id_ in ids:
        text += detokenizer.feed(id_)
        assert len(detokenizer._window) <= MAX_WINDOW + 16
    assert text + detokenizer.flush() == codec.decode(ids) == "".join(pieces(codec, ids))


def test_ids_that_no_vocabulary_has_read_nothing(codec: TextCodec) -> None:
    detokenizer = make_detokenizer(codec)
    assert [detokenizer.feed(id_) for id_ in (-1, 10**6)] == ["", ""]


# ---------------------------------------------------------------- stop strings


def feed_all(matcher: StopMatcher, parts: list[str]) -> str:
    out = ""
    for part in parts:
        out += matcher.feed(part)
        if matcher.matched is not None:
            return out
    return out + matcher.flush()


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    include=st.booleans(),
)
def test_stops_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    matcher = StopMatcher(stops, include=include)
    out = feed_all(matcher, parts)
    # Character by character is the reference: the stop that is complete first wins.
    ends = [i for i in range(1, len(text) + 1) if any(text[:i].endswith(s) for s in stops)]
    if not ends:
        assert (out, matcher.matched) == (text, None)
        return
    matched = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
    assert matcher.matched == matched
    assert out == text[: ends[0] if include else ends[0] - len(matched)]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(part) for part in ("a E", "N", "X", "EN")] == ["a ", "", "ENX", ""]
    assert matcher.flush() == "EN"
