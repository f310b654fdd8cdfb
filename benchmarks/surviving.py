"""What surviving costs: 25 million parameters with Adam on two ranks; ratios within a round of
one run.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from benchmarks.timing import HERE, keep
from lockstep.checkpoint.writer import Writer
from lockstep.data import Loader
from lockstep.launch.world import World
from lockstep.tensors.state_tree import encoded

WIDTH = 2900
"""Three layers of that have 25 million parameters."""


def model() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )


def waits(world: World, folder: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds of a save that the training waits for, and of copying what rank 0 writes, in turns."""
    step = lockstep.parallelize(
        model(), nn.MSELoss(), lambda params: torch.optim.Adam(params, lr=1e-4)
    )
    step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
    step.own_loop = False  # as in a training, whose ranks are known to come together
    writer = Writer(Path(folder), world, 1)
    _, tensors = encoded(step.state_dict())
    mine = list(tensors.values()) if world.is_first else []
    kept = [torch.empty_like(tensor) for tensor in mine]

    def save(number: int) -> None:
        writer.save(number, step.state_dict(), {"step": number})

    def copy(number: int) -> None:
        for target, source in zip(kept, mine, strict=True):
            target.copy_(source)

    found = []
    for number in range(rounds + 1):
        times = []
        for what in (save, copy):
            world.barrier()
            began = time.perf_counter()
            what(number)
            times.append(time.perf_counter() - began)
            writer.finish()
        found.append((times[0], times[1]))
    return found[1:]  # the first one makes the buffers


def job(save_every: int | None, steps: int) -> lockstep.Job:
    data = TensorDataset(torch.randn(256, WIDTH), torch.randn(256, WIDTH))
    return lockstep.Job(
        model=model,
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
        train_data=data,
        order=lambda epoch: list(range(256)) * steps,
        batch_size=256,
        epochs=1,
        save_every=save_every,
    )


def rate(save_every: int | None) -> float:
    """Samples per second of an epoch of 110 steps, the checkpoint at its end left out."""
    with tempfile.TemporaryDirectory() as folder:
        run = lockstep.train(
            job(save_every, 110), strategy="ddp", devices="2xcpu", folder=folder, quiet=True
        )
        return float(run.history[0]["samples_per_second"])


COMMAND = """
import os, time
from benchmarks.surviving import job as made, model
from torch import nn
from lockstep.launch.world import current

class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = model()

    def forward(self, x):
        world = current()
        if world.rank == 0 and self.training:
            with open(os.environ["NOTED"], "a") as file:
                file.write(f"{world.step} {time.time()}\\n")
        return self.whole(x)

job = made(5, 60).replace(model=Noted)
"""


def restarts() -> tuple[float, float]:
    """Seconds from a kill -9 of a rank to the next step done, and of a cold start to its first
    step done.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(COMMAND)
        noted = Path(folder) / "noted"
        words = ["train", "job.py", "--strategy", "ddp", "--devices", "2", "--restarts", "1"]
        environment = {
            **os.environ,
            "NOTED": str(noted),
            "PYTHONPATH": f"{HERE.parent}:{HERE.parent / 'src'}",
        }
        began = time.time()
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "lockstep"), *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

        def lines() -> list[tuple[int, float]]:
            text = noted.read_text() if noted.exists() else ""
            return [(int(step), float(at)) for step, at in map(str.split, text.splitlines())]

        def until(there: Callable[[], Any]) -> None:
            while not there():
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)

        # A step is done when the next one begins.
        until(lambda: any(step == 2 for step, _ in lines()))
        cold = next(at for step, at in lines() if step == 2) - began
        until(lambda: list(Path(folder).glob("runs/*/checkpoints/step-10")))
        (server,) = psutil.Process(process.pid).children()
        before = len(lines())
        killed = time.time()
        max(server.children(), key=lambda child: child.pid).send_signal(signal.SIGKILL)
        until(lambda: len({step for step, at in lines()[before:] if at > killed + 0.2}) > 1)
        after = [at for step, at in lines() if at > killed + 0.2]
        process.communicate()
        return after[1] - killed, cold


class Long(Dataset[Any]):
    """A hundred million samples, none of which takes time."""

    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1), 0


def places() -> tuple[float, float]:
    """Seconds to the first batch of an epoch that is taken up at batch 10^6, and at batch 10."""
    found = []
    for start in (10**6, 10):
        times = []
        for _ in range(30):
            loader = Loader(Long(), batch_size=64, workers=0)
            began = time.perf_counter()
            next(loader.epoch(0, start))
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    return found[0], found[1]


def run() -> None:
    """Measure, print and keep all four."""
    print("== surviving", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        every, _ = lockstep.launch(waits, devices="2xcpu", args=(folder, 9))
    saves = [save / copy for save, copy in every]
    rates = [(rate(100), rate(None)) if i % 2 else (rate(None), rate(100))[::-1] for i in range(4)]
    starts = [restarts() for _ in range(3)]
    rows = [
        _row("waiting for a save", "copying that rank's part", saves, 1.2),
        _row("a checkpoint every 100 steps", "none", [a / b for a, b in rates], 0.99),
        _row("from kill -9 to the next step", "a cold start", [a / b for a, b in starts], 1.0),
        _row(
            "finding batch 10^6", "batch 10", [a / b for a, b in (places() for _ in range(5))], 1.1
        ),
    ]
    keep("surviving", {"ratios": rows, "saves": every, "restarts": starts})


def _row(of: str, to: str, ratios: list[float], goal: float) -> dict[str, Any]:
    median, spread = statistics.median(ratios), (min(ratios), max(ratios))
    print(
        f"   {of} : {to}   {median:.3f} ({spread[0]:.3f} to {spread[1]:.3f})   goal {goal:.2f}",
        flush=True,
    )
    rounds = len(ratios)
    row = {"of": of, "to": to, "median": median, "spread": spread, "goal": goal}
    return row | {"rounds": rounds}
