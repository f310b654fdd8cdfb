"""CIFAR-10's experiment (MobileNetV2, images enlarged to 112 x 112, batch 256) on noise, tuned,
and by hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.models import experiment_job
from benchmarks.timing import Benchmark, Ratio, by_python
from lockstep.compare.timed_run import attempt


def on_cpu() -> Mapping[str, Callable[[], float]]:
    """The loop that a person writes first (all cores, fp32, default layout), and what tuning
    finds on this machine.
    """
    job = experiment_job()
    found = lockstep.tune(job, log=lambda line: print(f"   {line}", flush=True))
    return {
        "plain loop": by_python("first_loop.py"),
        "as it is": lambda: attempt(job, found.start, seconds=6).rate,
        "tuned, numbers kept": lambda: attempt(job, found.kept, seconds=6).rate,
        "tuned": lambda: attempt(job, found.changed, seconds=6).rate,
    }


def by_hand(
    build: Callable[[], nn.Module],
    data: TensorDataset,
    settings: Mapping[str, Any],
    place: torch.device,
    size: int,
) -> Callable[[], float]:
    """The experiment's loop over tensors that are on a device: the first one a person writes, or
    with settings.
    """
    dtype = {"bf16": torch.bfloat16}.get(settings.get("precision") or "")
    net = build().to(place)
    if settings.get("channels_last"):
        net = net.to(memory_format=torch.channels_last)
    if way := settings.get("compile"):
        net.compile(backend="inductor" if way is True else way)
    fused = bool(settings) and place.type in ("cpu", "cuda", "mps", "xpu")
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=fused or None
    )
    loss_of = nn.CrossEntropyLoss()

    def once() -> float:
        rates = []
        for _ in range(3):
            _wait(place)
            start = time.perf_counter()
            order = torch.randperm(len(data), device=place)
            for mine in order.split(size):
                inputs, targets = data.tensors[0][mine], data.tensors[1][mine]
                if settings.get("channels_last"):
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad()
                with torch.autocast(place.type, dtype=dtype, enabled=dtype is not None):
                    loss = loss_of(net(inputs), targets)
                loss.backward()
                optimizer.step()
            _wait(place)
            rates.append(len(data) / (time.perf_counter() - start))
        return statistics.median(rates[1:])

    return once


def _wait(place: torch.device) -> None:
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


EXPERIMENT = {
    "experiment": Benchmark(
        on_cpu,
        (
            Ratio("tuned", "plain loop", 1.8),
            Ratio("tuned, numbers kept", "plain loop"),
            Ratio("as it is", "plain loop"),
        ),
    ),
}
