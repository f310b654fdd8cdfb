"""What `lockstep verify` costs: its whole time against the plain updates of both sides that it
can't do without.

    python -m benchmarks.verifying [EXAMPLE ...] [--strategy ddp] [--rounds 3]

For each example: seconds of the command as a person starts it, start-up included; of both sides
alone in a process that is as new (Python, torch, the ranks' processes, models, data), without
looking at anything, apart from their updates and evaluations; of these updates and evaluations; and
how many times the latter the command takes beyond that start. The two take turns, and medians
count: where the updates take little, the ratio is the noise of two starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.timing import HERE
from lockstep.data import eval_loaders, job_loader, resolve, resolve_sets
from lockstep.jobfile import JobFile
from lockstep.launch.devices import parse
from lockstep.launch.placement import on_devices
from lockstep.launch.world import World
from lockstep.run.terminal import Display
from lockstep.strategies import Strategy, choose
from lockstep.training.evaluation import evaluate_sets
from lockstep.verify.batches import EPOCHS, Excerpt, evaluated_places, places_of

EXAMPLES = {
    "digits": {},
    "char_lm": {},
    "huggingface": {},
    "unet": {},
    "resnet50_split": {"generated": "true"},
    "cifar10_mobilenetv2": {"generated": "true"},
}


@dataclass(frozen=True)
class Plain:
    job: JobFile
    strategy: Strategy
    settings: dict[str, Any] = field(default_factory=dict)


def _seconds(world: World, plain: Plain) -> float:
    """The updates and evaluations of the course under one strategy."""
    world.emit = lambda event: None
    job = plain.job.load().replace(**plain.settings)
    step = plain.strategy.prepare(job, world)
    loader = job_loader(
        job.replace(accumulate=plain.strategy.num_microbatches(job)),
        world,
        resolve(job.train_data, world),
    )
    taken = 0.0
    for epoch in range(EPOCHS):
        places = places_of(loader, job, epoch)
        for batch in Excerpt(loader, places).epoch(epoch):
            world.barrier()
            began = time.perf_counter()
            step.seed(job.seed)
            step.update(batch)
            taken += time.perf_counter() - began
    if job.eval_data is not None:
        sets = eval_loaders(job, world, resolve_sets(job.eval_data, world))
        excerpts: Any = {}
        for name, loader in sets.items():
            excerpts[name] = Excerpt(loader, evaluated_places(loader))
        began = time.perf_counter()
        evaluate_sets(step, excerpts, job)
        taken += time.perf_counter() - began
    return taken


def plain(name: str, strategy: str, settings: dict[str, Any]) -> None:
    """Print the seconds of the updates and evaluations of both sides, the one after the other."""
    devices = parse("2xcpu")
    job = JobFile(str(HERE.parent / "examples" / f"{name}.py"), EXAMPLES[name])
    own = 0.0
    for side in ("single", strategy):
        places = devices[:1] if side == "single" else devices
        given = Plain(job, choose(side, places), settings)
        own += on_devices(_seconds, given, places, None, Display(quiet=True))
    print(own)


_ALONE = """
import gc, sys, json
from lockstep.tensors.allocator import prepare
from lockstep.launch.processes.fork_server import start
prepare()
start()
from benchmarks.verifying import plain
plain(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
gc.freeze()
"""
"""As the command begins and ends: the server of ranks starts beside this process's own import of
torch.
"""


@dataclass(frozen=True)
class _Cost:
    """Of one round, in seconds; and what was found."""

    command: float
    start: float
    updates: float
    found: str

    @classmethod
    def measured(cls, name: str, strategy: str) -> _Cost:
        path = str(HERE.parent / "examples" / f"{name}.py")
        words = [
            sys.executable,
            "-m",
            "lockstep",
            "verify",
            path,
            "--strategy",
            strategy,
            "--devices",
            "2xcpu",
        ]
        words += [
            word for key, value in EXAMPLES[name].items() for word in ("--set", f"{key}={value}")
        ]
        began = time.perf_counter()
        said = subprocess.run([*words, "--json", "-"], check=False, capture_output=True, text=True)
        command = time.perf_counter() - began
        found = json.loads(said.stdout)
        settings = {
            "precision": "fp64" if found["precision"] == "float64" else None,
            "loader_workers": 0,
        }
        settings |= {"batch_size": found["batch_size"], "eval_batch_size": found["batch_size"]}
        began = time.perf_counter()
        alone = [sys.executable, "-c", _ALONE, name, strategy, json.dumps(settings)]
        done = subprocess.run(alone, check=True, capture_output=True, text=True, cwd=HERE.parent)
        own = float(done.stdout.split()[-1])
        causes = ", ".join(cause["kind"] for cause in found["causes"]) or "equal"
        return cls(command, time.perf_counter() - began - own, own, causes)


def main() -> None:
    """Print a line for each example: medians of its rounds, and the shortest and the longest of
    the commands.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("example               command         of all    start   updates  ratio   found")
    for name in options.examples or EXAMPLES:
        rounds = [_Cost.measured(name, options.strategy) for _ in range(options.rounds)]
        commands = [cost.command for cost in rounds]
        command, start, updates = (
            statistics.median(values)
            for values in (
                commands,
                [cost.start for cost in rounds],
                [cost.updates for cost in rounds],
            )
        )
        ends = f"{min(commands):.1f} to {max(commands):.1f}"
        found = " / ".join(dict.fromkeys(cost.found for cost in rounds))
        ratio = (command - start) / updates
        print(
            f"{name:<20}{command:9.1f}{ends:>15} {start:8.1f} {updates:9.1f} {ratio:6.2f}   "
            f"{found}",
            flush=True,
        )


if __name__ == "__main__":
    main()
