"""A decode node's scheduler, its steps and the runner that does not wait, together on a CPU.

The scheduler runs ahead, the stream computes as late as it may, requests end by stop tokens, by
length and by aborts, and pages change hands: every text is what transformers generates.
"""

import random
from pathlib import Path

import pytest

from common.engine.cuda.runner import CudaModelRunner
from common.engine.loader import load_model
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams, StopReason, Tokens
from common.modes import PauseMode
from common.plan import ToRouterMsg
from common.steps import Steps
from decode_node.scheduler import DecodeScheduler
from tests.late_stream import LateStream
from tests.tiny_models import VOCAB_SIZE
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.cuda.doubles import CapturableTorchAttention, DrawingOps
from tests.unit.engine.driving import greedy
from tests.unit.scheduler.harness import generate
from tests.unit.scheduler.node_settings import settings

SLOTS, PAGE_SIZE = 4, 4


class Node:
    """Requests in, texts out; memory for about three of them."""

    def __init__(self, folder: Path, num_pages: int = 60) -> None:
        loaded = load_model(folder, "float32", ops=DrawingOps())
        spec = loaded.model.spec
        cache = PagedKVCache(
            num_pages=num_pages,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=PAGE_SIZE,
            head_dim=spec.head_dim,
            dtype=loaded.dtype,
            scratch=True,
        )
        attention = CapturableTorchAttention(cache, spec.num_heads, spec.windows)
        self.stream = LateStream()
        self.runner = CudaModelRunner(
            loaded, cache, attention, self.stream, SLOTS, 200, graph_sizes=(1, 2, SLOTS)
        )
        self.runner.warm_up()
        self.scheduler = DecodeScheduler(
            settings(
                "d", num_pages, vocab_size=VOCAB_SIZE, max_running_requests=SLOTS, chunk_size=16
            ),
            reserve_pages=0,
            local_chunk_size=5,
        )
        self.steps = Steps(self.scheduler, self.runner, lambda: 0.0)
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, StopReason] = {}
        self.launched = self.ahead = 0

    def submit(self, room: int, prompt: list[int], sampling: SamplingParams) -> None:
        request = generate(
            room, prompt_ids=prompt, sampling=sampling, prefill_incarnation="", prefill_address=""
        )
        self.scheduler.add_request(request, "r")

    def turn(self) -> None:
        plan = self.scheduler.schedule(0.0)
        for message in plan.messages:
            if isinstance(message, ToRouterMsg):
                assert isinstance(message.body, Tokens), message.body
                for output in message.body.outputs:
                    self.texts.setdefault(output.room, []).extend(output.token_ids)
                    if output.finish is not None:
                        self.ends[output.room] = output.finish
        if plan.batch is not None:
            self.launched += 1
            self.ahead += any(row.from_slot for row in plan.batch.rows)
        self.steps.launch(plan.batch)
        self.steps.take_in()
        assert self.scheduler.counters["failed_steps"] == 0
        self.scheduler.check_invariants()

    def rest(self) -> None:
        while not self.scheduler.is_empty:
            self.turn()
        self.turn()


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_texts_are_those_of_transformers(zoo: Zoo, variant: str) -> None:
    node = Node(zoo.folder(variant))
    chance = random.Random(5)
    wanted: dict[int, list[int]] = {}
    for room in range(1, 13):
        prompt = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 40))]
        count = chance.randint(1, 25)
        text = zoo.greedy(variant, prompt, count)
        stop: tuple[int, ...] = ()
        if room % 3 == 0:
            stop = (chance.choice(text),)
            text = text[: text.index(stop[0]) + 1]
        logprobs = 0 if room == 11 else None
        sampling = greedy(count, stop_token_ids=stop, logprobs=logprobs)
        wanted[room] = text
        node.submit(room, prompt, sampling)
        for _ in range(chance.randint(0, 6)):
            node.turn()
        if room == 6:
            node.steps.land()
            node.scheduler.pause_generation(PauseMode.IN_PLACE)
            node.turn()
            node.scheduler.continue_generation()
        if room == 8:
            node.scheduler.abort_room(room)
            del wanted[room]
    node.rest()
    assert {room: node.texts[room] for room in wanted} == wanted
    assert node.ahead > node.launched / 3, "it did run ahead"
    assert node.scheduler.counters["wasted_rows"] > 0
    assert node.scheduler.kv.num_free == node.scheduler.kv.num_pages


def test_a_conversation_goes_on_from_pages_that_steps_ahead_have_filled(zoo: Zoo) -> None:
    """What is cached of a text that a stop token ended is what it was, wasted row or not."""
    node = Node(zoo.folder("llama"))
    prompt = [7, 8, 9, 10, 11]
    text = zoo.greedy("llama", prompt, 15)
    stop = text[11]
    text = text[: text.index(stop) + 1]
    node.submit(1, prompt, greedy(60, stop_token_ids=(stop,)))
    node.rest()
    assert node.texts[1] == text
    following = [*prompt, *text, 20, 21]
    node.submit(2, following, greedy(9))
    node.rest()
    assert node.scheduler.counters["cache_hit_tokens"] > 0
    assert node.texts[2] == zoo.greedy("llama", following, 9)
