"""Layers: what each module of a model gave for each sample, in a few numbers, so that two sides can be compared.

A batch may have been cut in any way, so what is compared belongs to a sample: the sum, a weighted sum and the sum of
absolute values of its part of each output.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.data import Part
from lockstep.errors import InputError
from lockstep.tensors.pytree import batch_size_of, tensors
from lockstep.verify.comparison import row_numbers

Place = tuple[str, str, int]
"""A module's name, its class, and which call of it this is."""

Told = dict[Place, dict[int, tuple[float, ...]]]
"""For each call of a module, in order: by sample, the numbers of its outputs."""


class Watch:
    """Looks at every module of some replicas while they run.

    Args:
        models: the replicas of this process; each may run in a thread of its own, or in several.

    Attributes:
        told: what was seen.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.told: Told = {}
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._models = models
        self._hooks: list[Any] = []
        self._weights = _Weights()

    def begin(self) -> None:
        """Look at the next update."""
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._begins, with_kwargs=True))
            for name, module in model.named_modules():
                self._hooks.append(module.register_forward_hook(functools.partial(self._saw, name)))

    def end(self) -> None:
        """The update is done."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __deepcopy__(self, memo: Any) -> Watch:
        """That of a copy of the model, on which the strategy tries something, sees nothing."""
        return Watch([])

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._hooks:
            return
        try:
            self._mine.rows = batch_size_of((args, kwargs))
        except InputError:
            self._mine.rows = 0
        self._mine.seen = []

    def _saw(self, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
        seen: list[tuple[str, str, torch.Tensor]] | None = getattr(self._mine, "seen", None)
        if seen is None or not self._mine.rows:
            return
        try:
            given = list(tensors(outputs))
        except InputError:  # a PackedSequence: what unpacks it is seen
            return
        numbers = [n for t in given if (n := _of_samples(t, self._mine.rows, self._weights)) is not None]
        if numbers:
            seen.append((name, type(module).__name__, torch.cat(numbers, dim=1)))

    def forwarded(self, part: Part) -> None:
        """A part has gone through the model, in this thread."""
        if not self._hooks:
            return
        seen = self._mine.seen
        self._mine.seen = None  # what a checkpoint computes again in backward isn't looked at
        keys = part.samples if part.samples is not None else row_numbers(part.inputs, part.targets, part.size)
        if keys is None or len(keys) != self._mine.rows:
            return
        samples = keys.tolist()
        calls: dict[str, int] = {}
        with self._lock:
            for name, kind, numbers in seen:
                calls[name] = calls.get(name, 0) + 1
                of = self.told.setdefault((name, kind, calls[name]), {})
                of.update(zip(samples, map(tuple, numbers.tolist()), strict=True))


def _of_samples(tensor: torch.Tensor, rows: int, weights: _Weights) -> torch.Tensor | None:
    """Three numbers for each sample: (rows, 3), or None where it can't be told what belongs to which."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or not tensor.dim():
        return None
    tensor = tensor.detach()
    if tensor.dim() > 1 and tensor.shape[0] != rows and tensor.shape[1] == rows:  # time first
        tensor = tensor.transpose(0, 1)
    if tensor.shape[0] % rows:
        return None
    flat = tensor.reshape(rows, -1).cpu().double()
    return torch.stack([flat.sum(dim=1), flat @ weights(flat.shape[1]), flat.abs().sum(dim=1)], dim=1)


class _Weights:
    """Of each place in a sample's part, as many as are asked for; they are made once, since that takes long."""

    def __init__(self) -> None:
        self._longest = torch.empty(0, dtype=torch.float64)

    def __call__(self, places: int) -> torch.Tensor:
        longest = self._longest  # another thread may put its own there meanwhile
        if len(longest) < places:
            longest = self._longest = torch.arange(1, places + 1, dtype=torch.float64).remainder_(1009.0) / 1009.0
        return longest[:places]


def together(every: list[Told]) -> Told:
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


def _differ(ones: tuple[float, ...], others: tuple[float, ...], bound: float) -> bool:
    if len(ones) != len(others):
        return False  # of other shapes, padded otherwise say
    return any(
        not abs(a - b) <= bound * max(size, 1e-30)
        for a, b, size in zip(ones, others, _sizes(others), strict=True)
        if a != b
    )


def _sizes(numbers: tuple[float, ...]) -> Iterator[float]:
    """Beside each number the sum of absolute values that it belongs to."""
    for start in range(0, len(numbers), 3):
        yield from [abs(numbers[start + 2])] * 3
