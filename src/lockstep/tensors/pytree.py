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
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import InputError

T = TypeVar("T")


def parts(nest: Any) -> list[Any] | None:
    """Return what lies directly inside a nest, in order.

    None for a leaf: a tensor, or anything that isn't a container.

    Raises:
        InputError: a ``PackedSequence``, whose rows are not samples.
    """
    if isinstance(nest, Tensor):
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
    """Return what lies directly inside a nest with its key, field, or number from 0.

    There is nothing in a leaf.
    """
    inside = parts(nest) or []
    if isinstance(nest, MutableMapping):
        names: Any = nest
    elif isinstance(nest, (list, tuple)):
        names = getattr(nest, "_fields", range(len(inside)))
    else:
        names = _attributes(nest) or ()

    return list(zip(map(str, names), inside, strict=True))


def rebuilt(nest: Any, new: Sequence[Any]) -> Any:
    """Return a nest of the same type with new parts.

    Order, keys, and whatever else a subclass carries are kept.

    Args:
        nest: a container.
        new: a part for each of ``parts(nest)``.
    """
    if isinstance(nest, tuple):
        return nest._make(new) if hasattr(nest, "_make") else type(nest)(new)
    if type(nest) is list:
        return list(new)
    if isinstance(nest, list):
        made = _shallow_copy(nest)
        made[:] = new
        return made
    if isinstance(nest, MutableMapping):
        return _mapping_of(nest, zip(nest, new, strict=True))

    made = object.__new__(type(nest))  # (__post_init__ has had its turn)
    for name, value in zip(_attributes(nest) or (), new, strict=True):
        object.__setattr__(made, name, value)
    return made


def _mapping_of(nest: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a mapping of the same type with other items."""
    made = _shallow_copy(nest)
    attributes = getattr(made, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, dict):  # where a mapping of another class keeps its items
            attributes[name] = copy.copy(value)

    for key, value in items:
        made[key] = value
        if key in attributes:  # (``self.__dict__ = self``)
            attributes[key] = value

    return made


def _shallow_copy(nest: Any) -> Any:
    """Return a copy without what was computed of the parts and kept."""
    made = copy.copy(nest)
    for name in list(getattr(made, "__dict__", ())):
        if _is_cached(nest, name):
            del made.__dict__[name]

    return made


def _is_cached(nest: Any, name: str) -> bool:
    """Return whether an attribute was computed of others, by a ``cached_property``."""
    return isinstance(getattr(type(nest), name, None), functools.cached_property)


def tensors(nest: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nest, in order; of a ``PackedSequence`` its data."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, PackedSequence):
        yield nest.data
    else:
        for part in parts(nest) or ():
            yield from tensors(part)


def named_tensors(nest: Any, way: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nest with the way to it: ``logits``, ``hidden.2``.

    The way is "" where the nest is a tensor itself.
    """
    if isinstance(nest, Tensor):
        yield way, nest
        return
    for name, part in named_parts(nest):
        yield from named_tensors(part, f"{way}.{name}" if way else name)


def graph_nodes(nest: Any) -> Iterator[Any]:
    """Yield every node of the autograd graph behind the tensors of a nest."""
    todo: list[Any] = [tensor.grad_fn for tensor in tensors(nest)]
    seen = {None}
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def described(nest: Any) -> str:
    """Return the structure of a nest in one line.

    ::

        dict(logits=float32(8, 10), hidden=list(float32(8, 4)))
    """
    if isinstance(nest, Tensor):
        return f"{str(nest.dtype).removeprefix('torch.')}{tuple(nest.shape)}"
    if nest is None:
        return "None"
    kind = type(nest).__name__
    if isinstance(nest, PackedSequence) or parts(nest) is None:
        return kind
    has_names = not isinstance(nest, list | tuple) or hasattr(nest, "_fields")
    items = [f"{name}=" * has_names + described(part) for name, part in named_parts(nest)]
    if len(items) > 8:
        items[3:] = [f"... {len(items)} in all"]
    return f"{kind}({', '.join(items)})"


def same_kind(one: Any, other: Any) -> bool:
    """Return whether two nests can stand for one another at this level.

    They are of the same type, with the same keys and number of parts.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, MutableMapping):
        return set(one) == set(other)
    return len(parts(one) or ()) == len(parts(other) or ())


def each(
    function: Callable[[Tensor], Any],
    nest: Any,
    *,
    on_list: Callable[[Any], Any] | None = None,
    on_packed: Callable[[PackedSequence], Any] | None = None,
    on_object: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the same nest with ``function`` of each tensor; anything else is left as it is.

    Args:
        function: of a tensor.
        nest: any nesting.
        on_list: asked first of each list and tuple; what it gives is taken instead, unless that is
            None.
        on_packed: of a ``PackedSequence``, which is refused otherwise.
        on_object: of any other leaf.
    """
    if isinstance(nest, Tensor):
        return function(nest)
    if on_packed is not None and isinstance(nest, PackedSequence):
        return on_packed(nest)
    if on_list is not None and isinstance(nest, list | tuple):
        taken = on_list(nest)
        if taken is not None:
            return taken

    inside = parts(nest)
    if inside is None:
        return nest if on_object is None else on_object(nest)
    ways: Any = {"on_list": on_list, "on_packed": on_packed, "on_object": on_object}
    return rebuilt(nest, [each(function, part, **ways) for part in inside])


def copied_nest(nest: T) -> T:
    """Return the same nest of the same tensors.

    What a function keeps in an object of the nest, this one doesn't have.
    """
    copied: T = each(_same, nest, on_packed=_same)
    return copied


def clones(nest: Any) -> Any:
    """Return the same nest with a copy of each tensor, for what may write to it.

    A ``PackedSequence`` stays.
    """
    return each(torch.clone, nest, on_packed=_same)


def doubled(nest: Any) -> Any:
    """Return the same nest with floating tensors in float64, and complex ones in complex128."""
    return each(_doubled, nest)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


CONSTANTS = frozenset((int, float, bool, str, bytes, type(None)))
"""Types of values that nothing can change."""


def own_copy(value: Any) -> Any:
    """Return a deep copy of anything; what can't be copied is given itself."""
    return each(_cloned, value, on_packed=_deep_copy, on_object=_deep_copy)


def _cloned(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        return _deep_copy(tensor)
    # deepcopy copies byte by byte, on several threads.
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _deep_copy(value: T) -> T:
    if type(value) in CONSTANTS:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _same(thing: Any) -> Any:
    return thing


def versions(nest: Any) -> list[tuple[int, int]]:
    """Return what changes when a tensor of a nest is written to, taken out or put in."""
    with torch._C.DisableTorchFunction():  # a mode that is on would be asked for each of them
        return [(id(t), t._version) for t in tensors(nest) if not t.is_inference()]


def holds_packed(nest: Any) -> bool:
    """Return whether there is a ``PackedSequence`` in it, whose rows are not samples."""
    found: list[PackedSequence] = []
    each(_same, nest, on_packed=found.append)
    return bool(found)


def is_lazy(tensor: Tensor) -> bool:
    """Return whether it is a parameter or buffer of a lazy layer, without a shape yet."""
    return torch.nn.parameter.is_lazy(tensor)


def call(model: Any, inputs: Any) -> Any:
    """Call a model on its inputs.

    ::

        model(*inputs)     a tuple or a list
        model(**inputs)    a dict
        model(inputs)      anything else

    Raises:
        InputError: the model's forward takes another number of arguments, or other names.
    """
    args: Any = (inputs,)
    kwargs: Mapping[str, Any] = {}
    if type(inputs) in (tuple, list):
        args = inputs
    elif isinstance(inputs, Mapping):
        args = ()
        kwargs = inputs

    try:
        return model(*args, **kwargs)
    except TypeError as error:
        why = _unfit(model, inputs, args, kwargs)
        if why is None:
            raise
        raise InputError(why) from error


def _unfit(model: Any, inputs: Any, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return why arguments don't fit a model's forward; None where they do, or nobody can tell.

    Args:
        model: a module, or a function.
        inputs: what was given.
        args, kwargs: the arguments that ``inputs`` are.
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
        why = f"{forward} can't take {described(inputs)}: {error}"

    if kwargs:
        return f"{why}: a dict of inputs is passed by its names"
    if len(args) < 2:
        return why
    return (
        f"{why}: a {type(inputs).__name__} is passed as model(*inputs); pad samples of different "
        "lengths to one tensor in collate; where forward takes the list itself, let collate give "
        "a tuple of one, (samples,)"
    )


def to_device(
    tree: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    channels_last: bool = False,
) -> Any:
    """Return the same nest with every tensor on ``device``.

    Beside float64 complex ones are complex128. An object that has ``.to()``, as the batches of
    graph libraries have, is moved by ``.to(device)`` and cast by ``.to(dtype)``.

    An accelerator is waited for where its tensors come to the CPU: the host reads them next.

    Args:
        tree: any nesting.
        device: of the result.
        dtype: of floating tensors; None leaves it.
        channels_last: whether to lay out tensors of four dimensions as images.
    """
    pins = may_pin(device)
    ahead = device.type != "cpu"

    def moved(tensor: Tensor) -> Tensor:
        wanted = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            wanted = dtype
        elif dtype is torch.float64 and tensor.is_complex():
            wanted = torch.complex128

        if pins and tensor.is_cpu and tensor.layout == torch.strided:
            # From pageable memory a copy would wait for all that the device was given.
            tensor = tensor.to(wanted).pin_memory()

        layout = torch.preserve_format
        if channels_last and tensor.dim() == 4:
            layout = torch.channels_last
        return tensor.to(device, wanted, non_blocking=ahead, memory_format=layout)

    def moved_object(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
            return leaf

        leaf = leaf.to(device)
        if dtype is not None:
            with contextlib.suppress(Exception):  # some take a device only
                leaf = leaf.to(dtype)

        return leaf

    def moved_packed(packed: Any) -> Any:
        like = moved(packed.data[:0])
        return packed.to(device, like.dtype)

    return each(moved, tree, on_packed=moved_packed, on_object=moved_object)


def may_pin(device: torch.device) -> bool:
    """Return whether copies to a device are quicker from pinned memory."""
    return device.type in ("cuda", "xpu", torch._C._get_privateuse1_backend_name())


def _attributes(nest: Any) -> list[str] | None:
    """Return the names of what a dataclass holds, its fields first; None of anything else."""
    if isinstance(nest, type) or not dataclasses.is_dataclass(nest):
        return None

    names = [field.name for field in dataclasses.fields(nest)]
    for name in getattr(nest, "__dict__", ()):  # also what __post_init__ has computed
        if name not in names and not _is_cached(nest, name):
            names.append(name)

    return names
