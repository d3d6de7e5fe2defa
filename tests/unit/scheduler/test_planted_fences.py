"""The fences around a lost prefill's pages, taken down one by one: each must be missed."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from common.events import Reach
from common.messages import Incarnation
from common.request import Req
from decode_node.peers import PrefillLinks
from decode_node.quarantine import Quarantine, Suspect
from prefill_node.peers import DecodeLinks
from tests.unit.scheduler import test_prefill, test_quarantine
from tests.unit.scheduler.model import VOCAB
from tests.unit.scheduler.node_settings import LEASE_S, POST_S
from tests.unit.scheduler.world import World

CLOCK_S = LEASE_S + POST_S + 1.0
"""What decode would wait for if a clock were proof."""


def storm(seed: int) -> None:
    """Few pages, many who want them, and prefill nodes that stop, die or are cut off."""
    chance = random.Random(seed)
    world = World(
        seed,
        prefills=2,
        decodes=1,
        pages=20,
        reorder=chance.random() < 0.5,
        pieces=0.7 if seed % 3 == 0 else 0.0,
    )
    world.late_notifications = 0.0  # one that tells late of an early write counts as a stray one
    for step in range(200):
        if step % 3 == 0:
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(8, 40))]
            world.router.submit(prompt, chance.choice([1, 8, 16]))
        prefill = chance.choice(world.prefills())
        match chance.randrange(60):
            case 0 | 1:
                world.freeze(prefill, chance.choice([3.0, 9.0]))
            case 2:
                world.cut(prefill, world.decodes()[0], chance.choice([3.0, 9.0]))
            case 3:
                world.kill(prefill)
                world.add_prefill()
            case _:
                pass
        world.tick()
    world.settle()
    world.router.check()
    for name in world.decodes():
        assert world.nodes[name].scheduler.counters["stray_writes"] == 0


def storms(seeds: Iterable[int] = range(150)) -> None:
    for seed in seeds:
        storm(seed)


@pytest.mark.parametrize("seed", range(40))
def test_no_storm_gives_pages_away_too_early(seed: int) -> None:
    storm(seed)


Plant = Callable[[pytest.MonkeyPatch], None]


def a_clock_is_proof(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine._ending

    def planted(self: Quarantine, suspect: Suspect, now: float) -> str | None:
        if suspect.heard_at is not None and suspect.heard_at + CLOCK_S <= now:
            return "quarantine_expired"
        return original(self, suspect, now)

    patch.setattr(Quarantine, "_ending", planted)


def the_clock_starts_at_the_decision(patch: pytest.MonkeyPatch) -> None:
    """Not at the link's end, though pings are echoed until then."""
    original = Quarantine.set_aside

    def planted(self: Quarantine, req: Req, peer: Incarnation, address: str) -> None:
        original(self, req, peer, address)
        for suspect in self._suspects.values():
            if suspect.heard_at is None:
                suspect.heard_at, suspect.reach = 0.0, Reach.UNREACHABLE

    patch.setattr(Quarantine, "set_aside", planted)


def a_stopped_process_is_gone(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine.on_probed

    def planted(self: Quarantine, peer: Incarnation, reach: Reach, now: float) -> None:
        original(self, peer, Reach.GONE if reach is Reach.LISTENING else reach, now)

    patch.setattr(Quarantine, "on_probed", planted)


def the_unreachable_are_gone(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine.on_probed

    def planted(self: Quarantine, peer: Incarnation, reach: Reach, now: float) -> None:
        original(self, peer, Reach.GONE if reach is Reach.UNREACHABLE else reach, now)

    patch.setattr(Quarantine, "on_probed", planted)


def nothing_settles(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Quarantine, suspect: Suspect, now: float) -> None:
        suspect.free_at = now

    patch.setattr(Quarantine, "_on_gone", planted)


def an_outage_settles_as_fast_as_a_death(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Quarantine, suspect: Suspect, now: float) -> None:
        suspect.free_at = now + 1.0

    patch.setattr(Quarantine, "_on_gone", planted)


def decode_has_no_link_numbers(patch: pytest.MonkeyPatch) -> None:
    def planted(self: PrefillLinks, peer: Incarnation, number: int) -> bool:
        return peer in self._links

    patch.setattr(PrefillLinks, "is_current", planted)


def prefill_has_no_link_numbers(patch: pytest.MonkeyPatch) -> None:
    def planted(self: DecodeLinks, peer: Incarnation, number: int) -> bool:
        return peer in self._links

    patch.setattr(DecodeLinks, "is_current", planted)


def a_new_link_inherits_the_old_ones_rooms(patch: pytest.MonkeyPatch) -> None:
    def planted(self: DecodeLinks, peer: Incarnation, number: int) -> bool:
        return False

    patch.setattr(DecodeLinks, "supersedes", planted)


def redialled_before_it_is_closed(patch: pytest.MonkeyPatch) -> None:
    original = PrefillLinks.close

    def planted(self: PrefillLinks, peer: Incarnation) -> bool:
        news = original(self, peer)
        self._links.pop(peer, None)
        return news

    patch.setattr(PrefillLinks, "close", planted)


def nobody_dials_for_the_pages(patch: pytest.MonkeyPatch) -> None:
    original = Quarantine.on_probed

    def planted(self: Quarantine, peer: Incarnation, reach: Reach, now: float) -> None:
        links: Any = self._links
        kept, links.want = links.want, lambda *_: False
        original(self, peer, reach, now)
        links.want = kept

    patch.setattr(Quarantine, "on_probed", planted)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (a_clock_is_proof, storms),
        (
            the_clock_starts_at_the_decision,
            test_quarantine.test_no_clock_runs_before_the_link_is_closed,
        ),
        (a_stopped_process_is_gone, storms),
        (the_unreachable_are_gone, storms),
        (nothing_settles, storms),
        (
            an_outage_settles_as_fast_as_a_death,
            test_quarantine.test_after_an_outage_a_dead_peers_kernel_may_repeat_for_as_long_as_it_lasted,
        ),
        (
            decode_has_no_link_numbers,
            test_quarantine.test_what_a_link_says_after_its_end_counts_for_nothing,
        ),
        (
            prefill_has_no_link_numbers,
            test_prefill.test_what_an_older_link_says_counts_for_nothing,
        ),
        (
            a_new_link_inherits_the_old_ones_rooms,
            test_prefill.test_a_woken_node_drains_on_the_next_link_what_it_had_posted_on_the_last,
        ),
        (
            redialled_before_it_is_closed,
            test_quarantine.test_a_closing_link_is_not_dialled_anew_before_it_is_closed,
        ),
        (
            nobody_dials_for_the_pages,
            test_quarantine.test_reconnecting_is_tried_less_and_less_often,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fence_taken_down_is_missed(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, check: Callable[[], None]
) -> None:
    check(range(3)) if check is storms else check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check()
