"""The prefix cache as a router hears of it over a real socket."""

import time
from array import array

from common.messages import Abort, CacheUpdate, ListCache, Retracted
from common.node_io.cache_news import BATCH_S
from common.plan import CacheChanged, ToRouterMsg
from tests.unit.node_io.rig import REGISTRATION, FakeRouter, decode


def update(router: FakeRouter) -> CacheUpdate:
    body = router.await_body(CacheUpdate).body
    assert isinstance(body, CacheUpdate)
    return body


def stored(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def test_changes_come_in_batches_with_their_own_numbers(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        engine.io.send([CacheChanged(stored=(i,)) for i in range(3)])
        assert update(router) == CacheUpdate(seq=1, stored=stored(0, 1, 2))
        engine.io.send([CacheChanged(evicted=(1,), stored=(7,)), CacheChanged(evicted=(7,))])
        assert update(router) == CacheUpdate(seq=2, evicted=stored(1))
        engine.io.send([CacheChanged(cleared=True)])
        assert update(router) == CacheUpdate(seq=3, reset=True)


def test_a_router_that_joins_hears_what_was_cached_before(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.send([CacheChanged(stored=(5,))])
        engine.io.announce(REGISTRATION)
        router.welcome()
        assert update(router) == CacheUpdate(seq=1, reset=True, stored=stored(5))


def test_a_router_can_ask_for_all_of_it(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        router.say(ListCache(), to="d1")
        assert update(router) == CacheUpdate(seq=1, reset=True)
        engine.io.send([CacheChanged(stored=(5,))])
        assert update(router).seq == 2
        router.say(ListCache(), to="d1")
        assert update(router) == CacheUpdate(seq=3, reset=True, stored=stored(5))


def test_a_new_link_counts_from_one_again(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        engine.io.send([CacheChanged(stored=(5,))])
        assert update(router).seq == 1
        router.say(Abort(1), to="d1", skip=1)  # a gap: the node greets anew
        router.welcome()
        assert update(router) == CacheUpdate(seq=1, reset=True, stored=stored(5))


def test_tokens_do_not_wait_for_a_large_cache(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.send([CacheChanged(stored=tuple(range(400_000)))])
        engine.io.announce(REGISTRATION)
        router.welcome()
        assert update(router).reset
        asked = time.monotonic()
        engine.io.send([ToRouterMsg("r1", Retracted(1))])
        router.await_body(Retracted)
        assert time.monotonic() - asked < 4 * BATCH_S
        told = [e.body for e in router.got if isinstance(e.body, CacheUpdate)]
        assert len(told) < 7, "the snapshot was sent in one go"
        while sum(len(body.stored) for body in told) < 8 * 400_000:
            told.append(update(router))
        assert [body.seq for body in told] == list(range(1, len(told) + 1))
