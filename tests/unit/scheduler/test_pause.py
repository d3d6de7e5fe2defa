"""pause_generation and continue_generation: three modes, two roles, idle and busy."""

import random

import pytest

from common.messages import Aborted, Retracted
from common.modes import PauseMode
from tests.unit.scheduler.harness import decode, destination, generate, prefill, running
from tests.unit.scheduler.model import VOCAB
from tests.unit.scheduler.world import World


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_pause_is_a_no_op(mode: PauseMode, role: str) -> None:
    node = prefill() if role == "prefill" else decode()
    before = node.scheduler.stats()
    for _ in range(2):
        node.scheduler.pause_generation(mode)
        assert node.step().batch is None
    node.scheduler.continue_generation()
    node.step()
    assert node.scheduler.stats() == before
    assert len(node.scheduler.running_batch) == 0


@pytest.mark.parametrize("mode", PauseMode)
def test_a_paused_prefill_never_has_a_running_batch(mode: PauseMode) -> None:
    node = prefill()
    node.router(generate(1, prompt=20))
    node.peer(destination(1, pages=5), "d")
    node.step()
    node.scheduler.pause_generation(mode)
    for _ in range(3):
        assert node.step().batch is None
        assert len(node.scheduler.running_batch) == 0


def test_retract_hands_back_everything_that_holds_kv_and_nothing_else() -> None:
    node = prefill()
    for room in (1, 2):
        node.router(generate(room, prompt=20))
    node.peer(destination(1, pages=5), "d")
    node.step()
    node.scheduler.pause_generation(PauseMode.RETRACT)
    node.step()
    assert node.said(Retracted) == [Retracted(1)]
    assert [req.room for req in node.scheduler.unfinished()] == [2]


def test_decode_retracts_its_running_batch_one_by_one() -> None:
    node = decode()
    running(node, 1, 2)
    node.scheduler.pause_generation(PauseMode.RETRACT)
    node.step()
    assert node.said(Retracted) == [Retracted(1), Retracted(2)]
    assert node.scheduler.kv.num_free == 24
    assert node.scheduler.flush_cache() is None


def test_under_a_retract_pause_decode_takes_no_new_pages() -> None:
    node = decode()
    running(node, 1)
    node.scheduler.pause_generation(PauseMode.RETRACT)
    node.router(generate(2))
    node.step()
    assert node.scheduler.kv.num_free == 24
    node.scheduler.continue_generation()
    node.step()
    assert node.scheduler.kv.num_free < 24


def test_abort_reaches_every_queue_while_paused() -> None:
    node = decode()
    running(node, 1, 2)
    node.router(generate(3))
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.step()
    assert node.scheduler.abort_requests("rid-2") == 1
    assert node.scheduler.abort_requests() == 2
    node.step()
    assert {answer.room for answer in node.said(Aborted)} == {1, 2, 3}


def test_prefill_survives_sixteen_retract_cycles_under_load() -> None:
    """sglang#20273: afterwards nothing runs, nothing is held, and one request still answers."""
    world = World(1, pages=60, max_running_requests=4, reorder=True)
    chance = random.Random(2)
    prefill_name = world.prefills()[0]
    node = world.nodes[prefill_name].scheduler
    for cycle in range(16):
        for _ in range(4):
            prompt = [chance.randrange(VOCAB) for _ in range(60)]
            world.router.submit(prompt, 1)
        for _ in range(3):
            world.tick()
        node.pause_generation(PauseMode.RETRACT)
        world.tick()
        assert len(node.running_batch) == 0, cycle
        node.continue_generation()
    world.settle()
    world.router.check()
    for mode in PauseMode:
        node.pause_generation(mode)
        world.tick()
        node.continue_generation()
    world.router.submit([1, 2, 3], 4)
    world.settle()
    world.router.check()


def test_in_place_nothing_finishes_and_everything_resumes() -> None:
    world = World(3, pages=1100, max_running_requests=32, max_model_len=600)
    clients = [world.router.submit([n, n + 1], 512) for n in range(8)]
    for _ in range(30):
        world.tick()
    prefill_name, decode_name = world.prefills()[0], world.decodes()[0]
    before = [len(client.output) for client in clients]
    for name in (prefill_name, decode_name):
        world.nodes[name].scheduler.pause_generation(PauseMode.IN_PLACE)
    world.tick()
    frozen = [len(client.output) for client in clients]
    for _ in range(50):
        world.tick()
    assert [len(client.output) for client in clients] == frozen
    assert all(client.end is None for client in clients)
    assert sum(before) > 0
    for name in (decode_name, prefill_name):
        world.nodes[name].scheduler.continue_generation()
    world.settle()
    world.router.check()
    assert all(client.replays == 0 for client in clients)


def test_retract_on_decode_in_mid_stream_leaves_the_texts_as_they_were() -> None:
    world = World(4, prefills=2, decodes=2, pages=80)
    for n in range(6):
        world.router.submit([n, 5, 7], 30)
    for _ in range(20):
        world.tick()
    for name in world.decodes():
        world.nodes[name].pause(PauseMode.RETRACT)
    world.tick()
    for name in world.decodes():
        assert world.nodes[name].scheduler.flush_cache() is None or world.fabric.posted
        world.nodes[name].scheduler.continue_generation()
    world.settle()
    world.router.check()
    assert sum(client.replays for client in world.router.clients) > 0
