"""What holding a loss to its word costs: the part of an update that its check takes, by the
median of many updates.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F

import lockstep
from benchmarks.models import small_job
from benchmarks.timing import keep
from lockstep.data import job_loader, resolve
from lockstep.jobfile import JobFile
from lockstep.launch import cores
from lockstep.launch import devices as _devices
from lockstep.launch.world import World
from lockstep.model.losses.loss_check import LossCheck
from lockstep.strategies import choose

EXAMPLES = Path(__file__).parent.parent / "examples"


def char_lm() -> lockstep.Job:
    """Its loss returns (total, count)."""
    return JobFile(str(EXAMPLES / "char_lm.py"), {"size": 300_000}).load()


def resnet50() -> lockstep.Job:
    """The loss as a function of one's own, which isn't known to be a mean over samples."""
    job = JobFile(str(EXAMPLES / "resnet50_split.py"), {"generated": True}).load()
    return dataclasses.replace(job, loss=lambda outputs, targets: F.cross_entropy(outputs, targets))


def small() -> lockstep.Job:
    """Likewise, beside an update that takes less than a millisecond."""
    return dataclasses.replace(
        small_job(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets)
    )


JOBS: dict[str, tuple[Callable[[], lockstep.Job], int]] = {
    "char_lm": (char_lm, 120),
    "resnet50": (resnet50, 48),
    "small": (small, 4000),
}
"""With how many updates, of which the first 16, which are all checked, don't count."""


def shares(job: lockstep.Job, updates: int, rounds: int = 3) -> list[tuple[float, float]]:
    """The part of an update that the check takes under ``dp``.

    For each round of its usual update (the median), and of all of them.
    """
    spent: list[float] = []
    inner = LossCheck.__call__

    def timed(self: LossCheck, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(self, *args, **options)
        finally:
            spent.append(time.perf_counter() - began)

    LossCheck.__call__ = timed  # type: ignore[method-assign]
    found = []
    try:
        for _ in range(rounds):
            world = World(devices=_devices.slots(2))
            with cores.occupied(world.device):
                step = choose("dp", world.devices).prepare(job, world)
                loader = job_loader(job, world, resolve(job.train_data, world))
                batches = itertools.chain.from_iterable(map(loader.epoch, itertools.count()))
                taken = []
                for number in range(updates):
                    batch = next(batches)
                    spent.clear()
                    step.seed(number)
                    began = time.perf_counter()
                    step.update(batch)
                    whole = time.perf_counter() - began
                    taken.append((sum(spent) / len(step.models()), whole))
            rest = taken[16:]
            usual = statistics.median(check / whole for check, whole in rest)
            found.append((usual, sum(check for check, _ in rest) / sum(whole for _, whole in rest)))
    finally:
        LossCheck.__call__ = inner  # type: ignore[method-assign]
    return found


def run() -> None:
    """Measure, print and keep."""
    print("== loss-check", flush=True)
    rows = []
    for name, (job, updates) in JOBS.items():
        found = shares(job(), updates)
        row: dict[str, Any] = {"job": name}
        print(f"   {name}:", flush=True)
        for what, its in zip(
            ("a usual update", "all updates"), zip(*found, strict=True), strict=True
        ):
            row[what] = {"median": statistics.median(its), "spread": (min(its), max(its))}
            print(
                f"      {100 * row[what]['median']:.2f} % of {what} ({100 * min(its):.2f} to "
                f"{100 * max(its):.2f} %)"
            )
        rows.append(row)
    keep("loss-check", {"unit": "part of an update", "rows": rows})
