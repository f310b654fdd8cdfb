"""What a rank without samples computes must leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lockstep.strategies.sums.reference_modes import known_in_evaluation_mode


@contextlib.contextmanager
def without_a_trace(model: nn.Module) -> Iterator[None]:
    """Undo what is written to buffers in this context, where batch norms take no statistics."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with known_in_evaluation_mode(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer.copy_(before)
