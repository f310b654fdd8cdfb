"""``fsdp`` on two ranks against a hand-written loop of fully_shard, and against ``ddp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import lockstep
from benchmarks import models
from benchmarks.pipelining import char_lm_job
from benchmarks.timing import ROOT, Benchmark, Ratio, rate, torchrun
from lockstep.launch.devices import slots

JOBS: dict[str, Callable[[], lockstep.Job]] = {
    "stack": models.stack_job,
    "char_lm": lambda: char_lm_job().replace(epochs=8),
}


def by_hand(name: str) -> Callable[[], float]:
    """The hand-written loop's rate."""
    environment = {"JOB": name, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return lambda: float(torchrun("fully_shard_loop.py", 2, environment).stdout.strip().splitlines()[-1])


def sharding(name: str) -> Mapping[str, Callable[[], float]]:
    """Each in fresh ranks."""
    job = JOBS[name]()
    return {
        "fsdp": rate(job, "fsdp", slots(2)),
        "fully_shard by hand": by_hand(name),
        "ddp": rate(job, "ddp", slots(2)),
    }


SHARDING = {
    f"sharding-{name}": Benchmark(
        lambda name=name: sharding(name),  # type: ignore[misc]
        (Ratio("fsdp", "fully_shard by hand", 1.0), Ratio("fsdp", "ddp")),
    )
    for name in JOBS
}
