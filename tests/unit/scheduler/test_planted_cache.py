"""Faults of prefix caching on nodes, planted one by one: each must be noticed."""

from collections.abc import Callable, Iterable

import pytest

from common.kv_cache.manager import KVCacheManager
from common.kv_cache.page_pool import PageLeak
from common.kv_cache.prefix_cache import CachedPage, PrefixCache, PrefixLeak
from common.messages import ChunkLanded, Incarnation
from common.request import Req
from decode_node.request import DecodeReq
from decode_node.scheduler import DecodeScheduler
from prefill_node.request import PrefillReq
from tests.unit.scheduler import test_lora_fuzz, test_prefix_decode
from tests.unit.scheduler.test_fuzz import run

NOTICED = (AssertionError, PageLeak, PrefixLeak, KeyError, IndexError, ValueError)

Plant = Callable[[pytest.MonkeyPatch], None]


def fuzz() -> None:
    for seed in range(150):
        run(seed)


def fuzz_with_adapters() -> None:
    for seed in range(100):
        test_lora_fuzz.run(seed)


def published_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.admit

    def planted(
        self: KVCacheManager, req: Req, num_tokens: int, *, reuse: bool = True
    ) -> int | None:
        got = original(self, req, num_tokens, reuse=reuse)
        if got is not None and isinstance(req, PrefillReq):
            self.publish(req, num_tokens)
        return got

    patch.setattr(KVCacheManager, "admit", planted)


def published_before_all_chunks_have_landed(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._on_chunk

    def planted(self: DecodeScheduler, req: DecodeReq, chunk: ChunkLanded) -> None:
        self.kv.publish(req, req.num_tokens)
        original(self, req, chunk)

    patch.setattr(DecodeScheduler, "_on_chunk", planted)


def the_last_tokens_page_is_hit(patch: pytest.MonkeyPatch) -> None:
    def planted(self: KVCacheManager, req: Req) -> list[CachedPage]:
        if self._root_of is None:
            return []
        return self._cache.match(self._hashes(req, req.num_tokens // self.page_size))

    patch.setattr(KVCacheManager, "_match", planted)


def evicted_while_it_is_held(patch: pytest.MonkeyPatch) -> None:
    def planted(self: PrefixCache, chain: Iterable[CachedPage]) -> None:
        for entry in chain:
            entry.refs += 1

    patch.setattr(PrefixCache, "hold", planted)


def the_cache_outlives_a_pause(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "clear_cache", lambda self: None)


def one_cache_for_all_adapters(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._hashes

    def planted(self: KVCacheManager, req: Req, num_pages: int) -> list[bytes]:
        adapter, req.adapter = req.adapter, None
        hashes = original(self, req, num_pages)
        req.adapter = adapter
        return hashes

    patch.setattr(KVCacheManager, "_hashes", planted)


def a_stray_write_leaves_its_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "forget_pages", lambda self, pages: 0)


def hit_pages_are_set_aside(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.quarantine

    def planted(self: KVCacheManager, req: Req, peer: Incarnation) -> None:
        req.chain = []
        original(self, req, peer)

    patch.setattr(KVCacheManager, "quarantine", planted)


def prefill_is_asked_for_what_decode_has(patch: pytest.MonkeyPatch) -> None:
    """Its write goes into pages that others read."""
    original = DecodeScheduler._preallocate

    def planted(self: DecodeScheduler, req: DecodeReq) -> bool:
        send = self._prefill.send_destination
        said: list[DecodeReq] = []
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self._prefill, "send_destination", said.append)
            done = original(self, req)
        req.first_page = 0
        for named in said:
            send(named)
        return done

    patch.setattr(DecodeScheduler, "_preallocate", planted)


def budgeted_as_if_hits_were_free(patch: pytest.MonkeyPatch) -> None:
    def planted(self: KVCacheManager, req: Req, num_tokens: int, *, reuse: bool = True) -> int:
        return self.pages_for(num_tokens) - len(self._match(req))

    patch.setattr(KVCacheManager, "pages_to_admit", planted)


def routers_hear_of_no_eviction(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache._note

    def planted(self: PrefixCache, page_hash: bytes, *, stored: bool) -> None:
        if stored:
            original(self, page_hash, stored=True)

    patch.setattr(PrefixCache, "_note", planted)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (published_before_it_is_computed, fuzz),
        (published_before_all_chunks_have_landed, fuzz),
        (the_last_tokens_page_is_hit, fuzz),
        (evicted_while_it_is_held, fuzz),
        (the_cache_outlives_a_pause, fuzz),
        (one_cache_for_all_adapters, fuzz_with_adapters),
        (
            a_stray_write_leaves_its_entry,
            test_prefix_decode.test_a_stray_write_takes_the_pages_it_touched_and_all_behind_them_out_of_the_cache,
        ),
        (hit_pages_are_set_aside, fuzz),
        (prefill_is_asked_for_what_decode_has, fuzz),
        (budgeted_as_if_hits_were_free, fuzz),
        (routers_hear_of_no_eviction, fuzz),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, check: Callable[[], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(NOTICED):
        check()
