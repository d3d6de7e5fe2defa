"""NIXL writes between two processes against a memcpy in one, for SmolLM2's pages.

    python -m benchmarks.transfer               what UCX picks on one host
    UCX_TLS=tcp python -m benchmarks.transfer   the network path

Medians of some rounds. `done` is submit to `WriteDone` at the source, `notified` submit to the
notification at the target's engine; memcpy (GB/s) copies as many pages inside one process.
"""

import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.transfer_target import NUM_PAGES, PAGE_BYTES, TARGET, Target, backend, filled_pool
from common.plan import Write, WriteDone
from transfer.base import TransferBackend

ROUNDS = 15
COUNTS = (1, 16, 128, 512)


def scattered(count: int, seed: int) -> tuple[int, ...]:
    """Page ids in no order, as a pool in use gives them."""
    chosen = np.random.default_rng(seed).permutation(NUM_PAGES)[:count]
    return tuple(int(page) for page in chosen)


def one_write(source: TransferBackend, target: Target, count: int) -> tuple[float, float]:
    """Seconds until done at the source, and until the target's engine knows."""
    write = Write(1, 0, TARGET, scattered(count, 1), scattered(count, 2), b"stamp")
    start = time.monotonic()
    source.submit([write])
    while True:
        events = source.poll()
        if events:
            break
        time.sleep(0.0001)
    done = time.monotonic() - start
    if not isinstance(events[0], WriteDone):
        raise RuntimeError(f"the write failed: {events}")
    return done, float(target.pipe.recv()) - start


def median_s(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(ROUNDS))


def memcpy_s(count: int) -> float:
    source, target = filled_pool(), filled_pool()
    pairs = list(zip(scattered(count, 1), scattered(count, 2), strict=True))

    def copy() -> float:
        start = time.monotonic()
        for here, there in pairs:
            np.copyto(target[there], source[here])
        return time.monotonic() - start

    return median_s(copy)


def main() -> None:
    pool = filled_pool()
    source = backend(pool, "bench-source")
    source.start(lambda: None)
    target = Target(source)
    for count in COUNTS:
        one_write(source, target, count)  # connects, and maps pages
    print(f"page {PAGE_BYTES:,} B, UCX_TLS={os.environ.get('UCX_TLS', 'unset')}")
    print(
        f"{'pages':>6} {'MB':>7} {'done ms':>9} {'notified ms':>12} {'GB/s':>6} {'memcpy GB/s':>12}"
    )
    for count in COUNTS:
        size = count * PAGE_BYTES
        rounds = [one_write(source, target, count) for _ in range(ROUNDS)]
        done, notified = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"{count:>6} {size / 1e6:>7.1f} {done * 1e3:>9.2f} {notified * 1e3:>12.2f} "
            f"{size / notified / 1e9:>6.2f} {size / memcpy_s(count) / 1e9:>7.2f}"
        )
    target.close()
    source.close()


if __name__ == "__main__":
    main()
