"""Nestings: what models take and give, as tensors inside lists, tuples, mappings, named tuples and
dataclasses.

``torch.utils._pytree`` needs dataclasses and mappings to be registered one by one; a person's own
batch class should work as it is. A nest here is anything that has ``parts``, and can be rebuilt
from as many new ones. Objects of other classes are leaves: what is passed from layer to layer may
be written to, and has to stay what it is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import InputError

T = TypeVar("T")

MAKE_SEEN = "make it a dataclass, a named tuple or a dictionary"
"""What to do with an object of another class, whose tensors are not seen."""


def parts(nest: Any) -> list[Any] | None:
    """What lies directly inside a nest, in order; None for a leaf (a tensor, or anything that isn't
    a container).

    Raises:
        InputError: a ``PackedSequence``, whose rows are not samples.
    """
    if isinstance(nest, torch.Tensor):
        return None
    if isinstance(nest, PackedSequence):
        raise InputError(
            "a PackedSequence can't be split: pass the padded batch and its lengths, and pack "
            "them in forward"
        )
    if isinstance(nest, (list, tuple)):
        return list(nest)
    if isinstance(nest, MutableMapping):
        return list(nest.values())
    names = _attributes(nest)
    return None if names is None else [getattr(nest, name) for name in names]


def named_parts(nest: Any) -> list[tuple[str, Any]]:
    """What lies directly inside a nest with its key, field, or number from 0; none in a leaf."""
    inside = parts(nest) or []
    if isinstance(nest, MutableMapping):
        names: Any = map(str, nest)
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        names = nest._fields
    elif isinstance(nest, (list, tuple)):
        names = map(str, range(len(inside)))
    else:
        names = _attributes(nest) or ()
    return list(zip(names, inside, strict=True))


def rebuilt(nest: Any, new: Sequence[Any]) -> Any:
    """A nest of the same type with new parts: order, keys, and whatever else a subclass carries
    are kept.
    """
    if isinstance(nest, tuple):
        return nest._make(new) if hasattr(nest, "_make") else type(nest)(new)
    if type(nest) is list:
        return list(new)
    made = copy.copy(nest)
    if isinstance(nest, list):
        made[:] = new
    elif isinstance(nest, MutableMapping):
        own = getattr(made, "__dict__", {})
        own |= {
            name: copy.copy(its) for name, its in own.items() if isinstance(its, dict)
        }  # where it keeps its items
        for key, value in zip(nest, new, strict=True):
            made[key] = value
            if key in own:  # (``self.__dict__ = self``)
                own[key] = value
    else:
        for name, value in zip(_attributes(nest) or (), new, strict=True):
            object.__setattr__(made, name, value)  # frozen ones too; __post_init__ has had its turn
    for name in [name for name in getattr(made, "__dict__", ()) if _is_cached(nest, name)]:
        del made.__dict__[name]  # it was computed of the other parts
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
    """The same with the way to each: ``logits``, ``hidden.2``; "" where the nest is a tensor
    itself.
    """
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
    """The structure of a nest in one line: ``{'logits': float32(8, 10), 'hidden': [float32(8,
    4)]}``.
    """
    if isinstance(nest, torch.Tensor):
        return f"{str(nest.dtype).removeprefix('torch.')}{tuple(nest.shape)}"
    inside = parts(nest)
    if inside is None:
        return "None" if nest is None else type(nest).__name__
    if isinstance(nest, MutableMapping):
        body = ", ".join(
            f"{key!r}: {described(value)}" for key, value in zip(nest, inside, strict=True)
        )
        return f"{{{body}}}" if type(nest) is dict else f"{type(nest).__name__}({{{body}}})"
    if not isinstance(nest, (list, tuple)) or hasattr(nest, "_fields"):
        body = ", ".join(f"{name}={described(value)}" for name, value in named_parts(nest))
        return f"{type(nest).__name__}({body})"
    shown = inside if len(inside) <= 8 else inside[:3]
    body = ", ".join(map(described, shown))
    if len(shown) < len(inside):
        body += f", ... {len(inside)} in all"
    if isinstance(nest, tuple):
        return f"({body},)" if len(inside) == 1 else f"({body})"
    return f"[{body}]"


def opaque_class(nest: Any) -> str | None:
    """The name of the first class among its leaves that keeps tensors as attributes, which are
    not seen.
    """
    if isinstance(nest, (torch.Tensor, PackedSequence, type)):
        return None
    if (inside := parts(nest)) is None:
        held = getattr(nest, "__dict__", {}).values()
        return (
            type(nest).__name__ if any(isinstance(value, torch.Tensor) for value in held) else None
        )
    return next(filter(None, map(opaque_class, inside)), None)


def same_kind(one: Any, other: Any) -> bool:
    """Whether two nests can stand for one another at this level: same type, keys and number of
    parts.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, MutableMapping):
        return set(one) == set(other)
    return len(parts(one) or ()) == len(parts(other) or ())


def each(
    function: Callable[[torch.Tensor], Any],
    nest: Any,
    *,
    on_list: Callable[[list[Any] | tuple[Any, ...]], list[Any] | tuple[Any, ...] | None]
    | None = None,
    on_packed: Callable[[PackedSequence], Any] | None = None,
    on_object: Callable[[Any], Any] | None = None,
) -> Any:
    """The same nest with ``function`` of each tensor; anything else is left as it is.

    Args:
        function: of a tensor.
        nest: any nesting.
        on_list: asked first of each list and tuple; what it gives is taken instead, unless that is
            None.
        on_packed: of a ``PackedSequence``, which is refused otherwise.
        on_object: of any other leaf.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if on_packed is not None and isinstance(nest, PackedSequence):
        return on_packed(nest)
    if (
        on_list is not None
        and isinstance(nest, list | tuple)
        and (taken := on_list(nest)) is not None
    ):
        return taken
    inside = parts(nest)
    if inside is None:
        return nest if on_object is None else on_object(nest)
    of_part = functools.partial(
        each, function, on_list=on_list, on_packed=on_packed, on_object=on_object
    )
    return rebuilt(nest, list(map(of_part, inside)))


def copied_nest(nest: T) -> T:
    """The same nest of the same tensors: what a function keeps in an object of it, this one
    doesn't have.
    """
    copied: T = each(lambda tensor: tensor, nest, on_packed=lambda packed: packed)
    return copied


def clones(nest: Any) -> Any:
    """The same nest with a copy of each tensor, for what may write to it. (A ``PackedSequence``
    stays.)
    """
    return each(torch.clone, nest, on_packed=lambda packed: packed)


def versions(nest: Any) -> list[tuple[int, int]]:
    """What tells whether something was written to one of the tensors of a nest, taken out or put
    in.
    """
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
    """``model(*inputs)`` for a tuple or a list, ``model(**inputs)`` for a dict, else
    ``model(inputs)``.

    Raises:
        InputError: the model's forward doesn't take so many, or not by these names.
    """
    args: Any = (
        inputs
        if type(inputs) in (tuple, list)
        else ()
        if isinstance(inputs, Mapping)
        else (inputs,)
    )
    kwargs = inputs if isinstance(inputs, Mapping) else {}
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if (why := _unfit(model, inputs, args, kwargs)) is None:
            raise
        raise InputError(why) from error


def _unfit(model: Any, inputs: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why the arguments that ``inputs`` are don't fit the model's forward; None where they do,
    or nobody can tell.
    """
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
    what = (
        "pad samples of different lengths to one tensor in collate"
        if ragged
        else "put samples together in collate"
    )
    if isinstance(inputs, list) and len(signature.parameters) == 1:
        what += "; where forward takes the list itself, let collate give a tuple of one, (samples,)"
    return (
        f"{said}: a {type(inputs).__name__} is passed as model(*inputs); {what}"
        if len(args) > 1
        else said
    )


def to_device(
    tree: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    channels_last: bool = False,
) -> Any:
    """Every tensor on ``device``; floating ones as ``dtype`` where given, images in
    ``channels_last`` layout.

    Beside float64 complex ones are complex128. An object that has ``.to()``, as the batches of
    graph libraries have, is moved by ``.to(device)`` and cast by ``.to(dtype)``.

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

    def moved_object(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
            return leaf
        leaf = leaf.to(device)
        if dtype is not None:
            with contextlib.suppress(Exception):  # some take a device only
                leaf = leaf.to(dtype)
        return leaf

    return each(
        moved,
        tree,
        on_packed=lambda packed: packed.to(device),  # type: ignore[arg-type]  # the stubs know dtypes only
        on_object=moved_object,
    )


def may_pin(device: torch.device) -> bool:
    """Whether copies to a device are quicker from pinned memory."""
    return device.type in ("cuda", "xpu", torch._C._get_privateuse1_backend_name())


def _attributes(nest: Any) -> list[str] | None:
    """The names of what a dataclass holds, its fields first; None of anything else."""
    if isinstance(nest, type) or not dataclasses.is_dataclass(nest):
        return None
    names = dict.fromkeys(f.name for f in dataclasses.fields(nest))
    computed = [
        name for name in getattr(nest, "__dict__", ()) if not _is_cached(nest, name)
    ]  # in __post_init__
    return list(names | dict.fromkeys(computed))


def _is_cached(nest: Any, name: str) -> bool:
    return isinstance(getattr(type(nest), name, None), functools.cached_property)
