"""Two questions of a pipeline's plan: is the found split the best one, and does the simulation tell
the step time?

`splits`: every two-way split whose slowest stage is expected to be within a quarter of the best
one's is timed once; the three fastest are then timed against the found one, in turns.
`predictions`: each job, with several numbers of micro-batches and two schedules: forward and
backward of a global batch, as simulated from stage times on one core, and as measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import lockstep
from benchmarks.pipelining import JOBS
from benchmarks.timing import in_turns, keep
from lockstep.data import Batch
from lockstep.launch.devices import slots
from lockstep.launch.placement import alone
from lockstep.pipelining.planner.blocks import map_of
from lockstep.pipelining.planner.measured_blocks import ModelBenchmark
from lockstep.pipelining.planner.plan import planned
from lockstep.strategies.pp import PP
from lockstep.tensors.allocator import keep_freed_memory

MICROBATCHES = 8
SWEEP = (1, 2, 4, 8, 16)
SCHEDULES = ("1f1b", "gpipe")


def timed(job: lockstep.Job, way: PP) -> Callable[[], float]:
    """Seconds of a global batch's forward and backward: the median of five, after two updates
    that don't count.
    """

    def once() -> float:
        with alone(slots(2)) as world:
            step = way.prepare(job, world)
            loader = way.training_loader(job, world, job.train_data)
            batches: list[Batch] = list(loader.epoch(0))
            for batch in (batches[0], batches[-1]):
                step.update(batch)
            taken = []
            for _ in range(5):
                began = time.perf_counter()
                step.gradients(batches[0])
                taken.append(time.perf_counter() - began)
            loader.close()
            return statistics.median(taken)

    return once


def ready(name: str) -> lockstep.Job:
    """The job, its data made once."""
    job = JOBS[name]()
    data: Any = job.train_data
    return job.replace(train_data=data() if callable(data) else data, loader_workers=0)


def maps_of(job: lockstep.Job) -> Callable[[int], dict[str, int]]:
    """The device map that cuts before a block, by its number; what has no parameters is on its
    neighbours' stage.
    """
    with alone(slots(2)[:1]) as world:
        bench = ModelBenchmark(job, world)
        blocks = bench.blocks(bench.first.size, seconds=0.0)
    return lambda place: map_of(bench.model, blocks, (0, place, len(blocks)))


def split(name: str) -> dict[str, Any]:
    """The found split against the best of all others."""
    job = ready(name)
    partition, _ = planned(
        job, slots(2), chunks=(1,), schedules=["1f1b"], microbatches=[MICROBATCHES], seconds=3.0
    )
    blocks = partition.blocks
    map_at = maps_of(job)
    mine = len(partition.stages[0].blocks)
    whole = sum(block.time for block in blocks)
    before = [sum(block.time for block in blocks[:place]) for place in range(len(blocks) + 1)]
    slowest = {place: max(before[place], whole - before[place]) for place in range(1, len(blocks))}
    near = [
        place
        for place, seconds in slowest.items()
        if seconds <= 1.25 * min(slowest.values()) and place != mine
    ]
    once = {place: timed(job, PP(map_at(place), MICROBATCHES))() for place in near}
    best = sorted(once, key=once.__getitem__)[:3]
    ways: dict[str, Callable[[], float]] = {
        f"cut before {blocks[place].name}": _rate(timed(job, PP(map_at(place), MICROBATCHES)))
        for place in best
    }
    ways["found"] = _rate(timed(job, PP(partition.device_map, MICROBATCHES)))
    timings = in_turns(ways, rounds=3, log=lambda line: print(f"   {line}", flush=True))
    ratios = {other: timings["found"].over(timings[other]) for other in ways if other != "found"}
    least = min(ratios.values(), key=lambda ratio: ratio.median)
    print(
        f"   {name}: found (before {blocks[mine].name}) : the best of {len(near)} others   "
        f"{least}   goal 0.97"
    )
    return {
        "job": name,
        "found": blocks[mine].name,
        "tried": len(near),
        "ratios": {
            other: {"median": ratio.median, "spread": ratio.spread}
            for other, ratio in ratios.items()
        },
        "least": least.median,
    }


def _rate(seconds: Callable[[], float]) -> Callable[[], float]:
    return lambda: 1 / seconds()


def prediction(name: str) -> list[dict[str, Any]]:
    """Simulated and measured, for each cell of a sweep."""
    job = ready(name)
    partition, choice = planned(
        job, slots(2), chunks=(1,), schedules=SCHEDULES, microbatches=SWEEP, seconds=3.0
    )
    cells = []
    for candidate in sorted(choice.candidates, key=lambda c: (c.microbatches, c.schedule)):
        way = PP(partition.device_map, candidate.microbatches, candidate.schedule)
        measured = timed(job, way)()
        error = candidate.seconds / measured - 1
        print(
            f"   {name}, {candidate.microbatches:>2} {candidate.schedule:<5}   "
            f"simulated {candidate.seconds * 1e3:7.1f} ms   measured {measured * 1e3:7.1f} ms   "
            f"{100 * error:+.1f} %",
            flush=True,
        )
        cells.append(
            {
                "job": name,
                "microbatches": candidate.microbatches,
                "schedule": candidate.schedule,
                "simulated": candidate.seconds,
                "measured": measured,
                "error": error,
            }
        )
    return cells


def predictions() -> None:
    """Simulated and measured, for all jobs."""
    print("== partitioning-predictions", flush=True)
    # a virtual machine may have to ask its host for each page that was free for a while
    keep_freed_memory()
    cells = [cell for name in JOBS for cell in prediction(name)]
    error = statistics.median(abs(cell["error"]) for cell in cells)
    print(f"   median error of {len(cells)} cells: {100 * error:.1f} %   goal 5 %", flush=True)
    keep("partitioning-predictions", {"median_error": error, "cells": cells})


def splits() -> None:
    """Found and best, for three jobs."""
    print("== partitioning-splits", flush=True)
    keep_freed_memory()
    found = []
    for name in ("gpt2", "resnet50", "stack"):
        found.append(split(name))
        keep("partitioning-splits", {"splits": found})


PARTITIONING = {"partitioning-predictions": predictions, "partitioning-splits": splits}
