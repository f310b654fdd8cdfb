"""Where things go: the devices that a person names for the primitives, read once.

``torch.nn.parallel`` takes the numbers of GPUs; here anything that
``lockstep.launch.devices.parse`` understands will do.
"""

from __future__ import annotations

import torch

from lockstep.launch import devices as _devices
from lockstep.launch.devices import Device, Devices


def many(wanted: Devices) -> tuple[Device, ...]:
    """Read the devices that were named, in order."""
    if isinstance(wanted, torch.device):
        return _devices.parse(_indexed(wanted))
    if not isinstance(wanted, (list, tuple)):
        return _devices.parse(wanted)
    if wanted and all(isinstance(item, Device) for item in wanted):
        return tuple(wanted)
    return _devices.parse([_indexed(item) for item in wanted])


def one(wanted: Device | torch.device | str | int) -> torch.device:
    """Read the one place that was named; ``"cpu"``, -1 (as in PyTorch) and any slot are the memory of
    the CPU.
    """
    if isinstance(wanted, Device):
        return wanted.torch
    if wanted == -1 or str(wanted).startswith("cpu"):
        return torch.device("cpu")
    return many([wanted])[0].torch


def _indexed(item: Device | torch.device | str | int) -> Device | torch.device | str | int:
    """``torch.device("cuda")`` means the current device of its type, not all of them."""
    if not isinstance(item, torch.device) or item.type == "cpu" or item.index is not None:
        return item
    current = torch.accelerator.current_device_index()
    return torch.device(item.type, current)


def move(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Give a tensor on ``place``, without waiting where that is safe (a copy to the CPU must be
    waited for).
    """
    if tensor.device == place:
        return tensor
    return tensor.to(place, non_blocking=place.type != "cpu")
