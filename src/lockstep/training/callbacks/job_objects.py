"""Job objects: what a job's loss, data and models hold, of which a callback that holds it too gets no copy."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.job import Job
from lockstep.model.inspection import OutsideVariables

_MOST = 1000
"""Items of a list, or a set, up to which they are looked at."""

_PLAIN = (int, float, complex, str, bytes, type(None), type, types.FunctionType, types.ModuleType)


def objects_of(job: Job, model: nn.Module) -> dict[Any, Any]:
    """The objects that a job holds, by their ids, and the memory of its tensors: a memo of ``copy.deepcopy``."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "callbacks"}
    given = [one for of in fields.values() for one in (of.values() if isinstance(of, Mapping) else [of])]
    outside = OutsideVariables(given)
    todo = [*fields.values(), model, *outside.modules, *outside.values()]
    found: dict[Any, Any] = {}
    memories: dict[int, Any] = {}  # where a storage's own deepcopy looks
    while todo:
        one = todo.pop()
        if isinstance(one, _PLAIN) or id(one) in found:
            continue
        found[id(one)] = one
        if isinstance(one, torch.Tensor):
            if one.layout == torch.strided:
                memories[one.untyped_storage()._cdata] = one.untyped_storage()
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one if len(one) <= _MOST else []
        todo += getattr(one, "__dict__", {}).values()
    return {**found, "torch": memories}
