"""Backward of several replicas at the same time, each in the thread of its slot.

Autograd runs what was computed on a CPU in the thread that calls ``backward``, and only there:
replicas whose graphs hang together would go through backward one after the other. So each replica
has a graph of its own, whose leaves stand in for the module's parameters, and one node of the
caller's graph stands for all of them::

    caller  parameters ─────────────▶ [ _Joined ] ─────▶ outputs ──▶ loss
                                         │   ▲
    cpu:0   stand-ins ──▶ forward ──▶ outputs│gradients      backward hands each thread the gradients of its outputs,
    cpu:1   stand-ins ──▶ forward ──▶ outputs│gradients      and adds up what comes to its stand-ins

A stand-in shares memory and version with what it stands for, so that autograd notices weights that
are written between forward and backward, as it would without replicas. Where backward is itself to
be differentiated, the gradients' graphs are joined in the same way, to any order.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lockstep.launch.devices import Device
from lockstep.tensors import pytree
from lockstep.threads.thread_pool import run

_here = threading.local()


def stand_in(tensor: Tensor) -> Tensor:
    """Make a leaf in the place of ``tensor``, which shares its memory and version.

    Where somebody runs backward through a replica's graph by another way than its outputs (from
    what a hook has kept, say), gradients go on to ``tensor`` from there.
    """
    leaf = tensor.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(functools.partial(_send_on, tensor))  # type: ignore[no-untyped-call]
    return leaf


def _send_on(tensor: Tensor, leaf: Tensor) -> None:
    if getattr(_here, "collects", False):
        return
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    torch.autograd.backward([tensor], [grad], retain_graph=_keeps_graph())


def _keeps_graph() -> bool:
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _goes_everywhere() -> bool:
    """Return whether the backward that runs now is ``backward()``, not ``grad()`` or with
    ``inputs``.
    """
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def joined(
    outputs: Sequence[Any],
    devices: Sequence[Device],
    shared: Sequence[Tensor],
    leaves: Sequence[dict[int, Tensor]],
    *,
    overlaps: bool = False,
) -> list[Any]:
    """Give the outputs of replicas with graphs of their own as outputs of the tensors that their
    leaves stand for.

    Args:
        outputs: of each replica, of any nesting.
        devices: where each was computed; its backward runs there too.
        shared: the tensors that gradients go to.
        leaves: for each replica its leaves, by the number in ``shared`` of the tensor that they
            stand for.
        overlaps: the graphs go on into others, which backward will run through by themselves.

    Returns:
        Nests of the same structure, which share the memory of ``outputs``.
    """
    found = []
    for one in outputs:
        wanting = [tensor for tensor in pytree.tensors(one) if tensor.requires_grad]
        found.append(wanting)

    roots = list(itertools.chain(*found))
    if not shared or not roots:
        return list(outputs)
    # Not the outputs themselves: once they are gathered, their memory needn't be held.
    edges = [list(map(get_gradient_edge, some)) for some in found]
    made = iter(_Joined.apply(devices, leaves, edges, overlaps, roots, *shared))  # type: ignore[no-untyped-call]

    def put_in(tensor: Tensor) -> Any:
        return next(made) if tensor.requires_grad else tensor

    return [pytree.each(put_in, output) for output in outputs]


class _Joined(torch.autograd.Function):
    """All replicas as one node: ``(devices, leaves, edges, overlaps, outputs, *shared) ->
    outputs``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Any,
        leaves: Any,
        edges: Any,
        overlaps: bool,
        roots: list[Tensor],
        *shared: Any,
    ) -> tuple[Tensor, ...]:
        ctx.graphs = devices, leaves, edges
        ctx.overlaps = overlaps  # the first to run must leave the others what they need
        ctx.save_for_backward(*shared)
        ctx.set_materialize_grads(False)
        # With their versions: autograd sees what is changed in place.
        return tuple(root.detach() for root in roots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients of the shared tensors, in the order of the replicas.

        Where they are to be differentiated themselves, they have a graph to these tensors, in which
        the gradients of the outputs are tensors to differentiate by, too.
        """
        devices, leaves, edges = ctx.graphs
        differentiable = torch.is_grad_enabled()
        everything = _goes_everywhere()
        ctx.overlaps = ctx.overlaps or differentiable
        given = list(grads)
        again = [dict(mine) for mine in leaves]
        sources: list[Tensor] = []
        if differentiable:
            # Asking for saved tensors refuses those that were written since, which only a second
            # derivative would need.
            sources = list(ctx.saved_tensors)
            k = 0
            for mine, its in zip(again, edges, strict=True):
                for _ in its:
                    grad = grads[k]
                    if grad is not None and grad.requires_grad:
                        given[k] = stand_in(grad)
                        mine[len(sources)] = given[k]
                        sources.append(grad)
                    k += 1

        settings = {
            "create_graph": differentiable,
            "retain_graph": ctx.overlaps or _keeps_graph(),
        }
        tasks: list[Callable[[], dict[int, Tensor | None]] | None] = []
        start = 0
        for mine, its in zip(leaves, edges, strict=True):
            pairs = zip(its, given[start:], strict=False)
            used = [(edge, grad) for edge, grad in pairs if grad is not None]
            start += len(its)
            work = functools.partial(_collected, mine, used, everything, **settings)
            tasks.append(work if used else None)

        found = [theirs or {} for theirs in run(devices, tasks)]
        if differentiable:
            found = joined(found, devices, sources, again, overlaps=True)
        # What ``autograd.grad`` gives may be the gradient of several tensors at once.
        in_place = everything and not differentiable
        sums = _sums(found, len(ctx.needs_input_grad) - 5, in_place=in_place)
        return None, None, None, None, None, *sums


def _sums(
    found: list[dict[int, Tensor | None]],
    count: int,
    *,
    in_place: bool,
) -> list[Tensor | None]:
    """Add the gradients of replicas, which are given by the number of the tensor.

    Args:
        found: of each replica.
        count: of the tensors.
        in_place: add to the first replica's, where they are dense.
    """
    sums: list[Tensor | None] = [None] * count
    for theirs in found:
        for number, grad in theirs.items():
            so_far = sums[number]
            if so_far is None:
                sums[number] = grad
            elif grad is not None:
                is_dense = so_far.layout is grad.layout is torch.strided
                sums[number] = so_far.add_(grad) if in_place and is_dense else so_far + grad

    return sums


def _collected(
    leaves: dict[int, Tensor],
    used: list[tuple[GradientEdge, Tensor]],
    everything: bool,
    **settings: Any,
) -> dict[int, Tensor | None]:
    """Run backward of one replica from the outputs that have a gradient, in its thread, and give
    the gradients of its leaves.

    With ``everything`` the caller's backward goes to all leaves, those that the module has closed
    over too; PyTorch's reentrant checkpoints want that.
    """
    edges, given = zip(*used, strict=True)
    if not everything:
        wanted = list(leaves.values())
        found = torch.autograd.grad(edges, wanted, given, allow_unused=True, **settings)
        return dict(zip(leaves, found, strict=True))

    for leaf in leaves.values():
        leaf.grad = None
    before = getattr(_here, "collects", False)
    _here.collects = True
    try:
        torch.autograd.backward(edges, given, **settings)
        return {number: leaf.grad for number, leaf in leaves.items()}
    finally:
        _here.collects = before
        for leaf in leaves.values():
            leaf.grad = None
