"""The keys of a job's pages."""

import msgspec

from common.kv_cache.hashing import PageHashes, key, root
from router.page_keys import Lineage, PageKeys
from tests.unit.router.desk import FINGERPRINT

LINEAGE = Lineage(FINGERPRINT, "w1")


def expected(tokens: list[int], num_pages: int, weight_version: str = "w1") -> list[int]:
    hashes = PageHashes(root(FINGERPRINT, weight_version, "digest"), FINGERPRINT.page_size)
    return [key(page) for page in hashes.upto(num_pages, tokens)]


def test_they_are_those_that_nodes_publish_but_for_the_last_tokens_page() -> None:
    size = FINGERPRINT.page_size
    for num_tokens, num_pages in (
        (1, 0),
        (size, 0),
        (size + 1, 1),
        (3 * size, 2),
        (3 * size + 1, 3),
    ):
        tokens = list(range(num_tokens))
        assert PageKeys("digest").of_prefix(LINEAGE, tokens) == expected(tokens, num_pages)


def test_a_replay_adds_to_them() -> None:
    keys, tokens = PageKeys("digest"), list(range(40))
    first = list(keys.of_prefix(LINEAGE, tokens))
    longer = tokens + list(range(100, 150))
    assert keys.of_prefix(LINEAGE, longer) == expected(longer, 5)
    assert keys.of_prefix(LINEAGE, longer)[: len(first)] == first
    assert keys.of_prefix(LINEAGE, tokens) == first, "asked with fewer tokens again"


def test_each_model_version_and_adapter_has_its_own() -> None:
    tokens = list(range(40))
    other = Lineage(msgspec.structs.replace(FINGERPRINT, model="other"), "w1")
    keys = PageKeys("digest")
    found = [
        tuple(keys.of_prefix(LINEAGE, tokens)),
        tuple(keys.of_prefix(Lineage(FINGERPRINT, "w2"), tokens)),
        tuple(keys.of_prefix(other, tokens)),
        tuple(PageKeys().of_prefix(LINEAGE, tokens)),
    ]
    assert len(set(found)) == 4


def test_pages_of_another_size_are_cut_anew() -> None:
    small = Lineage(msgspec.structs.replace(FINGERPRINT, page_size=4), "")
    keys, tokens = PageKeys(), list(range(17))
    assert len(keys.of_prefix(small, tokens)) == 4
    assert len(keys.of_prefix(LINEAGE, tokens)) == 1
