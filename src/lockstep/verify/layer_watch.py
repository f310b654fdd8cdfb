"""Layers: what each module of a model gave over a batch, in a few sums, so that two sides can be
compared.

A batch may have been cut in any way: sums over its samples are those of its parts, added. An output
whose numbers of all parts are not as many as those of the whole (it has no row for each sample, or
is padded otherwise) isn't compared.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.tensors.pytree import tensors

Place = tuple[str, str, int, int]
"""A module's name, its class, which call of it this is, and which of its outputs."""

Told = dict[Place, torch.Tensor]
"""For each output of each call of a module, in order: how many numbers, and their sums."""


class Watch:
    """Looks at every module of some replicas while they run, each in a thread of its own, or in
    several.
    """

    def __init__(self) -> None:
        self.told: Told = {}
        self._mine = threading.local()
        self._lock = threading.Lock()

    @property
    def order(self) -> tuple[str, ...]:
        """The modules by name, in the order of their first call."""
        return tuple(dict.fromkeys(name for name, *_ in self.told))

    @contextmanager
    def looking(self, models: list[nn.Module]) -> Iterator[None]:
        """Look at what these replicas compute meanwhile."""
        names = {module: name for model in models for name, module in model.named_modules()}

        def begins(module: nn.Module, args: Any) -> None:
            if module in models:
                self._mine.seen, self._mine.calls = {}, Counter()

        def saw(module: nn.Module, args: Any, outputs: Any) -> None:
            if module in names:
                self._saw(names[module], type(module).__name__, outputs)

        # Global hooks, since strategies take a model's own hooks for a change of the model.
        hooks = [register_module_forward_pre_hook(begins), register_module_forward_hook(saw)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _saw(self, name: str, kind: str, outputs: Any) -> None:
        seen: Told | None = getattr(self._mine, "seen", None)
        if seen is None:
            return
        self._mine.calls[name] += 1
        for i, tensor in enumerate(tensors(outputs)):
            if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel():
                seen[name, kind, self._mine.calls[name], i] = _sums(tensor.detach())

    def forwarded(self) -> None:
        """A part of the batch has gone through the model, in this thread."""
        seen = getattr(self._mine, "seen", None)
        self._mine.seen = None  # what a checkpoint computes again in backward isn't looked at
        with self._lock:
            _add(self.told, seen or {})


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """How many numbers there are; their sum, a weighted sum, the sum of their absolute values,
    that of squares.
    """
    flat = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1).cpu().double()
    weighted = (flat @ torch.linspace(0.1, 1, flat.shape[1], dtype=flat.dtype)).sum()
    size = torch.tensor(float(flat.numel()), dtype=flat.dtype)
    return torch.stack([size, flat.sum(), weighted, flat.abs().sum(), flat.square().sum()])


def _add(whole: Told, part: Told) -> None:
    for place, sums in part.items():
        whole[place] = whole[place] + sums if place in whole else sums


def first_apart(every: Iterable[Told], theirs: Told, bound: float) -> tuple[str, str] | None:
    """Name and class of the first module, in the order of one device (``theirs``), that gave other
    numbers.

    ``every`` is what each rank of the strategy saw; differences up to ``bound`` of the numbers'
    size are rounding.
    """
    ours: Told = {}
    for told in every:
        _add(ours, told)
    for place, its in theirs.items():
        mine = ours.get(place)
        if mine is None or mine[0] != its[0]:
            continue
        sizes = its[[3, 3, 3, 4]].clamp(min=1e-30)
        if not bool(((mine - its).abs()[1:] <= bound * sizes).all()):
            return place[:2]
    return None
