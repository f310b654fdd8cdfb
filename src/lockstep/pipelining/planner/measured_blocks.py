"""A job's model on one device, timed block by block."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Part, job_loader, resolve
from lockstep.job import Job
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device
from lockstep.launch.memory import is_out_of_memory
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.counts import Counts
from lockstep.model.losses.loss import Totalled
from lockstep.model.precision import Precision
from lockstep.pipelining.planner.blocks import Block, ModelBlocks, blocks_of
from lockstep.pipelining.planner.trace import model_kept, trace, watched
from lockstep.tensors.placing import place_module
from lockstep.tensors.pytree import call, clones, tensors, to_device
from lockstep.tensors.rows import cut

_Times = dict[tuple[str, str], float]
"""Seconds by kind ("F" is forward, "B" backward) and name of a block."""

_MOST_ROUNDS = 50
"""The number of measurements after which medians are taken, however fast the model is."""


class ModelBenchmark:
    """A model on one device with all that a step of it needs, and the job's first micro-batch.

    Args:
        job: whose model it is. Its data are loaded without loader workers.
        world: of one device.

    Attributes:
        model: the job's, on the device, or on the CPU where it doesn't fit there.
        device: as given by the world.
        first: the first micro-batch of the job's training data.
    """

    def __init__(self, job: Job, world: World) -> None:
        job = job.replace(loader_workers=0)
        self.model = build_model(job, world, place=False)
        self.device = world.device
        self._place = self.device.torch
        self._fits = True
        try:
            place_module(self.model, self._place)
        except torch.OutOfMemoryError:
            self._place = torch.device("cpu")
            self._fits = False
            place_module(self.model, self._place)
        self.first = _first_part(job, world)
        self._state_copies = state_copies(job)
        self._channels_last = job.channels_last
        self._precision = Precision(job.precision, world)
        self._loss = Totalled(copy.deepcopy(job.loss), self._precision.whole)
        self._counts = job.counts

    def fixed(self, block: Block) -> float:
        """Count the bytes that a block takes besides activations: parameters, their gradients, the
        optimizer's state.
        """
        return block.parameters + (1 + self._state_copies) * block.trained

    def part(self, size: int) -> Part:
        """Give the first samples of the first micro-batch, on the device, in the job's format and
        layout.

        Args:
            size: how many samples.
        """
        first = self.first
        inputs, targets = cut((first.inputs, first.targets), 0, size, first.size)
        dtype = self._precision.whole
        inputs = to_device(inputs, self._place, dtype, channels_last=self._channels_last)
        targets = to_device(targets, self._place, dtype)
        return Part(inputs, targets, size, first.of)

    def blocks(self, part: Part, *, measure: bool = True, seconds: float = 1.0) -> ModelBlocks:
        """Find the blocks with their costs for a part, estimated where the model and the part
        don't fit on the device.

        Args:
            part: of the first micro-batch, as ``part`` gives it.
            measure: False estimates the costs.
            seconds: how long to measure.
        """
        if measure and self._fits:
            try:
                return self._measured(part, seconds)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        return self._traced(part, fake=True)

    def _measured(self, part: Part, seconds: float) -> ModelBlocks:
        # A forward on fake tensors might leave one of them where the training finds it.
        found = self._traced(part, fake=False)
        adds = part.size < self.first.size  # it is one of several of a batch
        total = functools.partial(self._total, part)
        blocks = measured(
            self.model,
            found.blocks,
            total,
            self.device,
            adds=adds,
            seconds=seconds,
        )
        return replace(found, blocks=blocks, measured=True)

    def _traced(self, part: Part, *, fake: bool) -> ModelBlocks:
        def forward(inputs: Any) -> Any:
            with self._precision.autocast():
                return call(self.model, inputs)

        seen = trace(self.model, part.inputs, forward, self.device.type, fake=fake)
        return blocks_of(self.model, seen)

    def _total(self, part: Part) -> Tensor:
        """One forward of a part and its loss."""
        with self._precision.autocast():
            inputs, targets = clones((part.inputs, part.targets))
            if self._counts is not None:
                counts = Counts.of(self._counts, targets, part.size, torch.device("cpu"))
                self._loss.counts = counts
                inputs = counts.given_to(self.model, inputs)
            outputs = call(self.model, inputs)
            loss = self._loss(outputs, targets, part.size)
        total: Tensor = loss.total
        return total


def _first_part(job: Job, world: World) -> Part:
    """Load the first micro-batch of the training data."""
    data = resolve(job.train_data, world, "train_data")
    loader = job_loader(job.replace(batches=None, cut_by=None), world, data)
    try:
        batches = iter(loader.epoch(0))
        return next(batches).parts[0]
    finally:
        loader.close()


def state_copies(job: Job) -> float:
    """Count how many times the parameters the job's optimizer keeps beside them: 0 for SGD, 1 with
    momentum, 2 for Adam.

    It is asked with one small parameter; where it won't take that, it is taken for Adam.
    """
    probe = nn.Parameter(torch.zeros(8))
    try:
        optimizer = job.optimizer([("weight", probe)])  # type: ignore[operator]  # a dict is no optimizer either
        probe.grad = torch.ones(8)
        optimizer.step()
    except Exception:  # groups by name, say, which this parameter isn't in
        return 2.0
    kept = 0
    for value in optimizer.state.get(probe, {}).values():
        if isinstance(value, Tensor) and value.numel() > 1:
            kept += value.numel()
    return kept / probe.numel()


def measured(
    model: nn.Module,
    blocks: Sequence[Block],
    total: Callable[[], Tensor],
    device: Device,
    *,
    adds: bool = False,
    seconds: float = 1.0,
    rounds: int = 3,
) -> tuple[Block, ...]:
    """Measure the times of blocks, as medians of a few rounds. The model is left as it is.

    One clock, and marks: when a block begins, the time until the next one begins is its own. In
    backward the gradient of a block's output shows that its backward begins. Nothing is put
    into the graph, so operators in place are of no concern::

        forward   |block 0      |block 1   |block 2        |loss
        backward  |loss, block 2     |block 1    |block 0         marks at the gradients of their outputs

    Args:
        model: on the device, in the mode in which it trains.
        blocks: as a look at the forward found them.
        total: one forward and the loss.
        device: the model's.
        adds: whether backward adds to gradients that are there, as it does for every micro-batch
            but a batch's first.
        seconds: how long to go on, after one round that doesn't count.
        rounds: how many there are at least.
    """
    names = [block.name for block in blocks]
    taken: list[_Times] = []
    with model_kept(model), occupied(device):
        model.zero_grad()
        _round(model, names, total, device)
        end = time.perf_counter() + seconds
        for number in range(_MOST_ROUNDS):
            if number >= rounds and time.perf_counter() >= end:
                break
            if not adds:
                model.zero_grad()
            taken.append(_round(model, names, total, device))

    def usual(kind: str, name: str) -> float:
        times = [of_round[kind, name] for of_round in taken]
        return statistics.median(times)

    found = []
    for block in blocks:
        forward = usual("F", block.name)
        backward = usual("B", block.name)
        found.append(replace(block, forward=forward, backward=backward))
    return tuple(found)


def _round(
    model: nn.Module,
    names: Sequence[str],
    total: Callable[[], Tensor],
    device: Device,
) -> _Times:
    """Time one forward and backward.

    Args:
        model: on the device.
        names: of its blocks, in the order in which forward comes to them.
        total: one forward and the loss.
        device: the model's.
    """
    taken: _Times = defaultdict(float)
    here = "F", names[0]

    def now() -> float:
        if not device.is_slot:
            torch.accelerator.synchronize(device.index)
        return time.perf_counter()

    since = now()

    def mark(kind: str, name: str) -> None:
        """Begin a block: the time until now was that of the block before."""
        nonlocal here, since
        moment = now()
        taken[here] += moment - since
        here = kind, name
        since = moment

    def ended(name: str, outputs: object) -> None:
        def backward_begins(gradient: Tensor) -> None:
            mark("B", name)

        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)  # type: ignore[no-untyped-call]

    def begun(name: str, inputs: object) -> None:
        mark("F", name)

    with watched(model, names, begun, ended):
        loss = total()
        mark("B", here[1])
        if loss.requires_grad:
            torch.autograd.backward(loss)
        mark("B", here[1])
    return taken
