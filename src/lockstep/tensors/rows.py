"""Rows of nestings: of each sample one in a tensor, or an item of a list. Batches are cut by
them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.tensors.pytree import (
    MAKE_SEEN,
    each,
    named_parts,
    opaque_class,
    parts,
    rebuilt,
    same_kind,
    tensors,
)


def batch_size_of(tree: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one.

    Raises:
        InputError: there is none.
    """
    for tensor in tensors(tree):
        if tensor.dim():
            return tensor.shape[0]

    if name := opaque_class(tree):
        raise InputError(
            f"the inputs are of the class {name}, whose tensors are not seen", fix=MAKE_SEEN
        )

    raise InputError("the inputs have no tensor with a batch dimension, so they have no size")


def share_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of ``parts`` of ``total`` items, as even as can be, the larger first.

    ::

        share_sizes(10, 4) == [3, 3, 2, 2]
    """
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def has_rows(tensor: Tensor, samples: int) -> bool:
    """Whether a tensor has a row for each sample.

    A parameter, which a model may give among its outputs, belongs to all samples.
    """
    if isinstance(tensor, nn.Parameter) or not tensor.dim():
        return False
    return tensor.shape[0] == samples


class SampleList(list[Any]):
    """A list that has an item for each sample, as can't be seen of each part of it: one box of
    the only image, say.
    """


class ListOfBatches(list[Any]):
    """A list of things of all samples (what each of several layers gives), also where it has as
    many items as those.
    """


def holds_samples(items: list[Any] | tuple[Any, ...], samples: int) -> bool:
    """Whether a list has an item for each sample: the boxes of each image, sentences.

    A dictionary or a dataclass is one sample's. Tensors are as many batches, where each of them has
    a row for each sample. Of tuples only those of texts have one, which PyTorch's collate makes.
    """
    if len(items) != samples or isinstance(items, ListOfBatches):
        return False
    if isinstance(items, SampleList):
        return True
    if isinstance(items, tuple):
        return type(items) is tuple and all(isinstance(item, str | bytes) for item in items)
    if all(isinstance(item, MutableMapping) or is_dataclass(item) for item in items):
        return True
    return not are_batches(items, samples)


def are_batches(items: list[Any], samples: int) -> bool:
    """Whether the items of a list hold tensors, and each tensor has a row for each sample."""
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
        if not holds_samples(items, whole):
            return None
        some = items[start : start + size]
        return SampleList(some) if isinstance(items, SampleList) else some

    def of_tensor(tensor: Tensor) -> Tensor:
        if not has_rows(tensor, whole):
            return tensor
        narrow = tensor.narrow_copy if tensor.layout == torch.sparse_coo else tensor.narrow
        return narrow(0, start, size)

    return each(of_tensor, tree, on_list=of_samples)


def folded(nest: tuple[Any, Any], samples: int) -> tuple[Any, Any] | None:
    """Return outputs of shape ``(batch x time, classes)`` as ``(batch, time, classes)``.

    Args:
        nest: outputs and targets.
        samples: the size of the batch.

    Returns:
        Outputs and targets; None where outputs aren't that: a single tensor, beside targets
        ``(batch, time, ...)``.
    """
    outputs, targets = nest
    if not isinstance(outputs, Tensor) or not outputs.dim():
        return None

    length = outputs.shape[0]
    times = length // samples
    if times < 2 or times * samples != length:
        return None
    possible: set[int] = set()
    for target in tensors(targets):
        if not target.dim() or target.shape[0] != samples:
            return None
        possible.update(itertools.accumulate(target.shape[1:], operator.mul))

    if times not in possible:
        return None
    return outputs.reshape(samples, times, *outputs.shape[1:]), targets


def part_of(nest: tuple[Any, Any], start: int, size: int, samples: int) -> tuple[Any, Any]:
    """Return some samples of outputs and targets.

    Outputs may have several rows for each sample, as ``folded`` takes them.

    Args:
        nest: outputs and targets.
        start, size, samples: as in ``cut``.
    """
    rows = folded(nest, samples)
    if rows is None:
        outputs, targets = cut(nest, start, size, samples)
        return outputs, targets
    outputs, targets = cut(rows, start, size, samples)
    return outputs.flatten(0, 1), targets


def with_sample_lists(nest: Any, samples: int, known: dict[str, bool], way: str = "") -> Any:
    """The nest with each list that has an item for each sample as a ``SampleList``.

    Lists of dictionaries that have not are each a ``ListOfBatches``: a part of the samples may be
    as many as they.

    Args:
        nest: of so many ``samples``.
        samples: their number.
        known: whether the list of a name has an item for each sample, which is added to: of a list
            with as many items as there are samples an earlier batch, with other numbers, tells what
            it is.
        way: the name of the nest.
    """
    if type(nest) is list:
        if len(nest) != samples:
            known[way] = False
        elif known.get(way, holds_samples(nest, samples)):
            known[way] = True
            return SampleList(nest)

    named = named_parts(nest)
    new = [with_sample_lists(part, samples, known, f"{way}.{name}") for name, part in named]
    if type(nest) is list and any(
        isinstance(one, MutableMapping) or is_dataclass(one) for one in nest
    ):
        return ListOfBatches(new)

    return nest if all(a is b for a, (_, b) in zip(new, named, strict=True)) else rebuilt(nest, new)


def joined(one: Any, its: int, other: Any, others: int) -> Any:
    """What ``cut`` would have made two batches of: ``its`` samples and ``others``; None where they
    don't go together.

    What isn't cut is that of the first.
    """
    if isinstance(one, Tensor):
        if not has_rows(one, its):
            return one
        fits = isinstance(other, Tensor) and other.shape == (others, *one.shape[1:])
        return torch.cat([one, other.to(one)]) if fits else None

    if not same_kind(one, other) and not (
        isinstance(one, list | tuple) and isinstance(other, list | tuple)
    ):
        return None

    if isinstance(one, str) and one != other:
        return None
    if isinstance(one, list | tuple) and holds_samples(one, its) and holds_samples(other, others):
        return type(one)([*one, *other]) if isinstance(one, tuple | SampleList) else [*one, *other]
    inside = parts(one)
    theirs = [other[key] for key in one] if isinstance(one, MutableMapping) else parts(other)
    if inside is None or theirs is None or len(inside) != len(theirs):
        return one if inside is None else None
    made = [joined(mine, its, more, others) for mine, more in zip(inside, theirs, strict=True)]
    lost = any(
        new is None and not (old is more is None)
        for new, old, more in zip(made, inside, theirs, strict=True)
    )
    return None if lost else rebuilt(one, made)


def both_of(
    one: tuple[Any, Any], its: int, other: tuple[Any, Any], others: int
) -> tuple[Any, Any] | None:
    """The samples of two; None where they don't go together."""
    if (rows := folded(one, its)) is None:
        made: tuple[Any, Any] | None = joined(one, its, other, others)
        return made
    more = folded(other, others)
    both = None if more is None else joined(rows, its, more, others)
    return None if both is None else (both[0].flatten(0, 1), both[1])
