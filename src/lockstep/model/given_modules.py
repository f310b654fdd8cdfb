"""What the function of a job's model uses without building it, which the trainings of a process would share.

With ``model=lambda: net`` each training goes on with the weights that the last one left; with
``nn.Embedding.from_pretrained(vectors, freeze=False)`` each would write to the vectors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

from lockstep.job import Job
from lockstep.model.inspection import NORMS, OutsideVariables, held_by
from lockstep.tensors.pytree import is_lazy

_taken: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Modules and parameters of them that models of this process have had, and that change in training, by their ids."""


def _held(job: Job) -> tuple[dict[int, Any], list[torch.Tensor | numpy.ndarray]]:
    """Modules and parameters that the function of the job's model uses, by their ids; and other tensors, and arrays."""
    outside = OutsideVariables([job.model])
    held = [*outside.modules, *held_by(outside.values()).values()]
    found: dict[int, Any] = {id(one): one for one in held if isinstance(one, nn.Parameter)}
    found |= {id(part): part for one in held if isinstance(one, nn.Module) for part in _parts_of(one)}
    arrays = [one for one in held if isinstance(one, torch.Tensor | numpy.ndarray) and id(one) not in found]
    return found, arrays


def given_parts(job: Job, model: nn.Module) -> list[nn.Module | nn.Parameter]:
    """Modules and parameters of a new model that were there before its function was called."""
    found, _ = _held(job)
    return [one for one in _parts_of(model) if id(one) in found]


def _parts_of(model: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    yield from model.modules()
    yield from model.parameters()


def was_given_before(job: Job) -> bool:
    """Whether a model of this process has had a module, or a parameter, that the function of the job's model gives."""
    found, _ = _held(job)
    return any(_taken.get(key) is one for key, one in found.items())


def take(job: Job, model: nn.Module) -> None:
    """Note what of a new model was there before; other tensors that it trains get memory of its own."""
    found, arrays = _held(job)
    _taken.update((id(one), one) for one in _parts_of(model) if id(one) in found and changes(one))
    memory = {_address(one) for one in arrays} - {0}
    copies: dict[int, torch.UntypedStorage] = {}
    for p in model.parameters() if memory else ():
        if id(p) in found or not changes(p) or is_lazy(p) or p.layout != torch.strided or p.is_meta:
            continue
        storage = p.untyped_storage()
        if storage.data_ptr() in memory:
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
            mine = torch.empty(0, dtype=p.dtype)
            p.data = mine.set_(copies[storage.data_ptr()], p.storage_offset(), p.shape, p.stride())


def changes(part: nn.Module | nn.Parameter) -> bool:
    """Whether training changes it, the layers and parameters of a module aside."""
    if isinstance(part, nn.Module):
        return isinstance(part, NORMS) and part.training
    return part.requires_grad


def _address(one: torch.Tensor | numpy.ndarray) -> int:
    if isinstance(one, numpy.ndarray):
        return one.ctypes.data
    return one.untyped_storage().data_ptr() if one.layout == torch.strided and not one.is_meta else 0
