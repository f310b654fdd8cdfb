"""The replicas of ``dp``: copies of a model on other devices, and the sum of their gradients."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import JobError, StrategyError
from lockstep.launch.devices import Device
from lockstep.model.compile import refuse_compiled
from lockstep.model.hooks import hooked_parameters
from lockstep.model.losses.loss import Totalled
from lockstep.tensors.placing import moved_in_buckets, place_module
from lockstep.tensors.pytree import graph_nodes


def replica_of(model: nn.Module, device: Device, *, shares: bool) -> nn.Module:
    """Copy a model, with parameters of its own, which may share the storage of the first one's."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        storage = p.detach() if shares else p.detach().to(device.torch, copy=True)
        memo[id(p)] = nn.Parameter(storage, requires_grad=p.requires_grad)
    mine = {id(p) for p in memo.values()}

    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        computed = computed_tensor(model)
        if computed is not None:
            raise StrategyError(f"dp: {computed}") from error
        raise JobError(
            f"model: it can't be copied for {device}: {type(error).__name__}: {error}; ddp builds "
            "it afresh"
        ) from error
    if any(id(p) not in mine for p in made.parameters()):
        raise StrategyError(
            "dp: a copy of the model has parameters of its own (TorchScript?); take ddp, which "
            "builds it afresh"
        )
    if not device.is_slot:
        place_module(made, device.torch)
    return made


def computed_tensor(model: nn.Module) -> str | None:
    """Say which attribute can't be copied, since it is a tensor with a history; None without one.

    Pruning and the old ``weight_norm`` leave such tensors.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                continue
            place = f"{name}.{key}" if name else key
            if f"{key}_mask" in module._buffers:
                return (
                    f'"{place}" is pruned by torch.nn.utils.prune, which computes it from '
                    f'"{place}_orig", so it can\'t be copied: take ddp, or multiply by the mask '
                    "in a parametrization (torch.nn.utils.parametrize)"
                )
            return (
                f'"{place}" is computed from other parameters, so it can\'t be copied: take ddp, '
                "or in place of the old torch.nn.utils.weight_norm that of "
                "torch.nn.utils.parametrizations"
            )
    return None


def refuse_what_replicas_would_share(model: nn.Module) -> None:
    """Refuse what a copy of the model can't take along.

    Raises:
        StrategyError: a hook on a parameter, or a compiled model, which would run the first one.
    """
    for name in hooked_parameters(model):
        raise StrategyError(
            f'dp: parameter "{name}" has a hook, which its replicas would not have; take ddp, '
            "which builds the model afresh for each device"
        )
    refuse_compiled(model)


def refuse_other_parameters(total: torch.Tensor, model: nn.Module) -> None:
    """Refuse the loss of a replica whose graph comes to parameters of the first one, ``model``.

    Several threads would add to their gradients at the same time, and the replica's own parameters
    would miss them.

    Raises:
        StrategyError: the loss, or something that the model holds, uses them.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for node in graph_nodes(total):
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            raise StrategyError(
                f'dp: the loss, or something that the model holds, uses "{name}" of the model '
                "itself (by a global, a closure or a reference), not that of the replica",
                kind="state",
                fix="take ddp, which has no copies",
            )


def add_gradients(
    mine: Sequence[nn.Parameter],
    of_replicas: Sequence[Sequence[nn.Parameter]],
    place: torch.device | None,
) -> None:
    """Add the gradients of other replicas to those of the first, in order.

    Args:
        mine: the parameters of the first replica.
        of_replicas: those of each other one.
        place: the device of the first replica; None where all are in the same memory.
    """
    for parameters in of_replicas:
        pairs = [(p, q.grad) for p, q in zip(mine, parameters, strict=True) if q.grad is not None]
        if place is not None:
            pairs = _moved(pairs, place)
        sums: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        for p, grad in pairs:
            if p.grad is None:
                p.grad = grad
            elif grad.is_sparse:
                p.grad = p.grad + grad
            else:
                sums.append(p.grad)
                added.append(grad)
        if sums:
            torch._foreach_add_(sums, added)


def _moved(
    pairs: list[tuple[nn.Parameter, torch.Tensor]], place: torch.device
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Give parameters with their gradients, which are copied to another device."""
    found = []
    for which, copies in moved_in_buckets([grad for _, grad in pairs], place):
        for number, moved in zip(which, copies, strict=True):
            p, _ = pairs[number]
            found.append((p, moved))
    return found


def even_spans(parameters: list[nn.Parameter], pieces: int) -> list[tuple[int, int]]:
    """Cut the list of parameters in spans of about equal numbers of elements."""
    sizes = [p.numel() for p in parameters]
    done = list(itertools.accumulate(sizes, initial=0))
    cuts = [bisect.bisect_left(done, done[-1] * i / pieces) for i in range(pieces)]
    return list(itertools.pairwise([*cuts, len(parameters)]))


def shared_by_threads(error: RuntimeError, loss: Totalled) -> StrategyError | None:
    """Say what an error means that comes from something that all threads share; else None."""
    if "forward AD level" in str(error):
        return StrategyError(
            "dp: forward calls torch.func.jvp or its like, of which PyTorch keeps one level for "
            "all threads",
            fix="take ddp, which has a process for each replica",
        )
    if loss.may_have_state and "modified by an inplace operation" in str(error):
        return StrategyError(
            f"dp: {loss.name} seems to write to a tensor that it holds, while another thread "
            "computes with it",
            kind="state",
            fix="take ddp, where each replica has a loss of its own, or give the loss a new "
            "tensor instead",
        )
    return None
