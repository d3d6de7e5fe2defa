"""Which nodes there are, judged from what they say and from their silence. Pure.

              Hello                       silence > timeout, Goodbye
    unknown ─────────▶ linked ───────────────────────────────────────▶ given up
                        │  ▲                                              │
       cannot be reached│  │ Hello                                        │ anything it says is
                        ▼  │                                              │ answered "greet me"
                      unlinked ── silence > timeout ──▶ given up ◀────────┘

Identity is the incarnation, and a restarted node is a new one: it takes over its predecessor's
name, while a second live node of one name is refused. Numbers count from 1 with each Hello on the
way up and from 1 with each Welcome on the way down; a jump on the way up means that messages were
lost, so every attempt on that node has failed, and it is asked to greet anew: its adapters or an
answer may be among what was lost.

"Greet me" is a `Ping` numbered 0: to a node it is a gap, or a new router, and both make it end the
rooms it holds for this router and say Hello.
"""

from collections import OrderedDict

import msgspec

from common.messages import (
    WIRE_VERSION,
    Envelope,
    Failed,
    FailureKind,
    Fingerprint,
    FromNode,
    Goodbye,
    Heartbeat,
    Hello,
    Incarnation,
    Introduction,
    NodeAdapters,
    NodeState,
    PeerNode,
    Peers,
    Ping,
    Refused,
    ToNode,
    ToRouter,
    Welcome,
)
from common.modes import DisaggregationMode
from router.fleet import Fleet
from router.node import Loss, Node

REMEMBERED_NODES = 1024
"""Given-up incarnations that are told to reset when they come back."""


class Received(msgspec.Struct, frozen=True):
    """What one envelope means; handled in the order of the fields."""

    loss: Loss | None = None
    """The sender's attempts are over."""
    joined: bool = False
    welcome: Welcome | None = None
    """Answer to the sender, as its first numbered message."""
    refused: Refused | None = None
    """Answer to the sender, which does not join."""
    replaced: tuple[Node, ...] = ()
    """Nodes that are given up for good, since the sender has taken their name."""
    greet_me: bool = False
    """Answer `Ping` number 0, so that the sender says Hello."""
    dropped: str | None = None
    """Why the body was ignored: a counter's name."""
    body: ToRouter | None = None


class NodeRegistry:
    """All nodes by incarnation."""

    def __init__(self, me: Incarnation, timeout_s: float, *, decode_alone: bool = False) -> None:
        """`decode_alone`: decode nodes may work where no prefill node does."""
        self.me = me
        self.decode_alone = decode_alone
        self._timeout_s = timeout_s
        self._nodes: dict[Incarnation, Node] = {}
        self._given_up: OrderedDict[Incarnation, Loss] = OrderedDict()
        self._fleet: Fleet | None = None
        self._announced: Fleet | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, incarnation: Incarnation) -> Node | None:
        return self._nodes.get(incarnation)

    def all(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    @property
    def fleet(self) -> Fleet:
        """What they allow together; the same object until that changes."""
        if self._fleet is None:
            self._fleet = Fleet(self.all(), decode_alone=self.decode_alone)
        return self._fleet

    def of_role(self, role: DisaggregationMode) -> tuple[Node, ...]:
        return self.fleet.of_role(role)

    def _on_change(self) -> None:
        self._fleet = None

    def named(self, name: str) -> tuple[Node, ...]:
        return tuple(node for node in self._nodes.values() if node.hello.name == name)

    # ------------------------------------------------------------ what nodes say

    def receive(self, routing_id: bytes, envelope: FromNode, now: float) -> Received:
        """Judge one envelope: addressee, sender, number; take in what concerns the node itself."""
        source, body = envelope.source, envelope.body
        if not source:
            return Received(dropped="garbage_frames")
        if isinstance(body, Introduction):
            return _refuse_version(body)
        if isinstance(body, Hello):
            return self._on_hello(routing_id, envelope, body, now)
        node = self._nodes.get(source)
        if envelope.to != self.me or node is None or not node.linked:
            left = self._given_up.get(source) is Loss.LEFT
            return Received(dropped="stale_node_messages", greet_me=not left)
        if envelope.seq < node.next_from:
            return Received(dropped="stale_node_messages")
        loss = None if envelope.seq == node.next_from else Loss.GAP
        if loss is not None:
            node.adapters = None  # a list may be among what was lost: greeted anew it says all
        node.next_from = envelope.seq + 1
        node.heard_at = now
        node.routing_id = routing_id
        match body:
            case Heartbeat(stats=stats, step_age_s=age):
                node.stats, node.step_age_s = stats, age
                node.note_state(stats.state)
            case NodeAdapters(adapters):
                node.adapters = {info.name: info for info in adapters}
            case Failed(kind=FailureKind.DRAINING):
                node.note_state(NodeState.DRAINING)
            case Goodbye():
                self._give_up(source, Loss.LEFT)
                return Received(loss=Loss.LEFT)
            case _:
                pass
        return Received(loss=loss, greet_me=loss is not None, body=body)

    def _on_hello(
        self,
        routing_id: bytes,
        envelope: FromNode,
        hello: Hello,
        now: float,
    ) -> Received:
        source = envelope.source
        if envelope.to not in ("", self.me):
            return Received(dropped="stale_node_messages", greet_me=True)
        if hello.fingerprint.wire_version != WIRE_VERSION:
            return _refuse_version(hello)
        rivals = self.rivals(source, hello)
        for rival in rivals:
            if rival.linked and now - rival.heard_at <= self._timeout_s / 2:
                return Received(dropped="refused_nodes", refused=_name_taken(rival))
        for rival in rivals:
            self._give_up(rival.incarnation, Loss.REPLACED)
        again = source in self._nodes
        known = again or source in self._given_up
        self._given_up.pop(source, None)
        first = envelope.seq + 1
        on_change = self._on_change
        node = Node(source, hello, routing_id, now, next_from=first, on_change=on_change)
        self._nodes[source] = node
        self._on_change()
        return Received(
            loss=Loss.RELINKED if again else None,
            joined=True,
            welcome=Welcome(reset=known),
            replaced=rivals,
            body=hello,
        )

    def rivals(self, source: Incarnation, hello: Hello) -> tuple[Node, ...]:
        """Other incarnations with the name of a node that says Hello, but for those that leave.

        Before `receive`, make sure that they can still be reached: a restarted node meets its
        predecessor here, whose connection is gone, and that must not keep it out.
        """
        return tuple(
            node
            for node in self.named(hello.name)
            if node.incarnation != source and node.state is not NodeState.DRAINING
        )

    # ------------------------------------------------------------ what nodes do not say

    def expire(self, now: float) -> list[Node]:
        """Give up the nodes that were silent for too long; returns them."""
        silent = [n for n in self._nodes.values() if now - n.heard_at > self._timeout_s]
        for node in silent:
            self._give_up(node.incarnation, Loss.SILENT)
        return silent

    def forgive_silence(self, gap_s: float) -> None:
        """This process itself was stopped for `gap_s`: that silence is not the nodes'."""
        for node in self._nodes.values():
            node.heard_at += gap_s

    def unreachable(self, incarnation: Incarnation) -> Node | None:
        """A message could not be sent. Returns the node if this is news."""
        node = self._nodes.get(incarnation)
        if node is None or not node.linked:
            return None
        node.linked = False
        return node

    def _give_up(self, incarnation: Incarnation, why: Loss) -> None:
        del self._nodes[incarnation]
        self._on_change()
        self._given_up[incarnation] = why
        while len(self._given_up) > REMEMBERED_NODES:
            self._given_up.popitem(last=False)

    # ------------------------------------------------------------ messages to nodes

    def envelope(self, node: Node, body: ToNode) -> Envelope[ToNode]:
        """Number a message for a linked node."""
        if isinstance(body, Welcome):
            node.sent = 0
        return Envelope(self.me, node.incarnation, node.number(), body)

    def greet_me(self, to: Incarnation) -> Envelope[ToNode]:
        return Envelope(self.me, to, 0, Ping(0.0))

    def refusal(self, to: Incarnation, refused: Refused) -> Envelope[ToNode]:
        return Envelope(self.me, to, 0, refused)

    def announcements(self) -> list[tuple[Node, Peers]]:
        """For each decode node whose prefill nodes have changed: all of them, to be dialled now.

        Who leaves is not named any more: decode keeps that link only while a room needs it.
        """
        fleet = self.fleet
        if fleet is self._announced:
            return []
        self._announced = fleet
        peers: dict[Fingerprint, list[PeerNode]] = {}
        for prefill in fleet.of_role(DisaggregationMode.PREFILL):
            if prefill.state is not NodeState.DRAINING:
                peer = PeerNode(prefill.incarnation, prefill.hello.side_channel)
                peers.setdefault(prefill.hello.fingerprint, []).append(peer)
        news = []
        for decode in fleet.of_role(DisaggregationMode.DECODE):
            fitting = tuple(peers.get(decode.hello.fingerprint, ()))
            if decode.linked and fitting != decode.told:
                decode.told = fitting
                news.append((decode, Peers(list(fitting))))
        return news

    # ------------------------------------------------------------ what nodes allow

    def unready(self) -> str | None:
        """Why a request that came now could not be served; None if a pair could, also one that is
        paused, and has shaken hands, or a decode node may work alone."""
        missing = self.fleet.missing()
        if missing is not None:
            return missing
        reason = "no decode node has shaken hands with a prefill node yet"
        served = self.fleet.prefill_groups(None)
        for decode in self.of_role(DisaggregationMode.DECODE):
            is_alone = self.decode_alone and decode.hello.fingerprint not in served
            if is_alone and decode.stays and decode.is_equipped:
                return None
            for peer in decode.stats.linked_peers:
                prefill = self.get(peer)
                if not decode.stays or prefill is None or not prefill.stays:
                    continue
                if decode.is_equipped and prefill.is_equipped:
                    return None
                reason = "nodes are being given the adapters of the cluster"
        return reason


def _refuse_version(hello: Hello | Introduction) -> Received:
    theirs = hello.fingerprint.wire_version
    reason = f"it speaks wire version {theirs}, this router {WIRE_VERSION}"
    return Received(dropped="refused_nodes", refused=Refused(reason))


def _name_taken(holder: Node) -> Refused:
    where = f"{holder.incarnation}, process {holder.hello.pid}, {holder.hello.url}"
    return Refused(f"the name {holder.hello.name} belongs to a live node ({where})")
