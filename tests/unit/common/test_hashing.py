"""Page hashes: equal exactly where tokens, their past and the weights are equal."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.hashing import HASH_BYTES, PageHashes, key, root
from tests.standin import FINGERPRINT

ROOT = root(FINGERPRINT)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def hashes(tokens: list[int], base: bytes = ROOT, size: int = 4) -> list[bytes]:
    return PageHashes(base, size).upto(len(tokens) // size, tokens)


@given(TOKENS, TOKENS)
def test_two_chains_agree_as_far_as_their_tokens_do(left: list[int], right: list[int]) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    ours, theirs = hashes(left), hashes(right)
    assert ours[: common // 4] == theirs[: common // 4]
    assert not set(ours[common // 4 :]) & set(theirs[common // 4 :])


@given(TOKENS, st.data())
def test_a_chain_that_grows_step_by_step_is_the_same(
    tokens: list[int], data: st.DataObject
) -> None:
    chain = PageHashes(ROOT, 4)
    known = 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        found = chain.upto(known // 4, tokens[:known])
        assert found == hashes(tokens[:known])
    assert chain.upto(0, []) == []


def test_tokens_that_do_not_fill_a_page_have_no_hash() -> None:
    with pytest.raises(IndexError, match="7 tokens do not fill 2 pages of 4"):
        PageHashes(ROOT, 4).upto(2, list(range(7)))


@pytest.mark.parametrize(
    "other",
    [
        root(msgspec.structs.replace(FINGERPRINT, model="n")),
        root(msgspec.structs.replace(FINGERPRINT, dtype="bfloat16")),
        root(FINGERPRINT, weight_version="2"),
        root(FINGERPRINT, adapter_digest="2"),
    ],
    ids=["model", "dtype", "weights", "adapter"],
)
def test_other_weights_share_nothing(other: bytes) -> None:
    tokens = list(range(12))
    assert not set(hashes(tokens)) & set(hashes(tokens, other))


def test_sizes() -> None:
    (first,) = hashes([1, 2, 3, 4])
    assert len(first) == HASH_BYTES
    assert 0 <= key(first) < 2**64
