"""A function on every rank that a strategy wants, on the devices that were chosen: for train,
evaluate and predict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lockstep.launch import launch, started_as_rank
from lockstep.launch.devices import Device
from lockstep.launch.world import World, lone
from lockstep.run.terminal import Display
from lockstep.tensors.seeding import kept_states

T = TypeVar("T")


def on_devices(
    function: Callable[[World, Any], T],
    argument: Any,
    devices: tuple[Device, ...],
    folder: str | None,
    display: Display,
    timeout: float = 1800.0,
) -> T:
    """Call ``function(world, argument)`` on every rank that the strategy wants; gives rank 0's
    result.

    Raises:
        InputError: this process is a rank already.
    """
    each = argument.strategy.devices_per_rank
    if not started_as_rank() and needs_one_process(argument.strategy, devices):
        each = len(devices)
    with kept_states():
        results = launch(
            function,
            devices,
            (argument,),
            folder=folder,
            on_event=lambda rank, event: display.show(event),
            on_output=display.output,
            timeout=timeout,
            devices_per_rank=each,
        )
    return results[0]


def needs_one_process(strategy: Any, devices: tuple[Device, ...]) -> bool:
    """Return whether the calling process alone drives these devices under a strategy (a
    ``Strategy``, which lies above).
    """
    processes: int = strategy.layout(len(devices)).processes
    return processes == 1


@contextlib.contextmanager
def alone(devices: tuple[Device, ...]) -> Iterator[World]:
    """One process that drives all these devices, for a while; its generators of random numbers
    go on as before.
    """
    with lone(devices) as world, kept_states():
        yield world
