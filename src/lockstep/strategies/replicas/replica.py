"""Replica: a model on one of the devices of ``dp``, and what it takes from the first one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.launch.devices import Device
from lockstep.model.attributes import follow_settings
from lockstep.model.build import buffers_of
from lockstep.model.hooks import hooks_of
from lockstep.model.modes import NORMS
from lockstep.tensors.placing import moved_in_buckets
from lockstep.tensors.seeding import seed_on


class Replica:
    """The model itself, on the first device, or a copy of it.

    Args:
        model: on the device.
        device: where the model computes.
        shares_storage: whether all replicas share the storage of the parameters.

    Attributes:
        model: as given.
        parameters: of the model.
        generator: draws its random numbers; None on accelerators, which have one each.
    """

    def __init__(self, model: nn.Module, device: Device, *, shares_storage: bool) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.generator = torch.Generator() if shares_storage else None
        self._device = device
        self._shares_storage = shares_storage
        self._modules = list(model.modules())
        self._buffers = buffers_of(model)

    def seed(self, key: int) -> None:
        """Begin the random stream of the replica.

        Compiled code on CPU devices has none of its own; all draw from the shared generator.

        Args:
            key: a seed.
        """
        if self.generator is not None:
            self.generator.manual_seed(key)
        elif not self._device.is_slot:
            seed_on(self._device.torch, key)

    def has_changed(self) -> bool:
        """Return whether the model has other modules or parameters than when this was made."""
        of_model = [*self.model.modules(), *self.model.parameters()]
        return list(map(id, of_model)) != list(map(id, [*self._modules, *self.parameters]))

    def hooks(self) -> list[Any]:
        """List the hooks of the modules and parameters."""
        return hooks_of(self._modules, self.parameters)

    def clear_gradients(self) -> None:
        """Forget the gradients."""
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def follow(self, first: Replica, *, statistics: bool) -> None:
        """Become equal to the first replica, in parameters, modes and buffers.

        Args:
            first: the first replica.
            statistics: whether its running statistics are taken, too.
        """
        self._follow_modes(first, statistics=statistics)
        for p, q in zip(first.parameters, self.parameters, strict=True):
            if q.requires_grad != p.requires_grad:
                q.requires_grad_(p.requires_grad)
            if self._shares_storage and q.data_ptr() != p.data_ptr():
                q.data = p.data  # somebody gave the parameter other storage
        if not self._shares_storage:
            self._copy_parameters(first)

    def _copy_parameters(self, first: Replica) -> None:
        """Copy the values of the first replica's parameters to this replica's device."""
        pairs = zip(first.parameters, self.parameters, strict=True)
        of_first = dict[torch.Tensor, torch.Tensor](pairs)
        for some, copies in moved_in_buckets(first.parameters, self._device.torch):
            mine = [of_first[p] for p in some]
            torch._foreach_copy_(mine, copies)

    def _follow_modes(self, first: Replica, *, statistics: bool) -> None:
        """Take over the attributes, the mode among them, and the buffers that act.

        Args:
            first: the first replica.
            statistics: whether running statistics are taken that don't act, too.
        """
        follow_settings(self._modules, first._modules)
        for place, (mine, _) in zip(first._buffers, self._buffers, strict=True):
            module, name = place
            # Running statistics act in evaluation only, so they may differ in training.
            if module.training and not statistics and isinstance(module, NORMS):
                continue
            # Always: batch norm's own kernels write without changing a buffer's version.
            self._copy_buffer(module._buffers[name], mine, name)

    def _copy_buffer(self, value: torch.Tensor | None, module: nn.Module, name: str) -> None:
        """Copy the value of a buffer of the first replica, which may have got another shape.

        Args:
            value: of the first replica's buffer.
            module: of this replica.
            name: the buffer's name in the module.
        """
        assert value is not None
        target = module._buffers[name]
        if target is not None and target.shape == value.shape:
            target.copy_(value, non_blocking=True)
        else:
            copied = value.clone()
            module._buffers[name] = copied.to(self._device.torch)
