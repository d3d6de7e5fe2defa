"""What is worked out once for each change: always what it would be if it were worked out anew."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import Adapter, NodeState, StopReason
from router.fleet import Fleet
from router.node import Loss
from router.requests import Job, JobState
from tests.unit.router.desk import Desk, room

LORA = Adapter("lora", "digest")


def test_the_same_object_until_something_changes() -> None:
    desk = Desk("p1 d1")
    fleet = desk.registry.fleet
    desk.beat("p1", queued_tokens=100, free_pages=3)
    assert desk.registry.fleet is fleet, "a load is no change"
    node = desk.registry_node("p1")
    node.pausing += 1
    assert desk.registry.fleet is not fleet
    fleet = desk.registry.fleet
    node.pausing += 0
    node.syncing = False
    assert desk.registry.fleet is fleet, "what is as it was is no change"


CHANGES = st.lists(
    st.sampled_from(
        ["join p", "join d", "lose", "pause", "drain", "unlink", "sync", "lora", "no lora"]
    ),
    max_size=20,
)


@given(CHANGES)
def test_every_change_of_a_node_is_seen(changes: list[str]) -> None:
    desk = Desk("p1 d1", decode_alone=True)
    registry = desk.registry
    serial = 1
    for change in changes:
        some = [node.incarnation for node in registry.all()][serial % 3 :][:1]
        serial += 1
        match change.split():
            case ["join", role]:
                desk.join(f"{role}{serial}", num_pages=10 * serial)
            case _ if not some:
                continue
            case ["lose"]:
                desk.lose(some[0], Loss.SILENT)
            case ["pause"]:
                desk.registry_node(some[0]).pausing ^= 1
            case ["drain"]:
                desk.registry_node(some[0]).note_state(NodeState.DRAINING)
            case ["unlink"]:
                registry.unreachable(some[0])
            case ["sync"]:
                desk.registry_node(some[0]).syncing ^= True
            case ["lora"]:
                desk.adapters_of(some[0], LORA)
            case _:
                desk.adapters_of(some[0])
        anew = Fleet(registry.all(), decode_alone=True)
        for adapter in (None, LORA):
            assert registry.fleet.missing(adapter) == anew.missing(adapter)
            assert registry.fleet.capacity_tokens(adapter) == anew.capacity_tokens(adapter)
            assert registry.fleet.prefill_groups(adapter) == anew.prefill_groups(adapter)
        assert registry.fleet.num_computing == anew.num_computing
        assert registry.fleet.decode_tokens == anew.decode_tokens
        assert registry.fleet.is_equipping == anew.is_equipping


EVENTS = st.lists(st.sampled_from(["ask", "first", "end", "beat", "lose", "join"]), max_size=40)


@settings(deadline=None)
@given(EVENTS)
def test_the_tokens_that_wait_on_prefill_nodes_are_the_sum_over_them(
    events: list[str],
) -> None:
    desk = Desk("p1 p2 d1 d2", decode_alone=True)
    book = desk.dispatcher._load
    jobs: list[Job] = []
    for step, event in enumerate(events):
        running = [job for job in jobs if job.state is JobState.DISPATCHED]
        names = [node.incarnation for node in desk.registry.all()]
        match event:
            case "ask":
                jobs.append(desk.submit(f"r{step}", prompt=5 + step))
            case "first" if running:
                job = running[step % len(running)]
                assert job.attempt is not None
                desk.tokens(job.attempt.computes, room(job), len(job.output_ids), 50)
            case "end" if running:
                job = running[step % len(running)]
                assert job.attempt is not None
                index = len(job.output_ids)
                desk.tokens(job.attempt.decode, room(job), index, 51, finish=StopReason.LENGTH)
            case "beat" if names:
                queues = {"waiting": step % 4}
                desk.beat(names[step % len(names)], queued_tokens=7 * step, queues=queues)
            case "lose" if len(names) > 2:
                desk.lose(names[step % len(names)], Loss.SILENT)
            case "join":
                desk.join(f"{'pd'[step % 2]}{step + 10}")
        book.settle(0.0)
        loads = [
            book.candidate(node).load
            for node in desk.registry.all()
            if node.incarnation.startswith("p")
        ]
        assert book.tokens_to_prefill == sum(loads) + book.local_tokens
