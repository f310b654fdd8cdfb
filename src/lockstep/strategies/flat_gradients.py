"""All gradients of a process in one flat tensor, so that one all-reduce sums them, and what must be summed beside them.

::

    | gradient of parameter 0 | gradient of parameter 1 | ... | used 0 | used 1 | ... | total | count | asked |

``asked`` is how many ranks were asked to stop.
``used`` is 1 where this rank has a gradient: a parameter that no rank used must keep ``grad = None`` (an optimizer with
momentum or decay treats a zero otherwise), and one that only some ranks used gets the sum of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.loss import Number


class FlatGradients:
    """One flat buffer per number format of the parameters.

    The sums beside the gradients ride in the first buffer where its format can hold a count (fp32, fp64), else in a
    buffer of their own.

    Args:
        parameters: those that are trained, in an order that is the same on all ranks.
        sparse: the ids of those whose gradients are sparse; they are summed dense, and are sparse again afterwards.
    """

    def __init__(self, parameters: list[nn.Parameter], sparse: Collection[int] = ()) -> None:
        self._parameters = parameters
        self._sparse = [i for i, p in enumerate(parameters) if id(p) in sparse]
        extras = len(parameters) + 3
        formats = sorted({(str(p.dtype), str(p.device)) for p in parameters})
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        for key in formats:
            mine = [i for i, p in enumerate(parameters) if (str(p.dtype), str(p.device)) == key]
            first = parameters[mine[0]]
            exact = first.dtype in (torch.float32, torch.float64)
            rides = exact and not hasattr(self, "_used")
            size = sum(parameters[i].numel() for i in mine)
            buffer = torch.zeros(size + (extras if rides else 0), dtype=first.dtype, device=first.device)
            offsets = itertools.accumulate((parameters[i].numel() for i in mine), initial=0)
            for i, offset in zip(mine, offsets, strict=False):
                self._views[i] = _view_like(buffer, offset, parameters[i])
            if rides:
                self._used, self._sums = buffer[size:-3], buffer[-3:]
            self._buffers.append(buffer)
        if not hasattr(self, "_used"):
            own = torch.zeros(extras, dtype=torch.float64, device=parameters[0].device)
            self._used, self._sums = own[:-3], own[-3:]
            self._buffers.append(own)

    @property
    def bytes(self) -> int:
        """The size of all buffers together."""
        return sum(b.numel() * b.element_size() for b in self._buffers)

    def sum_over(self, world: World, total: Number, count: Number) -> tuple[Number, Number, Number]:
        """Sum every ``parameter.grad``, total, count, and who was asked to stop, over the ranks.

        Afterwards each ``grad`` is a view of the flat buffer, or None where no rank had one.

        Returns:
            Total, count, and how many were asked: numbers on CPU, scalars elsewhere.
        """
        grads = [p.grad for p in self._parameters]
        here = [grad is not None for grad in grads]
        mine = [grad.to_dense() if grad.is_sparse else grad for grad in grads if grad is not None]
        if all(here):
            torch._foreach_copy_(self._views, mine)
            self._used.fill_(1.0)
        else:
            for buffer in self._buffers:
                buffer.zero_()
            if mine:
                torch._foreach_copy_(list(itertools.compress(self._views, here)), mine)
            self._used.copy_(torch.tensor(here, dtype=self._used.dtype))
        self._sums[0] = total
        self._sums[1] = count
        self._sums[2] = world.asked_to_stop()
        for buffer in self._buffers:
            world.all_reduce(buffer)
        used = here if all(here) else (self._used > 0).tolist()
        for p, view, anywhere in zip(self._parameters, self._views, used, strict=True):
            p.grad = view if anywhere else None
        for i in self._sparse:
            p = self._parameters[i]
            p.grad = None if p.grad is None else p.grad.to_sparse(1)
        if self._sums.is_cpu:
            total, count, asked = self._sums.tolist()
        else:
            total, count, asked = self._sums.clone()
        return total, count, asked


def _view_like(buffer: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """A piece of the buffer in the parameter's shape, and in its memory layout.

    The layout matters: PyTorch's fused optimizers on CPU go through parameter and gradient by address, and silently
    take the wrong elements where the layouts differ (seen with torch 2.13, ``channels_last``).
    """
    if torch.empty_like(parameter).stride() == parameter.stride():  # dense, so its strides fit in numel elements
        return torch.as_strided(buffer, parameter.shape, parameter.stride(), offset)
    return buffer[offset : offset + parameter.numel()].view(parameter.shape)
