"""What the ranks of ``ddp`` make equal: gradients, summed in one flat tensor, and buffers that
follow rank 0.

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


class FlatGradients:
    """One flat buffer per number format of the parameters.

    The sums beside the gradients ride in the first buffer where its format can hold a count (fp32,
    fp64), else in a buffer of their own.

    Args:
        parameters: those that are trained, in an order that is the same on all ranks.
        sparse: the ids of those whose gradients are sparse; they are summed dense, and are sparse
            again afterwards, with each row that any rank had.
        numbers: how many are summed beside the gradients.
    """

    def __init__(
        self, parameters: list[nn.Parameter], numbers: int, sparse: Collection[int] = ()
    ) -> None:
        self._parameters, self._numbers = parameters, numbers
        self._sparse = [i for i, p in enumerate(parameters) if id(p) in sparse]
        self._make_buffers()

    def _make_buffers(self) -> None:
        parameters, numbers = self._parameters, self._numbers
        rows = [len(parameters[i]) for i in self._sparse]
        extras = len(parameters) + sum(rows) + numbers
        formats = dict.fromkeys((str(p.dtype), str(p.device)) for p in parameters)
        self._buffers: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        rode = False
        for key in formats:
            mine = [i for i, p in enumerate(parameters) if (str(p.dtype), str(p.device)) == key]
            first = parameters[mine[0]]
            exact = first.dtype in (torch.float32, torch.float64)
            rides = exact and not rode
            size = sum(parameters[i].numel() for i in mine)
            buffer = torch.zeros(
                size + (extras if rides else 0), dtype=first.dtype, device=first.device
            )
            offsets = itertools.accumulate((parameters[i].numel() for i in mine), initial=0)
            for i, offset in zip(mine, offsets, strict=False):
                self._views[i] = _view_like(buffer, offset, parameters[i])
            if rides:
                self._used, self._sums, rode = buffer[size:-numbers], buffer[-numbers:], True
            self._buffers.append(buffer)
        if not rode:
            own = torch.zeros(extras, dtype=torch.float64, device=parameters[0].device)
            self._used, self._sums = own[:-numbers], own[-numbers:]
            self._buffers.append(own)
        self._used, *self._rows = torch.split(self._used, [len(parameters), *rows])
        self._holders = self._count_holders()

    def _count_holders(self) -> list[int]:
        """How many tensors have the memory of each buffer."""
        return [
            torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) for buffer in self._buffers
        ]

    @property
    def bytes(self) -> int:
        """The size of all buffers together."""
        return sum(b.nbytes for b in self._buffers)

    def sum_over(self, world: World, numbers: Sequence[Number]) -> Iterable[Number]:
        """Sum every ``parameter.grad``, and the numbers beside them, over the ranks.

        Afterwards each ``grad`` has its memory in the flat buffer, or is None where no rank had
        one. Where somebody has kept one of an earlier call, the buffers are left to them, and
        others made.

        Returns:
            The sums of the numbers: numbers on CPU, scalars elsewhere.
        """
        if self._count_holders() != self._holders:
            self._make_buffers()
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
        for i, rows in zip(self._sparse, self._rows, strict=True):
            rows.zero_()
            if (grad := grads[i]) is not None:
                rows[grad._indices()[0].to(rows.device) if grad.is_sparse else slice(None)] = 1.0
        for i, number in enumerate(numbers):
            self._sums[i] = number
        for buffer in self._buffers:
            world.all_reduce(buffer)
        used = here if all(here) else (self._used > 0).tolist()
        for p, view, anywhere in zip(self._parameters, self._views, used, strict=True):
            p.grad = view.detach() if anywhere else None
        for i, rows in zip(self._sparse, self._rows, strict=True):
            p = self._parameters[i]
            if (
                p.grad is not None
            ):  # (`to_sparse` would leave out rows whose gradients are 0, which SparseAdam moves)
                of = rows.nonzero().T.to(p.device)
                p.grad = torch.sparse_coo_tensor(
                    of, p.grad[of[0]], p.shape, is_coalesced=True, check_invariants=False
                )
        sums: Iterable[Number] = self._sums.tolist() if self._sums.is_cpu else self._sums.clone()
        return sums


def _view_like(buffer: torch.Tensor, offset: int, parameter: nn.Parameter) -> torch.Tensor:
    """A piece of the buffer in the parameter's shape, and in its memory layout.

    The layout matters: PyTorch's fused optimizers on CPU go through parameter and gradient by
    address, and silently take the wrong elements where the layouts differ (seen with torch 2.13,
    ``channels_last``).
    """
    if (
        torch.empty_like(parameter).stride() == parameter.stride()
    ):  # dense, so its strides fit in numel elements
        return torch.as_strided(buffer, parameter.shape, parameter.stride(), offset)
    return buffer[offset : offset + parameter.numel()].view(parameter.shape)


class FollowedBuffers:
    """Buffers that change in training and act in it: all ranks follow rank 0, as with PyTorch's own
    DDP.

    BatchNorm's running statistics only act in evaluation, so they are shared then, and when a
    person gives a layer that mode. The others are found by looking, after steps 1, 2, 4, 8, ... and
    at each evaluation, which have changed on any rank; constants (masks, positions) are never sent.
    Values are compared, since a version counter misses what kernels write.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._unchanged: dict[tuple[nn.Module, str], torch.Tensor] = {}
        if world.size > 1:
            self._unchanged = {
                (module, name): buffer.clone()
                for module, name in buffers_of(model)
                if (buffer := module._buffers[name]) is not None and not isinstance(module, NORMS)
            }
        self._changing: list[tuple[nn.Module, str]] = []
        self._norms = [m for m in model.modules() if isinstance(m, NORMS)]
        self._still: set[nn.Module] = set()

    def follow(self) -> None:
        """Take rank 0's values of those that are known to change, and of norms that are in
        evaluation mode now.
        """
        if self._world.size == 1:
            return
        before, self._still = self._still, {norm for norm in self._norms if not norm.training}
        if self._still - before:
            self._world.meet("a change of the model (a batch norm is in evaluation mode now)")
            take_first(
                self._world,
                [
                    place
                    for norm in self._norms
                    if norm in self._still
                    for place in buffers_of(norm)
                ],
            )
        take_first(self._world, self._changing)

    def look(self) -> None:
        """Find those that have changed; every rank calls this at the same time."""
        if not self._unchanged:
            return
        changed = [
            not _same(module._buffers[name], before)
            for (module, name), before in self._unchanged.items()
        ]
        flags = torch.tensor(changed, dtype=torch.float32, device=self._world.device.torch)
        anywhere = self._world.all_reduce(flags).tolist()
        found = [place for place, times in zip(self._unchanged, anywhere, strict=True) if times]
        for place in found:
            del self._unchanged[place]
        self._changing += found


def take_first(world: World, places: list[tuple[nn.Module, str]]) -> None:
    """Overwrite these buffers with rank 0's, which may have come to be of another shape."""
    if not places:
        return
    mine = [module._buffers[name] for module, name in places]
    forms = world.gather_objects(
        [None if b is None else (tuple(b.shape), str(b.dtype), b.is_contiguous()) for b in mine]
    )
    for (module, name), buffer, *theirs in zip(places, mine, *forms, strict=True):
        if buffer is None or None in theirs:
            continue
        # Decided by what all ranks know, so that all of them take the same way.
        plain = (
            buffer.dtype in (torch.float32, torch.float64, torch.int64) and buffer.is_contiguous()
        )
        if plain and len(set(theirs)) == 1:
            world.broadcast(buffer)
            continue
        first = world.broadcast_object(buffer.cpu())
        if first.shape == buffer.shape and not buffer.is_sparse:
            buffer.copy_(first)
        else:
            module._buffers[name] = first.to(buffer.device)


def _same(buffer: torch.Tensor | None, before: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == before.shape and torch.equal(buffer, before)
