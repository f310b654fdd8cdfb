"""Rows of nestings: of each sample one in a tensor, or an item of a list. Batches are cut by
them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.tensors.pytree import described, each, tensors


def batch_size_of(tree: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one.

    Raises:
        InputError: there is none.
    """
    for tensor in tensors(tree):
        if tensor.dim():
            return tensor.shape[0]

    raise InputError(
        f"the inputs are {described(tree)}, without a tensor that has a batch dimension: give "
        "tensors, or lists, tuples, dictionaries, named tuples and dataclasses of them"
    )


def share_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` of ``total`` items, as even as can be, the larger first.

    ::

        share_sizes(10, 4) == [3, 3, 2, 2]
    """
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def weighted_sizes(total: int, weights: Sequence[int]) -> list[int]:
    """Return the sizes of parts of ``total`` items, in proportion to whole numbers above 0.

    What rounding down leaves goes to the largest remainders. Each part has an item while there are
    enough of them. Equal weights give ``share_sizes``::

        weighted_sizes(10, [3, 1]) == [8, 2]

    Source: the method of the largest remainder (Hamilton, 1792).
    """
    number = len(weights)
    if total <= number:
        return share_sizes(total, number)
    whole = sum(weights)
    sizes = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(number), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(sizes)]:
        sizes[i] += 1
    while 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def sizes_by_cost(costs: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Return the sizes of parts of a row of items, such that the costs of parts are as the weights.

    Each part ends where the costs so far are nearest to what they should be, but has an item at
    least; where there are fewer items than parts, the first parts have one each.

    ::

        sizes_by_cost([1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1]) == [4, 2, 2]

    Args:
        costs: of the items.
        weights: of the parts.
    """
    items = len(costs)
    so_far = [0.0, *itertools.accumulate(costs)]
    shares = list(itertools.accumulate(weights))
    ends = [0]
    for part, share in enumerate(shares[:-1], start=1):
        wanted = so_far[-1] * share / shares[-1]
        end = bisect.bisect_left(so_far, wanted)
        if end and wanted - so_far[end - 1] < so_far[end] - wanted:
            end -= 1
        latest = items - (len(shares) - part)
        ends.append(min(max(min(end, latest), ends[-1] + 1), items))

    ends.append(items)
    return [end - start for start, end in itertools.pairwise(ends)]


def coprime_sizes(samples: int) -> tuple[int, int]:
    """Return the sizes of two parts, about even, which have no common divisor.

    A mask over samples leaves the same fraction of both only if it leaves all, or none.
    """
    first = (samples + 1) // 2
    while math.gcd(first, samples) > 1:
        first -= 1
    return first, samples - first


def has_rows(tensor: Tensor, samples: int) -> bool:
    """Return whether a tensor has a row for each sample.

    A parameter, which a model may give among its outputs, belongs to all samples.
    """
    if isinstance(tensor, nn.Parameter) or not tensor.dim():
        return False
    return tensor.shape[0] == samples


def holds_samples(items: list[Any] | tuple[Any, ...], samples: int) -> bool:
    """Return whether a list has an item for each sample: the boxes of each image, sentences.

    A dictionary or a dataclass is one sample's. Tensors are as many batches, where each of them has
    a row for each sample. Of tuples only those of texts have one, which PyTorch's collate makes.
    """
    if len(items) != samples:
        return False
    if isinstance(items, tuple):
        return type(items) is tuple and all(isinstance(item, str | bytes) for item in items)
    if all(isinstance(item, MutableMapping) or is_dataclass(item) for item in items):
        return True
    return not are_batches(items, samples)


def are_batches(items: list[Any], samples: int) -> bool:
    """Return whether the items of a list hold tensors, and each tensor has a row for each sample."""
    found = list(tensors(items))
    return bool(found) and all(t.dim() and t.shape[0] == samples for t in found)


def cut(tree: Any, start: int, size: int, whole: int) -> Any:
    """Return samples ``start`` to ``start + size`` of a nest of ``whole`` samples.

    Every tensor that has a row for each sample is cut, and so is a list that has an item for each.
    What else there is belongs to all samples.

    Args:
        tree: any nesting.
        start: the first sample.
        size: how many samples.
        whole: how many samples the nest has.
    """

    def of_samples(items: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...] | None:
        return items[start : start + size] if holds_samples(items, whole) else None

    def of_tensor(tensor: Tensor) -> Tensor:
        if not has_rows(tensor, whole):
            return tensor
        narrow = tensor.narrow_copy if tensor.layout == torch.sparse_coo else tensor.narrow
        return narrow(0, start, size)

    return each(of_tensor, tree, on_list=of_samples)
