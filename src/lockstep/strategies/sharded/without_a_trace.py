"""What a rank without samples computes, so that it comes to each collective, and what that
leaves behind: nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def without_a_trace(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> Iterator[None]:
    """What is computed meanwhile leaves no trace in a model; its batch norms take part in no
    statistics.

    Args:
        model: as its forward is called.
        dtype: of statistics, for batch norms that have none.
        device: where these are made.
    """
    modules = list(model.modules())
    norms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    attributes = []
    for module in modules:
        held = vars(module)
        numbers = {k: v for k, v in held.items() if isinstance(v, int | float | torch.Tensor)}
        attributes.append((held, numbers))
    buffers = [
        (m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None
    ]
    bare = [m for m in norms if m.running_mean is None]  # which one sample is too few for
    for norm in norms:
        norm.training = False
    for norm in bare:
        zeros = torch.zeros(norm.num_features, dtype=dtype, device=device)
        norm.running_mean, norm.running_var = zeros, zeros + 1
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer.copy_(before)
        for norm in bare:
            norm.running_mean = norm.running_var = None
        for held, then in attributes:
            held.update(then)
