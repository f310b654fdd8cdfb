"""What a rank without samples computes must leave nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def without_a_trace(model: nn.Module) -> Iterator[None]:
    """Undo what is written to buffers in this context, where batch norms take no statistics."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
        with torch.no_grad():
            for module, name, buffer, before in kept:
                module._buffers[name] = buffer.copy_(before)
