"""Who is linked, what is stale, what was lost: the registry's judgement."""

import msgspec
import pytest

from common.messages import (
    WIRE_VERSION,
    Adapter,
    AdapterInfo,
    Envelope,
    Fingerprint,
    Goodbye,
    Heartbeat,
    NodeAdapters,
    NodeState,
    NodeStats,
    Ping,
    Retracted,
    ToRouter,
    Welcome,
)
from common.modes import DisaggregationMode
from router.link import decode
from router.node import Loss, Node
from router.nodes import NodeRegistry, Received
from tests.unit.router.desk import FINGERPRINT, ME, hello

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
BEAT = Heartbeat(stats=NodeStats(), step_age_s=0.0)


class Wire:
    """A registry and what is said to it."""

    def __init__(self) -> None:
        self.registry = NodeRegistry(ME, timeout_s=3.0)

    def say(
        self, source: str, seq: int, body: ToRouter, *, to: str = ME, now: float = 0.0
    ) -> Received:
        return self.registry.receive(source.encode(), Envelope(source, to, seq, body), now)

    def join(self, name: str, role: DisaggregationMode = PREFILL, now: float = 0.0) -> Received:
        return self.say(name, 1, hello(role, name), to="", now=now)

    def node(self, name: str) -> Node:
        node = self.registry.get(name)
        assert node is not None
        return node


def test_hello_is_welcomed_and_numbering_starts_on_both_sides() -> None:
    wire = Wire()
    received = wire.join("p")
    assert received.welcome == Welcome(reset=False)
    assert received.loss is None
    node = wire.node("p")
    assert wire.registry.envelope(node, Welcome()).seq == 1
    assert wire.registry.envelope(node, Ping(0.0)).seq == 2
    assert wire.say("p", 2, Retracted(7)).body == Retracted(7)


def test_a_jump_in_the_numbers_is_a_loss_but_the_message_counts() -> None:
    wire = Wire()
    wire.join("p")
    received = wire.say("p", 4, Retracted(7))
    assert (received.loss, received.body) == (Loss.GAP, Retracted(7))
    assert received.greet_me
    assert wire.say("p", 5, BEAT).loss is None
    assert wire.say("p", 5, BEAT).dropped == "stale_node_messages"


def test_a_node_takes_work_once_it_has_told_its_adapters_and_was_given_those_it_lacks() -> None:
    wire = Wire()
    wire.join("p")
    assert [wire.node("p").takes_work, wire.node("p").is_equipped] == [False, False]
    wire.say("p", 2, NodeAdapters([AdapterInfo(name="a", digest="1", path="/a", rank=8)]))
    node = wire.node("p")
    ready = []
    for node.syncing in (False, True, False):
        ready.append(node.takes_work)
    assert ready == [True, False, True]
    held = [node.holds(a) for a in (None, Adapter("a", "1"), Adapter("a", "2"), Adapter("b", "1"))]
    assert held == [True, True, False, False]
    wire.say("p", 9, BEAT)  # what was lost may have been a list
    assert not wire.node("p").takes_work
    wire.join("p")
    wire.say("p", 2, NodeAdapters([]))
    assert wire.node("p").takes_work


def test_a_second_hello_fails_the_attempts_and_resets_the_node() -> None:
    wire = Wire()
    wire.join("p")
    wire.say("p", 2, BEAT)
    received = wire.join("p")
    assert (received.loss, received.welcome) == (Loss.RELINKED, Welcome(reset=True))
    assert wire.say("p", 2, BEAT).loss is None


def test_silence_gives_a_node_up_and_its_return_resets_it() -> None:
    wire = Wire()
    wire.join("p", now=0.0)
    wire.say("p", 2, BEAT, now=2.0)
    assert wire.registry.expire(4.9) == []
    assert [node.incarnation for node in wire.registry.expire(5.1)] == ["p"]
    late = wire.say("p", 3, Retracted(7), now=6.0)
    assert (late.body, late.greet_me) == (None, True)
    assert wire.join("p", now=6.1).welcome == Welcome(reset=True)


def test_our_own_stop_is_not_the_nodes_silence() -> None:
    wire = Wire()
    wire.join("p", now=0.0)
    wire.registry.forgive_silence(60.0)
    assert wire.registry.expire(61.0) == []


def test_messages_for_an_older_router_are_dropped_and_the_node_must_greet() -> None:
    wire = Wire()
    received = wire.say("p", 9, Retracted(7), to="router-before")
    assert received == Received(dropped="stale_node_messages", greet_me=True)
    assert wire.registry.greet_me("p").seq == 0
    wire.join("p")
    assert wire.say("p", 2, Retracted(7), to="router-before").body is None


def test_goodbye_removes_the_node_and_it_is_left_in_peace() -> None:
    wire = Wire()
    wire.join("p")
    assert wire.say("p", 2, Goodbye()).loss is Loss.LEFT
    assert wire.registry.get("p") is None
    assert wire.say("p", 3, BEAT).greet_me is False


def test_an_unreachable_node_gets_no_work_until_it_greets() -> None:
    wire = Wire()
    wire.join("p")
    assert wire.registry.unreachable("p") is not None
    assert wire.registry.unreachable("p") is None
    assert not wire.node("p").takes_work
    wire.join("p")
    wire.say("p", 2, NodeAdapters([]))
    assert wire.node("p").takes_work


def test_another_wire_version_is_refused() -> None:
    wire = Wire()
    received = wire.say("p", 1, hello(PREFILL, "p", wire_version=0), to="")
    assert received.dropped == "refused_nodes"
    assert received.refused is not None
    assert f"wire version 0, this router {WIRE_VERSION}" in received.refused.reason
    assert wire.registry.get("p") is None


def test_a_hello_of_another_version_is_understood_far_enough_to_refuse_it() -> None:
    fields = {"name": "old", "fingerprint": {"wire_version": 1}, "of_yore": 3}
    body = {"type": "Hello", **fields}
    payload = msgspec.msgpack.encode({"source": "p", "to": "", "seq": 1, "body": body})
    received = NodeRegistry(ME, 3.0).receive(b"", decode(payload), 0.0)
    assert received.refused is not None
    assert "wire version 1" in received.refused.reason


@pytest.mark.parametrize("version", [WIRE_VERSION, "x", None])
def test_a_malformed_hello_of_this_version_is_garbage(version: object) -> None:
    fields = {"name": "new", "fingerprint": {"wire_version": version}}
    body = {"type": "Hello", **fields}
    payload = msgspec.msgpack.encode({"source": "p", "to": "", "seq": 1, "body": body})
    with pytest.raises(msgspec.ValidationError):
        decode(payload)


def test_a_sender_without_a_name_is_garbage() -> None:
    assert Wire().say("", 1, hello(PREFILL, "p")).dropped == "garbage_frames"


def test_a_second_live_node_of_a_name_is_refused_until_the_first_has_gone() -> None:
    wire = Wire()
    wire.say("a", 1, hello(PREFILL, "same"), to="", now=0.0)
    wire.say("a", 2, BEAT, now=9.0)
    received = wire.say("b", 1, hello(DECODE, "same"), to="", now=10.0)
    assert (received.welcome, received.joined, received.dropped) == (None, False, "refused_nodes")
    assert received.refused is not None
    assert "the name same belongs to a live node (a, " in received.refused.reason
    assert [node.incarnation for node in wire.registry.all()] == ["a"]
    wire.say("a", 3, Goodbye(), now=11.0)
    assert wire.say("b", 1, hello(DECODE, "same"), to="", now=15.0).joined


def test_a_restarted_node_takes_its_name_over_at_once() -> None:
    wire = Wire()
    wire.say("a", 1, hello(PREFILL, "same"), to="", now=0.0)
    (rival,) = wire.registry.rivals("b", hello(PREFILL, "same"))
    wire.registry.unreachable(rival.incarnation)  # a message to it could not be sent
    received = wire.say("b", 1, hello(PREFILL, "same"), to="", now=0.1)
    assert received.joined
    assert [node.incarnation for node in received.replaced] == ["a"]
    assert [node.incarnation for node in wire.registry.all()] == ["b"]
    assert wire.say("a", 2, BEAT, now=0.2).greet_me, "and if it lives after all, it is told"


def test_a_node_that_fell_silent_does_not_hold_its_name() -> None:
    wire = Wire()
    wire.say("a", 1, hello(PREFILL, "same"), to="", now=0.0)
    assert wire.say("b", 1, hello(PREFILL, "same"), to="", now=1.4).refused is not None
    assert wire.say("b", 1, hello(PREFILL, "same"), to="", now=1.6).joined


def test_a_node_that_greets_again_is_not_its_own_rival() -> None:
    wire = Wire()
    wire.join("p")
    assert wire.registry.rivals("p", hello(PREFILL, "p")) == ()
    assert wire.join("p").joined


def test_heartbeats_tell_the_state() -> None:
    wire = Wire()
    wire.join("p")
    stats = NodeStats(state=NodeState.PAUSED, free_pages=3, num_pages=9)
    wire.say("p", 2, NodeAdapters([]))
    wire.say("p", 3, Heartbeat(stats=stats, step_age_s=1.5))
    node = wire.node("p")
    assert (node.state, node.stats.free_pages, node.step_age_s) == (NodeState.PAUSED, 3, 1.5)
    assert not node.takes_work
    assert node.stays


def test_capacity_and_context_are_those_of_pairs() -> None:
    wire = Wire()
    assert wire.registry.fleet.capacity_tokens() is None
    assert wire.registry.fleet.max_model_len(otherwise=77) == 77
    wire.say("p", 1, hello(PREFILL, "p", num_pages=10), to="")
    wire.say("d1", 1, hello(DECODE, "d1", num_pages=4), to="")
    wire.say("d2", 1, hello(DECODE, "d2", num_pages=99, dtype="bfloat16"), to="")
    assert wire.registry.fleet.capacity_tokens() == 4 * 16
    assert wire.registry.fleet.max_model_len(otherwise=77) == 512
    assert wire.registry.fleet.mismatches == ["p and d2 differ in dtype"]
    assert wire.registry.fleet.missing() is None


def test_fingerprints_compare_every_field() -> None:
    assert set(Fingerprint.__struct_fields__) == set(FINGERPRINT.__struct_fields__)
    for field in Fingerprint.__struct_fields__:
        if field == "wire_version":
            continue
        wire = Wire()
        wire.join("p")
        value = getattr(FINGERPRINT, field)
        other = value + 1 if isinstance(value, int) else value + "x"
        wire.say("d", 1, hello(DECODE, "d", **{field: other}), to="")
        assert field in (wire.registry.fleet.missing() or "")


# ---------------------------------------------------------------- who should shake hands


def test_decode_is_told_of_its_prefill_nodes_once_for_each_change() -> None:
    wire = Wire()
    wire.join("d", DECODE)
    assert wire.registry.announcements() == []
    wire.join("p1")
    odd = msgspec.structs.replace(FINGERPRINT, dtype="bfloat16")
    wire.say("p2", 1, msgspec.structs.replace(hello(PREFILL, "p2"), fingerprint=odd), to="")
    ((node, peers),) = wire.registry.announcements()
    assert (node.incarnation, [peer.incarnation for peer in peers.nodes]) == ("d", ["p1"])
    assert peers.nodes[0].address == wire.node("p1").hello.side_channel
    assert wire.registry.announcements() == []
    wire.say("p1", 2, Heartbeat(stats=NodeStats(state=NodeState.DRAINING), step_age_s=0.0))
    assert [peers.nodes for _, peers in wire.registry.announcements()] == [[]]
    wire.join("d", DECODE)  # it greets anew and has forgotten everything
    wire.join("p3")
    assert [len(peers.nodes) for _, peers in wire.registry.announcements()] == [1]


def test_ready_needs_a_pair_that_works_and_has_shaken_hands() -> None:
    wire = Wire()
    assert "prefill" in str(wire.registry.unready())
    wire.join("p")
    assert "decode" in str(wire.registry.unready())
    wire.join("d", DECODE)
    assert "shaken hands" in str(wire.registry.unready())
    linked = NodeStats(linked_peers=["gone", "p"])
    wire.say("d", 2, Heartbeat(stats=linked, step_age_s=0.0))
    wire.say("d", 3, NodeAdapters([]))
    assert "adapters" in str(wire.registry.unready())
    wire.say("p", 2, NodeAdapters([]))
    assert wire.registry.unready() is None
    paused = msgspec.structs.replace(linked, state=NodeState.PAUSED)
    wire.say("d", 4, Heartbeat(stats=paused, step_age_s=0.0))
    assert wire.registry.unready() is None
    draining = msgspec.structs.replace(linked, state=NodeState.DRAINING)
    wire.say("d", 5, Heartbeat(stats=draining, step_age_s=0.0))
    assert "decode" in str(wire.registry.unready())


def test_a_name_is_free_again_while_its_bearer_leaves() -> None:
    wire = Wire()
    wire.say("old", 1, hello(PREFILL, "same"), to="")
    wire.say("old", 2, Heartbeat(stats=NodeStats(state=NodeState.DRAINING), step_age_s=0.0))
    received = wire.say("new", 1, hello(PREFILL, "same"), to="")
    assert received.joined
    assert received.replaced == ()
    assert wire.node("old").linked
