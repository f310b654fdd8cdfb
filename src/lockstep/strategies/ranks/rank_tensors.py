"""What the ranks of ``ddp`` make equal: gradients, summed in one flat tensor, and buffers that
follow rank 0's.

One all-reduce sums all gradients of a process, and what must be summed beside them.

::

    | gradient of parameter 0 | gradient of parameter 1 | ... | used 0 | used 1 | ... | numbers |

The numbers are how many ranks were asked to stop, total and count of the loss, and those of its
parts. ``used`` is 1 where this rank has a gradient: a parameter that no rank used must keep ``grad
= None`` (an optimizer with momentum or decay treats a zero otherwise), and one that only some ranks
used gets the sum of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.build import buffers_of
from lockstep.model.losses.loss import Number
from lockstep.model.modes import NORMS
from lockstep.model.snapshot import same


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
        self, parameters: list[nn.Parameter], numbers: int, sparse: Collection[int] = ()
    ) -> None:
        self._parameters = parameters
        self._numbers = numbers
        self._sparse = [i for i, p in enumerate(parameters) if id(p) in sparse]
        self._make_buffers()

    def _make_buffers(self) -> None:
        parameters = self._parameters
        rows = [len(parameters[i]) for i in self._sparse]
        extras = len(parameters) + sum(rows) + self._numbers
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, p in enumerate(parameters):
            groups.setdefault((p.dtype, p.device), []).append(i)

        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        beside: torch.Tensor | None = None
        for (dtype, device), members in groups.items():
            size = sum(parameters[i].numel() for i in members)
            rides = beside is None and dtype in (torch.float32, torch.float64)
            length = size + extras if rides else size
            buffer = torch.zeros(length, dtype=dtype, device=device)
            self._buffers.append(buffer)
            if rides:
                beside = buffer[size:]
            offset = 0
            for i in members:
                self._views[i] = _view_like(buffer, offset, parameters[i])
                offset += parameters[i].numel()

        if beside is None:
            beside = torch.zeros(extras, dtype=torch.float64, device=parameters[0].device)
            self._buffers.append(beside)
        self._used, *self._rows, self._sums = beside.split(  # type: ignore[no-untyped-call]
            [len(parameters), *rows, self._numbers]
        )
        self._holders = self._count_holders()

    def _count_holders(self) -> list[int]:
        """Count the tensors that have the memory of each buffer."""
        return [
            torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) for buffer in self._buffers
        ]

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
        grads = [p.grad for p in self._parameters]
        here = [grad is not None for grad in grads]
        self._fill(grads, here)
        for i, number in enumerate(numbers):
            self._sums[i] = number

        for buffer in self._buffers:
            world.all_reduce(buffer)

        used = here if all(here) else (self._used > 0).tolist()
        for p, view, anywhere in zip(self._parameters, self._views, used, strict=True):
            p.grad = view.detach() if anywhere else None
        for i, rows in zip(self._sparse, self._rows, strict=True):
            _make_sparse(self._parameters[i], rows)
        sums: Iterable[Number] = self._sums.tolist() if self._sums.is_cpu else self._sums.clone()
        return sums

    def _fill(self, grads: list[torch.Tensor | None], here: list[bool]) -> None:
        """Copy the gradients of this rank into the buffers, and note which there are."""
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

        for i, rows in zip(self._sparse, self._rows, strict=True):
            rows.zero_()
            grad = grads[i]
            if grad is None:
                continue
            if grad.is_sparse:
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
        indices, p.grad[indices[0]], p.shape, is_coalesced=True, check_invariants=False
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


Place = tuple[nn.Module, str]
"""A module, and the name of a buffer of it."""


class FollowedBuffers:
    """Buffers that change in training and act in it: all ranks follow rank 0, as with PyTorch's own
    DDP.

    BatchNorm's running statistics only act in evaluation, so they are shared then, and when a
    person puts a layer in evaluation mode. The others are found by looking which have changed on
    any rank, after steps 1, 2, 4, 8, ... and at each evaluation. Constants (masks, positions) are
    never sent. Values are compared, since a version counter misses what kernels write.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._norms = [m for m in model.modules() if isinstance(m, NORMS)]
        self._still: set[nn.Module] = set()  # norms in evaluation mode
        self._changing: list[Place] = []
        self._unchanged: dict[Place, torch.Tensor] = {}
        for module, name in buffers_of(model) if world.size > 1 else ():
            buffer = module._buffers[name]
            if buffer is not None and not isinstance(module, NORMS):
                self._unchanged[module, name] = buffer.clone()

    def follow(self) -> None:
        """Take rank 0's values of buffers that change, and of norms that were put in evaluation
        mode.
        """
        if self._world.size == 1:
            return
        before = self._still
        self._still = {norm for norm in self._norms if not norm.training}
        if self._still - before:
            self._world.meet("a change of the model (a batch norm is in evaluation mode now)")
            still = [norm for norm in self._norms if norm in self._still]
            take_first(self._world, [place for norm in still for place in buffers_of(norm)])
        take_first(self._world, self._changing)

    def look(self) -> None:
        """Find buffers that have changed; every rank calls this at the same time."""
        if not self._unchanged:
            return
        changed = []
        for (module, name), before in self._unchanged.items():
            changed.append(not _same(module._buffers[name], before))
        flags = torch.tensor(changed, dtype=torch.float32, device=self._world.device.torch)
        anywhere = self._world.all_reduce(flags).tolist()
        found = list(itertools.compress(self._unchanged, anywhere))
        for place in found:
            del self._unchanged[place]
        self._changing += found


def take_first(world: World, places: list[Place]) -> None:
    """Overwrite buffers with rank 0's, which may have got another shape."""
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    forms = world.gather_objects([_form(buffer) for buffer in mine])
    for (module, name), buffer, *theirs in zip(places, mine, *forms, strict=True):
        if buffer is None or None in theirs:
            continue
        # All ranks know the forms of all, so they take the same way.
        is_plain = buffer.dtype in _SENT and buffer.is_contiguous()
        if is_plain and len(set(theirs)) == 1:
            world.broadcast(buffer)
            continue
        first = world.broadcast_object(buffer.cpu())
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module._buffers[name] = first.to(buffer.device)


_SENT = (torch.float32, torch.float64, torch.int64)
"""Formats that are broadcast as they are."""


def _form(buffer: torch.Tensor | None) -> tuple[tuple[int, ...], str, bool] | None:
    if buffer is None:
        return None
    return tuple(buffer.shape), str(buffer.dtype), buffer.is_contiguous()


def _same(buffer: torch.Tensor | None, before: torch.Tensor) -> bool:
    return buffer is not None and same(buffer, before)
