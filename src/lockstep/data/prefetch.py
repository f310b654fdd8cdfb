"""Batches copied to an accelerator one ahead: the copy of the next one runs while the current one is used.

::

    copying stream     | copy 0 | copy 1 |       | copy 2 |
    computing stream            | step 0         | step 1         | ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shares import Batch
from lockstep.tensors.pytree import each, tensors


def copied_ahead(batches: Iterator[Batch], device: torch.device, pin: bool) -> Iterator[Batch]:
    """The same batches with their tensors on ``device``.

    Args:
        batches: with tensors in memory, pinned or not.
        device: an accelerator. Copies overlap with computing on CUDA; on others they only don't block.
        pin: pin what isn't yet; from pageable memory a copy would wait.
    """
    if device.type != "cuda":
        for batch in batches:
            _move(batch, device, pin)
            yield batch
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    before: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            _move(batch, device, pin)
            done = copying.record_event()
        if before is not None:
            yield _received(*before, device)
        before = batch, done
    if before is not None:
        yield _received(*before, device)


def _move(batch: Batch, device: torch.device, pin: bool) -> None:
    def moved(tensor: Tensor) -> Tensor:
        if pin and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    for part in batch.parts:
        part.inputs, part.targets = each(moved, part.inputs), each(moved, part.targets)


def _received(batch: Batch, done: Any, device: torch.device) -> Batch:
    """Let the computing stream wait for the copy, and keep its memory from being given away before it is used."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(done)
    for part in batch.parts:
        for tensor in tensors((part.inputs, part.targets)):
            if tensor.is_cuda:
                tensor.record_stream(computing)
    return batch
