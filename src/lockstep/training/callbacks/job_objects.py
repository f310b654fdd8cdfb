"""Job objects: what a job's loss, data and models hold, of which a callback that holds it too gets no copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.job import Job
from lockstep.model.inspection import OutsideVariables, held_by


def objects_of(job: Job, model: nn.Module) -> dict[Any, Any]:
    """The objects that a job holds, by their ids, and the memory of its tensors: a memo of ``copy.deepcopy``."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "callbacks"}
    given = [one for of in fields.values() for one in (of.values() if isinstance(of, Mapping) else [of])]
    outside = OutsideVariables(given)
    found = held_by([*fields.values(), model, *outside.modules, *outside.values()], set(map(id, job.callbacks)))
    memories = (
        t.untyped_storage() for t in found.values() if isinstance(t, torch.Tensor) and t.layout == torch.strided
    )
    return {**found, "torch": {memory._cdata: memory for memory in memories}}  # where a storage's deepcopy looks
