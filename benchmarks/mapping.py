"""A CPU-bound Python function over 10,000 items: one process, two, and multiprocessing's pool with its best chunks."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import lockstep
from lockstep.devices import slots

ITEMS = 10_000
CHUNKS = (1, 8, 32, 128, 512)


def work(n: int) -> int:
    """About a millisecond of Python."""
    total = 0
    for i in range(15_000 + n % 1_000):
        total += i * i
    return total


def _rate(results: Callable[[], Iterable[int]], items: int) -> float:
    began = time.perf_counter()
    count = sum(1 for _ in results())
    assert count == items
    return items / (time.perf_counter() - began)


def mapping(items: int = ITEMS) -> Mapping[str, Callable[[], float]]:
    """Items per second; the processes of the pool have started before its clock does, the workers of `map` have not."""
    fork = multiprocessing.get_context("fork")

    def pool(chunk: int, items: int) -> float:
        with fork.Pool(2) as processes:
            processes.map(work, range(2))
            return _rate(lambda: processes.imap(work, range(items), chunk), items)

    def ours(devices: int) -> float:
        return _rate(lambda: lockstep.map(work, range(items), slots(devices), progress=False), items)

    tried = {chunk: statistics.median(pool(chunk, items // 10) for _ in range(3)) for chunk in CHUNKS}
    best = max(tried, key=lambda chunk: tried[chunk])
    list(lockstep.map(work, range(2), "2xcpu"))  # the process that forks workers has imported torch
    return {
        "one process": lambda: ours(1),
        "two processes": lambda: ours(2),
        "multiprocessing.Pool.imap": lambda: pool(best, items),
    }
