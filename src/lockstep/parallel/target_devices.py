"""Where the primitives put things: the place that a person names, and moves to it."""

from __future__ import annotations

import torch

from lockstep.launch.devices import Device, parse


def one(wanted: Device | torch.device | str | int) -> torch.device:
    """Read the one place that was named; ``"cpu"``, -1 (as in PyTorch) and any slot are the memory of
    the CPU.
    """
    if isinstance(wanted, Device):
        return wanted.torch
    if wanted == -1 or str(wanted).startswith("cpu"):
        return torch.device("cpu")
    return parse([wanted])[0].torch


def move(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Give a tensor on ``place``, without waiting where that is safe (a copy to the CPU must be
    waited for).
    """
    if tensor.device == place:
        return tensor
    return tensor.to(place, non_blocking=place.type != "cpu")
