"""On one accelerator, or several: Lockstep beside loops by hand, in turns, in one command.

    python -m benchmarks gpu         all of it, in under nine minutes on one H100
    python -m benchmarks gpu --tiny  each measurement once, of a few samples, on whatever is here:
    whether it runs

The measurements come in the order of their worth. What was found is kept in results/gpu.json after
each; one that fails is a row of the table too, and none begins after `PATIENCE` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lockstep
from benchmarks import level
from benchmarks.experiment import by_hand
from benchmarks.models import (
    experiment_job,
    many_small_layers,
    resnet50,
    sgd,
    small_data,
    small_mlp,
)
from benchmarks.parallel_loss import on_device as loss_on_device
from benchmarks.timing import HERE, Benchmark, Ratio, keep, measured, rate
from examples.models.mobilenetv2 import MobileNetV2
from lockstep.data import Loader
from lockstep.launch import cores
from lockstep.launch import devices as places
from lockstep.launch.devices import Device, accelerators, slots
from lockstep.launch.processes import group
from lockstep.launch.world import World
from lockstep.parallel import DataParallel
from lockstep.strategies import MP, Strategy
from lockstep.strategies.ddp import DDP, DDPStep
from lockstep.strategies.dp import DP
from lockstep.strategies.pp import PP
from lockstep.strategies.ranks.reducers import OverlappedReducer
from lockstep.strategies.single import Single

PATIENCE = 7.5 * 60
"""Seconds after which no further measurement begins: the longest takes a minute and a half."""

Turns = Mapping[str, Callable[[], float]]


@dataclass(frozen=True)
class Sizes:
    """How much is measured: in brackets, what that is on an H100, estimated."""

    rounds: int = 3
    width: int = 64  # of ResNet-50's first block
    image: int = 224
    batch: int = (
        128  # of ResNet-50 (0.14 s an update in fp32 with PyTorch's defaults, TF32 in convolutions)
    )
    updates: int = 8  # of a turn, or batches of an epoch, of which the first of three doesn't count
    side: int = 112  # MobileNetV2's images, in batches of twice `batch` (0.06 s an update)
    mlp: int = 64_000  # samples of the small step (0.2 ms each 64)
    words: int = 32_000
    compiled: tuple[bool | str, ...] = (True, "reduce-overhead")  # (a minute to compile, each)


TINY = Sizes(1, 4, 32, 8, 1, 32, 256, 50, ("aot_eager",))


class Card:
    """The device that is measured: an accelerator, or a CPU device in its place."""

    def __init__(self) -> None:
        found = accelerators()
        self.device = found[0] if found else slots(1)[0]
        self.place = self.device.torch
        self.twice = (self.device,) * 2 if found else slots(2)
        """For two replicas, or stages."""

    def wait(self) -> None:
        if not self.device.is_slot:
            torch.accelerator.synchronize(self.device.index)

    def timed(self, update: Callable[[], Any], count: int, samples: int) -> float:
        """Samples per second of so many updates."""
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            update()
        self.wait()
        return count * samples / (time.perf_counter() - start)


# ---- by hand, and by Lockstep --------------------------------------------------------------------


def plain(
    card: Card,
    model: nn.Module,
    batches: Callable[[], Iterable[tuple[Any, Any]]],
    samples: int,
    epochs: int = 3,
) -> Callable[[], float]:
    """The best plain loop we can write with the same settings: fused SGD, no waiting for the
    loss.
    """
    net = model.to(card.place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=_fused(card))
    loss_of = nn.CrossEntropyLoss()

    def once() -> float:
        rates = []
        for _ in range(epochs):
            card.wait()
            start = time.perf_counter()
            running = torch.zeros((), device=card.place)
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


def _fused(card: Card) -> bool:
    return card.device.type in ("cpu", "cuda", "mps", "xpu")


def on_the_card(
    card: Card, data: TensorDataset, size: int
) -> tuple[TensorDataset, Callable[[], Iterable[Any]]]:
    """Data that lie there, and their batches by hand in a new order each time."""
    held = TensorDataset(*(tensor.to(card.place) for tensor in data.tensors))

    def batches() -> Iterable[Any]:
        order = torch.randperm(len(held), device=card.place)
        return ((held.tensors[0][mine], held.tensors[1][mine]) for mine in order.split(size))

    return held, batches


def updates(
    card: Card, job: lockstep.Job, strategy: Strategy, devices: Sequence[Device], count: int
) -> Callable[[], float]:
    """Updates of a step that is built once, on batches of its loader; compiled code is made before
    they are timed.

    None but the first looks at what the model does in forward, which ``looking`` measures.
    """
    world = World(devices=tuple(devices))
    return stepping(card, job, strategy, world, count)[1]


def stepping(
    card: Card, job: lockstep.Job, strategy: Strategy, world: World, count: int
) -> tuple[Any, Callable[[], float]]:
    step = strategy.prepare(job, world)
    step.sums.last = 1
    loader = strategy.training_loader(job, world, job.train_data)
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())

    def update() -> None:
        step.seed(job.seed)
        step.update(next(batches))

    return step, lambda: card.timed(update, count, job.batch_size)


def images(count: int, side: int, classes: int = 10) -> TensorDataset:
    """Float images, on the host."""
    return TensorDataset(torch.randn(count, 3, side, side), torch.randint(classes, (count,)))


def resnet_job(card: Card, sizes: Sizes, batches: int) -> lockstep.Job:
    """ResNet-50, with its images on the card."""
    data = images(batches * sizes.batch, sizes.image, 1000)
    return lockstep.Job(
        model=lambda: resnet50(width=sizes.width),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=TensorDataset(*(tensor.to(card.place) for tensor in data.tensors)),
        batch_size=sizes.batch,
        epochs=3,
    )


# ---- what is measured ----------------------------------------------------------------------------


def resnet(card: Card, sizes: Sizes) -> Turns:
    """Whole runs of ``single`` on data that are on the card."""
    job = resnet_job(card, sizes, sizes.updates)
    _, batches = on_the_card(card, job.train_data, sizes.batch)
    samples = len(job.train_data)
    return {
        "plain loop": plain(card, job.model(), batches, samples),
        "single": rate(job, "single", [card.device]),
    }


def small(card: Card, sizes: Sizes) -> Turns:
    """A small MLP on data that are on the card: what the host does for an update."""
    held, batches = on_the_card(card, small_data(sizes.mlp), 64)
    job = lockstep.Job(
        model=small_mlp,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=held,
        batch_size=64,
        epochs=3,
    )
    return {
        "plain loop": plain(card, small_mlp(), batches, len(held)),
        "single": rate(job, "single", [card.device]),
    }


def experiment(card: Card, sizes: Sizes) -> Turns:
    """CIFAR-10's experiment: the loop a person writes first, in fp32, and settings that gain on a
    card.

    bf16 is with channels_last.
    """
    size = 2 * sizes.batch
    job = experiment_job(sizes.updates * size, image_size=sizes.side).replace(
        batch_size=size, eval_data=None
    )
    data = TensorDataset(*(tensor.to(card.place) for tensor in job.train_data().tensors))
    job = job.replace(train_data=data, on_event=())
    narrow = job.replace(channels_last=True, precision="bf16")
    ways = {_way(way): narrow.replace(compile=way) for way in (False, *sizes.compiled)}
    best = {"channels_last": True, "precision": "bf16", "compile": sizes.compiled[0]}
    return {
        "plain fp32 loop": by_hand(job.model, data, {}, card.place, size),
        **{
            name: updates(card, its, Single(), [card.device], sizes.updates)
            for name, its in ways.items()
        },
        "by hand, bf16, compiled": by_hand(job.model, data, best, card.place, size),
    }


def _way(compiled: bool | str) -> str:
    return "bf16" if not compiled else f"bf16, {'compiled' if compiled is True else compiled}"


def experiment_ratios(sizes: Sizes) -> tuple[Ratio, ...]:
    first, *others = map(_way, sizes.compiled)
    return (
        Ratio(first, "plain fp32 loop", 4.0),
        *(Ratio(name, "plain fp32 loop") for name in [_way(False), *others]),
        Ratio(first, "by hand, bf16, compiled", 0.98),
    )


def one_rank(card: Card, sizes: Sizes, stack: contextlib.ExitStack) -> Turns:
    """DistributedDataParallel with one rank: its buckets, hooks and copies, and nobody to send
    them to.
    """
    here, threads = places.usable_cores(), torch.get_num_threads()
    world = World(devices=(card.device,))
    group.join(world, dist.HashStore())

    def left() -> None:
        group.leave(world)
        torch.set_num_threads(threads)
        with contextlib.suppress(AttributeError, OSError):
            os.sched_setaffinity(0, here)

    stack.callback(left)
    job = resnet_job(card, sizes, 1)
    step, ours = stepping(card, job, DDP(reduce="overlapped"), world, sizes.updates)
    assert isinstance(step, DDPStep)
    # As with several ranks: one by itself has nothing to sum.
    step._overlapped = OverlappedReducer(step.model, world, step._forward_loss, bucket_mb=25.0)
    net = job.model().to(card.place)
    net = DistributedDataParallel(
        net,
        device_ids=None if card.device.is_slot else [card.device.index],
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=_fused(card))
    inputs, targets = job.train_data.tensors
    loss_of = nn.CrossEntropyLoss()

    def update() -> None:
        optimizer.zero_grad()
        loss_of(net(inputs), targets).backward()
        optimizer.step()

    return {
        "DDP by hand, one rank": lambda: card.timed(update, sizes.updates, sizes.batch),
        "ddp, one rank": ours,
    }


STAGES = {"": 0, **{str(place): 1 for place in range(11, 23)}}
"""Of ResNet-50: eleven of its parts, and the other twelve."""
PARTS = 4


def two_stages(card: Card, sizes: Sizes) -> Turns:
    """ResNet-50 as two stages that share the card, beside the same stages one after the other by
    hand.
    """
    job = resnet_job(card, sizes, 1)
    inputs, targets = job.train_data.tensors
    loss_of = nn.CrossEntropyLoss()

    def by_hand_in(parts: int) -> Callable[[], float]:
        net = job.model().to(card.place)
        first, second = net[:11], net[11:]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=_fused(card))

        def update() -> None:
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                sent = first(x)
                received = sent.detach().requires_grad_()
                (loss_of(second(received), y) / parts).backward()
                sent.backward(received.grad)
            optimizer.step()

        return lambda: card.timed(update, sizes.updates, sizes.batch)

    pipeline = PP(STAGES, microbatches=PARTS)
    return {
        "both stages by hand": by_hand_in(1),
        "mp": updates(card, job, MP(STAGES), card.twice, sizes.updates),
        "both stages by hand, micro-batches": by_hand_in(PARTS),
        "pp": updates(card, job, pipeline, card.twice, sizes.updates),
    }


def looking(card: Card, sizes: Sizes) -> Turns:
    """An update of ResNet-50 under ``dp`` on one card that is held to the sum check, as 2,
    4, 8 and so on do.
    """
    step, turn = stepping(card, resnet_job(card, sizes, 1), DP(), World(devices=card.twice), 1)

    def look() -> float:
        step.sums.last, step._updates = math.inf, (1 << 20) - 1
        try:
            return turn()
        finally:
            step.sums.last = 1

    return {"dp": turn, "dp, with a look": look}


def several_cards(sizes: Sizes) -> Turns:
    """ResNet-50 on two cards, the batch twice as large, beside one."""
    data = images(2 * sizes.updates * sizes.batch, sizes.image, 1000)
    job = lockstep.Job(
        model=lambda: resnet50(width=sizes.width),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=2 * sizes.batch,
        epochs=3,
    )
    two = accelerators()[:2]
    one = job.replace(batch_size=sizes.batch)
    return {
        "single": rate(one, "single", two[:1]),
        "ddp": rate(job, "ddp", two),
        "dp": rate(job, "dp", two),
        "pp": rate(job, PP(STAGES, microbatches=2 * PARTS), two),
    }


def replicas(card: Card, net: nn.Module, inputs: torch.Tensor, count: int) -> Turns:
    """Whole updates of two replicas on one card: forward, backward, fused SGD."""
    net, inputs = net.to(card.place), inputs.to(card.place)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, fused=_fused(card))

    def turn(parallel: nn.Module) -> Callable[[], float]:
        def update() -> None:
            optimizer.zero_grad()
            parallel(inputs).square().mean().backward()
            optimizer.step()

        return lambda: card.timed(update, count, len(inputs))

    theirs = (
        {"torch.nn.DataParallel": turn(nn.DataParallel(net, [0, 0]))}
        if card.device.type == "cuda"
        else {}
    )
    return {
        **theirs,
        "DataParallel": turn(DataParallel(net, list(card.twice))),
        "the module itself": turn(net),
    }


REPLICAS = (
    Ratio("DataParallel", "torch.nn.DataParallel", 1 / 0.7),  # a time ratio of 0.7
    Ratio("the module itself", "DataParallel"),
)


def copying(card: Card, sizes: Sizes) -> Turns:
    """Float images on the host: what copying them ahead, through pinned memory, saves."""
    size = 2 * sizes.batch
    data = images(sizes.updates * size, sizes.side)
    job = lockstep.Job(
        model=lambda: MobileNetV2(classes=10, dropout=0.0),
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        train_data=data,
        batch_size=size,
        epochs=3,
    )

    def pageable() -> Iterable[Any]:
        for mine in torch.randperm(len(data)).split(size):
            yield tuple(tensor[mine].to(card.place) for tensor in data.tensors)

    ahead = Loader(data, batch_size=size, device=card.place)
    return {
        "plain loop, pageable": plain(card, job.model(), pageable, len(data)),
        "plain loop, pinned and copied ahead": plain(card, job.model(), lambda: ahead, len(data)),
        "single": rate(job, "single", [card.device]),
    }


def measurements(card: Card, sizes: Sizes, stack: contextlib.ExitStack) -> dict[str, Benchmark]:
    """All of them, in the order of their worth; ``stack`` is closed after each."""
    rounds, net = sizes.rounds, lambda: resnet50(width=sizes.width)

    def of(turns: Callable[..., Turns], *ratios: Ratio, **more: Any) -> Benchmark:
        return Benchmark(lambda: turns(card, sizes, **more), ratios, rounds)

    many = 50 if sizes is not TINY else 1
    picture = torch.randn(max(2, sizes.batch // 2), 3, sizes.image, sizes.image)
    found = {
        "resnet50": of(resnet, Ratio("single", "plain loop", 0.98)),
        "small": of(small, Ratio("single", "plain loop", 0.95)),
        "experiment": of(experiment, *experiment_ratios(sizes)),
        "ddp": of(one_rank, Ratio("ddp, one rank", "DDP by hand, one rank", 0.98), stack=stack),
        "stages": of(
            two_stages,
            Ratio("pp", "both stages by hand, micro-batches", 0.95),
            Ratio("mp", "both stages by hand", 1 / 1.05),
        ),
        "look": of(looking, Ratio("dp, with a look", "dp")),
        "two-cards": Benchmark(
            lambda: several_cards(sizes),
            (Ratio("ddp", "single", 1.9), Ratio("dp", "single"), Ratio("pp", "single")),
            min(2, rounds),
        ),
        "images": of(
            copying,
            Ratio("single", "plain loop, pinned and copied ahead", 0.98),
            Ratio("plain loop, pinned and copied ahead", "plain loop, pageable"),
        ),
        "replicas-resnet50": Benchmark(
            lambda: replicas(card, net(), picture, sizes.updates), REPLICAS, rounds
        ),
        "replicas-small": Benchmark(
            lambda: replicas(card, many_small_layers(4 * many), torch.randn(64, 64), many),
            REPLICAS,
            rounds,
        ),
        **loss_on_device(card.place, sizes.words),
    }
    if len(accelerators()) < 2:
        del found["two-cards"]
    return found


# ---- the command ---------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ratios of all measurements, or why there is none."""
    lines = [("", "of : to", "ratio", "lowest", "highest", "goal", "")]
    for row in rows:
        for ratio in row.get("ratios", ()):
            low, high = ratio["spread"]
            goal = ratio["goal"]
            reached = "" if goal is None else "reached" if ratio["median"] >= goal else "MISSED"
            numbers = (
                f"{ratio['median']:.3f}",
                f"{low:.3f}",
                f"{high:.3f}",
                "" if goal is None else f"{goal:.2f}",
            )
            lines.append((row["benchmark"], f"{ratio['of']} : {ratio['to']}", *numbers, reached))
        if "failed" in row:
            lines.append((row["benchmark"], row["failed"][:100], "", "", "", "", "FAILED"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def run(
    sizes: Sizes, folder: Path, names: Sequence[str] = (), patience: float = PATIENCE
) -> list[dict[str, Any]]:
    """Measure, and keep what was found with the machine's description in gpu.json."""
    card, rows, began = Card(), list[dict[str, Any]](), time.monotonic()
    stack = contextlib.ExitStack()
    place = cores.occupied(card.device)
    with place, stack:
        for name, benchmark in measurements(card, sizes, stack).items():
            if names and name not in names:
                continue
            start = time.monotonic()
            try:
                if start - began > patience:
                    raise TimeoutError(f"left out: {start - began:.0f} s are gone")
                row = measured(name, benchmark)
            except Exception as error:
                traceback.print_exc()
                row = {"benchmark": name, "failed": f"{type(error).__name__}: {error}"}
            stack.close()
            rows.append({**row, "seconds": round(time.monotonic() - start, 1)})
            keep("gpu", {"rows": rows}, folder)
    print(f"\n{table(rows)}\n{time.monotonic() - began:.0f} s in all", flush=True)
    return rows


def main(words: list[str]) -> int:
    """Run the command; 1 where a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("names", nargs="*", help="of measurements (default: all but level)")
    parser.add_argument(
        "--tiny", action="store_true", help="a few samples of each, on whatever device is here"
    )
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    options = parser.parse_args(words)
    if not options.tiny and not accelerators():
        print(
            "there is no accelerator here: --tiny shows on a CPU whether it runs", file=sys.stderr
        )
        return 2
    if options.names == ["level"]:
        level.run(accelerators())  # on several cards: minutes, and a table of its own
        return 0
    rows = run(TINY if options.tiny else Sizes(), options.folder, options.names)
    return int(any("failed" in row for row in rows))
