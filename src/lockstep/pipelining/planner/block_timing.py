"""How long each block takes, forward and backward, on a real device with real inputs.

One clock, and marks: when a block begins, the time until the next one begins is its own. In backward the gradient of a
block's output is what says that its backward begins. Nothing is put into the graph, so operators in place are of no
concern::

    forward     |block 0      |block 1   |block 2        |loss
    backward    |loss, block 2     |block 1    |block 0              marks at the gradients of their outputs
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lockstep.launch.devices import Device, occupied
from lockstep.pipelining.planner.blocks import Block
from lockstep.pipelining.planner.trace import as_before, watched
from lockstep.tensors.pytree import tensors


def measured(
    model: nn.Module,
    blocks: Sequence[Block],
    total: Callable[[], torch.Tensor],
    device: Device,
    *,
    adds: bool = False,
    seconds: float = 1.0,
    rounds: int = 3,
) -> tuple[Block, ...]:
    """The same blocks with measured times, medians of a few rounds. The model is left as it is.

    Args:
        model: on the device, in the mode in which it trains.
        blocks: as a look at the forward found them.
        total: one forward and the loss, a scalar.
        device: the model's.
        adds: whether backward adds to gradients that are there, as it does for every micro-batch but a batch's first.
        seconds: how long to go on, after one round that doesn't count.
        rounds: how many rounds there are at least.
    """
    names = [block.name for block in blocks]
    taken: list[dict[tuple[str, str], float]] = []
    with as_before(model), occupied(device):
        model.zero_grad()
        _round(model, names, total, device)
        end = time.perf_counter() + seconds
        while len(taken) < rounds or (time.perf_counter() < end and len(taken) < 50):
            if not adds:
                model.zero_grad()
            taken.append(_round(model, names, total, device))
    return tuple(
        replace(
            block,
            forward=statistics.median(one["F", block.name] for one in taken),
            backward=statistics.median(one["B", block.name] for one in taken),
        )
        for block in blocks
    )


def _round(
    model: nn.Module, names: Sequence[str], total: Callable[[], torch.Tensor], device: Device
) -> dict[tuple[str, str], float]:
    """Seconds of one forward ("F") and backward ("B") by kind and block."""
    taken = {(kind, name): 0.0 for kind in "FB" for name in names}

    def now() -> float:
        if not device.is_slot:
            torch.accelerator.synchronize(device.index)
        return time.perf_counter()

    here, since = ("F", names[0]), now()

    def mark(kind: str, name: str) -> None:
        """The time until now was that of what began last; this begins."""
        nonlocal here, since
        moment = now()
        taken[here] += moment - since
        here, since = (kind, name), moment

    def ended(name: str, outputs: object) -> None:
        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: mark("B", name))  # type: ignore[no-untyped-call]

    with watched(model, names, lambda name, inputs: mark("F", name), ended):
        loss = total()
        mark("B", here[1])
        if loss.requires_grad:
            torch.autograd.backward(loss)
        mark("B", here[1])
    return taken
