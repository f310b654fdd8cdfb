"""Run benchmarks: all, or those named; `gpu` is for one NVIDIA GPU. Results go to benchmarks/results/."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lockstep
from benchmarks import models
from lockstep.compare import in_turns
from lockstep.devices import Device, slots, usable_cores
from lockstep.strategies import Strategy

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Ratio:
    """A row of the table: how many times the rate of ``to`` that of ``name`` is."""

    name: str
    to: str
    goal: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """Alternatives to be timed in turns, and the ratios that are wanted of them."""

    alternatives: Callable[[], Mapping[str, Callable[[], float]]]
    ratios: tuple[Ratio, ...]
    rounds: int = 5
    unit: str = "samples per second"


def rate(job: lockstep.Job, strategy: str | Strategy, devices: Any) -> Callable[[], float]:
    """Train in fresh ranks; the rate of the median epoch after the first."""

    def once() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = lockstep.train(job, strategy=strategy, devices=devices, folder=folder, quiet=True)
        return statistics.median(record["samples_per_second"] for record in run.history[1:])

    return once


def by_torchrun(script: str, *, ranks: int = 2) -> Callable[[], float]:
    """Run a hand-written loop under torchrun, a thread per rank; the rate is the last line that it prints."""

    def once() -> float:
        out = _torchrun(script, ranks, {})
        return float(out.stdout.strip().splitlines()[-1])

    return once


def _torchrun(script: str, ranks: int, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **environment,
    }
    out = subprocess.run(
        [*command, str(HERE / "by_hand" / script)],
        env=surroundings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    return out


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
        command = [str(Path(sys.executable).parent / "lockstep"), "train", str(HERE / "first_step_job.py")]
        words = ["--strategy", "ddp", "--devices", "2", "--folder", environment["RUNS"]]
        subprocess.run([*command, *words], env={**os.environ, **environment}, check=True, capture_output=True)

    return {
        "lockstep train": timed(ours),
        "torchrun, plain PyTorch": timed(lambda environment: _torchrun("first_step.py", 2, environment)),
    }


def _has(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


BENCHMARKS = {
    "stack": Benchmark(stack, (Ratio("ddp, 2 slots", "one core", 1.95), Ratio("dp, 2 slots", "one core", 2.00))),
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
    "start": Benchmark(
        start,
        (Ratio("lockstep train", "torchrun, plain PyTorch", 1 / 0.8),),
        unit="1 / seconds to the first step",
    ),
}


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    described = {
        "processor": model,
        "cores": len(usable_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def run(name: str, benchmark: Benchmark, rounds: int | None = None) -> None:
    """Time one benchmark, print its ratios, and keep them with the machine's description."""
    print(f"== {name}", flush=True)
    alternatives = benchmark.alternatives()
    timings = in_turns(
        alternatives, rounds=rounds or benchmark.rounds, told=lambda line: print(f"   {line}", flush=True)
    )
    rows = []
    for ratio in benchmark.ratios:
        if ratio.name not in alternatives or ratio.to not in alternatives:
            print(f"   {ratio.name} : {ratio.to}   not here (not installed)")
            continue
        found = timings.ratio(ratio.name, ratio.to)
        goal = f"   goal {ratio.goal:.2f}" if ratio.goal else ""
        print(f"   {ratio.name} : {ratio.to}   {found}{goal}", flush=True)
        rows.append(
            {"of": ratio.name, "to": ratio.to, "median": found.median, "spread": found.spread, "goal": ratio.goal}
        )
    kept = {
        "benchmark": name,
        "machine": machine(),
        "unit": benchmark.unit,
        "ratios": rows,
        "rates": {key: timing.rates for key, timing in timings.by_name.items()},
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")


def main(names: list[str]) -> int:
    """Run the benchmarks of these names."""
    if names == ["gpu"]:
        from benchmarks.gpu import GPU

        for name, benchmark in GPU.items():
            run(name, benchmark)
        return 0
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"there is no benchmark {unknown[0]}: there are {', '.join(BENCHMARKS)}, gpu", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        run(name, BENCHMARKS[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
