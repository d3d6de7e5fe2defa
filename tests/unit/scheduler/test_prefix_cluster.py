"""Prefix caches of both nodes of a pair together, in the virtual cluster that models KV exactly."""

import pytest

from common.messages import Destination, Incarnation
from common.modes import PauseMode
from common.plan import Outgoing, ToPeerMsg, TransferCommand, Write
from tests.unit.scheduler.model import PAGE
from tests.unit.scheduler.virtual_node import Node
from tests.unit.scheduler.world import World

PROMPT = list(range(20, 33))


class Watched(World):
    """Keeps what decode asked for and what prefill sent."""

    def __init__(self) -> None:
        self.asked: list[Destination] = []
        self.sent: list[Write] = []
        super().__init__(3, pages=40)

    def _send(self, name: Incarnation, message: Outgoing) -> None:
        if isinstance(message, ToPeerMsg) and isinstance(message.body, Destination):
            self.asked.append(message.body)
        super()._send(name, message)

    def _transfer(self, name: Incarnation, node: Node, command: TransferCommand) -> None:
        if isinstance(command, Write):
            self.sent.append(command)
        super()._transfer(name, node, command)

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        client = self.router.submit(prompt, max_tokens)
        self.settle()
        client.check()
        return client.output


@pytest.mark.parametrize("on_prefill", range(4))
@pytest.mark.parametrize("on_decode", range(4))
def test_either_node_may_know_more_of_a_prompt_than_the_other(
    on_prefill: int, on_decode: int
) -> None:
    world = Watched()
    prefill, decode = (world.nodes[name].scheduler for name in ("p1", "d2"))
    if on_decode:
        world.answer(PROMPT[: PAGE * on_decode + 1], 2)
        assert prefill.flush_cache() is None
    if on_prefill:
        world.answer(PROMPT[: PAGE * on_prefill + 1], 1)  # never reaches decode
    assert (prefill.kv.num_cached, decode.kv.num_cached) == (on_prefill, on_decode)
    world.asked.clear()
    world.sent.clear()
    before = prefill.counters["cache_hit_tokens"]
    world.answer(PROMPT, 9)
    assert prefill.counters["cache_hit_tokens"] - before == PAGE * on_prefill
    assert {(d.first_page, len(d.pages)) for d in world.asked} == {(on_decode, 4 - on_decode)}
    assert sum(len(write.target_pages) for write in world.sent) == 4 - on_decode


def test_a_conversation_sends_each_page_once() -> None:
    world = Watched()
    said = list(PROMPT)
    for _ in range(3):
        said += world.answer(said, 7)
        said += [50, 51]
    pages = sum(len(write.target_pages) for write in world.sent)
    # 13, 22 and 31 tokens fill 4, 6 and 8 pages; of these decode had 0, 4 and 7, the last token of
    # each answer not being computed.
    assert pages == 4 + 2 + 1


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
@pytest.mark.parametrize("which", ["p1", "d2"])
def test_after_a_pause_that_empties_a_node_nothing_of_before_is_read(
    which: str, mode: PauseMode
) -> None:
    world = Watched()
    world.answer(PROMPT, 5)
    node = world.nodes[which]
    node.pause(mode)  # the model's memory is wiped with it
    node.scheduler.continue_generation()
    world.answer([*PROMPT, 7], 5)
