"""Total: shares worked through on their devices, as one node of the caller's graph.

::

    forward    replicate the generator ──▶ every share in the thread of its device ──▶ add up totals, counts, gradients
    backward   the gradients that forward found, times the gradient of the total

Gradients of weights are added up on the device of the generator as soon as they are there, by all slots together, so
that one set of them is kept until backward, and none made anew there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.model.torch_losses import Count
from lockstep.parallel import target_devices
from lockstep.parallel.loss.loss_chunks import Share
from lockstep.parallel.replicate import replicate
from lockstep.tensors import pytree
from lockstep.threads import random_streams
from lockstep.threads.thread_pool import Team, borrowed

T = TypeVar("T")


def total_of(shares: list[Share], generator: nn.Module | None) -> tuple[Tensor, Count]:
    """Total and count of all shares, the total with gradient where something wants one.

    Args:
        shares: at least one, none of them empty; their generator is set here.
        generator: the original.
    """
    tensors = [tensor for share in shares for tensor in pytree.tensors(share.outputs)]
    weights = [] if generator is None else [p for p in generator.parameters() if p.requires_grad]
    call = _Call(shares, generator)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*tensors, *weights)):
        return call.evaluate()
    total: Tensor = _Total.apply(call, *tensors, *weights)  # type: ignore[no-untyped-call]
    return total, call.count


class _Call:
    """The shares of one batch; ``count`` is known once they are worked through."""

    def __init__(self, shares: list[Share], generator: nn.Module | None) -> None:
        self.count: Count = 0
        self._shares, self._generator = shares, generator
        self._home = next(pytree.tensors(shares[0].outputs)).device
        self._on_slots = all(share.device.is_slot for share in shares)

    @torch.no_grad()
    def evaluate(self) -> tuple[Tensor, Count]:
        self._replicate()
        with borrowed([share.device for share in self._shares]) as team:
            found = self._run(team, [share.evaluate for share in self._shares])
        return self._added([total for total, _ in found], [count for _, count in found])

    @torch.no_grad()
    def learn(self) -> tuple[Tensor, list[Tensor | None]]:
        """The total, and its gradient for each tensor of each share and each weight that wants one."""
        self._replicate()
        with borrowed([share.device for share in self._shares]) as team:
            found = self._run(team, [share.learn for share in self._shares])
            weights = self._added_weights(team)
        total, self.count = self._added([part for part, _, _ in found], [count for _, count, _ in found])
        return total, [*(grad for _, _, grads in found for grad in grads), *weights]

    def _replicate(self) -> None:
        if self._generator is None:
            return
        replicas = replicate(self._generator, [share.device for share in self._shares], detach=True)
        for share, replica in zip(self._shares, replicas, strict=True):
            for mine, original in zip(replica.parameters(), self._generator.parameters(), strict=True):
                mine.requires_grad_(original.requires_grad)
            share.generator = replica

    def _run(self, team: Team, works: Sequence[Callable[[], T]]) -> list[T]:
        """All at the same time; on slots each draws random numbers from a stream of its own."""
        streams: list[random_streams.Source | None] = [None] * len(works)
        if self._on_slots and len(works) == 1:
            streams = [random_streams.source()]
        elif self._on_slots:
            several = random_streams.Streams()
            streams = [functools.partial(several.generator, i) for i in range(len(works))]
        calls = [functools.partial(_drawing, work, source) for work, source in zip(works, streams, strict=True)]
        return team.run(calls)  # type: ignore[return-value]  # None only for a device that sits out

    def _added(self, totals: list[Tensor | None], counts: list[Count]) -> tuple[Tensor, Count]:
        """In the order of the shares: the same bits each time."""
        moved = [target_devices.move(total, self._home) for total in totals if total is not None]
        total = functools.reduce(torch.add, moved) if moved else torch.zeros((), device=self._home)
        here = [target_devices.move(c, self._home) if isinstance(c, Tensor) else c for c in counts]
        return total, functools.reduce(lambda one, other: one + other, here)

    def _added_weights(self, team: Team) -> list[Tensor | None]:
        """For each weight its gradient, on the weight's device."""
        if self._generator is None:
            return []
        homes = [p.device for p in self._generator.parameters() if p.requires_grad]
        columns: list[list[Tensor]] = [[] for _ in homes]
        for share in self._shares:
            assert share.generator is not None
            trained = (p for p in share.generator.parameters() if p.requires_grad)
            for column, home, weight in zip(columns, homes, trained, strict=True):
                if weight.grad is not None:
                    column.append(target_devices.move(weight.grad, home))
                    weight.grad = None
        several = [column for column in columns if len(column) > 1]
        spans = len(self._shares) if self._on_slots else 1
        if several and spans > 1:
            team.run([functools.partial(_add_span, several, i, spans) for i in range(spans)])
        else:
            _add_span(several, 0, 1)
        return [column[0] if column else None for column in columns]


def _drawing(work: Callable[[], T], source: random_streams.Source | None) -> T:
    with random_streams.stream(source):
        return work()


def _add_span(columns: list[list[Tensor]], number: int, spans: int) -> None:
    """Add up one of so many spans of every column into its first tensor."""
    with torch.no_grad():
        for first, *others in columns:
            for other in others:
                if first.dim() and spans > 1:
                    first.tensor_split(spans)[number].add_(other.tensor_split(spans)[number])
                elif number == 0:
                    first.add_(other)


class _Total(torch.autograd.Function):
    """``(call, *tensors of the shares, *weights) -> total``."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        total, grads = call.learn()
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "a parallel loss can't be differentiated twice (create_graph=True): its gradients were computed with "
                "it; take the plain loss for that"
            )
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        scaled: list[Tensor | None] = []
        for found in ctx.saved_tensors:
            if found is None:
                scaled.append(None)
                continue
            scale = target_devices.move(grad, found.device)
            scaled.append(found * scale if kept else found.mul_(scale))  # nobody comes back for them: no copy
        return None, *scaled
