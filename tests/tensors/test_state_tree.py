"""A state as JSON and tensors: what comes back is what was given, bit by bit, without pickle."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy
import pytest
import torch

from lockstep.errors import InputError
from lockstep.tensors.array_file import SAFETENSORS_TYPES
from lockstep.tensors.state_tree import decoded, encoded

STATES: dict[str, Any] = {
    "plain": {
        "a": 1,
        "b": 0.1 + 0.2,
        "c": None,
        "d": True,
        "e": "ä\n",
        "f": [1, [2.5]],
        "g": -(2**70),
    },
    "odd numbers": [math.inf, -math.inf, 1e-320, -0.0, complex(1, -2)],
    "keys": {1: "one", (2, 3): [4], None: 5, "$": {"$": 1}, 1.5: torch.ones(2)},
    "containers": (
        1,
        {2, 3},
        frozenset("x"),
        collections.deque([1]),
        torch.Size([2, 3]),
        b"\0\xff",
        bytearray(b"x"),
    ),
    "dicts": [collections.OrderedDict(a=1), collections.Counter({30: 1, 80: 2})],
    "torch": {"dtype": torch.bfloat16, "device": torch.device("cpu"), "none": torch.empty(0, 3)},
    "numpy": [numpy.float64(0.1), numpy.arange(6).reshape(2, 3), numpy.bool_(True)],
    "layouts": [torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(4), torch.tensor(3.0)],
    "types": [
        torch.ones(3).to(dtype) for dtype in (*SAFETENSORS_TYPES, torch.complex64, torch.complex128)
    ],
    "eight bits": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.sparse_coo_tensor(
        [[0, 2]], [[1.0, 2.0], [3.0, 4.0]], (4, 2), check_invariants=True
    ).coalesce(),
    "two keys of one text": {1: torch.zeros(1), "1": torch.ones(1)},
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if a.layout != torch.strided:
            return b.layout == a.layout and torch.equal(a.to_dense(), b.to_dense())
        raw = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if type(a) is not type(b):
        return False
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if isinstance(a, float | complex) else a == b


@pytest.mark.parametrize("name", STATES)
def test_what_comes_back_is_what_was_given(name: str) -> None:
    tree, tensors = encoded({"x": STATES[name]})
    assert {tensor.dtype for tensor in tensors.values()} <= set(SAFETENSORS_TYPES)
    assert same(decoded(json.loads(json.dumps(tree, allow_nan=False)), tensors)["x"], STATES[name])


@pytest.mark.parametrize(
    "thing", [object(), print, torch.nn.Linear(1, 1), torch.empty(2, device="meta")]
)
def test_what_can_not_be_kept_is_named_by_its_place(thing: Any) -> None:
    with pytest.raises(
        InputError, match=r'"scheduler/0/inner" is a .*, which no checkpoint can hold'
    ):
        encoded({"scheduler": [{"inner": thing}]})
