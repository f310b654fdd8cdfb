"""Layers: what each module of a model gave for each sample, in a few numbers, so that two sides can be compared.

A batch may have been cut in any way, so what is compared belongs to a sample: the sum, a weighted sum and the sum of
absolute values of its part of each output.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.data import Part
from lockstep.errors import InputError
from lockstep.tensors.pytree import batch_size_of, tensors
from lockstep.verify.comparison import row_ids

Place = tuple[str, str, int]
"""A module's name, its class, and which call of it this is."""

Told = dict[Place, dict[Hashable, list[list[float]]]]
"""For each call of a module, in order: by sample, three numbers for each of its outputs."""


class Watch:
    """Looks at every module of some replicas while they run, each in a thread of its own, or in several.

    Attributes:
        told: what was seen.
    """

    def __init__(self) -> None:
        self.told: Told = {}
        self._mine = threading.local()
        self._lock = threading.Lock()

    @property
    def order(self) -> tuple[str, ...]:
        """The modules by name, in the order of their first call."""
        return tuple(dict.fromkeys(name for name, _, _ in self.told))

    @contextmanager
    def looking(self, models: list[nn.Module]) -> Iterator[None]:
        """Look at what these replicas compute meanwhile."""

        # Functions, since a copy of the model, on which the strategy tries something, would copy an object.
        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begins((args, kwargs))

        def saw(name: str) -> Any:
            return lambda module, args, outputs: self._saw(name, module, outputs)

        hooks: list[Any] = []
        for model in models:
            hooks.append(model.register_forward_pre_hook(begins, with_kwargs=True))
            hooks += [module.register_forward_hook(saw(name)) for name, module in model.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begins(self, inputs: Any) -> None:
        try:
            self._mine.rows = batch_size_of(inputs)
        except InputError:
            self._mine.rows = 0
        self._mine.seen = []

    def _saw(self, name: str, module: nn.Module, outputs: Any) -> None:
        seen: list[tuple[str, str, torch.Tensor]] | None = getattr(self._mine, "seen", None)
        if seen is None or not self._mine.rows:
            return
        given = outputs if type(outputs) is tuple else (outputs,)
        if any(isinstance(one, PackedSequence) for one in given):  # what unpacks it is seen
            return
        numbers = [n for t in tensors(outputs) if (n := _of_samples(t, self._mine.rows)) is not None]
        if numbers:
            seen.append((name, type(module).__name__, torch.stack(numbers, dim=1)))

    def forwarded(self, part: Part) -> None:
        """A part has gone through the model, in this thread."""
        seen = getattr(self._mine, "seen", None)
        if seen is None:
            return
        self._mine.seen = None  # what a checkpoint computes again in backward isn't looked at
        known = part.samples
        keys = known.tolist() if known is not None else row_ids(part.inputs, part.targets, part.size)
        if keys is None or len(keys) != self._mine.rows:
            return
        calls: dict[str, int] = {}
        with self._lock:
            for name, kind, numbers in seen:
                calls[name] = calls.get(name, 0) + 1
                of = self.told.setdefault((name, kind, calls[name]), {})
                of.update(zip(keys, numbers.tolist(), strict=True))


def _of_samples(tensor: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Three numbers for each sample: (rows, 3), or None where it can't be told what belongs to which."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or not tensor.dim():
        return None
    tensor = tensor.detach()
    if tensor.dim() > 1 and tensor.shape[0] != rows and tensor.shape[1] == rows:  # time first
        tensor = tensor.transpose(0, 1)
    if tensor.shape[0] % rows or not tensor.numel():
        return None
    flat = tensor.reshape(rows, -1).cpu().double()
    weights = torch.linspace(0.1, 1, flat.shape[1], dtype=flat.dtype)
    return torch.stack([flat.sum(dim=1), flat @ weights, flat.abs().sum(dim=1)], dim=1)


def together(every: Iterable[Told]) -> Told:
    """What all ranks saw."""
    whole: Told = {}
    for told in every:
        for place, of in told.items():
            whole.setdefault(place, {}).update(of)
    return whole


def first_apart(ours: Told, theirs: Told, bound: float) -> tuple[str, str] | None:
    """Name and class of the first module, in the order of one device (``theirs``), that gave a sample other numbers."""
    for place, of in theirs.items():
        mine = ours.get(place, {})
        if any(_differ(mine[sample], numbers, bound) for sample, numbers in of.items() if sample in mine):
            return place[0], place[1]
    return None


def _differ(ones: list[list[float]], others: list[list[float]], bound: float) -> bool:
    """Whether outputs differ by more than ``bound`` times their sums of absolute values."""
    return len(ones) == len(others) and any(
        not abs(a - b) <= bound * max(abs(its[2]), 1e-30)
        for mine, its in zip(ones, others, strict=True)
        for a, b in zip(mine, its, strict=True)
        if a != b
    )
