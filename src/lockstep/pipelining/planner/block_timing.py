"""How long each block takes, forward and backward, on a real device with real inputs.

One clock, and marks: when a block begins, the time until the next one begins is its own. In backward the gradient of a
block's output is what says that its backward begins. Nothing is put into the graph, so operators in place are of no
concern::

    forward     |block 0      |block 1   |block 2        |loss
    backward    |loss, block 2     |block 1    |block 0              marks at the gradients of their outputs
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lockstep.launch.devices import Device, occupied
from lockstep.pipelining.planner.blocks import Block, watched
from lockstep.pipelining.planner.trace import as_before
from lockstep.tensors.pytree import tensors
from lockstep.threads.thread_pool import borrowed


def measured(
    model: nn.Module,
    blocks: Sequence[Block],
    total: Callable[[], torch.Tensor],
    device: Device,
    *,
    adds: bool = False,
    seconds: float = 1.0,
    rounds: int = 3,
) -> list[Block]:
    """The same blocks with measured times, medians of a few rounds. The model is left as it is.

    Args:
        model: on the device, in the mode in which it trains.
        blocks: as a look at the forward found them.
        total: one forward and the loss, a scalar.
        device: where it runs.
        adds: whether backward adds to gradients that are there, as it does for every micro-batch but a batch's first.
        seconds: how long to go on, after one round that doesn't count.
        rounds: how many rounds there are at least.
    """
    clock = _Clock(len(blocks), device)
    with as_before(model), occupied(device):
        model.zero_grad()
        _round(model, blocks, total, clock)
        clock.rounds.clear()
        end = time.perf_counter() + seconds
        while len(clock.rounds) < rounds or (time.perf_counter() < end and len(clock.rounds) < 50):
            if not adds:
                model.zero_grad()
            _round(model, blocks, total, clock)
    return [
        replace(
            block,
            forward=statistics.median(taken["F", place] for taken in clock.rounds),
            backward=statistics.median(taken["B", place] for taken in clock.rounds),
        )
        for place, block in enumerate(blocks)
    ]


_TURNS = 3


def contention(
    model: nn.Module,
    total: Callable[[], torch.Tensor],
    other: Callable[[], torch.Tensor],
    devices: Sequence[Device],
    *,
    seconds: float = 0.6,
) -> float:
    """How many times longer forward and backward take on a slot while another slot computes them too; 1 or more.

    Threads of one process share Python's interpreter lock, which small operators wait for, and the machine's memory.

    Args:
        model: is left as it is.
        total: one forward and the loss, a scalar.
        other: the same of a copy of the model.
        devices: slots; the first two are used.
        seconds: how long it goes on alone, and as long together.
    """

    def rounds(total: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        count = 0
        while count < 1 or time.perf_counter() < began + seconds / _TURNS:
            loss = total()
            if loss.requires_grad:
                torch.autograd.backward(loss)
            count += 1
        return (time.perf_counter() - began) / count

    with as_before(model), borrowed(devices[:2]) as team:
        one, two = functools.partial(rounds, total), functools.partial(rounds, other)
        team.run([one, two])  # warms up
        ratios = []
        for _ in range(_TURNS):  # in turns, because a machine that does something else meanwhile spoils one of them
            (alone, _), together = team.run([one, None]), team.run([one, two])
            assert alone is not None
            ratios.append(statistics.mean(taken for taken in together if taken is not None) / alone)
    return max(1.0, statistics.median(ratios))


class _Clock:
    """Gives the time between two marks to what began at the first."""

    def __init__(self, blocks: int, device: Device) -> None:
        self.rounds: list[dict[tuple[str, int], float]] = []
        self._blocks = blocks
        self._device = device
        self._kind = "F"
        self._place = 0
        self._since = 0.0

    def begin(self) -> None:
        """A round begins, with the first block."""
        self.rounds.append({(kind, place): 0.0 for kind in "FB" for place in range(self._blocks)})
        self._kind, self._place = "F", 0
        self._since = self._now()

    def mark(self, place: int | None = None, kind: str | None = None) -> None:
        """A block begins; None means the same one goes on."""
        now = self._now()
        self.rounds[-1][self._kind, self._place] += now - self._since
        self._place = self._place if place is None else place
        self._kind = kind or self._kind
        self._since = now

    def _now(self) -> float:
        if not self._device.is_slot:
            torch.accelerator.synchronize(self._device.index)
        return time.perf_counter()


def _round(model: nn.Module, blocks: Sequence[Block], total: Callable[[], torch.Tensor], clock: _Clock) -> None:
    def ended(place: int, outputs: object) -> None:
        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: clock.mark(place, "B"))  # type: ignore[no-untyped-call]

    with watched(model, [block.name for block in blocks], clock.mark, ended):
        clock.begin()
        loss = total()
        clock.mark(kind="B")
        if loss.requires_grad:
            torch.autograd.backward(loss)
        clock.mark()
