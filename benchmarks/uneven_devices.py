"""Two devices of a core each, the second of which a busy process shares: that device has half of
its core, as an older card beside a newer one has less to give. Even local batches against shares.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from benchmarks import models
from benchmarks.timing import Benchmark, Ratio, rate
from lockstep.launch.devices import Device, slots
from lockstep.strategies import DDP

BUSY = "while True: pass"


@contextlib.contextmanager
def busy(device: Device) -> Iterator[None]:
    """Have another process compute on the cores of a device all the while."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        os.sched_setaffinity(process.pid, device.cores)
        yield
    finally:
        process.kill()
        process.wait()


def uneven() -> Mapping[str, Callable[[], float]]:
    job = models.stack_job()
    devices = slots(2)

    def beside(strategy: DDP) -> Callable[[], float]:
        train = rate(job, strategy, devices)

        def once() -> float:
            with busy(devices[1]):
                return train()

        return once

    return {
        "ddp, even": beside(DDP()),
        "ddp, 2,1": beside(DDP(shares="2,1")),
        "ddp, auto": beside(DDP(shares="auto")),
    }


UNEVEN = {
    "uneven-devices": Benchmark(
        uneven,
        (
            Ratio("ddp, auto", "ddp, even", 1.2),
            Ratio("ddp, 2,1", "ddp, even", 1.2),
        ),
    ),
}
