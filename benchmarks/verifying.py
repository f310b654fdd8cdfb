"""What `lockstep verify` costs: its whole time against the plain updates of both sides that it can't do without.

    python -m benchmarks.verifying [EXAMPLE ...] [--strategy ddp]

For each example: seconds of the command as a person starts it, start-up included; of `verify` in this process; of
starting both sides alone (processes, models, data); of their updates and evaluations alone, without looking at
anything; and how many times these `verify` takes beyond the start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import lockstep
from benchmarks.timing import HERE
from lockstep.data import eval_loaders, job_loader, resolve, resolve_sets
from lockstep.devices import Device, parse
from lockstep.display import Display
from lockstep.evaluation import evaluate_sets
from lockstep.jobfile import JobFile
from lockstep.placement import on_devices
from lockstep.strategies import Strategy, choose
from lockstep.verify import Verification
from lockstep.verify.course import EPOCHS, Excerpt
from lockstep.world import World

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
    world.tell = lambda told: None
    job = plain.job.load().having(**plain.settings)
    step = plain.strategy.build(job, world)
    loader = job_loader(job.having(accumulate=plain.strategy.parts(job)), world, resolve(job.train_data, world))
    taken = 0.0
    for epoch in range(EPOCHS):
        for batch in Excerpt(loader).epoch(epoch):
            world.barrier()
            began = time.perf_counter()
            step.seed(job.seed)
            step.update(batch)
            taken += time.perf_counter() - began
    if job.eval_data is not None:
        sets = eval_loaders(job, world, resolve_sets(job.eval_data, world))
        excerpts: Any = {name: Excerpt(loader, evaluation=True) for name, loader in sets.items()}
        began = time.perf_counter()
        evaluate_sets(step, excerpts, job.metrics, world)
        taken += time.perf_counter() - began
    return taken


def _plain(job: JobFile, strategy: Strategy, devices: tuple[Device, ...], found: Verification) -> tuple[float, float]:
    """Seconds of the updates and evaluations of one side, and of all that is around them."""
    settings = {"precision": "fp64" if found.precision == "float64" else None, "batch_size": found.batch_size}
    settings |= {"eval_batch_size": found.batch_size, "loader_workers": 0}
    began = time.perf_counter()
    own = on_devices(_seconds, Plain(job, strategy, settings), devices, None, None, Display(quiet=True))
    return own, time.perf_counter() - began - own


def main() -> None:
    """Print a line for each example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("examples", nargs="*")
    parser.add_argument("--strategy", default="ddp")
    options = parser.parse_args()
    devices = parse("2xcpu")
    way = choose(options.strategy, devices)
    print("example               command   verify    start   updates  ratio   found")
    for name in options.examples or EXAMPLES:
        path = str(HERE.parent / "examples" / f"{name}.py")
        words = [sys.executable, "-m", "lockstep", "verify", path, "--strategy", options.strategy, "--devices", "2xcpu"]
        words += [word for key, value in EXAMPLES[name].items() for word in ("--set", f"{key}={value}")]
        began = time.perf_counter()
        subprocess.run(words, check=False, capture_output=True)
        command = time.perf_counter() - began
        job = JobFile(path, EXAMPLES[name])
        found = lockstep.verify(job, strategy=way, devices="2xcpu")
        sides = _plain(job, choose("single", devices[:1]), parse("1xcpu"), found), _plain(job, way, devices, found)
        own, start = map(sum, zip(*sides, strict=True))
        causes = ", ".join(cause.name for cause in found.causes) or "equal"
        times = (found.seconds - start) / own
        print(
            f"{name:<20}{command:9.1f} {found.seconds:8.1f} {start:8.1f} {own:9.1f} {times:6.2f}   {causes}", flush=True
        )


if __name__ == "__main__":
    main()
