"""Nests: what models take and give, as tensors inside lists, tuples, mappings, named tuples and dataclasses.

``torch.utils._pytree`` needs dataclasses and mappings to be registered one by one; a person's own batch class should
work as it is. A nest here is anything that has ``parts``, and can be rebuilt from as many new ones.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
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
            "a PackedSequence can't be cut or put together: pass the padded batch and its lengths, and pack inside"
        )
    if isinstance(nest, (list, tuple)):
        return list(nest)
    if isinstance(nest, MutableMapping):
        return list(nest.values())
    if _is_dataclass(nest):
        return [getattr(nest, f.name) for f in dataclasses.fields(nest)]
    return None


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
    """Every tensor of a nest, in order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    else:
        for part in parts(nest) or ():
            yield from tensors(part)


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
        names = nest._fields if hasattr(nest, "_fields") else [f.name for f in dataclasses.fields(nest)]
        body = ", ".join(f"{name}={described(value)}" for name, value in zip(names, inside, strict=True))
        return f"{type(nest).__name__}({body})"
    body = ", ".join(map(described, inside))
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


def _is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)
