"""Layers on two slots: `pp` against one core that trains the whole batch, and what is between that and the bound.

The bound of m micro-batches over two stages of equal time is 2 m / (m + 1), divided by what cutting the batch in m
costs one core by itself: the alternative "one core, 16 micro-batches" shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks import models
from benchmarks.timing import Benchmark, Ratio, rate
from lockstep.devices import Device, slots, usable_cores
from lockstep.strategies.mp import MP
from lockstep.strategies.pp import PP

_HALVES = {**{f"layers.{i}": i // 4 for i in range(8)}}


def stack() -> Mapping[str, Callable[[], float]]:
    job = models.stack_job().having(epochs=4)
    core = Device("cpu", 0, usable_cores()[:1])
    return {
        "one core": rate(job, "single", core),
        "one core, 16 micro-batches": rate(job.having(accumulate=16), "single", core),
        "mp, 2 slots": rate(job, MP(_HALVES), slots(2)),
        "pp, 8 micro-batches": rate(job, PP(_HALVES, 8), slots(2)),
        "pp, 16 micro-batches": rate(job, PP(_HALVES, 16), slots(2)),
        "pp, 16 micro-batches, gpipe": rate(job, PP(_HALVES, 16, "gpipe"), slots(2)),
    }


PIPELINING = {
    "pipelining-stack": Benchmark(
        stack,
        (
            Ratio("pp, 16 micro-batches", "one core", 1.8),
            Ratio("pp, 16 micro-batches", "one core, 16 micro-batches", 0.97 * 32 / 17),
            Ratio("pp, 8 micro-batches", "one core"),
            Ratio("one core, 16 micro-batches", "one core"),
            Ratio("mp, 2 slots", "one core"),
        ),
    ),
}
