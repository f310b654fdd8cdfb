"""The devices of this machine: its accelerators, or its cores cut into slots.

A *slot* is one of N CPU "devices": some cores of the machine, with a thread limit of as many
threads. Accelerators are found through ``torch.accelerator``, so any that PyTorch knows works by
its name.

A person writes devices as

=============  ================================================================================
``auto``       every accelerator; without one, one CPU device with all cores
``4``          the first four accelerators; without one, four slots
``2xcpu``      two slots, whatever else is here (more slots than cores is allowed: they share)
``cuda``       every device of that type
``cuda:0,2``   two of them; indices count inside ``CUDA_VISIBLE_DEVICES``
=============  ================================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import DeviceError, counted


@dataclass(frozen=True)
class Device:
    """One device: an accelerator, or a CPU device (some of the machine's cores).

    Attributes:
        type: ``"cpu"`` for a CPU device, else the accelerator's type (``"cuda"``, ``"mps"``, ...).
        index: its number among the devices of its type; for CPU devices, its place in the list.
        cores: those of a CPU device, as the operating system numbers them; none for accelerators.
    """

    type: str
    index: int = 0
    cores: tuple[int, ...] = ()

    @property
    def torch(self) -> torch.device:
        """The device where its tensors live. All CPU devices are ``torch.device("cpu")``."""
        return torch.device("cpu") if self.is_slot else torch.device(self.type, self.index)

    @property
    def is_slot(self) -> bool:
        """Whether this is a CPU device."""
        return self.type == "cpu"

    @property
    def threads(self) -> int:
        """How many threads compute on it at most."""
        return max(1, len(self.cores))

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


Devices = str | int | Device | torch.device | Sequence["Device | torch.device | str | int"] | None
"""What a person may give for devices."""


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on (its affinity mask; all where the system has
    none).
    """
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def slots(count: int, cores: Sequence[int] | None = None) -> tuple[Device, ...]:
    """Cut the cores in ``count`` slots, as evenly as can be; of more slots than cores neighbours
    share one.
    """
    mine = tuple(usable_cores() if cores is None else cores)
    found = []
    for number in range(count):
        first = number * len(mine) // count
        last = (number + 1) * len(mine) // count
        found.append(Device("cpu", number, mine[first : max(last, first + 1)]))
    return tuple(found)


def accelerators() -> tuple[Device, ...]:
    """Return every accelerator that this process can see."""
    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return tuple(Device(kind.type, i) for i in range(torch.accelerator.device_count()))


def parse(wanted: Devices = "auto") -> tuple[Device, ...]:
    """Turn what a person wrote into devices.

    Args:
        wanted: see the table at the top of this module; None means ``auto``; a list is taken item
            by item.

    Raises:
        DeviceError: the words aren't understood, or there are fewer devices than asked for.
    """
    if isinstance(wanted, Device):
        return (wanted,)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _from_list(wanted)
    word = "auto" if wanted is None else str(wanted).strip()
    here = accelerators()
    if word == "auto":
        return here or slots(1)
    if word == "cpu":
        return slots(1)
    if re.fullmatch(r"-?\d+", word):
        return _first(int(word), here)
    if cut := re.fullmatch(r"(\d+)\s*x\s*cpu", word):
        return slots(_positive(int(cut[1])))
    if match := re.fullmatch(r"([a-z]+)(?::([\d,]+))?", word):
        return _of_type(match[1], match[2], here)
    raise DeviceError(f'devices "{word}" isn\'t understood: write auto, 4, 2xcpu, cuda or cuda:0,2')


def parse_several(wanted: Devices = "auto") -> tuple[Device, ...]:
    """As ``parse``, but ``auto`` without an accelerator is a CPU device for each core: one has
    nothing to share.
    """
    chosen = parse(wanted)
    if wanted in ("auto", None) and len(chosen) == 1 and chosen[0].is_slot:
        return slots(len(usable_cores()))
    return chosen


def _from_list(wanted: Sequence[Device | torch.device | str | int]) -> tuple[Device, ...]:
    if not wanted:
        raise DeviceError("an empty list of devices: name at least one")
    if all(str(item) == "cpu" for item in wanted):
        return slots(len(wanted))
    found: list[Device] = []
    for item in wanted:
        if isinstance(item, Device) or not (word := str(item)).isdigit():
            found.extend(parse(item))
            continue
        here = accelerators()
        if int(word) >= len(here):
            slots_too = "" if here else ' (two CPU devices are "2xcpu")'
            raise DeviceError(
                f"device {word} doesn't exist: there are {len(here)} accelerators here{slots_too}"
            )
        found.append(here[int(word)])
    return tuple(found)


def _positive(count: int) -> int:
    if count < 1:
        raise DeviceError(f"{count} devices: ask for at least one, or for auto")
    return count


def _first(count: int, here: tuple[Device, ...]) -> tuple[Device, ...]:
    _positive(count)
    if here:
        if count > len(here):
            are = "is" if len(here) == 1 else "are"
            there = f"there {are} {len(here)} ({here[0].type})"
            raise DeviceError(f"{count} devices, but {there}: ask for {len(here)}")
        return here[:count]
    cores = len(usable_cores())
    if count > cores:
        raise DeviceError(
            f"{count} devices, but this machine has {counted(cores, 'core')} and no accelerator: "
            f"use {cores}, or {count}xcpu to let CPU devices share cores"
        )
    return slots(count)


def _of_type(kind: str, indices: str | None, here: tuple[Device, ...]) -> tuple[Device, ...]:
    if kind == "cpu":
        raise DeviceError(
            f'CPU devices have no fixed numbers ("cpu:{indices}"): write 2xcpu for two of them'
        )
    mine = tuple(d for d in here if d.type == kind)
    if not mine:
        others = f"{counted(len(usable_cores()), 'core')} and no accelerator"
        if here:
            others = f"{len(here)} {here[0].type}"
        raise DeviceError(f"no {kind} device here, only {others}: use auto")
    if indices is None:
        return mine
    numbers = [int(i) for i in indices.split(",") if i]
    missing = [i for i in numbers if i >= len(mine)]
    if missing or not numbers:
        first = missing[0] if missing else ""
        raise DeviceError(f"{kind}:{first} doesn't exist: there are {len(mine)}, from 0")
    if len(set(numbers)) < len(numbers):
        raise DeviceError(f'"{kind}:{indices}" names a device twice')
    return tuple(mine[i] for i in numbers)
