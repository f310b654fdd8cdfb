"""A state as JSON and tensors by name, so that it can be kept without pickle.

``encoded`` turns nested dicts, lists and tuples into values that JSON has, and names each tensor by
its place. What JSON lacks is a dict with ``"$"``, its type, and ``"of"``, what it is made of::

    1, "a", None, [1], {"a": 1}     1, "a", null, [1], {"a": 1}
    {"model": {"bias": tensor}}     {"model": {"bias": {"$": "tensor", "of": "model/bias"}}}
                                    and the tensor by the name "model/bias"
    (1, 2)                          {"$": "tuple", "of": [1, 2]}
    {0: "a"}                        {"$": "dict", "of": [[0, "a"]]}
    inf                             {"$": "float", "of": "inf"}
    torch.float16                   {"$": "dtype", "of": "float16"}

A tensor of a type that safetensors files lack is a dict, too: of its parts (a sparse one), or of
its real numbers (a complex one). `decoded` makes the same again.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from lockstep.errors import InputError
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.row_shard import RowShard

_LISTS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "Size": torch.Size,
}
"""How a list becomes a container again."""

_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}
"""How a list of pairs becomes a dict again."""


def _base64(value: bytes) -> str:
    """Return bytes as a text."""
    return base64.b64encode(value).decode()


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a format in ``torch``."""
    return str(dtype).removeprefix("torch.")


_TEXTS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "float": (repr, float),  # infinite, or not a number
    "complex": (repr, complex),
    "bytes": (_base64, base64.b64decode),
    "bytearray": (_base64, lambda text: bytearray(base64.b64decode(text))),
    "dtype": (_name_of, lambda name: getattr(torch, name)),
    "device": (str, torch.device),
}
"""How values of a type become a text, and the value again."""


def encoded(state: Any) -> tuple[Any, dict[str, Tensor | RowShard]]:
    """Return a state as what JSON holds, and its tensors by their places in it.

    The tensors have types that safetensors files have. They are not copied, but for sparse ones.
    A tensor whose rows are on several ranks is this rank's `RowShard`.

    Args:
        state: nested dicts, lists and tuples.

    Returns:
        The values for JSON, and the tensors by name.

    Raises:
        InputError: something in it is neither a tensor nor a plain value; its place is named.
    """
    encoder = _Encoder()
    return encoder.value(state, ""), encoder.tensors


class _Encoder:
    """Encodes a state, and collects its tensors.

    Attributes:
        tensors: by their places, as far as the state was encoded.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor | RowShard] = {}

    def value(self, value: Any, place: str) -> Any:
        """Return what JSON has in the place of any value.

        Args:
            value: a part of the state.
            place: where it is in the state: ``optimizer/state/0``.
        """
        kind = type(value)

        if value is None or kind in (bool, int, str):
            return value
        if kind is float and math.isfinite(value):
            return value

        if kind is list:
            return self._items(value, place)
        if kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: self.value(item, _under(place, key)) for key, item in value.items()}

        if isinstance(value, Tensor):
            return self._tensor(value.detach(), place)
        if kind is RowShard:
            return self._kept(value, place)

        return self._marked(value, place)

    def _items(self, items: Iterable[Any], place: str) -> list[Any]:
        """Return what JSON has in the place of each item of a list."""
        return [self.value(item, f"{place}/{i}") for i, item in enumerate(items)]

    def _kept(self, tensor: Tensor | RowShard, place: str) -> dict[str, Any]:
        """Keep a tensor by its place, and return what stands for it."""
        while place in self.tensors:  # two keys that are one text
            place += "'"
        self.tensors[place] = tensor
        return {"$": "tensor", "of": place}

    def _marked(self, value: Any, place: str) -> dict[str, Any]:
        """Return a dict that says the type of a value that JSON lacks."""
        kind = type(value)
        name = kind.__name__

        if name in _TEXTS:
            return {"$": name, "of": _TEXTS[name][0](value)}

        if name in _LISTS and not hasattr(value, "_fields"):
            return {"$": name, "of": self._items(value, place)}

        if name in _DICTS:
            pairs = []
            for key, item in value.items():
                pairs.append([self.value(key, place), self.value(item, _under(place, str(key)))])
            return {"$": name, "of": pairs}

        if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
            return {
                "$": "numpy",
                "of": _base64(value.tobytes()),
                "dtype": value.dtype.str,
                "shape": value.shape if value.ndim else None,
            }

        raise InputError(
            f'"{place}" is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold: '
            "keep it as tensors, numbers, texts, or lists and dicts of them"
        )

    def _tensor(self, tensor: Tensor, place: str) -> dict[str, Any]:
        """Keep a tensor in types that safetensors files have, and return what stands for it."""
        if tensor.layout == torch.sparse_coo:
            tensor = tensor.coalesce()
            held = {
                "indices": self._tensor(tensor.indices(), f"{place}/indices"),
                "values": self._tensor(tensor.values(), f"{place}/values"),
            }
            return {"$": "sparse", "of": held, "shape": list(tensor.shape)}

        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            real = self._tensor(torch.view_as_real(tensor), f"{place}/real")
            return {"$": "complex tensor", "of": real}

        is_plain = tensor.layout is torch.strided and tensor.dtype in SAFETENSORS_TYPES
        if tensor.is_meta or not is_plain:
            raise InputError(
                f'"{place}" is a tensor of {tensor.layout} and {tensor.dtype} on {tensor.device}, '
                "which no checkpoint can hold"
            )
        return self._kept(tensor, place)


def _under(place: str, key: str) -> str:
    """Return the place of an item of a dict."""
    return f"{place}/{key}" if place else key


def decoded(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state that ``encoded`` was given.

    Args:
        tree: the values from JSON.
        tensors: by the names that ``encoded`` gave them.
    """
    if isinstance(tree, list):
        return [decoded(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$" not in tree:
        return {key: decoded(item, tensors) for key, item in tree.items()}

    kind = tree["$"]
    if kind == "tensor":
        return tensors[tree["of"]]
    if kind in _TEXTS:
        return _TEXTS[kind][1](tree["of"])

    if kind == "numpy":
        body = base64.b64decode(tree["of"])
        flat = numpy.frombuffer(body, dtype=tree["dtype"])
        return flat[0] if tree["shape"] is None else flat.reshape(tree["shape"]).copy()

    return _rebuilt(tree, decoded(tree["of"], tensors))


def _rebuilt(tree: dict[str, Any], of: Any) -> Any:
    """Return a container, or a tensor of another type, made of what is in it.

    Args:
        tree: what says the type.
        of: what is in it, decoded.
    """
    kind = tree["$"]

    if kind in _LISTS:
        return _LISTS[kind](of)
    if kind in _DICTS:
        return _DICTS[kind](of)

    if kind == "complex tensor":
        return torch.view_as_complex(of)
    return torch.sparse_coo_tensor(
        of["indices"], of["values"], tree["shape"], is_coalesced=True, check_invariants=True
    )
