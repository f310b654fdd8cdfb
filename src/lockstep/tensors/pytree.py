"""Nestings: what models take and give, as tensors inside lists, tuples, mappings, named tuples and dataclasses.

``torch.utils._pytree`` needs dataclasses and mappings to be registered one by one; a person's own batch class should
work as it is. A nest here is anything that has ``parts``, and can be rebuilt from as many new ones.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import InputError


def parts(nest: Any) -> list[Any] | None:
    """What lies directly inside a nest, in order; None for a leaf (a tensor, or anything that isn't a container).

    Raises:
        InputError: a ``PackedSequence``, whose rows are not samples.
    """
    if isinstance(nest, torch.Tensor):
        return None
    if isinstance(nest, PackedSequence):
        raise InputError(
            "a PackedSequence can't be split: pass the padded batch and its lengths, and pack them in forward"
        )
    if isinstance(nest, (list, tuple)):
        return list(nest)
    if isinstance(nest, MutableMapping):
        return list(nest.values())
    if _is_dataclass(nest):
        return [getattr(nest, f.name) for f in dataclasses.fields(nest)]
    return None


def named_parts(nest: Any) -> list[tuple[str, Any]]:
    """What lies directly inside a nest with its key, field, or number from 0; none in a leaf."""
    inside = parts(nest) or []
    if isinstance(nest, MutableMapping):
        names: Any = map(str, nest)
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        names = nest._fields
    elif _is_dataclass(nest) and not isinstance(nest, (list, tuple)):
        names = [f.name for f in dataclasses.fields(nest)]
    else:
        names = map(str, range(len(inside)))
    return list(zip(names, inside, strict=True))


def rebuilt(nest: Any, new: Sequence[Any]) -> Any:
    """A nest of the same type with new parts: order, keys, and whatever else a subclass carries are kept."""
    if isinstance(nest, tuple):
        return nest._make(new) if hasattr(nest, "_make") else type(nest)(new)
    if type(nest) is list:
        return list(new)
    made = copy.copy(nest)
    if isinstance(nest, list):
        made[:] = new
    elif isinstance(nest, MutableMapping):
        for key, value in zip(nest, new, strict=True):
            made[key] = value
    else:
        for f, value in zip(dataclasses.fields(nest), new, strict=True):
            object.__setattr__(made, f.name, value)  # frozen ones too; __post_init__ has had its turn
    return made


def tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nest, in order; of a ``PackedSequence`` its data."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, PackedSequence):
        yield nest.data
    else:
        for part in parts(nest) or ():
            yield from tensors(part)


def named_tensors(nest: Any, way: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The same with the way to each: ``logits``, ``hidden.2``; "" where the nest is a tensor itself."""
    if isinstance(nest, torch.Tensor):
        yield way, nest
        return
    for name, part in named_parts(nest):
        yield from named_tensors(part, f"{way}.{name}" if way else name)


def graph_nodes(nest: Any) -> Iterator[Any]:
    """Every node of the autograd graph behind the tensors of a nest."""
    todo: list[Any] = [tensor.grad_fn for tensor in tensors(nest)]
    seen = {None}
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def described(nest: Any) -> str:
    """The structure of a nest in one line: ``{'logits': float32(8, 10), 'hidden': [float32(8, 4)]}``."""
    if isinstance(nest, torch.Tensor):
        return f"{str(nest.dtype).removeprefix('torch.')}{tuple(nest.shape)}"
    inside = parts(nest)
    if inside is None:
        return "None" if nest is None else type(nest).__name__
    if isinstance(nest, MutableMapping):
        body = ", ".join(f"{key!r}: {described(value)}" for key, value in zip(nest, inside, strict=True))
        return f"{{{body}}}" if type(nest) is dict else f"{type(nest).__name__}({{{body}}})"
    if _is_dataclass(nest) or hasattr(nest, "_fields"):
        body = ", ".join(f"{name}={described(value)}" for name, value in named_parts(nest))
        return f"{type(nest).__name__}({body})"
    shown = inside if len(inside) <= 8 else inside[:3]
    body = ", ".join(map(described, shown))
    if len(shown) < len(inside):
        body += f", ... {len(inside)} in all"
    if isinstance(nest, tuple):
        return f"({body},)" if len(inside) == 1 else f"({body})"
    return f"[{body}]"


def same_kind(one: Any, other: Any) -> bool:
    """Whether two nests can stand for one another at this level: same type, keys and number of parts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, MutableMapping):
        return set(one) == set(other)
    return len(parts(one) or ()) == len(parts(other) or ())


def each(
    function: Callable[[torch.Tensor], Any],
    nest: Any,
    *,
    on_list: Callable[[list[Any]], list[Any] | None] | None = None,
    on_packed: Callable[[PackedSequence], Any] | None = None,
) -> Any:
    """The same nest with ``function`` of each tensor; anything else is left as it is.

    Args:
        function: of a tensor.
        nest: any nesting.
        on_list: asked first of each list; what it gives is taken instead, unless that is None.
        on_packed: of a ``PackedSequence``, which is refused otherwise.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if on_packed is not None and isinstance(nest, PackedSequence):
        return on_packed(nest)
    if on_list is not None and isinstance(nest, list) and (taken := on_list(nest)) is not None:
        return taken
    inside = parts(nest)
    if inside is None:
        return nest
    return rebuilt(nest, [each(function, part, on_list=on_list, on_packed=on_packed) for part in inside])


def clones(nest: Any) -> Any:
    """The same nest with a copy of each tensor, for what may write to it. (A ``PackedSequence`` stays.)"""
    return each(torch.clone, nest, on_packed=lambda packed: packed)


def versions(nest: Any) -> list[tuple[int, int]]:
    """What tells whether something was written to one of the tensors of a nest, taken out or put in."""
    with torch._C.DisableTorchFunction():  # a mode that is on would be asked for each of them
        return [(id(t), t._version) for t in tensors(nest) if not t.is_inference()]


def holds_packed(nest: Any) -> bool:
    """Whether there is a ``PackedSequence`` in it, whose rows are not samples."""
    found: list[PackedSequence] = []
    each(lambda t: t, nest, on_packed=found.append)
    return bool(found)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy layer, without a shape yet."""
    return torch.nn.parameter.is_lazy(tensor)


def call(model: Any, inputs: Any) -> Any:
    """``model(*inputs)`` for a tuple or a list, ``model(**inputs)`` for a dict, else ``model(inputs)``.

    Raises:
        InputError: the model's forward doesn't take so many, or not by these names.
    """
    args: Any = inputs if type(inputs) in (tuple, list) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if (why := _unfit(model, inputs, args, kwargs)) is None:
            raise
        raise InputError(why) from error


def _unfit(model: Any, inputs: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why the arguments that ``inputs`` are don't fit the model's forward; None where they do, or nobody can tell."""
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
        return None
    except TypeError as error:
        forward = f"{type(model).__name__}'s forward({', '.join(signature.parameters)})"
        said = f"{forward} can't take {described(inputs)}: {error}"
    if kwargs:
        return f"{said}: a dict of inputs is passed by its names"
    ragged = len({t.shape for t in args if isinstance(t, torch.Tensor)}) > 1 and len(args) > 2
    what = "pad samples of different lengths to one tensor in collate" if ragged else "put samples together in collate"
    if isinstance(inputs, list) and len(signature.parameters) == 1:
        what += "; where forward takes the list itself, let collate give a tuple of one, (samples,)"
    return f"{said}: a {type(inputs).__name__} is passed as model(*inputs); {what}" if len(args) > 1 else said


def batch_size_of(tree: Any) -> int:
    """The size of the first dimension of the first tensor that has one.

    Raises:
        InputError: there is none.
    """
    for tensor in tensors(tree):
        if tensor.dim():
            return tensor.shape[0]
    raise InputError("the inputs have no tensor with a batch dimension, so they have no size")


def share_sizes(total: int, parts: int) -> list[int]:
    """Cut ``total`` items in ``parts`` as evenly as can be, larger first: 10 in 4 is 3, 3, 2, 2."""
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


class SampleList(list[Any]):
    """A list that has an item for each sample, as can't be seen of each part of it: one box of the only image, say."""


def holds_samples(items: list[Any], samples: int) -> bool:
    """Whether a list has an item for each sample: the boxes of each image, sentences.

    A dictionary is one sample's. Tensors are as many batches, where each of them has a row for each sample.
    """
    if isinstance(items, SampleList):
        return len(items) == samples
    if len(items) != samples or all(isinstance(item, MutableMapping) for item in items):
        return len(items) == samples
    found = [t for item in items for t in tensors(item)]
    return not found or not all(t.dim() and t.shape[0] == samples for t in found)


def with_sample_lists(nest: Any, samples: int, known: set[str], way: str = "") -> Any:
    """The nest with each list that has an item for each sample as a ``SampleList``.

    Args:
        nest: of so many ``samples``.
        samples: their number.
        known: the names of such lists, which are added to: one whose tensors all have a row for each sample, by chance,
            is one if it was one before.
        way: the name of the nest.
    """
    if type(nest) is list and len(nest) == samples and (way in known or holds_samples(nest, samples)):
        known.add(way)
        return SampleList(nest)
    named = named_parts(nest)
    new = [with_sample_lists(part, samples, known, f"{way}.{name}") for name, part in named]
    return nest if all(a is b for a, (_, b) in zip(new, named, strict=True)) else rebuilt(nest, new)


def cut(tree: Any, start: int, size: int, whole: int, shared: Collection[str] = ()) -> Any:
    """Samples ``start`` to ``start + size`` of every tensor that has a row for each of ``whole``; others are shared.

    A list that has an item for each sample is cut too. Tensors whose names are in ``shared`` are not, however many rows
    they have.
    """
    kept = {id(t) for name, t in named_tensors(tree) if name in shared} if shared else set()

    def of_samples(items: list[Any]) -> list[Any] | None:
        if not holds_samples(items, whole):
            return None
        some = items[start : start + size]
        return SampleList(some) if isinstance(items, SampleList) else some

    def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if not has_rows(tensor, whole) or id(tensor) in kept:
            return tensor
        narrow = tensor.narrow_copy if tensor.layout == torch.sparse_coo else tensor.narrow
        return narrow(0, start, size)

    return each(of_tensor, tree, on_list=of_samples)


def has_rows(tensor: torch.Tensor, samples: int) -> bool:
    """Whether it has a row for each sample. A parameter, which a model may give among its outputs, is that of all."""
    return bool(tensor.dim()) and tensor.shape[0] == samples and not isinstance(tensor, nn.Parameter)


def joined(one: Any, its: int, other: Any, others: int) -> Any:
    """What ``cut`` would have made two batches of: ``its`` samples and ``others``; None where they don't go together.

    What isn't cut is that of the first.
    """
    if isinstance(one, torch.Tensor):
        if not has_rows(one, its):
            return one
        fits = isinstance(other, torch.Tensor) and other.shape == (others, *one.shape[1:])
        return torch.cat([one, other.to(one)]) if fits else None
    if not same_kind(one, other) and not (isinstance(one, list) and isinstance(other, list)):
        return None
    if isinstance(one, list) and holds_samples(one, its) and holds_samples(other, others):
        return SampleList([*one, *other]) if isinstance(one, SampleList) else [*one, *other]
    inside = parts(one)
    theirs = [other[key] for key in one] if isinstance(one, MutableMapping) else parts(other)
    if inside is None or theirs is None or len(inside) != len(theirs):
        return one if inside is None else None
    made = [joined(mine, its, more, others) for mine, more in zip(inside, theirs, strict=True)]
    lost = any(new is None and old is not None for new, old in zip(made, inside, strict=True))
    return None if lost else rebuilt(one, made)


def folded(nest: tuple[Any, Any], samples: int) -> tuple[Any, Any] | None:
    """Outputs with a row for each word of each sample, ``(batch x time, classes)``, as ``(batch, time, classes)``.

    None where they aren't that: a single tensor, beside targets ``(batch, time, ...)``.
    """
    outputs, targets = nest
    if not isinstance(outputs, torch.Tensor) or not outputs.dim():
        return None
    length = outputs.shape[0]  # (len, asked of a tensor, is a Python function of PyTorch's where a mode is on)
    times = length // samples
    if times < 2 or times * samples != length:
        return None
    shapes = [t.shape for t in tensors(targets)]
    if any(not shape or shape[0] != samples for shape in shapes):
        return None
    if times not in {size for shape in shapes for size in itertools.accumulate(shape[1:], operator.mul)}:
        return None
    return outputs.reshape(samples, times, *outputs.shape[1:]), targets


def part_of(nest: tuple[Any, Any], start: int, size: int, samples: int) -> tuple[Any, Any]:
    """Some samples of outputs and targets; what isn't one row for each (or several) is shared."""
    if (rows := folded(nest, samples)) is None:
        made: tuple[Any, Any] = cut(nest, start, size, samples)
        return made
    outputs, targets = cut(rows, start, size, samples)
    return outputs.flatten(0, 1), targets


def both_of(one: tuple[Any, Any], its: int, other: tuple[Any, Any], others: int) -> tuple[Any, Any] | None:
    """The samples of two; None where they don't go together."""
    if (rows := folded(one, its)) is None:
        made: tuple[Any, Any] | None = joined(one, its, other, others)
        return made
    more = folded(other, others)
    both = None if more is None else joined(rows, its, more, others)
    return None if both is None else (both[0].flatten(0, 1), both[1])


def to_device(tree: Any, device: torch.device, dtype: torch.dtype | None = None, *, channels_last: bool = False) -> Any:
    """Every tensor on ``device``; floating ones as ``dtype`` where given, images in ``channels_last`` layout.

    Beside float64 complex ones are complex128.

    An accelerator is waited for where its tensors come to the CPU: the host reads them next.
    """
    pins, ahead = may_pin(device), device.type != "cpu"

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if dtype is torch.float64 and tensor.is_complex():
            wanted = torch.complex128
        if pins and tensor.is_cpu and tensor.layout == torch.strided:
            # From pageable memory a copy would wait for all that the device was given.
            tensor = tensor.to(wanted).pin_memory()
        if channels_last and tensor.dim() == 4:
            return tensor.to(device, wanted, non_blocking=ahead, memory_format=torch.channels_last)
        return tensor.to(device, wanted, non_blocking=ahead)

    return each(moved, tree, on_packed=lambda packed: packed.to(device))  # type: ignore[arg-type]  # the stubs know dtypes only


def may_pin(device: torch.device) -> bool:
    """Whether copies to a device are quicker from pinned memory."""
    return device.type in ("cuda", "xpu", torch._C._get_privateuse1_backend_name())


def _is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)
