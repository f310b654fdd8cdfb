"""Level: how evenly a step loads its devices, in bytes and in time.

A data-parallel step is as slow as its busiest device, and its batch as large as the fullest one can hold. PyTorch's
DataParallel gathers outputs on the first device and computes the loss there, which is the fullest then; outputs and
losses that stay where they were computed leave all devices level::

    gathered   first device  ████████████████████    share, all outputs, the loss of all, its gradient
               second        ███████                 share
    level      first device  ██████████              share, its outputs, their loss, its gradient
               second        ██████████              share, its outputs, their loss, its gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import InputError
from lockstep.launch.devices import Device, Devices
from lockstep.parallel import target_devices
from lockstep.parallel.balance.busy_time import BusyTime
from lockstep.parallel.balance.live_memory import LiveBytes


@dataclass(frozen=True)
class Level:
    """What a step asks of each device; ``print`` it for a table.

    Attributes:
        bytes: for each device, by name, the most bytes of tensors that were alive at once, beyond those before the
            step.
        seconds: for each device how long it computed in a step.
    """

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def fullest(self) -> float:
        """The bytes of the fullest device, to the mean of all: 1.0 is level."""
        return _most_to_mean(self.bytes)

    @property
    def busiest(self) -> float:
        """The seconds of the busiest device, to the mean of all: 1.0 is level."""
        return _most_to_mean(self.seconds)

    def __str__(self) -> str:
        rows = [(name, f"{self.bytes[name] / 1e6:,.1f} MB", f"{self.seconds[name]:.3f} s") for name in self.bytes]
        rows = [("", "peak", "busy"), *rows, ("most to mean", f"{self.fullest:.2f}", f"{self.busiest:.2f}")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}  {peak:>{widths[1]}}  {busy:>{widths[2]}}".rstrip() for name, peak, busy in rows
        )


def level_of(step: Callable[[], object], devices: Devices = None, *, repeat: int = 3) -> Level:
    """Measure what ``step`` asks of each device.

    It is called once uncounted (replicas and optimizer state are made then), once for the bytes, and ``repeat`` times
    for the seconds, whose least is taken. On slots what the calling thread makes and computes is the first slot's, as
    the first accelerator has it: gathered outputs, their loss, the optimizer's update. On accelerators it is nobody's.

    Args:
        step: a whole update, say, on a batch that is there already. What it changes stays changed.
        devices: those that it computes on, as ``lockstep.launch.devices.parse`` reads them, or a list.
        repeat: how often it is timed.

    Raises:
        InputError: it isn't to be timed at all.
        DeviceError: devices that don't exist.

    Example::

        step = lockstep.parallelize(model, loss, optimizer, strategy="dp", devices="2xcpu")
        print(lockstep.parallel.level_of(lambda: step(inputs, targets), "2xcpu"))
    """
    if repeat < 1:
        raise InputError(f"repeat {repeat}: a step is timed at least once")
    places = tuple(dict.fromkeys(target_devices.many(devices)))
    step()
    live = peaks_of(step, places)
    timings = []
    for _ in range(repeat):
        with BusyTime(caller_of(places)) as busy:
            step()
        timings.append(busy)
    return Level(live, {str(place): min(busy.seconds(place) for busy in timings) for place in places})


def peaks_of(step: Callable[[], object], devices: tuple[Device, ...]) -> dict[str, int]:
    """The peak of live bytes on each device during one call of ``step``."""
    with LiveBytes(caller_of(devices)) as live:
        step()
    return {str(device): live.peak(device) for device in devices}


def caller_of(devices: tuple[Device, ...]) -> str:
    """On whose account the calling thread's work is: the first slot's."""
    return str(devices[0]) if devices[0].is_slot else "cpu"


def _most_to_mean(found: Mapping[str, float]) -> float:
    mean = sum(found.values()) / len(found)
    return max(found.values()) / mean if mean else 1.0
