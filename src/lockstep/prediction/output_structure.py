"""The form of a model's outputs: which of their tensors have a row for each sample, and what these
are called.

A tensor is called by the way to it: ``logits`` in a dict, a dataclass or a named tuple, ``0`` and
``1`` in a tuple, ``hidden.2`` deeper down, ``outputs`` where it is all there is. The form is a nest
like the outputs, with one of three leaves::

    {"logits": float32(8, 10), "boxes": [8 tensors], "loss": float32()}      outputs of 8 samples
    {"logits": Rows,           "boxes": Items,       "loss": Left}           their form
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import InputError
from lockstep.tensors.pytree import described, named_parts, parts, rebuilt, same_kind
from lockstep.tensors.rows import has_rows, holds_samples


@dataclass(frozen=True)
class Rows:
    """A tensor with a row for each sample, of this shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Items:
    """A list with an item for each sample (the boxes of each image, say)."""

    name: str


@dataclass(frozen=True)
class Left:
    """Anything else; ``noted`` where a note is logged that it is left out."""

    name: str
    noted: bool


Leaf = Rows | Items | Left


def form_of(outputs: Any, size: int, name: str = "") -> Any:
    """Return the form of some outputs.

    Args:
        outputs: of the model.
        size: their samples.
        name: that of the nest they lie in.
    """
    called = name or "outputs"
    if isinstance(outputs, torch.Tensor):
        if has_rows(outputs, size):
            return Rows(called, tuple(outputs.shape[1:]), outputs.dtype)
        return Left(called, noted=True)

    inside = parts(outputs)
    if inside is None:
        return Left(called, noted=outputs is not None)
    if type(outputs) is list and holds_samples(outputs, size):
        return Items(called)
    prefix = f"{name}." if name else ""
    inner = [form_of(part, size, prefix + key) for key, part in named_parts(outputs)]
    return rebuilt(outputs, inner)


def left_out(form: Any, names: Collection[str]) -> Any:
    """Return the form with the leaves of these names left out.

    Args:
        form: as ``form_of`` gives it, or a part of it.
        names: of its leaves.
    """
    if isinstance(form, Leaf):
        is_kept = isinstance(form, Left) or form.name not in names
        return form if is_kept else Left(form.name, noted=True)

    return rebuilt(form, [left_out(part, names) for part in parts(form) or ()])


def leaves(form: Any) -> Iterator[Leaf]:
    """Return every leaf of a form, in order."""
    if isinstance(form, Leaf):
        yield form
    else:
        for part in parts(form) or ():
            yield from leaves(part)


def taken(form: Any, outputs: Any, size: int) -> Iterator[tuple[Rows | Items, Any]]:
    """Yield what the form says to keep, out of further outputs of the same model.

    Args:
        form: of the first batch.
        outputs: of another one.
        size: its samples.

    Raises:
        InputError: these are of another form.
    """
    if isinstance(form, Left):
        return
    if isinstance(form, Rows | Items):
        _refuse_unlike(form, outputs, size)
        yield form, outputs
        return
    if not same_kind(form, outputs):
        raise InputError(
            f"outputs: a later batch has them in another structure: {described(outputs)}"
        )

    theirs = dict(named_parts(outputs))  # a later batch may have filled a dict in another order
    for name, part in named_parts(form):
        yield from taken(part, theirs[name], size)


def _refuse_unlike(leaf: Rows | Items, outputs: Any, size: int) -> None:
    """Refuse a later batch's tensor without a row for each sample, or list without an item."""
    if isinstance(leaf, Rows):
        what = "a row"
        is_like = isinstance(outputs, torch.Tensor) and outputs.shape[:1] == (size,)
    else:
        what = "an item"
        is_like = type(outputs) is list and len(outputs) == size

    if is_like:
        return
    squeezed = isinstance(leaf, Rows) and size == 1
    hint = " (does the model squeeze() a batch of one?)" if squeezed else ""
    raise InputError(
        f'outputs: "{leaf.name}" has {what} for each sample in the first batch, and is '
        f"{described(outputs)} for {size} samples in another{hint}"
    )


def filled(form: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """Return the nesting of the outputs with whole arrays for its tensors.

    What was left out is None.

    Args:
        form: of the first batch.
        arrays: by the names of leaves.
    """
    if isinstance(form, Rows):
        return arrays[form.name]
    if isinstance(form, Leaf):
        return None
    return rebuilt(form, [filled(part, arrays) for part in parts(form) or ()])
