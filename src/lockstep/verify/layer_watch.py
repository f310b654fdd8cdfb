"""Layers: what each module of a model gave over a batch, in a few sums, so that two sides can be
compared.

A batch may have been cut in any way: sums over its samples are the sums of its parts, added. An
output isn't compared where the parts have another number of values than the whole (no row for each
sample, or other padding).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.tensors.pytree import tensors

Place = tuple[str, str, int]
"""A module's name, its class, and which of its outputs."""

Sums = dict[Place, Tensor]
"""For each output of a module, in order: how many values all its calls gave, and their sums."""


class Watch:
    """Looks at every module of some replicas while they run, in one thread or in several."""

    def __init__(self) -> None:
        self.sums: Sums = {}
        self._mine = threading.local()
        self._lock = threading.Lock()

    @contextmanager
    def looking(self, models: list[nn.Module]) -> Iterator[None]:
        """Look at what these replicas compute meanwhile."""
        names = {}
        for model in models:
            for name, module in model.named_modules():
                names[module] = name

        def before(module: nn.Module, args: Any) -> None:
            """Begin anew where a replica's forward begins."""
            if module in models:
                self._mine.sums = {}

        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            """Note what a module of a replica gave."""
            if module in names:
                self._note(names[module], type(module).__name__, outputs)

        # Global hooks, since strategies take a model's own hooks for a change of the model.
        hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]

        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, name: str, kind: str, outputs: Any) -> None:
        """Note the sums of what a module gave in this thread."""
        sums: Sums | None = getattr(self._mine, "sums", None)
        if sums is None:
            return
        for i, tensor in enumerate(tensors(outputs)):
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            if tensor.is_floating_point():
                _add(sums, {(name, kind, i): _sums_of(tensor.detach())})

    def forwarded(self) -> None:
        """Add what a part of the batch gave, in this thread."""
        sums = getattr(self._mine, "sums", None) or {}
        # What a checkpoint computes again in backward isn't looked at.
        self._mine.sums = None
        with self._lock:
            _add(self.sums, sums)


def _sums_of(tensor: Tensor) -> Tensor:
    """Return how many values there are; the sum of absolute values, the sum, and a weighted one."""
    width = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.reshape(-1, width).cpu().double()
    number = torch.tensor(float(rows.numel()))
    weights = torch.linspace(0.1, 1, width, dtype=rows.dtype)
    weighted = rows @ weights
    sums = [rows.abs().sum(), rows.sum(), weighted.sum()]
    return torch.stack([number, *sums])


def _add(whole: Sums, part: Sums) -> None:
    """Add the sums of a part of the batch to those of the whole."""
    for place, sums in part.items():
        if place in whole:
            sums = whole[place] + sums
        whole[place] = sums


def first_apart(every: Iterable[Sums], theirs: Sums, bound: float) -> tuple[str, str] | None:
    """Return name and class of the first module, in the order of one device, that gave other
    values.

    Args:
        every: the sums of each rank of the strategy.
        theirs: those of one device.
        bound: up to which part of the values' size a difference is rounding.
    """
    ours: Sums = {}
    for sums in every:
        _add(ours, sums)

    for place, wanted in theirs.items():
        mine = ours.get(place)
        if mine is None or mine[0] != wanted[0]:
            continue
        apart = (mine - wanted).abs()
        most = bound * wanted[1].clamp(min=1e-30)
        if not bool((apart <= most).all()):
            return place[:2]

    return None
