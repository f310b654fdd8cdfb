"""What the function of a job's model uses without building it, which the trainings of a process would share.

With ``model=lambda: net`` each training goes on with the weights that the last one left; with
``nn.Embedding.from_pretrained(vectors, freeze=False)`` each would write to the vectors.
"""

from __future__ import annotations

import weakref

import numpy
import torch
from torch import nn

from lockstep.job import Job
from lockstep.model.inspection import NORMS, OutsideVariables, held_by
from lockstep.tensors.pytree import is_lazy

_taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those that models of this process have had, and change in training."""


def _held(job: Job) -> tuple[set[nn.Module], list[torch.Tensor | numpy.ndarray]]:
    """The modules that the function of the job's model uses, and the tensors and arrays."""
    outside = OutsideVariables([job.model])
    held = [*outside.modules, *held_by(outside.values()).values()]
    modules = {part for one in held if isinstance(one, nn.Module) for part in one.modules()}
    return modules, [one for one in held if isinstance(one, torch.Tensor | numpy.ndarray)]


def given_parts(job: Job, model: nn.Module) -> list[nn.Module]:
    """Modules of a new model that were there before its function was called."""
    modules, _ = _held(job)
    return [part for part in model.modules() if part in modules]


def was_given_before(job: Job) -> bool:
    """Whether a model of this process has had a module that the function of the job's model gives."""
    modules, _ = _held(job)
    return any(part in _taken for part in modules)


def take(job: Job, model: nn.Module) -> None:
    """Note which modules of a new model were there before; other tensors that it trains get memory of its own."""
    modules, arrays = _held(job)
    _taken.update(part for part in model.modules() if part in modules and changes(part))
    owned = {id(p) for part in modules for p in part.parameters(recurse=False)}
    memory = {_address(one) for one in arrays} - {0}
    copies: dict[int, torch.UntypedStorage] = {}
    for p in model.parameters() if memory else ():
        if not p.requires_grad or id(p) in owned or is_lazy(p) or p.layout != torch.strided or p.is_meta:
            continue
        storage = p.untyped_storage()
        if storage.data_ptr() in memory:
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
            mine = torch.empty(0, dtype=p.dtype)
            p.data = mine.set_(copies[storage.data_ptr()], p.storage_offset(), p.shape, p.stride())


def changes(part: nn.Module) -> bool:
    """Whether training changes it, its own layers aside."""
    is_trained = any(p.requires_grad for p in part.parameters(recurse=False))
    return is_trained or (isinstance(part, NORMS) and part.training)


def _address(one: torch.Tensor | numpy.ndarray) -> int:
    if isinstance(one, numpy.ndarray):
        return one.ctypes.data
    return one.untyped_storage().data_ptr() if one.layout == torch.strided and not one.is_meta else 0
