"""The gradients of the ranks of ``ddp``, summed in one flat tensor.

One all-reduce sums all gradients of a process, and what must be summed beside them.

::

    | gradient of parameter 0 | gradient of parameter 1 | ... | used 0 | used 1 | ... | numbers |

The numbers are how many ranks were asked to stop, total and count of the loss, and those of its
parts. ``used`` is 1 where this rank has a gradient: a parameter that no rank used must keep ``grad
= None`` (an optimizer with momentum or decay treats a zero otherwise), and one that only some ranks
used gets the sum of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.losses.loss import Number

_COUNTS = (torch.float32, torch.float64)
"""Formats that can hold a count."""


class FlatGradients:
    """One flat buffer per number format of the parameters.

    The sums beside the gradients ride in the first buffer whose format can hold a count (fp32,
    fp64), else in a buffer of their own.

    Args:
        parameters: those that are trained, in an order that is the same on all ranks.
        numbers: how many numbers are summed beside the gradients.
        sparse: the ids of parameters whose gradients are sparse. They are summed dense, and are
            sparse again afterwards, with each row that any rank had.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        numbers: int,
        sparse: Collection[int] = (),
    ) -> None:
        self._parameters = parameters
        self._numbers = numbers
        self._sparse = [i for i, p in enumerate(parameters) if id(p) in sparse]
        self._make_buffers()

    def _make_buffers(self) -> None:
        """Make the buffers, and views of them in the parameters' shapes."""
        by_format: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for i, p in enumerate(self._parameters):
            by_format[p.dtype, p.device].append(i)
        can_count = [key for key in by_format if key[0] in _COUNTS]
        if not can_count:
            can_count = [(torch.float64, self._parameters[0].device)]
        members_beside = by_format[can_count[0]]

        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._parameters)
        rows = [len(self._parameters[i]) for i in self._sparse]
        sizes = [len(self._parameters), *rows, self._numbers]
        self._buffers: list[torch.Tensor] = []
        for (dtype, device), members in by_format.items():
            size = sum(self._parameters[i].numel() for i in members)
            if members is members_beside:
                size += sum(sizes)
            buffer = torch.zeros(size, dtype=dtype, device=device)
            self._buffers.append(buffer)
            end = self._view(buffer, members)
            if members is members_beside:
                self._used, *self._rows, self._sums = torch.split(buffer[end:], sizes)
        self._holders = self._count_holders()

    def _view(self, buffer: torch.Tensor, members: list[int]) -> int:
        """Make the views of a buffer for some parameters, and return where the last one ends."""
        offset = 0
        for i in members:
            p = self._parameters[i]
            self._views[i] = _view_like(buffer, offset, p)
            offset += p.numel()
        return offset

    def _count_holders(self) -> list[int]:
        """Count the tensors that have the memory of each buffer."""
        storages = [buffer.untyped_storage() for buffer in self._buffers]
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

    def sum_over(self, world: World, numbers: Sequence[Number]) -> Iterable[Number]:
        """Sum every ``parameter.grad``, and the numbers beside them, over the ranks.

        Afterwards each ``grad`` has its memory in the flat buffer, or is None where no rank had
        one. If somebody has kept a gradient of an earlier call, the buffers are left to them, and
        others made.

        Returns:
            The sums of the numbers: numbers on CPU, scalars elsewhere.
        """
        if self._count_holders() != self._holders:
            self._make_buffers()
        here = [p.grad is not None for p in self._parameters]
        is_complete = all(here)
        if is_complete:
            self._used.fill_(1.0)
        else:
            for buffer in self._buffers:
                buffer.zero_()
            self._used.copy_(torch.tensor(here))
        self._fill()
        for i, number in enumerate(numbers):
            self._sums[i] = number

        for buffer in self._buffers:
            world.all_reduce(buffer)

        used = here
        if not is_complete:
            used = (self._used > 0).tolist()
        for p, view, is_used in zip(self._parameters, self._views, used, strict=True):
            p.grad = view.detach() if is_used else None
        for i, rows in zip(self._sparse, self._rows, strict=True):
            _make_sparse(self._parameters[i], rows)
        if self._sums.is_cpu:
            return self._sums.tolist()
        return self._sums.clone()

    def _fill(self) -> None:
        """Copy the gradients of this rank into the buffers."""
        views = []
        grads = []
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is not None:
                views.append(view)
                grads.append(p.grad.to_dense() if p.grad.is_sparse else p.grad)
        if grads:
            torch._foreach_copy_(views, grads)
        for i, rows in zip(self._sparse, self._rows, strict=True):
            _note_rows(self._parameters[i].grad, rows)


def _note_rows(grad: torch.Tensor | None, rows: torch.Tensor) -> None:
    """Set the elements of ``rows`` to 1 where a gradient has a row, else to 0."""
    if grad is None:
        rows.zero_()
    elif grad.is_sparse:
        rows.zero_()
        rows[grad._indices()[0].to(rows.device)] = 1.0
    else:
        rows.fill_(1.0)


def _make_sparse(p: nn.Parameter, rows: torch.Tensor) -> None:
    """Make a gradient sparse again, of the rows that any rank had.

    ``to_sparse`` would leave out rows whose gradients are 0, which SparseAdam moves.
    """
    if p.grad is None:
        return
    indices = rows.nonzero().T.to(p.device)
    p.grad = torch.sparse_coo_tensor(
        indices,
        p.grad[indices[0]],
        p.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _view_like(buffer: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """Return a piece of the buffer in the parameter's shape and memory layout.

    PyTorch's fused optimizers on CPU go through parameter and gradient by address, and silently
    take the wrong elements where the layouts differ (torch 2.13, ``channels_last``).
    """
    is_dense = torch.empty_like(parameter).stride() == parameter.stride()
    if is_dense:  # its strides fit in numel elements
        return torch.as_strided(buffer, parameter.shape, parameter.stride(), offset)
    return buffer[offset : offset + parameter.numel()].view(parameter.shape)
