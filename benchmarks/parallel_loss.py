"""The parallel loss at 32,000 words, width 512, 32 x 64 tokens, fp32: time, and peak bytes above
the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import nn

from benchmarks.live_memory import LiveBytes
from benchmarks.timing import Benchmark, Ratio
from lockstep.launch.devices import Device, usable_cores
from lockstep.parallel import ParallelLoss
from lockstep.threads.thread_pool import run

WORDS, WIDTH, BATCH, TIME = 32_000, 512, 32, 64
CHUNK = {1: 8, 2: 8}
"""Time steps of a chunk, by the number of slots."""


def _steps(
    place: torch.device | None = None, words: int = WORDS
) -> tuple[nn.Module, dict[str, Callable[[], None]]]:
    """The generator, and one step of each alternative: value and gradients, none of which were
    there before.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, TIME, WIDTH, generator=generator).to(place).requires_grad_()
    targets = torch.randint(words, (BATCH, TIME), generator=generator).to(place)
    layer, criterion = nn.Linear(WIDTH, words).to(place), nn.CrossEntropyLoss()

    def cleared() -> None:
        layer.zero_grad()
        hidden.grad = None

    def plain() -> None:
        cleared()
        criterion(layer(hidden).flatten(0, 1), targets.flatten()).backward()

    def parallel(devices: list[Device]) -> Callable[[], None]:
        loss_of = ParallelLoss(layer, criterion, devices, CHUNK[len(devices)])

        def once() -> None:
            cleared()
            loss_of(hidden, targets).loss.backward()

        return once

    if place is not None:
        devices = [Device(place.type, place.index)]
        return layer, {
            "plain": plain,
            "one device": parallel(devices),
            "one device twice": parallel(devices * 2),
        }
    core = Device("cpu", 0, usable_cores()[:1])
    return layer, {
        "plain, one CPU device": lambda: run([core], [plain]) and None,
        "one CPU device": parallel([core]),
        "two slots": parallel([Device("cpu", i, (usable_cores()[i],)) for i in range(2)]),
    }


def speed() -> Mapping[str, Callable[[], float]]:
    return {name: _rate(step) for name, step in _steps()[1].items()}


def memory() -> Mapping[str, Callable[[], float]]:
    return {name: _rarity(step) for name, step in _steps()[1].items()}


def speed_on(place: torch.device, words: int) -> Mapping[str, Callable[[], float]]:
    wait = torch.accelerator.synchronize if place.type != "cpu" else lambda: None
    return {name: _rate(step, wait) for name, step in _steps(place, words)[1].items()}


def memory_on(place: torch.device, words: int) -> Mapping[str, Callable[[], float]]:
    """By the card's own allocator, which also knows what kernels take for themselves."""
    layer, steps = _steps(place, words)

    def rarity(step: Callable[[], None]) -> Callable[[], float]:
        def once() -> float:
            layer.zero_grad()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            step()
            torch.accelerator.synchronize()
            return 1e9 / (torch.accelerator.max_memory_allocated() - before)

        return once

    return {name: rarity(step) for name, step in steps.items()}


def _rate(step: Callable[[], None], wait: Callable[[], None] = lambda: None) -> Callable[[], float]:
    def once() -> float:
        wait()
        began = time.perf_counter()
        for _ in range(3):
            step()
        wait()
        return 3 * BATCH * TIME / (time.perf_counter() - began)

    return once


def _rarity(step: Callable[[], None]) -> Callable[[], float]:
    def once() -> float:
        with LiveBytes() as live:
            step()
        for owner in ("cpu", "cpu:0", "cpu:1"):
            peak = live.peak(owner)
            if peak:
                print(f"      {owner} {peak / 1e6:,.1f} MB", flush=True)
        return 1e9 / live.peak()

    return once


PARALLEL_LOSS = {
    "loss": Benchmark(
        speed,
        (
            Ratio("one CPU device", "plain, one CPU device", 1 / 1.1),
            Ratio("two slots", "one CPU device", 1.8),
        ),
        unit="tokens/s",
    ),
    "loss-memory": Benchmark(
        memory,
        (
            Ratio("one CPU device", "plain, one CPU device", 4.0),
            Ratio("two slots", "plain, one CPU device"),
        ),
        rounds=1,
        unit="1 / GB at the peak, above the weights",
    ),
}


def on_device(place: torch.device, words: int = WORDS) -> dict[str, Benchmark]:
    """On one accelerator; on a CPU device without its memory."""
    found = {
        "loss": Benchmark(
            lambda: speed_on(place, words),
            (Ratio("one device", "plain", 1 / 1.1),),
            rounds=3,
            unit="tokens/s",
        ),
        "loss-memory": Benchmark(
            lambda: memory_on(place, words),
            (Ratio("one device", "plain", 4.0),),
            rounds=1,
            unit="1 / GB at the peak, above the weights",
        ),
    }
    if place.type == "cpu":
        del found["loss-memory"]
    return found
