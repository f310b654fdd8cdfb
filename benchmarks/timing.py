"""How a benchmark is timed and kept: alternatives in turns, ratios within a round, the machine
described.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import lockstep
from lockstep.compare.timing import Timing
from lockstep.launch.device_table import machine
from lockstep.strategies import Strategy

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ("lightning", "accelerate", "transformers")


def in_turns(
    alternatives: Mapping[str, Callable[[], float]],
    *,
    rounds: int = 5,
    warm_up: int = 1,
    log: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time alternatives in turns: A B C, A B C, ...; each does its work once and gives its rate
    (more is faster).

    The first ``warm_up`` rounds don't count; after each of the ``rounds`` that do, ``log`` is
    called with a line.
    """
    rates: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(-warm_up, rounds):
        taken = {name: alternative() for name, alternative in alternatives.items()}
        if turn < 0:
            continue
        for name, rate in taken.items():
            rates[name].append(rate)
        if log is not None:
            log(
                f"round {turn + 1}/{rounds}: "
                + "  ".join(f"{name} {rate:,.5g}" for name, rate in taken.items())
            )
    return {name: Timing(values) for name, values in rates.items()}


@dataclass(frozen=True)
class Ratio:
    """A row of the table: how many times the rate of ``to`` that of ``name`` is.

    With ``over``, the bare work, it is what each takes beyond that: the overhead of ``name`` to
    that of ``to``, of which less is better.
    """

    name: str
    to: str
    goal: float | None = None
    over: str | None = None

    def of(self, timings: Mapping[str, Timing]) -> Timing:
        """From each round."""
        if self.over is None:
            return timings[self.name].over(timings[self.to])
        mine, theirs, bare = (timings[name].rates for name in (self.name, self.to, self.over))
        return Timing(
            tuple(
                (1 / a - 1 / c) / (1 / b - 1 / c)
                for a, b, c in zip(mine, theirs, bare, strict=True)
            )
        )

    def __str__(self) -> str:
        return f"{self.name} : {self.to}" + (f", each beyond {self.over}" if self.over else "")


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
    """Run a hand-written loop under torchrun, a thread per rank; the rate is the last line that
    it prints.
    """

    def once() -> float:
        out = torchrun(script, ranks, {})
        return float(out.stdout.strip().splitlines()[-1])

    return once


def by_python(script: str, *words: str, threads: int | None = None) -> Callable[[], float]:
    """Run a hand-written loop in a process of its own; the rate is the last line that it prints.

    Args:
        script: in by_hand/.
        words: its arguments.
        threads: None leaves PyTorch's own choice.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONWARNINGS": "ignore"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)

    def once() -> float:
        command = [sys.executable, str(HERE / "by_hand" / script), *words]
        out = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if out.returncode:
            raise RuntimeError(out.stderr[-2000:])
        return float(out.stdout.strip().splitlines()[-1])

    return once


def torchrun(
    script: str, ranks: int, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
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
    # A rank that leaves gloo's group a moment after the other may abort there; by then the loop is
    # done and timed.
    if out.returncode and not out.stdout.strip() and "SIGABRT" not in out.stderr:
        raise RuntimeError(out.stderr[-2000:])
    return out


def run(name: str, benchmark: Benchmark, rounds: int | None = None) -> None:
    """Time one benchmark, print its ratios, and keep them."""
    keep(name, measured(name, benchmark, rounds))


def keep(name: str, found: Mapping[str, Any], folder: Path = HERE / "results") -> None:
    """Keep what was found, with the day, the machine and the versions of the peers that are
    installed: ``python -m benchmarks page`` shows it.
    """
    peers = {peer: one.version for peer in PEERS for one in distributions(name=peer)}
    kept = {"benchmark": name, "recorded": date.today().isoformat(), "machine": machine() | peers}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(kept | dict(found), indent=2) + "\n")


def measured(name: str, benchmark: Benchmark, rounds: int | None = None) -> dict[str, Any]:
    """Time one benchmark, print its ratios, and give them."""
    print(f"== {name}", flush=True)
    alternatives = benchmark.alternatives()
    timings = in_turns(
        alternatives,
        rounds=rounds or benchmark.rounds,
        log=lambda line: print(f"   {line}", flush=True),
    )
    rows = []
    for ratio in benchmark.ratios:
        if ratio.name not in alternatives or ratio.to not in alternatives:
            print(f"   {ratio}   not here (not installed)")
            continue
        found = ratio.of(timings)
        goal = f"   goal {ratio.goal:.2f}" if ratio.goal else ""
        print(f"   {ratio}   {found}{goal}", flush=True)
        row = {
            "of": ratio.name,
            "to": ratio.to,
            "median": found.median,
            "spread": found.spread,
            "goal": ratio.goal,
        }
        rows.append(row | ({"over": ratio.over} if ratio.over else {}))
    return {
        "benchmark": name,
        "unit": benchmark.unit,
        "ratios": rows,
        "rates": {key: timing.rates for key, timing in timings.items()},
    }
