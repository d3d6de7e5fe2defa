"""Single situations of the page manager that the state machine would meet too seldom."""

from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.test_prefix_machine import request

PAGE = 4


def manager(num_pages: int) -> KVCacheManager:
    return KVCacheManager(num_pages, PAGE, lambda adapter: adapter.encode())


def test_pages_freed_without_proof_are_given_away_after_all_that_is_cached() -> None:
    kv = manager(6)
    doubted = request(1, [9] * 8)
    kv.admit(doubted, 8)
    kv.quarantine(doubted, "p")
    cached = request(2, [1] * 8)
    kv.admit(cached, 8)
    kv.publish(cached, 8)
    kv.release(cached)
    assert kv.free_quarantine("p", last=True) == 1
    first = request(3, [2] * 16)
    assert kv.admit(first, 16) == 0
    assert set(first.pages).isdisjoint({0, 1}), "what a late write may still touch goes last"
    assert kv.num_cached == 0
    kv.check([first])


def test_what_two_computed_at_once_is_kept_once_when_the_first_ends() -> None:
    kv = manager(8)
    one, two = request(1, [1] * 9), request(2, [1] * 9)
    for req in (one, two):
        assert kv.admit(req, 9) == 0
    for req in (one, two):
        kv.publish(req, 9)
    assert (kv.num_cached, kv.num_free) == (2, 2)
    kv.release(one)
    assert (kv.num_cached, kv.num_free) == (2, 5), "two's own pages are the cached ones now"
    third = request(3, [1] * 9)
    assert kv.admit(third, 9) == 8
    assert third.pages[:2] == two.pages[:2]
    kv.check([two, third])


def test_a_request_that_is_alone_grows_to_the_whole_pool_whatever_it_computed_twice() -> None:
    kv = manager(8)
    one, two = request(1, [1] * 13), request(2, [1] * 13)
    for req in (one, two):
        assert kv.admit(req, 13) == 0
    for req in (one, two):
        kv.publish(req, 13)
    kv.release(one)
    two.output_ids += [5] * 19
    assert kv.grow(two, 32) is not None
    assert len(two.pages) == 8
    kv.check([two])


def test_a_page_that_was_let_go_is_replaced_by_one_computed_since() -> None:
    """Content and name are the same; one of the two is free again."""
    kv = manager(8)
    one, two = request(1, [1] * 9), request(2, [1] * 9)
    kv.admit(one, 9)
    kv.admit(two, 9)
    kv.publish(one, 9)
    kv.release(one)
    kv.publish(two, 9)
    assert (kv.num_cached, kv.num_free) == (2, 5)
    kv.check([two])


def test_an_old_conversation_leaves_from_its_end_and_before_a_newer_one() -> None:
    kv = manager(8)
    for room, token in ((1, 1), (2, 2)):
        req = request(room, [token] * 12)
        kv.admit(req, 12)
        kv.publish(req, 12)
        kv.release(req)
    touched = request(3, [1] * 5)
    assert kv.admit(touched, 5) == 4  # the oldest page of all is in use once more
    kv.release(touched)
    big = request(4, [3] * 17)
    assert kv.admit(big, 17) == 0  # two are free, three must go
    found = [len(kv._match(request(9, [token] * 13))) for token in (1, 2)]
    assert found == [1, 2]
