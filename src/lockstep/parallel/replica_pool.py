"""Kept: replicas that stay from one forward to the next, and are equal to the module at the start of each.

``torch.nn.DataParallel`` makes every replica afresh in each forward, module by module, and copies all weights. Most of
its cost on small layers is that. Here the modules of a replica stay, and take over the original's attributes, hooks,
modes and tensors, of which nothing is remembered: so whatever was changed in between, in whatever way, is seen.

::

    module  ──attributes, hooks, mode──▶  replica 0   its buffers are the module's own: what it updates stays
            ──parameters──────────────▶               slots share the memory; accelerators: one coalesced copy
            ──attributes, hooks, mode──▶  replica 1   its buffers are copies
            ──parameters──────────────▶

A set of replicas belongs to one forward until its graph is used up: backward may run parts of a replica again
(activation checkpointing), and must find it as it was. Forwards whose graphs live together get sets of their own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.launch.devices import Device
from lockstep.parallel import backward_threads, module_attributes
from lockstep.parallel.replicate import fill, refuse_compiled, refuse_without_shape, shell, spread

_SPARE = 2
"""How many sets are kept for later; more than one is in use only where graphs live together."""


class Kept:
    """The sets of replicas that are free now. Copies of it, and what is loaded from files, have none yet.

    Args:
        devices: where replicas compute; several may be the same.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._frame: _Frame | None = None
        self._free: list[_Set] = []

    def __reduce__(self) -> tuple[type[Kept], tuple[tuple[Device, ...]]]:
        return Kept, (self.devices,)

    def lend(self, module: nn.Module, count: int) -> Lease:
        """The first ``count`` replicas, equal to the module as it is now.

        Raises:
            InputError: something in the module can't be replicated, or lies on another device than the first.
        """
        frame = self._frame
        if frame is None or not frame.stands_for(module):
            frame = self._frame = _Frame(module)
            self._free = []
        try:
            lent = self._free.pop()  # needs no lock
        except IndexError:
            lent = None
        if lent is None or lent.frame is not frame:
            lent = _Set(frame, self.devices)
        lent.refresh(count)
        return Lease(self, lent, count)

    def take_back(self, lent: _Set) -> None:
        """A set that no graph needs any more."""
        if lent.frame is self._frame and len(self._free) < _SPARE:
            self._free.append(lent)


class Lease:
    """A set of replicas, until this object is gone.

    Attributes:
        replicas: one for each device used.
        shared: the module's tensors that gradients are wanted of, in order; only on slots.
        leaves: for each replica, its own stand-ins for ``shared``, by their number.
    """

    def __init__(self, kept: Kept, lent: _Set, count: int) -> None:
        self._kept = kept
        self._lent: _Set | None = lent
        self.replicas = [shells[id(lent.frame.module)] for shells in lent.shells[:count]]
        self.shared, self.leaves = lent.shared, lent.leaves
        self._named = lent.alike
        self._before = [] if torch.is_inference_mode_enabled() else lent.versions()

    def __del__(self) -> None:
        if self._lent is not None:
            self._kept.take_back(self._lent)

    def forfeit(self) -> None:
        """Don't give the set back: after Ctrl-C somebody may still compute with it."""
        self._lent = None

    def refuse_written(self) -> None:
        """Look for parameters that a replica has written: on slots all have written to the same memory.

        Raises:
            InputError: there is one; it is named.
        """
        for (name, tensor), before in zip(self._named, self._before, strict=False):
            if tensor._version != before:
                raise InputError(
                    f'parameter "{name}" was changed in forward, by every replica, and they share its memory: '
                    "make it a buffer (the first replica's is kept), or change it outside of forward"
                )


class _Frame:
    """The modules inside a module, and a look whether they are still the same."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.named = [(m, name) for name, m in module.named_modules()]
        self._inside = [(m, m._modules.copy()) for m, _ in self.named]
        parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
        self.special = {id(m) for m, _ in self.named if _takes_part(m) or module_attributes.entangled(m, parts)}

    def stands_for(self, module: nn.Module) -> bool:
        # Equal by identity: modules aren't equal to one another.
        return module is self.module and all(children == m._modules for m, children in self._inside)


class _Set:
    """A replica of the module for each device."""

    def __init__(self, frame: _Frame, devices: Sequence[Device]) -> None:
        self.frame = frame
        self.devices = devices
        self.places = [device.torch for device in devices]
        self.on_slots = all(device.is_slot for device in devices)
        self.shells: list[dict[int, Any]] = [{id(m): shell(m, name) for m, name in frame.named} for _ in devices]
        self.alike: list[tuple[str, torch.Tensor]] = []
        self.shared: list[torch.Tensor] = []
        self.leaves: list[dict[int, torch.Tensor]] = []
        self._stand_ins: list[dict[int, torch.Tensor]] = [{} for _ in devices]

    def versions(self) -> list[int]:
        if not self.on_slots or any(tensor.is_inference() for _, tensor in self.alike):
            return []
        return [tensor._version for _, tensor in self.alike]

    def refresh(self, count: int) -> None:
        alike, own = self._tensors()
        self.alike = list(alike.values())
        values = self._on_slots(count) if self.on_slots else self._on_accelerators(count)
        for number, of in enumerate(values):
            at_home = number == 0
            copies = list(own.values()) if at_home else copied_together(list(own.values()), self.places[number])
            of.update(zip(own, copies, strict=True))
        special = [
            (m, name)
            for m, name in self.frame.named
            if id(m) in self.frame.special
            or (_may_be_entangled(m) and module_attributes.entangled(m, (*values[0], *self.shells[0])))
        ]
        known = {id(m) for m, _ in special}
        for shells, of in zip(self.shells[:count], values, strict=True):
            for m, name in special:
                shells[id(m)] = shell(m, name)
            for m, name in special:
                fill(shells[id(m)], m, name, shells, of)
            for m, _ in self.frame.named:
                if id(m) not in known:
                    _take_over(shells[id(m)], m, shells, of)

    def _tensors(self) -> tuple[dict[int, tuple[str, torch.Tensor]], dict[int, torch.Tensor]]:
        """What replicas follow, by id, with names: parameters, and buffers that want gradients; and other buffers."""
        home = self.places[0]
        alike: dict[int, tuple[str, torch.Tensor]] = {}
        own: dict[int, torch.Tensor] = {}
        for module, path in self.frame.named:
            refuse_compiled(module, path)
            for kind in (module._parameters, module._buffers):
                for key, tensor in kind.items():
                    if tensor is None or id(tensor) in alike:
                        continue
                    name = f"{path}.{key}" if path else key
                    refuse_without_shape(tensor, name)
                    if tensor.device != home:
                        raise InputError(
                            f"module must have its parameters and buffers on device {home} (device_ids[0]) but "
                            f'"{name}" is on {tensor.device}: call .to("{home}") first'
                        )
                    if kind is module._parameters or tensor.requires_grad:
                        alike[id(tensor)] = (name, tensor)
                    else:
                        own[id(tensor)] = tensor
        return alike, own

    def _on_slots(self, count: int) -> list[dict[int, torch.Tensor]]:
        """The parameters themselves, or, where gradients are wanted, stand-ins that share their memory."""
        wants = torch.is_grad_enabled()
        self.shared = [tensor for _, tensor in self.alike if wants and tensor.requires_grad]
        self.leaves, values = [], []
        for number in range(count):
            before, now = self._stand_ins[number], {}
            for tensor in self.shared:
                leaf = before.get(id(tensor))
                if leaf is None or leaf.dtype != tensor.dtype or not leaf.is_set_to(tensor):
                    leaf = backward_threads.stand_in(tensor)
                now[id(tensor)] = leaf
            self._stand_ins[number] = now
            self.leaves.append(dict(enumerate(now.values())))
            values.append({id(tensor): now.get(id(tensor), tensor) for _, tensor in self.alike})
        return values

    def _on_accelerators(self, count: int) -> list[dict[int, torch.Tensor]]:
        tensors = [tensor for _, tensor in self.alike]
        found = spread(tensors, self.places[:count], detach=not torch.is_grad_enabled())
        return [{id(t): copy for t, copy in zip(tensors, copies, strict=True)} for copies in found]


@torch.no_grad()
def copied_together(tensors: list[torch.Tensor], place: torch.device) -> list[torch.Tensor]:
    """Copies on ``place`` of tensors that lie on one device: few large copies instead of many small ones."""
    made: list[torch.Tensor] = []
    by_kind: dict[torch.dtype, list[int]] = {}
    for k, tensor in enumerate(tensors):
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
            by_kind.setdefault(tensor.dtype, []).append(k)
            made.append(tensor)
        else:
            made.append(tensor.detach().to(place, copy=True))
    for numbers in by_kind.values():
        theirs = [tensors[k] for k in numbers]
        if theirs[0].device == place:
            copies = [torch.empty_like(tensor) for tensor in theirs]
            torch._foreach_copy_(copies, theirs)
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in theirs]).to(place, non_blocking=place.type != "cpu")
            pieces = torch.split(flat, [tensor.numel() for tensor in theirs])
            # Each with a version of its own.
            copies = [piece.view(tensor.shape).data for piece, tensor in zip(pieces, theirs, strict=True)]
        for k, copy in zip(numbers, copies, strict=True):
            made[k] = copy
    return made


def _take_over(replica: Any, module: nn.Module, shells: dict[int, Any], of: dict[int, torch.Tensor]) -> None:
    """What ``Module._replicate_for_data_parallel`` and `fill` do to an ordinary module, in one go."""
    taken = vars(module).copy()
    taken["_is_replica"] = True
    for kind, known in (("_parameters", of), ("_buffers", of), ("_modules", shells)):
        theirs = taken[kind]
        taken[kind] = {k: None if v is None else known[id(v)] for k, v in theirs.items()} if theirs else {}
    object.__setattr__(replica, "__dict__", taken)


_ordinary: set[type] = set()
"""Types of attributes in which nothing of a module can be."""


_ENTANGLING = (types.MethodType, types.FunctionType, functools.partial, nn.Module, torch.Tensor)


def _takes_part(module: nn.Module) -> bool:
    """Whether its class has a word in how it is replicated."""
    kind = type(module)
    return (
        kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel
        or kind.__setattr__ is not nn.Module.__setattr__
    )


def _may_be_entangled(module: nn.Module) -> bool:
    """Whether it has methods, functions, modules or tensors as attributes. (Containers were looked into before.)"""
    found = set(map(type, vars(module).values()))
    if found <= _ordinary:
        return False
    if any(
        issubclass(t, (types.MethodType, types.FunctionType, functools.partial, nn.Module, torch.Tensor)) for t in found
    ):
        return True
    _ordinary.update(found)
    return False
