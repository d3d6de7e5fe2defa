"""Faults of the prefix cache, planted one by one: the state machine must notice each."""

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from common.kv_cache.manager import KVCacheManager
from common.kv_cache.page_pool import PageLeak
from common.kv_cache.prefix_cache import CachedPage, PrefixCache, PrefixLeak
from common.request import Req
from tests.unit.kv_cache.test_prefix_machine import ORDERLY, PAGE, CacheMachine


def shared_but_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "hold", lambda self, chain: None)


def first_page_let_go_first(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.let_go
    patch.setattr(
        PrefixCache, "let_go", lambda self, chain, pages: original(self, chain[::-1], pages[::-1])
    )


def used_pages_evicted(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.let_go

    def planted(self: PrefixCache, chain: list[CachedPage], pages: list[int]) -> None:
        original(self, chain, pages)
        for entry in chain:
            if entry.refs and entry.is_known:
                self._idle[entry] = None

    patch.setattr(PrefixCache, "let_go", planted)


def published_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.publish
    patch.setattr(
        KVCacheManager, "publish", lambda self, req, end: original(self, req, end + PAGE - 1)
    )


def spares_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.let_go

    def planted(self: PrefixCache, chain: list[CachedPage], pages: list[int]) -> None:
        for entry, page in zip(chain, pages, strict=True):
            if entry.page == page:
                entry.spares = ()
        original(self, chain, pages)

    patch.setattr(PrefixCache, "let_go", planted)


def the_last_page_is_hit(patch: pytest.MonkeyPatch) -> None:
    def planted(self: KVCacheManager, req: Req) -> list[CachedPage]:
        return self._cache.match(self._hashes(req, req.num_tokens // self.page_size))

    patch.setattr(KVCacheManager, "_match", planted)


def locked_though_it_failed(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.admit

    def planted(self: KVCacheManager, req: Req, num_tokens: int, *, reuse: bool) -> int | None:
        chain = self._match(req)
        got = original(self, req, num_tokens, reuse=reuse)
        if got is None:
            self._cache.hold(chain)
        return got

    patch.setattr(KVCacheManager, "admit", planted)


def doubtful_pages_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "forget", lambda self, pages: 0)


def evictions_untold(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache._note
    patch.setattr(
        PrefixCache,
        "_note",
        lambda self, page_hash, *, stored: original(self, page_hash, stored=True),
    )


@pytest.mark.parametrize(
    "plant",
    [
        shared_but_not_counted,
        first_page_let_go_first,
        used_pages_evicted,
        published_before_it_is_computed,
        spares_forgotten,
        the_last_page_is_hit,
        locked_though_it_failed,
        doubtful_pages_stay,
        evictions_untold,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    hasty = settings(
        ORDERLY, max_examples=1000, phases=[Phase.generate], database=None, derandomize=True
    )
    with pytest.raises((AssertionError, KeyError, PageLeak, PrefixLeak, ValueError)):
        run_state_machine_as_test(CacheMachine, settings=hasty)
