"""Stand-in nodes that cost as little as they can: a prefill and a decode node in one process.

They speak the real protocol. The prefill node answers every prompt at once; the decode node sends
one `Tokens` message a step for all its rooms.
"""

import argparse
import math
import time
from pathlib import Path

import zmq

from benchmarks.router_cost.stamps import FIRST, Stamps, word_of_step
from benchmarks.router_cost.words import find_words
from common.messages import (
    WIRE_VERSION,
    Abort,
    Envelope,
    Fingerprint,
    Generate,
    Heartbeat,
    Hello,
    NodeAdapters,
    NodeStats,
    Peers,
    Ping,
    StopReason,
    TokenOutput,
    Tokens,
    ToRouter,
    Welcome,
    decode_to_node,
    encode,
)
from common.modes import DisaggregationMode

NUM_PAGES = 1_000_000
HEARTBEAT_S = 0.5
FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="cost",
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=16,
)


class Node:
    """One node's link to the router."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: str, name: str) -> None:
        self.name = name
        self._role = DisaggregationMode(name)
        self._router = ""
        self._seq = 0
        self._peers: list[str] = []
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(router)
        self._greet()

    def _greet(self) -> None:
        self._seq = 0
        self.send(
            Hello(
                role=self._role,
                name=self.name,
                url="http://127.0.0.1:1",
                pid=1,
                served_model_name="cost",
                fingerprint=FINGERPRINT,
                max_model_len=8192,
                max_running_requests=4096,
                num_pages=NUM_PAGES,
                side_channel="tcp://127.0.0.1:1",
            )
        )

    def send(self, body: ToRouter) -> None:
        self._seq += 1
        to = "" if isinstance(body, Hello) else self._router
        self.socket.send(encode(Envelope(f"{self.name}-incarnation", to, self._seq, body)))

    def beat(self) -> None:
        stats = NodeStats(num_pages=NUM_PAGES, free_pages=NUM_PAGES, linked_peers=self._peers)
        self.send(Heartbeat(stats=stats, step_age_s=0.0))

    def receive(self) -> list[Generate | Abort]:
        """What is to be computed, or no more; everything else is answered here."""
        found: list[Generate | Abort] = []
        while True:
            try:
                envelope = decode_to_node(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found
            match envelope.body:
                case Generate() | Abort() as body:
                    found.append(body)
                case Welcome():
                    self._router = envelope.source
                    self.send(NodeAdapters([]))
                    self.beat()
                case Ping() if envelope.seq == 0:
                    self._greet()
                case Peers(nodes):
                    self._peers = [node.incarnation for node in nodes]
                    self.beat()
                case _:
                    pass


def serve(router: str, folder: Path, stamps: Stamps, step_s: float) -> None:
    """Run both nodes until the process is ended. Without `step_s` they are as fast as they can."""
    ids = [token_id for token_id, _ in find_words(folder)]
    context = zmq.Context()
    prefill, decode = Node(context, router, "prefill"), Node(context, router, "decode")
    poller = zmq.Poller()
    poller.register(prefill.socket, zmq.POLLIN)
    poller.register(decode.socket, zmq.POLLIN)
    rooms: dict[int, tuple[int, int]] = {}
    step = 0
    beat_at = step_at = time.monotonic()
    while True:
        due_at = min(step_at, beat_at) if rooms else beat_at
        poller.poll(math.ceil(max(0.0, due_at - time.monotonic()) * 1000))
        asked = [body for body in prefill.receive() if isinstance(body, Generate)]
        if asked:
            prefill.send(
                Tokens([TokenOutput(room=g.room, index=0, token_ids=[ids[FIRST]]) for g in asked])
            )
        for body in decode.receive():
            if isinstance(body, Generate):
                rooms[body.room] = (0, body.sampling.max_tokens)
            else:
                rooms.pop(body.room, None)
        now = time.monotonic()
        if now >= beat_at:
            beat_at = now + HEARTBEAT_S
            prefill.beat()
            decode.beat()
        if now < step_at:
            continue
        step_at = max(step_at + step_s, now)
        step += 1
        outputs = _step(rooms, ids, word_of_step(step))
        if outputs:
            stamps.times[word_of_step(step)] = time.monotonic()
            decode.send(Tokens(outputs))


def _step(rooms: dict[int, tuple[int, int]], ids: list[int], word: int) -> list[TokenOutput]:
    """A token for each room; its first is a repetition of prefill's."""
    outputs = []
    for room, (index, count) in tuple(rooms.items()):
        finish = StopReason.LENGTH if index + 1 == count else None
        token_id = ids[word if index else FIRST]
        outputs.append(TokenOutput(room=room, index=index, token_ids=[token_id], finish=finish))
        if finish is None:
            rooms[room] = (index + 1, count)
        else:
            del rooms[room]
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    args = parser.parse_args()
    serve(args.router, args.folder, Stamps(args.stamps), args.step_s)


if __name__ == "__main__":
    main()
