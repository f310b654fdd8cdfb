"""Total: shares worked through on their devices, as one node of the caller's graph.

::

    forward    replicate the generator ──▶ every share in the thread of its device ──▶ add up totals, counts, gradients
    backward   the gradients that forward found, times the gradient of the total

Gradients of weights are added up on the device of the generator as soon as they are there, so that one set of them is
kept until backward, and none made anew there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import InputError
from lockstep.model.torch_losses import Count
from lockstep.parallel import target_devices
from lockstep.parallel.loss.loss_chunks import Share
from lockstep.parallel.parallel_apply import in_stream
from lockstep.parallel.replicate import replicate
from lockstep.tensors import pytree
from lockstep.threads import random_streams
from lockstep.threads.thread_pool import borrowed


def total_of(shares: list[Share], generator: nn.Module | None) -> tuple[Tensor, Count]:
    """Total and count of all shares, the total with gradient where something wants one.

    Args:
        shares: at least one, none of them empty; their generator is set here.
        generator: the original.
    """
    weights = [] if generator is None else [p for p in generator.parameters() if p.requires_grad]
    inputs = [*(tensor for share in shares for tensor in pytree.tensors(share.outputs)), *weights]
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with torch.no_grad():
        if generator is not None:
            _replicate(generator, shares)
        with borrowed([share.device for share in shares]) as team:
            found = team.run(_calls(shares, learns))
        results = [result for result in found if result is not None]
        total, count = _added([result[0] for result in results], [result[1] for result in results], inputs[0].device)
        grads = [grad for _, _, those in results for grad in those]
        grads += [_weight_gradient(shares, number, weight) for number, weight in enumerate(weights)]
    if learns:
        total = _Total.apply([total, *grads], *inputs)  # type: ignore[no-untyped-call]
    return total, count


def _replicate(generator: nn.Module, shares: list[Share]) -> None:
    replicas = replicate(generator, [share.device for share in shares], detach=True)
    for share, replica in zip(shares, replicas, strict=True):
        for mine, original in zip(replica.parameters(), generator.parameters(), strict=True):
            mine.requires_grad_(original.requires_grad)
        share.generator = replica


def _calls(shares: list[Share], learns: bool) -> list[Callable[[], tuple[Tensor | None, Count, list[Tensor | None]]]]:
    """What each device is to do; on slots each draws random numbers from a stream of its own."""
    sources: list[random_streams.Source | None] = [None] * len(shares)
    if all(share.device.is_slot for share in shares):
        several = random_streams.Streams()
        sources = [functools.partial(several.generator, i) for i in range(len(shares))]
        if len(shares) == 1:
            sources = [random_streams.source()]
    pairs = zip(shares, sources, strict=True)
    return [functools.partial(in_stream, source, share.work, learns) for share, source in pairs]


def _added(totals: list[Tensor | None], counts: list[Count], home: torch.device) -> tuple[Tensor, Count]:
    """In the order of the shares: the same bits each time."""
    moved = [target_devices.move(total, home) for total in totals if total is not None]
    total = functools.reduce(torch.add, moved) if moved else torch.zeros((), device=home)
    here = [target_devices.move(c, home) if isinstance(c, Tensor) else c for c in counts]
    return total, functools.reduce(lambda one, other: one + other, here)


def _weight_gradient(shares: list[Share], number: int, weight: Tensor) -> Tensor | None:
    """The sum of what the replicas found for one trained weight of the generator, on its device."""
    total: Tensor | None = None
    for share in shares:
        assert share.generator is not None
        mine = [p for p in share.generator.parameters() if p.requires_grad][number]
        if mine.grad is not None:
            grad, mine.grad = target_devices.move(mine.grad, weight.device), None
            total = grad if total is None else total.add_(grad)
    return total


class _Total(torch.autograd.Function):
    """``([total, its gradient for each tensor], *tensors) -> total``."""

    @staticmethod
    def forward(ctx: Any, found: list[Tensor | None], *tensors: Tensor) -> Tensor | None:
        total, *grads = found
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
