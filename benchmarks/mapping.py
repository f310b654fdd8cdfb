"""A CPU-bound Python function over 10,000 items: one process, two, and multiprocessing's pool
with its best chunks.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import lockstep
from lockstep.launch.devices import slots

ITEMS = 10_000
CHUNKS = (1, 8, 32, 128, 512)


def work(n: int) -> int:
    """About a millisecond of Python."""
    total = 0
    for i in range(15_000 + n % 1_000):
        total += i * i
    return total


def _rate(results: Callable[[], Iterable[int]], items: int) -> float:
    """Items per second of a whole call: what it starts, and what it ends."""
    began = time.perf_counter()
    count = sum(1 for _ in results())
    assert count == items
    return items / (time.perf_counter() - began)


def _pooled(items: int, chunk: int) -> Iterator[int]:
    """What `map` does, by a pool of this process's forks. Both start their processes and wait
    for the end of these.
    """
    with multiprocessing.get_context("fork").Pool(2) as processes:
        yield from processes.imap(work, range(items), chunk)
        processes.close()
        processes.join()


def mapping(items: int = ITEMS) -> Mapping[str, Callable[[], float]]:
    """Items per second, the start and the end of processes in it on all sides.

    What comes once for a program isn't: the process that forks our workers has imported torch
    before, as this one has, of which the pool's are forks.
    """

    def pool(chunk: int, items: int) -> float:
        return _rate(lambda: _pooled(items, chunk), items)

    def ours(devices: int) -> float:
        return _rate(lambda: lockstep.map(work, range(items), slots(devices)), items)

    tried = {
        chunk: statistics.median(pool(chunk, items // 10) for _ in range(3)) for chunk in CHUNKS
    }
    best = max(tried, key=lambda chunk: tried[chunk])
    list(lockstep.map(work, range(2), "2xcpu"))
    return {
        "one process": lambda: ours(1),
        "two processes": lambda: ours(2),
        "multiprocessing.Pool.imap": lambda: pool(best, items),
    }
