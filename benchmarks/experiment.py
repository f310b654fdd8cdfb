"""CIFAR-10's experiment (MobileNetV2, images enlarged to 112 x 112, batch 256) on noise, tuned, and by hand."""

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
from benchmarks.timing import Benchmark, Ratio, by_python, rate
from lockstep.compare.timed_run import attempt

BATCH = 256
GPU_SAMPLES = 16 * BATCH


def on_cpu() -> Mapping[str, Callable[[], float]]:
    """The loop that a person writes first (all cores, fp32, default layout), and what tuning finds on this machine."""
    job = experiment_job()
    found = lockstep.tune(job, told=lambda line: print(f"   {line}", flush=True))
    return {
        "plain loop": by_python("first_loop.py"),
        "as it is": lambda: attempt(job, found.start, seconds=6).rate,
        "tuned, numbers kept": lambda: attempt(job, found.kept, seconds=6).rate,
        "tuned": lambda: attempt(job, found.changed, seconds=6).rate,
    }


def on_gpu() -> Mapping[str, Callable[[], float]]:
    """On one card: what tuning finds, the loop a person writes first, and the best loop by hand."""
    job = experiment_job(GPU_SAMPLES)
    found = lockstep.tune(job, rounds=2, seconds=1.0, told=lambda line: print(f"   {line}", flush=True))
    tensors = TensorDataset(*(tensor.cuda() for tensor in job.train_data().tensors))
    settings = {**job.settings, **found.changed.settings}
    held = job.replace(train_data=tensors, eval_data=None, epochs=4, on_event=(), **found.changed.settings)
    return {
        "plain fp32 loop": by_hand(job.model, tensors, {}),
        "tuned": lambda: attempt(job, found.changed, seconds=4).rate,
        "best loop by hand, the settings that tune found": by_hand(job.model, tensors, settings),
        "single, the settings that tune found": rate(held, "single", "cuda:0"),
    }


def by_hand(build: Callable[[], nn.Module], data: TensorDataset, settings: Mapping[str, Any]) -> Callable[[], float]:
    """The experiment's loop over tensors that are on the device: the first one a person writes, or with settings."""
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def once() -> float:
        net = build().cuda()
        if settings.get("channels_last"):
            net = net.to(memory_format=torch.channels_last)
        if settings.get("compile"):
            net.compile()
        fused = bool(settings) and settings.get("fused") is not False
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=fused or None)
        dtype = formats.get(settings.get("precision") or "")
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        loss_of = nn.CrossEntropyLoss()
        rates = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            order = torch.randperm(len(data), device="cuda")
            for mine in order.split(BATCH):
                inputs, targets = data.tensors[0][mine], data.tensors[1][mine]
                if settings.get("channels_last"):
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                    loss = loss_of(net(inputs), targets)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            torch.cuda.synchronize()
            rates.append(len(data) / (time.perf_counter() - start))
        return statistics.median(rates[1:])

    return once


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
GPU_EXPERIMENT = {
    "gpu-experiment": Benchmark(
        on_gpu,
        (
            Ratio("tuned", "plain fp32 loop", 4.0),
            Ratio("single, the settings that tune found", "best loop by hand, the settings that tune found", 0.99),
        ),
        rounds=3,
    ),
}
