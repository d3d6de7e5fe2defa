"""The runner that does not wait, over a stream that computes as late as it may: the same tokens."""

from collections.abc import Callable

import pytest
import torch

from common.engine.cuda import graphs, staging
from common.engine.loader import LoadedModel, load_model
from common.messages import SamplingParams
from common.plan import Batch, Row
from tests.late_stream import HostWaited, LateStream, Recorded
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.cuda.doubles import DrawingOps, TorchDraws
from tests.unit.engine.cuda.driving import LateEngine
from tests.unit.engine.driving import Engine, Generation, greedy

Prompt = Callable[..., list[int]]


@pytest.fixture
def load(zoo: Zoo) -> Callable[[str], LoadedModel]:
    return lambda variant: load_model(zoo.folder(variant), "float32", ops=DrawingOps())


Load = Callable[[str], LoadedModel]


def decode(engine: LateEngine, generations: list[Generation], steps: int) -> None:
    for _ in range(steps):
        engine.ahead(*((generation, 1) for generation in generations))


def replays(engine: LateEngine) -> list[int]:
    """Of each captured graph, in the order of capture."""
    return [graph.replays for graph in engine.stream.graphs]


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3", "qwen2-sliding"])
def test_greedy_tokens_equal_transformers(
    zoo: Zoo, prompt: Prompt, load: Load, variant: str
) -> None:
    """Prompts in chunks beside rows that go on from tokens in flight, then graphs with padding."""
    engine = LateEngine(load(variant))
    engine.late.warm_up()
    first = engine.start(3, prompt(5, 1), greedy(20))
    second = engine.start(0, prompt(33, 2), greedy(20))
    third = engine.start(6, prompt(9, 3), greedy(20))
    engine.ahead((first, 5))
    engine.ahead((first, 1), (second, 16))
    engine.ahead((second, 17), (third, 4), (first, 1))
    engine.ahead((third, 5), (first, 1))
    decode(engine, [first, third], 2)
    decode(engine, [second, first, third], 11)
    decode(engine, [third], 4)
    engine.settle()
    for generation in (first, second, third):
        count = len(generation.outputs)
        assert count > 11
        assert generation.outputs == zoo.greedy(variant, generation.prompt, count)


def test_each_decode_step_replays_the_smallest_graph_that_holds_it(
    prompt: Prompt, load: Load
) -> None:
    engine = LateEngine(load("llama"), sizes=(1, 2, 4))
    engine.late.warm_up()
    assert [len(graph.output) for graph in engine.stream.graphs] == [4, 2, 1], "largest first"
    before = replays(engine)
    generations = [engine.start(slot, prompt(4, slot), greedy(9)) for slot in range(6)]
    engine.ahead(*((generation, 4) for generation in generations))
    for count in (1, 3, 2, 4, 3):
        decode(engine, generations[:count], 1)
    decode(engine, generations, 1)  # more than any graph holds: piece by piece
    engine.settle()
    grown = [after - before for after, before in zip(replays(engine), before, strict=True)]
    assert grown == [3, 1, 1]
    assert len(engine.stream.graphs) == 3, "nothing is captured that was captured before"


def test_warming_up_draws_both_at_random_and_the_best(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU these are different kernels, which a request would otherwise wait for."""
    seen = set()
    original = TorchDraws.reset

    def reset(self: TorchDraws, slot: int, params: SamplingParams) -> None:
        seen.add(params.temperature > 0.0)
        original(self, slot, params)

    monkeypatch.setattr(TorchDraws, "reset", reset)
    LateEngine(load("llama"), sizes=(1,)).late.warm_up()
    assert seen == {True, False}


def test_the_host_waits_once_a_step(prompt: Prompt, load: Load) -> None:
    """And submitted work never does: the stream would say so."""
    engine = LateEngine(load("llama"))
    engine.late.warm_up()
    generations = [engine.start(slot, prompt(4 + slot), greedy(30)) for slot in range(3)]
    waits = engine.stream.waits
    engine.ahead(*((generation, 4) for generation in generations))
    assert engine.stream.waits == waits, "a launch does not wait"
    decode(engine, generations[:1], 20)
    engine.settle()
    assert engine.stream.waits == waits + 21


def test_work_that_waits_is_noticed() -> None:
    stream = LateStream()
    held = torch.zeros(3)

    def look() -> None:
        held.add_(held.tolist()[0])

    event = stream.submit(look)
    with pytest.raises(HostWaited):
        event.wait()
    with pytest.raises(HostWaited):
        stream.capture(lambda: held + torch.tensor([1.0, 2.0, 3.0]))


def test_a_recorded_graph_takes_new_values_and_keeps_numbers() -> None:
    stream = LateStream()
    given, scale = torch.ones(3), [2.0]
    graph = stream.capture(lambda: given * scale[0] + given.view(3, 1).sum())
    given.fill_(2.0)
    scale[0] = 100.0
    with torch.inference_mode():
        graph.replay()
    assert isinstance(graph, Recorded)
    assert graph.output.tolist() == [10.0] * 3


def test_padding_rows_touch_the_scratch_page_alone(prompt: Prompt, load: Load) -> None:
    engine = LateEngine(load("llama"), sizes=(8,))
    engine.late.warm_up()
    tensor = engine.cache.tensor
    tensor[: engine.cache.num_pages].fill_(float("nan"))
    scratch = engine.cache.scratch_page
    assert scratch == engine.cache.num_pages
    generations = [engine.start(slot, prompt(6, slot), greedy(9)) for slot in range(3)]
    engine.ahead(*((generation, 6) for generation in generations))
    decode(engine, generations, 8)
    engine.settle()
    owned = {page for generation in generations for page in generation.pages}
    for page in range(engine.cache.num_pages):
        assert bool(tensor[page].isnan().all()) is (page not in owned), page
    assert not tensor[scratch].isnan().any()


def test_what_padding_has_left_behind_reaches_nobody(zoo: Zoo, prompt: Prompt, load: Load) -> None:
    engine = LateEngine(load("llama"), sizes=(8,))
    engine.late.warm_up()
    engine.cache.tensor[engine.cache.num_pages].fill_(float("nan"))
    generation = engine.start(2, prompt(7), greedy(9))
    engine.ahead((generation, 7))
    decode(engine, [generation], 8)
    engine.settle()
    assert generation.outputs == zoo.greedy("llama", prompt(7), 9)


def test_a_slots_next_owner_begins_anew(zoo: Zoo, prompt: Prompt, load: Load) -> None:
    """Behind a wasted row of its last one, which draws into the slot once more."""
    engine = LateEngine(load("llama"))
    engine.late.warm_up()
    first = engine.start(1, prompt(6, 1), greedy(9))
    engine.ahead((first, 6))
    decode(engine, [first], 3)
    engine.take_in()
    engine.release(first)
    second = engine.start(1, prompt(11, 2), greedy(9))
    engine.ahead((second, 11))
    decode(engine, [second], 8)
    engine.settle()
    assert second.outputs == zoo.greedy("llama", second.prompt, 9)


def random_wishes() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=9, seed=4, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=9, seed=5, top_k=7, min_p=0.02),
        SamplingParams(max_tokens=9, seed=6, temperature=1.5),
        greedy(9),
    ]


def test_random_draws_equal_the_cpus(zoo: Zoo, prompt: Prompt, load: Load) -> None:
    late, plain = LateEngine(load("llama")), Engine(zoo.loaded("llama"))
    late.late.warm_up()
    wishes = random_wishes()
    ahead = [late.start(slot, prompt(6, slot), wish) for slot, wish in enumerate(wishes)]
    late.ahead(*((generation, 6) for generation in ahead))
    decode(late, ahead, 8)
    late.settle()
    for slot, wish in enumerate(wishes):
        want = plain.generate(prompt(6, slot), wish, slot=slot)
        assert ahead[slot].outputs == want.outputs


def test_what_the_host_draws_is_the_same_too(zoo: Zoo, prompt: Prompt, load: Load) -> None:
    """Beside what the device draws, one step at a time."""
    late, plain = LateEngine(load("qwen3")), Engine(zoo.loaded("qwen3"))
    late.late.warm_up()
    wishes = [
        greedy(9, logprobs=2),
        SamplingParams(max_tokens=9, seed=6, repetition_penalty=1.3),
        SamplingParams(max_tokens=9, seed=6, min_tokens=4, stop_token_ids=tuple(range(200))),
        *random_wishes(),
    ]
    for engine in (late, plain):
        generations = [engine.start(s, prompt(6, s), wish) for s, wish in enumerate(wishes)]
        engine.step(*((generation, 6) for generation in generations))
        for _ in range(8):
            engine.step(*((generation, 1) for generation in generations))
        if engine is late:
            ahead = generations
    assert [g.outputs for g in ahead] == [g.outputs for g in generations]
    assert [s.logprob is None for s in ahead[0].samples] == [False] * 9
    scores = [
        [sample.logprob.logprob for sample in g.samples if sample.logprob is not None]
        for g in (ahead[0], generations[0])
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_prompts_are_scored(zoo: Zoo, prompt: Prompt, load: Load) -> None:
    late, plain = LateEngine(load("llama")), Engine(zoo.loaded("llama"))
    told = []
    for engine in (late, plain):
        row = engine.row(engine.start(0, prompt(9), greedy(2)), 9)
        scored = Row(
            row.slot, 0, row.token_ids, row.new_pages, 0, row.init,
            prompt_logprobs=2, next_ids=prompt(9)[1:],
        )  # fmt: skip
        (scores,) = engine.runner.launch(Batch((scored,))).result().prompt_logprobs
        told.append([score.logprob for score in scores])
    assert len(told[0]) == 8
    assert told[0] == pytest.approx(told[1], abs=1e-4)


def test_more_than_the_staging_holds_is_sent_beside_it(
    zoo: Zoo, prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.engine.cuda.runner.ROOM_FOR_PAGES", 0)
    engine = LateEngine(load("llama"), max_tokens=8)
    engine.late.warm_up()
    generations = [engine.start(slot, prompt(70, slot), greedy(6)) for slot in range(3)]
    engine.ahead(*((generation, 70) for generation in generations))
    decode(engine, generations, 5)
    engine.settle()
    for generation in generations:
        assert generation.outputs == zoo.greedy("llama", generation.prompt, 6)


def test_a_graph_captured_while_a_step_is_in_flight_disturbs_nothing(
    zoo: Zoo, prompt: Prompt, load: Load
) -> None:
    engine = LateEngine(load("llama"))  # not warmed up: captured when they are wanted
    generations = [engine.start(slot, prompt(6, slot), greedy(12)) for slot in range(4)]
    engine.ahead(*((generation, 6) for generation in generations))
    for count in (4, 1, 2, 3):
        decode(engine, generations[:count], 2)
    engine.settle()
    for generation in generations:
        count = len(generation.outputs)
        assert generation.outputs == zoo.greedy("llama", generation.prompt, count)


def test_the_fence_falls_with_what_was_taken_in(prompt: Prompt, load: Load) -> None:
    engine = LateEngine(load("llama"))
    assert engine.late.fence()()
    generation = engine.start(0, prompt(6), greedy(9))
    engine.ahead((generation, 6))
    engine.ahead((generation, 1))
    ready = engine.late.fence()
    assert ready()
    assert not engine.in_flight[0][0].event.done()  # type: ignore[union-attr]


def test_what_goes_wrong_on_the_device_is_said_with_the_result(
    prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LateEngine(load("llama"))
    generation = engine.start(0, prompt(6), greedy(9))

    def broken(*_: object) -> None:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(engine.late._core, "forward", broken)
    step = engine.late.launch(Batch((engine.row(generation, 6),)))
    with pytest.raises(RuntimeError, match="illegal address"):
        step.result()
    monkeypatch.undo()
    again = engine.start(1, prompt(5), greedy(9))
    engine.step((again, 5))
    assert len(again.outputs) == 1


def test_no_third_step_is_launched_and_none_taken_in_before_its_turn(
    prompt: Prompt, load: Load
) -> None:
    engine = LateEngine(load("llama"))
    generations = [engine.start(slot, prompt(6), greedy(9)) for slot in range(4)]
    one, two = (engine.late.launch(Batch((engine.row(g, 6),))) for g in generations[:2])
    with pytest.raises(AssertionError, match="a third step"):
        engine.late.launch(Batch((engine.row(generations[2], 6),)))
    with pytest.raises(AssertionError, match="out of order"):
        two.result()
    del one


# ---------------------------------------------------------------- planted faults


def run_ahead(zoo: Zoo, prompt: Prompt, loaded: LoadedModel, *, warm: bool = True) -> None:
    engine = LateEngine(loaded)
    if warm:
        engine.late.warm_up()
    generations = [engine.start(slot, prompt(6, slot), greedy(12)) for slot in range(3)]
    engine.ahead(*((generation, 6) for generation in generations))
    decode(engine, generations, 3)
    decode(engine, generations[:1], 5)
    engine.settle()
    for generation in generations:
        count = len(generation.outputs)
        assert generation.outputs == zoo.greedy("llama", generation.prompt, count)


def test_one_host_buffer_would_be_too_few(
    zoo: Zoo, prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "NUM_HOST_BUFFERS", 1)
    with pytest.raises(AssertionError):
        run_ahead(zoo, prompt, load("llama"))


def test_a_capture_that_computes_what_it_finds_is_noticed(
    zoo: Zoo, prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ahead(zoo, prompt, load("llama"), warm=False)
    monkeypatch.setattr(graphs.DecodeGraphs, "_blank", lambda self, size: None)
    with pytest.raises((AssertionError, IndexError)):
        run_ahead(zoo, prompt, load("llama"), warm=False)


def test_a_plan_that_is_not_refilled_is_noticed(
    zoo: Zoo, prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs.DecodeGraphs, "refill", lambda self, size, spans: None)
    with pytest.raises(AssertionError):
        run_ahead(zoo, prompt, load("llama"))


def test_a_token_that_is_not_remembered_is_noticed(
    zoo: Zoo, prompt: Prompt, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "known_tokens", lambda token_ids, *_: token_ids)
    with pytest.raises(AssertionError):
        run_ahead(zoo, prompt, load("llama"))
