"""On one NVIDIA GPU: what Lockstep adds to a plain loop, what copying ahead saves, `DataParallel` beside PyTorch's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from benchmarks.models import many_small_layers, resnet50, sgd, small_data, small_mlp
from benchmarks.timing import Benchmark, Ratio, rate
from examples.models.mobilenetv2 import MobileNetV2
from lockstep.data import Batch, Loader, Part
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.parallel import DataParallel
from lockstep.strategies import MP

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


def beside_pytorch(net: nn.Module, inputs: torch.Tensor, steps: int) -> Mapping[str, Callable[[], float]]:
    """Whole steps of two replicas on one card: forward, backward, fused SGD."""
    net, inputs = net.cuda(), inputs.cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=True)

    def rate(parallel: nn.Module) -> Callable[[], float]:
        def once() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                parallel(inputs).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()
            return steps * len(inputs) / (time.perf_counter() - start)

        return once

    return {
        "torch.nn.DataParallel": rate(nn.DataParallel(net, device_ids=[0, 0])),
        "DataParallel": rate(DataParallel(net, device_ids=[0, 0])),
        "the module itself": rate(net),
    }


def two_stages(batch: int = 128, steps: int = 10) -> Mapping[str, Callable[[], float]]:
    """ResNet-50 whole, and as two stages of ``mp`` that share the card: forward and backward."""
    inputs, targets = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(1000, (batch,), device="cuda")
    job = lockstep.Job(
        model=resnet50, loss=nn.CrossEntropyLoss(), optimizer=sgd, train_data=[(inputs, targets)], batch_size=batch
    )
    world = World(devices=(Device("cuda", 0), Device("cuda", 0)))
    halves = {"": 0, **{str(place): 1 for place in range(11, 23)}}
    step = MP(halves).prepare(job, world)
    part = Part(inputs, targets, batch, batch)
    plain, loss_of = resnet50().cuda(), nn.CrossEntropyLoss()

    def by_hand() -> None:
        plain.zero_grad()
        loss_of(plain(inputs), targets).backward()

    def rate(once: Callable[[], Any]) -> Callable[[], float]:
        def rated() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                once()
            torch.cuda.synchronize()
            return steps * batch / (time.perf_counter() - start)

        return rated

    return {
        "plain": rate(by_hand),
        "mp, two stages": rate(lambda: step.gradients(Batch([part], batch, 0, 0, None))),
    }


BESIDE = (
    Ratio("DataParallel", "torch.nn.DataParallel", 1 / 0.7),  # a time ratio of 0.7
    Ratio("the module itself", "DataParallel"),
)

GPU = {
    "gpu-parallel-resnet50": Benchmark(
        lambda: beside_pytorch(resnet50(), torch.randn(64, 3, 224, 224), steps=20), BESIDE
    ),
    "gpu-parallel-small": Benchmark(lambda: beside_pytorch(many_small_layers(), torch.randn(64, 64), steps=50), BESIDE),
    "gpu-images": Benchmark(
        copying,
        (
            Ratio("single", "plain loop, pinned and copied ahead"),
            Ratio("ddp, one rank", "plain loop, pinned and copied ahead"),
            Ratio("plain loop, pinned and copied ahead", "plain loop, pageable"),
        ),
        rounds=3,
    ),
    "gpu-mp": Benchmark(two_stages, (Ratio("mp, two stages", "plain", 1 / 1.05),)),
    "gpu-small": Benchmark(small, (Ratio("single", "plain loop"),), rounds=3),
}
