"""Run benchmarks: all, or those named; `gpu` is for accelerators (see gpu.py). Results go to
benchmarks/results/; `page` writes docs/performance.md from them (see page.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import level, loss_checking, models, page, surviving
from benchmarks.checkpointing import CHECKPOINTING
from benchmarks.comparing import COMPARING
from benchmarks.experiment import EXPERIMENT
from benchmarks.mapping import mapping
from benchmarks.parallel import PARALLEL
from benchmarks.parallel_loss import PARALLEL_LOSS
from benchmarks.partitioning import PARTITIONING
from benchmarks.pipelining import PIPELINING
from benchmarks.sharding import SHARDING
from benchmarks.sparse import sparse
from benchmarks.timing import HERE, Benchmark, Ratio, by_python, by_torchrun, rate, run, torchrun
from benchmarks.uneven_devices import UNEVEN
from lockstep.launch.devices import Device, slots, usable_cores
from lockstep.tensors.allocator import prepare


def one_core() -> Device:
    return Device("cpu", 0, usable_cores()[:1])


def stack() -> Mapping[str, Callable[[], float]]:
    job = models.stack_job()
    return {
        "one core": rate(job, "single", one_core()),
        "ddp, 2 slots": rate(job, "ddp", slots(2)),
        "dp, 2 slots": rate(job, "dp", slots(2)),
    }


def mobilenet() -> Mapping[str, Callable[[], float]]:
    job = models.mobilenet_job()
    return {
        "all cores": rate(job, "single", slots(1)),
        "one core": rate(job, "single", one_core()),
        "dp, 2 slots": rate(job, "dp", slots(2)),
        "ddp, 2 slots": rate(job, "ddp", slots(2)),
    }


def small() -> Mapping[str, Callable[[], float]]:
    alternatives = {
        "ddp": rate(models.small_job(), "ddp", slots(2)),
        "DDP, DistributedSampler, DataLoader": by_torchrun("ddp_loader.py"),
        "DDP, indexing tensors": by_torchrun("ddp_indexing.py"),
    }
    for name, script, module in (
        ("Fabric", "fabric_loop.py", "lightning"),
        ("Accelerate", "accelerate_loop.py", "accelerate"),
    ):
        if _has(module):
            alternatives[name] = by_torchrun(script)
    return alternatives


def overhead() -> Mapping[str, Callable[[], float]]:
    """The small step on one core of one process; every loop has the same fused optimizer."""
    alternatives = {
        "bare step": by_python("bare_step.py", threads=1),
        "single": rate(models.small_job(), "single", one_core()),
    }
    if _has("lightning"):
        alternatives["Lightning"] = by_python("lightning_loop.py", threads=1)
    if _has("accelerate"):
        alternatives["Accelerate"] = by_python("accelerate_alone.py", threads=1)
    return alternatives


def start() -> Mapping[str, Callable[[], float]]:
    def timed(command: Callable[[Mapping[str, str]], Any]) -> Callable[[], float]:
        def once() -> float:
            with tempfile.TemporaryDirectory() as folder:
                noted = Path(folder) / "noted"
                began = time.time()
                command({"FIRST_STEP": str(noted), "RUNS": folder})
                return 1.0 / (float(noted.read_text()) - began)

        return once

    def ours(environment: Mapping[str, str]) -> None:
        command = [
            str(Path(sys.executable).parent / "lockstep"),
            "train",
            str(HERE / "first_step_job.py"),
        ]
        words = ["--strategy", "ddp", "--devices", "2", "--folder", environment["RUNS"]]
        subprocess.run(
            [*command, *words], env={**os.environ, **environment}, check=True, capture_output=True
        )

    return {
        "lockstep train": timed(ours),
        "torchrun, plain PyTorch": timed(
            lambda environment: torchrun("first_step.py", 2, environment)
        ),
    }


def _has(module: str) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, check=False
        ).returncode
        == 0
    )


BENCHMARKS = {
    "stack": Benchmark(
        stack, (Ratio("ddp, 2 slots", "one core", 1.95), Ratio("dp, 2 slots", "one core", 2.00))
    ),
    "mobilenet": Benchmark(
        mobilenet,
        (
            Ratio("dp, 2 slots", "all cores", 1.6),
            Ratio("dp, 2 slots", "one core"),
            Ratio("ddp, 2 slots", "all cores"),
            Ratio("all cores", "one core"),
        ),
    ),
    "small": Benchmark(
        small,
        (
            Ratio("ddp", "DDP, DistributedSampler, DataLoader", 1.6),
            Ratio("ddp", "DDP, indexing tensors", 1.2),
            Ratio("ddp", "Fabric", 1.7),
            Ratio("ddp", "Accelerate", 1.7),
        ),
    ),
    "overhead": Benchmark(
        overhead,
        (
            Ratio("single", "Lightning", 0.5, over="bare step"),
            Ratio("single", "Accelerate", 0.5, over="bare step"),
            Ratio("bare step", "single"),
        ),
    ),
    "start": Benchmark(
        start,
        (Ratio("lockstep train", "torchrun, plain PyTorch", 1 / 0.8),),
        unit="1 / seconds to the first step",
    ),
    **EXPERIMENT,
    **CHECKPOINTING,
    **COMPARING,
    **PARALLEL,
    **PARALLEL_LOSS,
    "sparse": Benchmark(
        sparse,
        (Ratio("hogwild", "ddp", 1.0), Ratio("hogwild", "one core"), Ratio("ddp", "one core")),
        unit="1 / seconds of training to the same held-out loss",
    ),
    "map": Benchmark(
        mapping,
        (
            Ratio("two processes", "one process", 1.8),
            Ratio("two processes", "multiprocessing.Pool.imap", 1 / 1.05),
        ),
        unit="items per second",
    ),
    **PIPELINING,
    **SHARDING,
    **UNEVEN,
}


def main(names: list[str]) -> int:
    """Run the benchmarks of these names."""
    if names == ["page"]:
        return page.main()
    prepare()  # as the command does: what trains in this process has what ranks have
    if names[:1] == ["gpu"]:
        from benchmarks import gpu

        return gpu.main(names[1:])
    known = [*BENCHMARKS, "level", "loss-check", "surviving", *PARTITIONING]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(
            f"there is no benchmark {unknown[0]}: there are {', '.join(known)}, gpu, page",
            file=sys.stderr,
        )
        return 2
    for name in names or known:
        if name == "level":
            level.run(slots(2))
        elif name == "loss-check":
            loss_checking.run()
        elif name == "surviving":
            surviving.run()
        elif name in PARTITIONING:
            PARTITIONING[name]()
        else:
            run(name, BENCHMARKS[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
