"""A state as JSON and tensors by name, so that it can be kept without pickle.

``encoded`` turns nested dicts, lists and tuples into values that JSON has, and names each tensor by
its place: ``{"model": {"0.weight": tensor}}`` becomes ``{"model": {"0.weight": {"$": "tensor",
"of": "model/0.weight"}}}`` and ``{"model/0.weight": tensor}``. What JSON lacks is a dict with
``"$"``, its type. `decoded` makes the same again.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

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
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}
_LAYOUTS = {torch.sparse_coo: "coo"}


def encoded(state: Any) -> tuple[Any, dict[str, torch.Tensor | RowShard]]:
    """A state as what JSON holds, and its tensors by their places in it, in types that safetensors
    files have.

    Tensors are not copied, but for sparse ones. Of a tensor whose rows are on several ranks there
    is this rank's part.

    Raises:
        InputError: something in it is neither a tensor nor a plain value; its place is named.
    """
    tensors: dict[str, torch.Tensor | RowShard] = {}
    return _encoded(state, "", tensors), tensors


def _encoded(value: Any, place: str, tensors: dict[str, torch.Tensor | RowShard]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, place, tensors)
    if kind is RowShard:
        tensors[place] = value
        return {"$": "tensor", "of": place}
    if kind is list:
        return [_encoded(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str for key in value) and "$" not in value:
        return {key: _encoded(item, _under(place, key), tensors) for key, item in value.items()}
    if kind.__name__ in _LISTS and not hasattr(value, "_fields"):
        return {
            "$": kind.__name__,
            "of": [_encoded(item, f"{place}/{i}", tensors) for i, item in enumerate(value)],
        }
    if kind.__name__ in _DICTS:
        pairs = [
            (key, _encoded(item, _under(place, str(key)), tensors)) for key, item in value.items()
        ]
        return {
            "$": kind.__name__,
            "of": [[_encoded(key, place, tensors), item] for key, item in pairs],
        }
    if kind in (float, complex):
        return {"$": kind.__name__, "of": repr(value)}
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "of": base64.b64encode(value).decode()}
    if kind in (torch.dtype, torch.device):
        return {"$": kind.__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        whole = numpy.ascontiguousarray(value)
        body = base64.b64encode(whole.tobytes()).decode()
        return {
            "$": "numpy",
            "of": body,
            "dtype": whole.dtype.str,
            "shape": None if value.ndim == 0 else value.shape,
        }
    raise InputError(
        f'"{place}" is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold: '
        "keep it as tensors, "
        "numbers, texts, or lists and dicts of them"
    )


def _under(place: str, key: str) -> str:
    return f"{place}/{key}" if place else key


def _of_tensor(value: torch.Tensor, place: str, tensors: dict[str, torch.Tensor | RowShard]) -> Any:
    value = value.detach()
    if value.layout in _LAYOUTS:
        value = value.coalesce()
        parts = {"indices": value.indices(), "values": value.values()}
        held = {name: _of_tensor(part, f"{place}/{name}", tensors) for name, part in parts.items()}
        return {"$": "sparse", "of": held, "shape": list(value.shape)}
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise InputError(
            f'"{place}" is a tensor of {value.layout}, quantized or on meta, which no checkpoint '
            "can hold"
        )
    value = value.resolve_conj().resolve_neg()
    if value.is_complex():
        return {
            "$": "complex tensor",
            "of": _of_tensor(torch.view_as_real(value), f"{place}/real", tensors),
        }
    if value.dtype not in SAFETENSORS_TYPES:
        whole = value.clone(
            memory_format=torch.contiguous_format
        )  # (a single element may have any stride)
        bits = whole.view(torch.uint8 if value.itemsize == 1 else torch.int32)
        held = _of_tensor(bits, f"{place}/bits", tensors)
        return {"$": "bits", "of": held, "dtype": str(value.dtype).removeprefix("torch.")}
    while place in tensors:  # two keys that are one text
        place += "'"
    tensors[place] = value
    return {"$": "tensor", "of": place}


def decoded(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """The state of which ``encoded`` gave these."""
    if isinstance(tree, list):
        return [decoded(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$" not in tree:
        return {key: decoded(item, tensors) for key, item in tree.items()}
    kind, of = tree["$"], tree["of"]
    if kind == "tensor":
        return tensors[of]
    if kind == "complex tensor":
        return torch.view_as_complex(decoded(of, tensors))
    if kind == "bits":
        return decoded(of, tensors).view(getattr(torch, tree["dtype"]))
    if kind == "sparse":
        parts = {name: decoded(part, tensors) for name, part in of.items()}
        where, values = parts["indices"], parts["values"]
        return torch.sparse_coo_tensor(
            where, values, tree["shape"], is_coalesced=True, check_invariants=True
        )
    if kind in _LISTS:
        return _LISTS[kind](decoded(item, tensors) for item in of)
    if kind in _DICTS:
        return _DICTS[kind]((decoded(key, tensors), decoded(item, tensors)) for key, item in of)
    if kind == "numpy":
        flat = numpy.frombuffer(base64.b64decode(of), dtype=tree["dtype"])
        return flat[0] if tree["shape"] is None else flat.reshape(tree["shape"]).copy()
    made: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "complex": complex,
        "bytes": base64.b64decode,
        "bytearray": lambda text: bytearray(base64.b64decode(text)),
        "dtype": lambda name: getattr(torch, name),
        "device": torch.device,
    }
    return made[kind](of)
