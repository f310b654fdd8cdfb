"""A few updates with the found stages: what they really take, to choose by.

What blocks take one after the other says nothing of turns: a thread is woken, its caches are another micro-batch's, the
interpreter is busy with the other stage. Each is small, and there are two turns of each stage for each micro-batch::

    taken     |0F0 ·|0F1 ·|  ..  |0B0 ·|             a turn's cost: what is between both ends,
    simulated |0F0|0F1| .. |0B0|                     by the turns of a device
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from lockstep.data import Part
from lockstep.launch.devices import Device
from lockstep.launch.placement import alone
from lockstep.pipelining.device_map import stage_of
from lockstep.pipelining.planner.choice import Candidate
from lockstep.pipelining.planner.partition import Bench
from lockstep.pipelining.runner import Runner
from lockstep.pipelining.stage_layers import Layers
from lockstep.tensors.seeding import kept_states
from lockstep.threads.random_streams import stream


def seconds_taken(
    bench: Bench,
    parts: Sequence[Part],
    device_map: Mapping[str, int],
    candidate: Candidate,
    devices: Sequence[Device],
    *,
    seconds: float = 1.0,
) -> float | None:
    """Seconds of forward and backward of a batch; None where its micro-batches can't overlap.

    Args:
        bench: whose model gets hooks, and other gradients and buffers: it is of no use afterwards.
        parts: the micro-batches, placed.
        device_map: the stage of each layer.
        candidate: the schedule, and where its stages are.
        devices: slots.
        seconds: how long to go on, after those that show the route.
    """
    places = candidate.plan.places
    model = bench.model
    found = stage_of(model, device_map, len(places))
    Layers(model, found, [devices[place] for place in places])
    with alone(tuple(devices)) as world, kept_states():
        runner = Runner(model, world, lambda count: candidate.order, places)

        def forward(number: int) -> torch.Tensor:
            # As a step does: each micro-batch draws for itself, if it does.
            with stream(torch.Generator() if runner.overlaps and runner.draws else None):
                return bench.total(parts[number])()

        def update() -> float:
            model.zero_grad()
            began = time.perf_counter()
            runner.run(lambda number: None, forward, lambda number, loss: torch.autograd.backward(loss), len(parts))
            return time.perf_counter() - began

        update()
        update()
        if not runner.overlaps:
            return None
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < end:
            taken.append(update())
    return statistics.median(taken)
