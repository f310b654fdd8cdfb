"""The replicas of ``dp``, their threads, and the sum of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.devices import Device
from lockstep.strategies.batch_losses.whole_batch import WholeBatch
from lockstep.strategies.replicas.copied_model import copied_model
from lockstep.strategies.replicas.replica import Replica
from lockstep.tensors.placing import moved_in_buckets
from lockstep.threads import recompute
from lockstep.threads.random_streams import stream
from lockstep.threads.replica_collectives import ThreadExchange
from lockstep.threads.thread_pool import borrowed, hand_back, run

T = TypeVar("T")


class Replicas:
    """A model on the first device, and a copy of it on each other device, each with a thread.

    On CPU devices the copies share the storage of the model's parameters, and have gradients of
    their own. On accelerators they have parameters of their own, which are copied anew before each
    update.

    Args:
        model: the model, which is on the first device.
        devices: where the replicas are.
        waiting: in what the replicas wait for one another; None is left out.

    Attributes:
        all: the replicas.
        share_storage: whether they share the storage of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        waiting: Sequence[ThreadExchange | WholeBatch | None],
    ) -> None:
        shares = all(device.is_slot for device in devices)
        self.share_storage = shares
        self.all = [Replica(model, devices[0], shares_storage=shares)]
        for device in devices[1:]:
            copied = copied_model(model, device, shares=shares)
            replica = Replica(copied, device, shares_storage=shares)
            self.all.append(replica)
        self._devices = devices
        hand_back([borrowed(device) for device in devices])  # threads are there before the first
        self._on_abort = [one.abort for one in waiting if one is not None]
        self._home = devices[0].torch
        self._first, *self._others = self.all
        numbers = range(len(self._first.parameters))
        by_size = sorted(numbers, key=lambda i: self._first.parameters[i].numel())
        self._parts = [by_size[i :: len(devices)] for i in range(len(devices))]
        recompute.install()

    def run(self, function: Callable[[int], T], numbers: Iterable[int]) -> list[T]:
        """Call a function with the number of each of these replicas, in its thread.

        Random numbers come from the stream of the replica meanwhile.

        Args:
            function: is called in all threads at the same time.
            numbers: of the replicas; the others sit out.

        Returns:
            What it returned, in order.
        """

        def call(number: int) -> T:
            with stream(self.all[number].generator):
                return function(number)

        work: list[Callable[[], T] | None] = [None] * len(self.all)
        for number in numbers:
            work[number] = functools.partial(call, number)
        return [
            result
            for result in run(self._devices, work, on_abort=self._on_abort)
            if result is not None
        ]

    def draw_from_shared_generator(self) -> None:
        """Give up random streams on CPU devices: compiled code can't draw from them."""
        for replica in self.all:
            replica.generator = None

    # ---- what the copies take from the model -----------------------------------------------------

    def refuse_changes(self) -> None:
        """Refuse a model that has other modules or parameters than it had, or other hooks than a
        copy of it.

        Raises:
            StrategyError: the model has changed.
        """
        hooks = self._first.hooks()
        if self._first.has_changed() or any(other.hooks() != hooks for other in self._others):
            raise StrategyError(
                "dp: modules, parameters or hooks of the model have changed since its replicas "
                "were made: call lockstep.parallelize again, or take ddp"
            )

    def follow(self, *, statistics: bool) -> None:
        """Make the copies equal to the model.

        Args:
            statistics: whether they get its running statistics, which don't act in an update.
        """
        for replica in self._others:
            replica.follow(self._first, statistics=statistics)

    # ---- gradients -------------------------------------------------------------------------------

    def add_gradients(self) -> None:
        """Add the gradients of the copies, in order, to those of the model.

        On CPU devices each thread adds those of some of the parameters.
        """
        if not self._others:
            return
        if self.share_storage:
            run(self._devices, [functools.partial(self._add, part) for part in self._parts])
        else:
            self._add(range(len(self._first.parameters)))

    def _add(self, numbers: Sequence[int]) -> None:
        """Add the gradients of the copies for the parameters with these numbers."""
        for replica in self._others:
            parameters = []
            grads = []
            for i in numbers:
                grad = replica.parameters[i].grad
                if grad is not None:
                    parameters.append(self._first.parameters[i])
                    grads.append(grad)
            if self.share_storage:
                _add(parameters, grads)
            else:
                self._add_moved(parameters, grads)

    def _add_moved(self, parameters: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
        """Add gradients of another device to those that parameters have."""
        by_grad = dict(zip(grads, parameters, strict=True))
        for some, copies in moved_in_buckets(grads, self._home):
            mine = [by_grad[grad] for grad in some]
            _add(mine, copies)


def _add(parameters: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    """Add gradients to those that parameters have.

    A sparse gradient is added to a new tensor, since the sum may have other rows.

    Args:
        parameters: some of the model's.
        grads: a gradient for each of them, on the device of the parameter.
    """
    sums: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    for p, grad in zip(parameters, grads, strict=True):
        if p.grad is None:
            p.grad = grad
        elif grad.is_sparse:
            p.grad = p.grad + grad
        else:
            sums.append(p.grad)
            added.append(grad)
    if sums:
        torch._foreach_add_(sums, added)
