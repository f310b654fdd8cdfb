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

Format = tuple[torch.dtype, torch.device]
"""The number format of parameters, and their device."""

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
        self._by_format: dict[Format, list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            self._by_format[p.dtype, p.device].append(p)
        self._beside = self._format_beside()

        self._parameters: list[nn.Parameter] = []
        for members in self._by_format.values():
            self._parameters += members
        self._sparse = [p for p in self._parameters if id(p) in sparse]
        rows = map(len, self._sparse)
        self._sizes_beside = [len(parameters), *rows, numbers]
        self._make_buffers()

    def _format_beside(self) -> Format:
        """Choose the buffer of the sums beside the gradients, and add one where none can count."""
        for key in self._by_format:
            dtype, _ = key
            if dtype in _COUNTS:
                return key
        _, device = next(iter(self._by_format))
        key = torch.float64, device
        self._by_format[key] = []
        return key

    def _make_buffers(self) -> None:
        """Make a buffer for each format, and views of it in the parameters' shapes."""
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        for key, members in self._by_format.items():
            self._make_buffer(key, members)
        self._holders = self._count_holders()

    def _make_buffer(self, key: Format, members: list[nn.Parameter]) -> None:
        """Make the buffer of some parameters, and of the sums beside them where it has those."""
        sizes = [p.numel() for p in members]
        if key == self._beside:
            sizes += self._sizes_beside
        dtype, device = key
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._buffers.append(buffer)

        pieces = torch.split(buffer, sizes)
        for p, piece in zip(members, pieces, strict=False):
            view = _view_like(piece, p)
            self._views.append(view)
        if key == self._beside:
            self._used, *self._rows, self._sums = pieces[len(members) :]

    def _count_holders(self) -> list[int]:
        """Count the tensors that have the memory of each buffer."""
        counts = []
        for buffer in self._buffers:
            storage = buffer.untyped_storage()
            counts.append(torch._C._storage_Use_Count(storage._cdata))
        return counts

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
        used = [p.grad is not None for p in self._parameters]
        is_complete = all(used)
        if is_complete:
            self._used.fill_(1.0)
        else:
            for buffer in self._buffers:
                buffer.zero_()
            self._used.copy_(torch.tensor(used))
        self._fill()
        for i, number in enumerate(numbers):
            self._sums[i] = number

        for buffer in self._buffers:
            world.all_reduce(buffer)

        if not is_complete:
            used = (self._used > 0).tolist()
        self._show(used)
        if self._sums.is_cpu:
            return self._sums.tolist()
        return self._sums.clone()

    def _fill(self) -> None:
        """Copy the gradients of this rank into the buffers."""
        views = []
        grads = []
        for p, view in zip(self._parameters, self._views, strict=True):
            grad = p.grad
            if grad is None:
                continue
            if grad.is_sparse:
                grad = grad.to_dense()
            views.append(view)
            grads.append(grad)
        if grads:
            torch._foreach_copy_(views, grads)
        for p, rows in zip(self._sparse, self._rows, strict=True):
            _note_rows(p.grad, rows)

    def _show(self, used: list[bool]) -> None:
        """Give the parameters that any rank used their gradients in the buffers."""
        for p, view, is_used in zip(self._parameters, self._views, used, strict=True):
            if is_used:
                p.grad = view.detach()
            else:
                p.grad = None
        for p, rows in zip(self._sparse, self._rows, strict=True):
            _make_sparse(p, rows)


def _note_rows(grad: torch.Tensor | None, rows: torch.Tensor) -> None:
    """Set the elements of ``rows`` to 1 where a gradient has a row, else to 0."""
    if grad is None:
        rows.zero_()
    elif grad.is_sparse:
        rows.zero_()
        indices = grad._indices()[0]
        rows[indices.to(rows.device)] = 1.0
    else:
        rows.fill_(1.0)


def _make_sparse(p: nn.Parameter, rows: torch.Tensor) -> None:
    """Make a gradient sparse again, of the rows that any rank had.

    ``to_sparse`` would leave out rows whose gradients are 0, which SparseAdam moves.
    """
    if p.grad is None:
        return
    indices = rows.nonzero().T.to(p.device)
    values = p.grad[indices[0]]
    p.grad = torch.sparse_coo_tensor(
        indices,
        values,
        p.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _view_like(piece: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a piece of the buffer in the parameter's shape and memory layout.

    PyTorch's fused optimizers on CPU go through parameter and gradient by address, and silently
    take the wrong elements where the layouts differ (torch 2.13, ``channels_last``).
    """
    shape = parameter.shape
    strides = parameter.stride()
    is_dense = torch.empty_like(parameter).stride() == strides
    if is_dense:  # its strides fit in numel elements
        return torch.as_strided(piece, shape, strides)
    return piece.view(shape)
