"""On one NVIDIA GPU: what Lockstep adds to a plain loop, and what copying ahead saves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.models import experiment_job, sgd, small_data, small_mlp
from benchmarks.timing import Benchmark, Ratio, rate
from examples.models.mobilenetv2 import MobileNetV2
from lockstep.data import Loader
from lockstep.trial import attempt

BATCH = 256


def images(samples: int = 16 * BATCH) -> TensorDataset:
    """Float images of 112 x 112, on the host: 2.5 GB."""
    return TensorDataset(torch.randn(samples, 3, 112, 112), torch.randint(10, (samples,)))


def images_job(data: TensorDataset) -> lockstep.Job:
    return lockstep.Job(
        model=lambda: MobileNetV2(classes=10, dropout=0.0),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=BATCH,
        epochs=4,
        channels_last=True,
    )


def plain(model: nn.Module, batches: Callable[[], Iterable[tuple[Any, Any]]], samples: int) -> Callable[[], float]:
    """The best plain loop we can write with the same settings: fused SGD, no waiting for the loss."""

    def once() -> float:
        net = model.cuda().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
        loss_of = nn.CrossEntropyLoss()
        rates = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            running = torch.zeros((), device="cuda")
            for inputs, targets in batches():
                optimizer.zero_grad()
                loss = loss_of(net(inputs), targets)
                loss.backward()
                optimizer.step()
                running += loss.detach()
            running.item()
            rates.append(samples / (time.perf_counter() - start))
        return statistics.median(rates[1:])

    return once


def _pageable(data: TensorDataset) -> Iterable[tuple[Any, Any]]:
    order = torch.randperm(len(data))
    for start in range(0, len(data), BATCH):
        mine = order[start : start + BATCH]
        inputs, targets = (tensor[mine] for tensor in data.tensors)
        yield inputs.cuda().to(memory_format=torch.channels_last), targets.cuda()


def _ahead(data: TensorDataset) -> Iterable[tuple[Any, Any]]:
    loader = Loader(data, batch_size=BATCH, device=torch.device("cuda", 0))
    for inputs, targets in loader:
        yield inputs.to(memory_format=torch.channels_last), targets


def copying() -> Mapping[str, Callable[[], float]]:
    data = images()
    net = MobileNetV2(classes=10, dropout=0.0)
    return {
        "plain loop, pageable": plain(net, lambda: _pageable(data), len(data)),
        "plain loop, pinned and copied ahead": plain(net, lambda: _ahead(data), len(data)),
        "single": rate(images_job(data), "single", "cuda:0"),
        "ddp, one rank": rate(images_job(data), "ddp", "cuda:0"),
    }


def small() -> Mapping[str, Callable[[], float]]:
    held = small_data(16_000)
    data = TensorDataset(*(tensor.cuda() for tensor in held.tensors))
    job = lockstep.Job(
        model=small_mlp, loss=nn.CrossEntropyLoss(), optimizer=sgd, train_data=data, batch_size=64, epochs=4
    )

    def batches() -> Iterable[tuple[Any, Any]]:
        order = torch.randperm(len(data), device="cuda")
        for mine in order.split(64):
            yield data.tensors[0][mine], data.tensors[1][mine]

    return {"plain loop": plain(small_mlp(), batches, len(data)), "single": rate(job, "single", "cuda:0")}


def experiment() -> Mapping[str, Callable[[], float]]:
    """CIFAR-10's experiment on noise: what tuning finds here, the loop a person writes first, and the best by hand."""
    job = experiment_job(16 * BATCH)
    found = lockstep.tune(job, rounds=2, seconds=1.0, told=lambda line: print(f"   {line}", flush=True))
    tensors = TensorDataset(*(tensor.cuda() for tensor in job.train_data().tensors))
    settings = {**job.settings, **found.changed.settings}
    held = job.having(train_data=tensors, eval_data=None, epochs=4, on_event=(), **found.changed.settings)
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


GPU = {
    "gpu-experiment": Benchmark(
        experiment,
        (
            Ratio("tuned", "plain fp32 loop", 4.0),
            Ratio("single, the settings that tune found", "best loop by hand, the settings that tune found", 0.99),
        ),
        rounds=3,
    ),
    "gpu-images": Benchmark(
        copying,
        (
            Ratio("single", "plain loop, pinned and copied ahead"),
            Ratio("ddp, one rank", "plain loop, pinned and copied ahead"),
            Ratio("plain loop, pinned and copied ahead", "plain loop, pageable"),
        ),
        rounds=3,
    ),
    "gpu-small": Benchmark(small, (Ratio("single", "plain loop"),), rounds=3),
}
