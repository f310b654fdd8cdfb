"""Reducers sum the gradients of ranks: in one flat all-reduce after backward, or in buckets while
backward runs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from lockstep.data import Part
from lockstep.errors import StrategyError
from lockstep.launch.world import World
from lockstep.model.losses.loss import Loss, Number
from lockstep.model.optimizers.fused import sparse_parameters
from lockstep.strategies.steps.weighting import as_tensor, scalar

_COUNTS = (torch.float32, torch.float64)
"""Formats that can hold a count."""

_SETTINGS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch 2.13 gave it a new name.
_FORWARD_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers"
)


class Reducer(Protocol):
    """Sums gradients over the ranks, and numbers beside them."""

    def sum(self, parameters: list[nn.Parameter], numbers: list[Number]) -> Iterable[Number]:
        """Leave the sum over the ranks in every ``parameter.grad``; every rank calls this.

        Args:
            parameters: those that are trained, in the same order on all ranks.
            numbers: what is summed beside them.

        Returns:
            The sums of the numbers; on an accelerator they are scalar tensors.
        """


class FlatReducer:
    """Sums gradients after backward, in one flat all-reduce for each number format of parameters.

    ::

        | gradient of parameter 0 | gradient of parameter 1 | ... | used 0 | used 1 | ... | numbers |

    ``used`` is 1 where this rank has a gradient: a parameter that no rank used must keep ``grad =
    None`` (an optimizer with momentum or decay treats a zero otherwise), and one that only some
    ranks used gets the sum of theirs. ``used`` and the numbers are beside the gradients of a format
    that can hold a count, or alone where there is none.

    Gradients of embeddings with ``sparse=True`` are gathered from all ranks, each with its rows, and
    stay sparse.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._sparse = sparse_parameters(model)

    def sum(self, parameters: list[nn.Parameter], numbers: list[Number]) -> Iterable[Number]:
        """Leave the sum over the ranks in every ``parameter.grad``."""
        parameters = self._without_sparse(parameters)
        device = self._world.device.torch
        here = [p.grad is not None for p in parameters]
        beside = as_tensor(numbers, device)
        used = scalar(1.0, beside.dtype, device).expand(len(here))
        if not all(here):
            used = torch.tensor(here).to(beside)
        beside = torch.cat([used, beside])

        by_format: dict[Any, list[int]] = defaultdict(list)
        for number, p in enumerate(parameters):
            by_format[p.dtype, p.device].append(number)
        summed: dict[int, torch.Tensor] = {}
        is_summed = False
        for (dtype, place), members in by_format.items():
            pieces = [_dense(parameters[number]) for number in members]
            rides = not is_summed and dtype in _COUNTS
            if rides:
                pieces.append(beside.to(place, dtype))
            flat = self._world.all_reduce(_flatten_dense_tensors(pieces))  # type: ignore[no-untyped-call]
            pieces = _unflatten_dense_tensors(flat, pieces)  # type: ignore[no-untyped-call]
            if rides:
                beside = pieces[-1]
                is_summed = True
            summed.update(zip(members, pieces, strict=False))
        if not is_summed:
            beside = self._world.all_reduce(beside)

        if not all(here):
            here = (beside[: len(here)] > 0).tolist()
        for number, p in enumerate(parameters):
            p.grad = _laid_out(summed[number], p) if here[number] else None
        sums = beside[len(here) :]
        return sums.tolist() if sums.is_cpu else sums

    def _without_sparse(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Sum sparse gradients, and return the other parameters."""
        others = []
        for p in parameters:
            if id(p) in self._sparse:
                self._sum_rows(p)
            else:
                others.append(p)
        return others

    def _sum_rows(self, p: nn.Parameter) -> None:
        """Sum a sparse gradient over the ranks; rows that any of them has stay, also with zeros.

        A rank's gradient is dense where the parameter is used elsewhere in its model, too.
        """
        mine = p.grad
        if mine is not None:
            mine = (mine.coalesce() if mine.is_sparse else mine).cpu()
        total: torch.Tensor | None = None
        for grad in self._world.gather_objects(mine):
            if grad is None:
                continue
            if total is None:
                total = grad
            elif grad.is_sparse == total.is_sparse:
                total = total + grad
            else:
                total = total.to_dense() + grad.to_dense()
        if total is not None and total.is_sparse:
            total = total.coalesce()
        p.grad = None if total is None else total.to(p.device)


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient; zeros where there is none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return grad


def _laid_out(grad: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a summed gradient in the parameter's memory layout.

    PyTorch's fused optimizers on CPU go through parameter and gradient by address, and silently
    take the wrong elements where the layouts differ (torch 2.13, ``channels_last``).

    Args:
        grad: dense and contiguous.
        parameter: the gradient's.
    """
    if not grad.numel():
        return torch.empty_like(parameter)  # PyTorch gives vectors for tensors without elements
    if parameter.is_contiguous():
        return grad
    return torch.empty_like(parameter).copy_(grad)


class OverlappedReducer:
    """Sums gradients while backward runs, by PyTorch's DistributedDataParallel.

    It always looks for unused parameters. Without that, a parameter that is unused in the last
    update gives wrong numbers and no error, and with large models the search costs nothing that can
    be measured.

    Args:
        model: this rank's replica.
        world: the ranks.
        forward_loss: computes the loss of a part.
        bucket_mb: the size of a bucket, in MiB.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        forward_loss: Callable[[nn.Module, Part], Loss],
        bucket_mb: float,
    ) -> None:
        self._world = world
        self._with_loss = _WithLoss(model, forward_loss)
        self._bucket_mb = bucket_mb
        self._ddp: DistributedDataParallel | None = None
        self._has_warned = False

    def begin(self, *, keeps_gradients: bool) -> None:
        """Begin an update.

        Args:
            keeps_gradients: a person's code may keep them, so they are no views of buckets, which
                the next backward writes.
        """
        if self._ddp is not None:
            return
        device = self._world.device
        self._ddp = DistributedDataParallel(
            self._with_loss,
            device_ids=None if device.is_slot else [device.index],
            init_sync=False,  # build_model has compared the ranks
            find_unused_parameters=True,
            gradient_as_bucket_view=not keeps_gradients,
            bucket_cap_mb=self._bucket_mb,
            **{_FORWARD_BUFFERS: False},  # type: ignore[arg-type]
        )
        # PyTorch's own would divide by the number of ranks.
        self._ddp.register_comm_hook(None, lambda _, bucket: _sum_over_ranks(bucket.buffer()))

    def drop(self) -> None:
        """Forget PyTorch's reducer where an update is summed in another way.

        It goes on marking the parameters that this update used, and fails in the next one that
        doesn't use them ("gradient which is undefined, but still allreduced", torch 2.13).
        """
        self._ddp = None

    def part(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Compute a part of an update in this context; only the last one's backward sums."""
        assert self._ddp is not None
        return nullcontext() if is_last else self._ddp.no_sync()

    def forward(self, part: Part, *, is_last: bool) -> Loss:
        """Compute the loss of a part."""
        assert self._ddp is not None
        # PyTorch's reducer warns once, in the first forward whose backward is summed.
        warns = is_last and not self._has_warned
        self._has_warned |= is_last
        with _without_line("find_unused_parameters=True was") if warns else nullcontext():
            total, count = self._ddp(part)
        return Loss(total, count, self._with_loss.parts)

    def sum(self, parameters: list[nn.Parameter], numbers: list[Number]) -> Iterable[Number]:
        """Sum the numbers; backward has summed the gradients."""
        place = self._world.device
        sums = self._world.all_reduce(as_tensor(numbers, place.torch))
        return sums.tolist() if place.is_slot else sums


class _WithLoss(nn.Module):
    """Model and loss as one module.

    DistributedDataParallel looks for used parameters from the outputs of its module. From a model's
    outputs it would also find the parameters of a head that the loss ignores, and wait for them. It
    would find none behind outputs of a person's own class.
    """

    def __init__(self, model: nn.Module, forward_loss: Callable[[nn.Module, Part], Loss]) -> None:
        super().__init__()
        self.model = model
        self._forward_loss = forward_loss

    def forward(self, part: Part) -> tuple[torch.Tensor, Number]:
        loss = self._forward_loss(self.model, part)
        self.parts = loss.parts
        return loss.total, loss.count


def _sum_over_ranks(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Begin to sum a bucket of gradients over all ranks."""
    work = torch.distributed.all_reduce(bucket, async_op=True)
    assert work is not None
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return summed


@contextlib.contextmanager
def _without_line(words: str) -> Iterator[None]:
    """Leave out lines with these words of what is written to standard error in this context.

    PyTorch's reducer writes from C++, past Python's warnings, that no parameter was unused.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, contextlib.ExitStack() as stack:
        before = os.dup(2)
        stack.callback(os.close, before)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            kept.seek(0)
            for line in kept:
                if words.encode() not in line:
                    os.write(2, line)


def explain_reducer(error: Exception) -> None:
    """Raise an error that explains one of PyTorch's reducer.

    Raises:
        StrategyError: the reducer can't follow reentrant activation checkpointing.
    """
    if "mark a variable ready only once" in str(error):
        raise StrategyError(
            "ddp: a checkpoint of activations in the model is reentrant, and gradients "
            "can't be summed while such a backward runs: call torch.utils.checkpoint with "
            "use_reentrant=False, or take DDP(reduce='flat')"
        ) from error
