"""What the function of a job's model uses without building it, which the trainings of a process would share.

With ``model=lambda: net`` each training goes on with the weights that the last one left; with
``nn.Embedding.from_pretrained(vectors, freeze=False)`` each would write to the vectors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
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


def take(job: Job, model: nn.Module, *, loads: bool) -> None:
    """Note what of a new model was there before; other tensors that it trains get memory of its own.

    Args:
        job: whose function gave the model.
        model: the new one.
        loads: weights will be loaded into it, so that all its tensors are written to.
    """
    found, arrays = _held(job)
    _taken.update((id(one), one) for one in _parts_of(model) if id(one) in found and changes(one))
    given, files = [_memory(one) for one in arrays], _mapped_files()

    def is_shared(tensor: torch.Tensor) -> bool:
        if is_lazy(tensor) or not _memory(tensor):
            return False
        where = tensor.data_ptr()
        return any(where in one for one in files) or (id(tensor) not in found and any(where in one for one in given))

    copies: dict[int, torch.UntypedStorage] = {}
    for p in model.parameters():
        if (loads or changes(p)) and is_shared(p):
            storage = p.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
            mine = torch.empty(0, dtype=p.dtype)
            p.data = mine.set_(copies[storage.data_ptr()], p.storage_offset(), p.shape, p.stride())
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if loads and b is not None]
    cloned = {id(b): b.clone() for _, _, b in buffers if is_shared(b)}
    for module, name, b in buffers:
        module._buffers[name] = cloned.get(id(b), b)


def _mapped_files() -> list[range]:
    """Where files are mapped to be written to, by all processes: ``numpy.load(..., mmap_mode="r+")``."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not on Linux
        return []
    mapped = [fields for line in lines if len(fields := line.split(maxsplit=5)) == 6 and fields[1][3] == "s"]
    named = (where for where, *_, name in mapped if not name.startswith("/dev/") and not name.endswith("(deleted)"))
    return [range(*(int(end, 16) for end in where.split("-"))) for where in named]


def changes(part: nn.Module | nn.Parameter) -> bool:
    """Whether training changes it, the layers and parameters of a module aside."""
    if isinstance(part, nn.Module):
        return isinstance(part, NORMS) and part.training
    return part.requires_grad


def _memory(one: torch.Tensor | numpy.ndarray) -> range:
    """Its addresses; none of a tensor that is sparse, or on the meta device."""
    if isinstance(one, numpy.ndarray):
        while isinstance(one.base, numpy.ndarray):
            one = one.base
        return range(one.ctypes.data, one.ctypes.data + one.nbytes)
    if one.layout != torch.strided or one.is_meta:
        return range(0)
    storage = one.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
