"""What CURVE costs on a link: messages a second, and what a step's tokens take to arrive.

    python -m benchmarks.curve

A ROUTER and a DEALER as router and node have them, in two processes; plain and encrypted in turns,
in one run, so that their ratio says something on any machine; the best round of each counts, since
others may use the processors.
"""

import argparse
import multiprocessing as mp
import statistics
import time
from multiprocessing.connection import Connection

import zmq

from common.credentials import ClusterKeys, Secret
from common.gatekeeper import dial_with
from common.messages import Envelope, TokenOutput, Tokens, ToRouter, encode

ROUNDS = 7
KEYS = ClusterKeys.derive(Secret("a secret for this benchmark"))


def tokens_message(num_rooms: int) -> bytes:
    """What a decode node sends after a step with so many running requests."""
    outputs = [TokenOutput(room=2**62 + i, index=100 + i, token_ids=[7]) for i in range(num_rooms)]
    return encode(
        Envelope[ToRouter]("decode-" + "0" * 32, "router-" + "0" * 32, 9, Tokens(outputs))
    )


def echo(encrypted: bool, pipe: Connection, num_messages: int) -> None:
    """A node: answers pings one by one, then sends a burst when asked."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndhwm = 0
    dial_with(dealer, KEYS if encrypted else None)
    dealer.connect(pipe.recv())
    dealer.send(b"here")
    while (asked := dealer.recv()) != b"burst":
        dealer.send(asked)
    payload = dealer.recv()
    for _ in range(num_messages):
        dealer.send(payload)
    dealer.recv()
    dealer.close()
    context.term()


def measure(
    encrypted: bool, payload: bytes, num_messages: int, num_pings: int
) -> tuple[float, float]:
    """(messages a second, median seconds there and back)."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvhwm = 0
    if encrypted:
        router.curve_server = 1
        router.curve_publickey, router.curve_secretkey = KEYS.curve_public, KEYS.curve_secret
    router.bind("tcp://127.0.0.1:*")
    ours, theirs = mp.Pipe()
    node = mp.get_context("spawn").Process(target=echo, args=(encrypted, theirs, num_messages))
    node.start()
    ours.send(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    who = router.recv_multipart()[0]
    times = []
    for _ in range(num_pings):
        began = time.perf_counter()
        router.send_multipart([who, payload])
        router.recv_multipart()
        times.append(time.perf_counter() - began)
    router.send_multipart([who, b"burst"])
    router.send_multipart([who, payload])
    router.recv_multipart()
    began = time.perf_counter()
    for _ in range(num_messages - 1):
        router.recv_multipart()
    rate = (num_messages - 1) / (time.perf_counter() - began)
    router.send_multipart([who, b"end"])
    node.join()
    router.close()
    context.term()
    return rate, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--pings", type=int, default=2_000)
    args = parser.parse_args()
    print("| rooms | bytes | plain msg/s | CURVE msg/s | ratio | plain us | CURVE us | more us |")
    print("|---|---|---|---|---|---|---|---|")
    for num_rooms in (1, 16, 64):
        payload = tokens_message(num_rooms)
        pairs = [
            [measure(encrypted, payload, args.messages, args.pings) for encrypted in (False, True)]
            for _ in range(ROUNDS)
        ]
        plain_rate, curve_rate = (max(pair[i][0] for pair in pairs) for i in (0, 1))
        plain_us, curve_us = (min(pair[i][1] for pair in pairs) * 1e6 for i in (0, 1))
        print(
            f"| {num_rooms} | {len(payload):,} | {plain_rate:,.0f} | {curve_rate:,.0f} "
            f"| {curve_rate / plain_rate:.2f} | {plain_us:.0f} | {curve_us:.0f} "
            f"| {curve_us - plain_us:+.0f} |"
        )


if __name__ == "__main__":
    main()
