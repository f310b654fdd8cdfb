"""Inputs of any nesting, leaf by leaf: moved to a device, cut along the batch, joined again.

Tuples, lists, dicts, named tuples and dataclasses are gone through; anything that isn't a tensor is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.errors import InputError


def each(
    function: Callable[[torch.Tensor], Any], tree: Any, on_list: Callable[[list[Any]], list[Any] | None] | None = None
) -> Any:
    """The same nesting with ``function`` of each tensor.

    Args:
        function: of a tensor.
        tree: any nesting.
        on_list: asked first of each list; what it gives is taken instead, unless that is None.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if on_list is not None and isinstance(tree, list) and (taken := on_list(tree)) is not None:
        return taken
    if isinstance(tree, tuple):
        items = [each(function, item, on_list) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [each(function, item, on_list) for item in tree]
    if isinstance(tree, Mapping):
        items_by_key = {key: each(function, value, on_list) for key, value in tree.items()}
        return items_by_key if type(tree) is dict else type(tree)(items_by_key)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {f.name: each(function, getattr(tree, f.name), on_list) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **changed)
    return tree


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nesting, in order."""
    found: list[torch.Tensor] = []
    each(found.append, tree)
    return iter(found)


def batch_size_of(tree: Any) -> int:
    """The size of the first dimension of the first tensor that has one.

    Raises:
        InputError: there is none.
    """
    for tensor in tensors(tree):
        if tensor.dim():
            return tensor.shape[0]
    raise InputError("the inputs have no tensor with a batch dimension, so they have no size")


def cut(tree: Any, start: int, size: int, whole: int) -> Any:
    """Samples ``start`` to ``start + size`` of every tensor whose first dimension is ``whole``; others are shared.

    A list of ``whole`` items that aren't themselves batches (boxes of each image, sentences) has an item for each
    sample, and is cut too.
    """

    def of_samples(items: list[Any]) -> list[Any] | None:
        if len(items) != whole or any(t.dim() and t.shape[0] == whole for item in items for t in tensors(item)):
            return None
        return items[start : start + size]

    return each(lambda t: t.narrow(0, start, size) if t.dim() and t.shape[0] == whole else t, tree, of_samples)


def to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None, *, channels_last: bool = False) -> Any:
    """Every tensor on ``device``; floating ones as ``dtype`` where given, images in ``channels_last`` layout."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, wanted, non_blocking=True, memory_format=torch.channels_last)
        return tensor.to(device, wanted, non_blocking=True)

    return each(moved, tree)
