"""A job's model on one device, timed block by block."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import Part, job_loader, resolve
from lockstep.job import Job
from lockstep.launch.cores import occupied
from lockstep.launch.devices import Device
from lockstep.launch.world import World
from lockstep.model.build import build_model
from lockstep.model.losses.counts import Counts
from lockstep.model.losses.loss import Totalled
from lockstep.model.precision import Precision
from lockstep.model.snapshot import Snapshot
from lockstep.pipelining.planner.blocks import Block, block_names
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
        model: the job's, on the device.
        first: the first micro-batch of the job's training data.
    """

    def __init__(self, job: Job, world: World) -> None:
        job = job.replace(loader_workers=0)
        self.model = build_model(job, world)
        self.first = _first_part(job, world)
        self._device = world.device
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

    def bytes_of(self, block: Block) -> float:
        """Count the bytes that a block takes with the activations of a micro-batch."""
        return self.fixed(block) + block.activations

    def blocks(self, size: int, seconds: float = 1.0) -> tuple[Block, ...]:
        """Find the blocks with their costs for the first samples of the first micro-batch.

        Args:
            size: how many samples.
            seconds: how long to measure.
        """
        first = self.first
        inputs, targets = cut((first.inputs, first.targets), 0, size, first.size)
        place = self._device.torch
        dtype = self._precision.whole
        inputs = to_device(inputs, place, dtype, channels_last=self._channels_last)
        targets = to_device(targets, place, dtype)
        part = Part(inputs, targets, size, first.of)
        total = functools.partial(self._total, part)
        return measured(self.model, total, self._device, seconds=seconds)

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
    total: Callable[[], Tensor],
    device: Device,
    *,
    seconds: float = 1.0,
    rounds: int = 3,
) -> tuple[Block, ...]:
    """Find a model's blocks, in the order in which forward comes to them, and measure their times,
    as medians of a few rounds. The model is left as it is.

    One clock, and marks: when a block begins, the time until the next one begins is its own. In
    backward the gradient of a block's output shows that its backward begins. Nothing is put
    into the graph, so operators in place are of no concern::

        forward   |block 0      |block 1   |block 2        |loss
        backward  |loss, block 2     |block 1    |block 0         marks at the gradients of their outputs

    Gradients add up, as those of a batch's micro-batches do.

    Args:
        model: on the device, in the mode in which it trains.
        total: one forward and the loss.
        device: the model's.
        seconds: how long to go on, after one round that doesn't count.
        rounds: how many there are at least.
    """
    taken: list[_Times] = []
    with model_kept(model), occupied(device):
        model.zero_grad()
        blocks = _observed(model, total)
        names = [block.name for block in blocks]
        end = time.perf_counter() + seconds
        while len(taken) < rounds or time.perf_counter() < end:
            taken.append(_round(model, names, total, device))
            if len(taken) == _MOST_ROUNDS:
                break

    def usual(kind: str, name: str) -> float:
        times = [of_round[kind, name] for of_round in taken]
        return statistics.median(times)

    found = []
    for block in blocks:
        forward = usual("F", block.name)
        backward = usual("B", block.name)
        found.append(replace(block, forward=forward, backward=backward))
    return tuple(found)


def _observed(model: nn.Module, total: Callable[[], Tensor]) -> list[Block]:
    """Find the blocks, and their bytes, in one forward and backward.

    Args:
        model: on the device.
        total: one forward and the loss.
    """
    begun = [""]  # modules, in the order in which they begin
    kept = [0]  # bytes that are kept for backward, from each begin to the next
    known = {_storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    name_of = {module: name for name, module in model.named_modules()}

    def begins(module: nn.Module, args: Any) -> None:
        begun.append(name_of[module])
        kept.append(0)

    def keep(tensor: Tensor) -> Tensor:
        storage = _storage_of(tensor)
        if storage not in known:
            known.add(storage)
            kept[-1] += _bytes_of([tensor])
        return tensor

    with ExitStack() as stack:
        for module in name_of:
            stack.enter_context(module.register_forward_pre_hook(begins))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        loss = total()
    if loss.requires_grad:
        torch.autograd.backward(loss)

    calls = Counter(begun[1:])
    repeated = {name for name, number in calls.items() if number > 1}
    names = block_names(model, calls, repeated)
    first = {name: place for place, name in reversed(list(enumerate(begun)))}
    names.sort(key=lambda name: first.get(name, 0))
    activations: Counter[str] = Counter()
    here = names[0]
    for name, size in zip(begun, kept, strict=True):
        if name in names:
            here = name
        activations[here] += size
    return [_block(model, name, activations[name]) for name in names]


def _storage_of(tensor: Tensor) -> int:
    """Give the number of a tensor's storage; of one that isn't strided its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(held: Iterable[Tensor]) -> int:
    """Count the bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _block(model: nn.Module, name: str, activations: int) -> Block:
    """Count the bytes of a block.

    Args:
        model: whose block it is.
        name: of its module.
        activations: bytes that it keeps for backward.
    """
    module = model.get_submodule(name)
    parameters = _bytes_of([*module.parameters(), *module.buffers()])
    trained = _bytes_of(p for p in module.parameters() if p.requires_grad)
    return Block(name, parameters=parameters, trained=trained, activations=activations)


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
    name_of = {model.get_submodule(name): name for name in names}

    since = _now(device)

    def mark(kind: str, name: str) -> None:
        """Begin a block: the time until now was that of the block before."""
        nonlocal here, since
        moment = _now(device)
        taken[here] += moment - since
        here = kind, name
        since = moment

    def begins(module: nn.Module, args: Any) -> None:
        mark("F", name_of[module])

    def ends(module: nn.Module, args: Any, outputs: Any) -> None:
        def backward_begins(gradient: Tensor) -> None:
            mark("B", name_of[module])

        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for module in name_of:
            stack.enter_context(module.register_forward_pre_hook(begins))
            stack.enter_context(module.register_forward_hook(ends))
        loss = total()
        mark("B", here[1])
        if loss.requires_grad:
            torch.autograd.backward(loss)
        mark("B", here[1])
    return taken


def _now(device: Device) -> float:
    """Give the time at which a device has done all that it was given."""
    if not device.is_slot:
        torch.accelerator.synchronize(device.index)
    return time.perf_counter()


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """Put attributes, buffers and the states of the CPU's generators back; leave no gradients."""
    snapshot = Snapshot(model, parameters=False)
    try:
        yield
    finally:
        snapshot.put_back()
        model.zero_grad()
