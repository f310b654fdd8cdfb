"""The module face: a forward and a backward of `DataParallel` on slots, against the module
itself on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from benchmarks.models import Stack
from benchmarks.timing import Benchmark, Ratio
from examples.models.mobilenetv2 import MobileNetV2
from lockstep.launch.devices import Device, slots, usable_cores
from lockstep.parallel import DataParallel
from lockstep.threads.thread_pool import run

STEPS = 5


def step(net: nn.Module, inputs: torch.Tensor) -> None:
    net.zero_grad()
    net(inputs).square().mean().backward()


def stepping(net: nn.Module, inputs: torch.Tensor) -> Mapping[str, Callable[[], float]]:
    parallel = DataParallel(net, slots(2))
    one_core = [Device("cpu", 0, usable_cores()[:1])]

    def rate(work: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                work()
            return STEPS * len(inputs) / (time.perf_counter() - start)

        return once

    return {
        "one core": rate(lambda: run(one_core, [lambda: step(net, inputs)])),
        "DataParallel, 2 slots": rate(lambda: step(parallel, inputs)),
    }


def stack() -> Mapping[str, Callable[[], float]]:
    """64 sequences of 64 tokens."""
    return stepping(Stack(), torch.randn(64, 64, 256))


def mobilenet() -> Mapping[str, Callable[[], float]]:
    """32 images of 112 x 112."""
    net = MobileNetV2(classes=10, dropout=0.0).to(memory_format=torch.channels_last)
    return stepping(net, torch.randn(32, 3, 112, 112).to(memory_format=torch.channels_last))


PARALLEL = {
    "parallel-stack": Benchmark(stack, (Ratio("DataParallel, 2 slots", "one core", 1.95),)),
    "parallel-mobilenet": Benchmark(mobilenet, (Ratio("DataParallel, 2 slots", "one core", 1.9),)),
}
