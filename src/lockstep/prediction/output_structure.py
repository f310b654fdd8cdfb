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
from lockstep.tensors.rows import holds_samples


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
    """Anything else; ``said`` where leaving it out is worth a line."""

    name: str
    said: bool


Leaf = Rows | Items | Left


def form_of(outputs: Any, size: int) -> Any:
    """The form of the outputs of ``size`` samples.

    Raises:
        InputError: nothing in them has a row for each sample, or two tensors have one name.
    """
    form = formed(outputs, size)
    found = [leaf.name for leaf in leaves(form) if not isinstance(leaf, Left)]
    if not found:
        raise nothing_to_keep(outputs, size)
    for name in found:
        if found.count(name) > 1:
            raise InputError(
                f'outputs: two of them are called "{name}"; rename one in what the model returns'
            )
    return form


def nothing_to_keep(outputs: Any, size: int) -> InputError:
    """Says that outputs of ``size`` samples have no row for each."""
    return InputError(
        f"outputs: the model gives {described(outputs)} for {size} samples, without a row for "
        "each: "
        "there is nothing to keep"
    )


def formed(outputs: Any, size: int, name: str = "") -> Any:
    """As ``form_of``, also where nothing has a row for each sample."""
    called = name or "outputs"
    if isinstance(outputs, torch.Tensor):
        if outputs.dim() and outputs.shape[0] == size:
            return Rows(called, tuple(outputs.shape[1:]), outputs.dtype)
        return Left(called, said=True)
    inside = parts(outputs)
    if inside is None:
        return Left(called, said=outputs is not None)
    if type(outputs) is list and holds_samples(outputs, size):
        return Items(called)
    return rebuilt(
        outputs,
        [
            formed(part, size, f"{name}.{key}" if name else key)
            for key, part in named_parts(outputs)
        ],
    )


def left_out(form: Any, names: Collection[str]) -> Any:
    """The form with the leaves of these names left out."""
    if isinstance(form, Leaf):
        return (
            Left(form.name, said=True)
            if form.name in names and not isinstance(form, Left)
            else form
        )
    inside = parts(form)
    return form if inside is None else rebuilt(form, [left_out(part, names) for part in inside])


def leaves(form: Any) -> Iterator[Leaf]:
    """Every leaf of a form, in order."""
    if isinstance(form, Leaf):
        yield form
    else:
        for part in parts(form) or ():
            yield from leaves(part)


def taken(form: Any, outputs: Any, size: int) -> Iterator[tuple[Rows | Items, Any]]:
    """What the form says to keep, out of further outputs of the same model.

    Raises:
        InputError: these are of another form.
    """
    if isinstance(form, Left):
        return
    if isinstance(form, Rows):
        if not isinstance(outputs, torch.Tensor) or not outputs.dim() or outputs.shape[0] != size:
            hint = " (does the model squeeze() a batch of one?)" if size == 1 else ""
            raise InputError(
                f'outputs: "{form.name}" has a row for each sample in the first batch, and is '
                f"{described(outputs)} "
                f"for {size} samples in another{hint}"
            )
        yield form, outputs
    elif isinstance(form, Items):
        if type(outputs) is not list or len(outputs) != size:
            raise InputError(
                f'outputs: "{form.name}" has an item for each sample in the first batch, and is '
                f"{described(outputs)} "
                f"for {size} samples in another"
            )
        yield form, outputs
    elif not same_kind(form, outputs):
        raise InputError(
            f"outputs: a later batch has them in another structure: {described(outputs)}"
        )
    else:
        theirs = dict(
            named_parts(outputs)
        )  # by key: a later batch may have filled a dict in another order
        for name, part in named_parts(form):
            yield from taken(part, theirs[name], size)


def filled(form: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The nesting of the outputs with whole arrays for its tensors, and None for what was left
    out.
    """
    if isinstance(form, Rows):
        return arrays[form.name]
    if isinstance(form, Leaf):
        return None
    return rebuilt(form, [filled(part, arrays) for part in parts(form) or ()])
