"""How level devices are: a classifier of 50,000 classes, its first device beside the others, and
the largest batch.

Each way trains the same classifier (hidden width 512, plain SGD) on the same batches. What counts
is the whole update: forward, loss, backward, optimizer. Bytes are those above what lies there
between two steps; on slots what the calling thread makes and computes is the first slot's, and it
has as many threads as that, as if slots were accelerators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn

import lockstep
from benchmarks.device_load import Level, level_of
from benchmarks.largest_batch import largest_batch
from benchmarks.timing import keep
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device
from lockstep.parallel import Balanced, DataParallel, ParallelLoss

INPUTS, WIDTH, CLASSES, BATCH = 1024, 512, 50_000, 256
CHUNK = 32
"""Samples that the output layer sees at once on a device, in the chunked way."""
BUDGET = 300_000_000
"""Bytes of a slot for what a step makes; a card has those of all tensors of this process:
`CARD`.
"""
CARD = 1_000_000_000
LIMIT = 16 * BATCH
"""No larger batch is tried."""

Update = Callable[[torch.Tensor, torch.Tensor], object]


def classifier(place: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(trunk, nn.Linear(WIDTH, CLASSES)).to(place)


def updating(
    model: nn.Module, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def update(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(inputs, labels).backward()
        optimizer.step()

    return update


def pytorch(devices: tuple[Device, ...]) -> Update:
    model, criterion = classifier(devices[0].torch), nn.CrossEntropyLoss()
    net = nn.DataParallel(model, [device.index for device in devices])
    return updating(model, lambda inputs, labels: criterion(net(inputs), labels))


def gathered(devices: tuple[Device, ...]) -> Update:
    model, criterion = classifier(devices[0].torch), nn.CrossEntropyLoss()
    net = DataParallel(model, devices)
    return updating(model, lambda inputs, labels: criterion(net(inputs), labels))


def balanced(devices: tuple[Device, ...]) -> Update:
    model = classifier(devices[0].torch)
    net, loss_of = (
        DataParallel(model, devices, balanced=True),
        ParallelLoss(None, nn.CrossEntropyLoss(), devices),
    )
    return updating(model, lambda inputs, labels: loss_of(net(inputs), labels).loss)


def chunked(devices: tuple[Device, ...]) -> Update:
    model = classifier(devices[0].torch)
    net = DataParallel(model[0], devices, balanced=True)
    loss_of = ParallelLoss(model[1], nn.CrossEntropyLoss(), devices, CHUNK)

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = net(inputs)
        rows = Balanced(
            [share.unsqueeze(0) for share in hidden], hidden.devices
        )  # samples in the place of time
        return loss_of(rows, labels.view(len(hidden), -1)).loss

    return updating(model, loss)


def by_dp(devices: tuple[Device, ...]) -> Update:
    model = classifier(devices[0].torch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return lockstep.parallelize(
        model, nn.CrossEntropyLoss(), optimizer, strategy="dp", devices=devices
    )


WAYS: dict[str, Callable[[tuple[Device, ...]], Update]] = {
    "gathered, loss on the first": gathered,
    "balanced, ParallelLoss": balanced,
    "output layer in ParallelLoss": chunked,
    "dp's own step": by_dp,
}


def run(devices: tuple[Device, ...], budget: int | None = None) -> None:
    """Measure every way, print one table, and keep it with the machine's description."""
    slots = devices[0].is_slot
    budget = budget or (BUDGET if slots else CARD)
    name = "level" if slots else "gpu-level"
    print(
        f"== {name}: {CLASSES:,} classes, batch {BATCH}, on {', '.join(map(str, devices))}",
        flush=True,
    )
    ways = WAYS if slots else {"torch.nn.DataParallel": pytorch, **WAYS}
    found: dict[str, tuple[Level, int]] = {}
    with occupied(devices[0]) if slots else contextlib.nullcontext():
        for way, build in ways.items():
            found[way] = _measured(build(devices), devices, budget)
            print(f"   {way}: done", flush=True)
    rows = [
        (
            "",
            *(f"{d} peak" for d in devices),
            "fullest",
            *(f"{d} busy" for d in devices),
            "busiest",
            "batch",
        )
    ]
    for way, (level, largest) in found.items():
        peaks = [f"{level.bytes[str(device)] / 1e6:,.0f} MB" for device in devices]
        times = [f"{level.seconds[str(device)]:.4f} s" for device in devices]
        rows.append(
            (
                way,
                *peaks,
                f"{level.fullest:.2f}",
                *times,
                f"{level.busiest:.2f}",
                f"{largest:,}{'+' * (largest == LIMIT)}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
        ]
        print("   " + "  ".join(cells))
    print(
        f"   fullest, busiest: to the mean device; batch: the largest within {budget / 1e6:,.0f} "
        "MB a device, none "
        f"above {LIMIT:,} tried"
    )
    kept = {
        "devices": [str(device) for device in devices],
        "model": {
            "inputs": INPUTS,
            "width": WIDTH,
            "classes": CLASSES,
            "batch": BATCH,
            "chunk": CHUNK,
        },
        "largest_batch_tried": LIMIT,
        "budget_bytes": budget,
        "ways": {
            way: {
                "peak_bytes": level.bytes,
                "fullest_to_mean": level.fullest,
                "busy_seconds": level.seconds,
                "busiest_to_mean": level.busiest,
                "largest_batch": largest,
            }
            for way, (level, largest) in found.items()
        },
    }
    keep(name, kept)


def _measured(update: Update, devices: tuple[Device, ...], budget: int) -> tuple[Level, int]:
    def step(batch: int) -> None:
        inputs, labels = _drawn(batch, devices[0].torch)
        update(inputs, labels)

    inputs, labels = _drawn(BATCH, devices[0].torch)
    level = level_of(lambda: update(inputs, labels), devices)
    return level, largest_batch(step, devices, budget, multiple=CHUNK * len(devices), limit=LIMIT)


def _drawn(batch: int, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, INPUTS, device=place), torch.randint(CLASSES, (batch,), device=place)
