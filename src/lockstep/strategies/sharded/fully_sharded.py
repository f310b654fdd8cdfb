"""Cut a model by PyTorch's ``fully_shard``, which gathers each block on its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError
from lockstep.model.optimizers.fused import sparse_parameters
from lockstep.tensors.placing import place_tensor


def sends_zeros() -> bool:
    """Return whether ``fully_shard`` sums zeros for what a rank didn't use (since torch 2.13)."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def shard_modules(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    whole: set[nn.Parameter],
    place: torch.device,
) -> type[nn.Module]:
    """Cut the parameters of a model in place.

    ``fully_shard`` changes the classes of modules. They get back their own, since a forward may ask
    whether ``type(layer) is Block``.

    Args:
        model: the same on every rank; it may be on the CPU still.
        blocks: the modules that are gathered on their own.
        mesh: the ranks.
        whole: the parameters that aren't cut.
        place: this rank's device. It holds one block's whole parameters at a time while the model
            is cut.

    Returns:
        The class that ``fully_shard`` has given the model.
    """
    sharded = type(model)
    for module in (*blocks, model):
        own = type(module)
        _cut(module, mesh, whole, place)
        sharded = type(module)
        module.__class__ = own
        vars(module)["__deepcopy__"] = _refuse_copy
    return sharded


def _cut(
    module: nn.Module,
    mesh: DeviceMesh,
    whole: set[nn.Parameter],
    place: torch.device,
) -> None:
    """Cut the parameters of a module, but those of its blocks.

    Args:
        module: a block, or the model, whose blocks are cut before.
        mesh: the ranks.
        whole: the parameters that aren't cut.
        place: this rank's device, to which the module is moved.
    """
    cut = []
    for p in module.parameters():
        if p not in whole and not isinstance(p, DTensor):
            cut.append(p)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != place:
            place_tensor(tensor, place)
    sharded = fully_shard(module, mesh=mesh, ignored_params=whole)
    # The mean over ranks isn't that over samples, and ranks may lack gradients of other parameters.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    if sends_zeros():
        sharded.set_reduce_scatter_unused_params(True, recurse=False)
    # The optimizer has the whole parameters until it is given the local ones.
    for p in cut:
        p.data = torch.empty(0, dtype=p.dtype, device=place)


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
    """Take the place of ``__deepcopy__`` in a module that was cut.

    Raises:
        StrategyError: always.
    """
    raise StrategyError(
        "fsdp: a sharded model can't be copied (copy.deepcopy, AveragedModel)",
        fix="copy its state_dict(), or let lockstep.callbacks.EMA or SWA average it",
    )


def kept_whole(model: nn.Module) -> list[str]:
    """Find the names of the parameters that ``fully_shard`` can't cut.

    They are single numbers, are empty, have sparse gradients or no contiguous memory, or another
    number format than the largest parameter.
    """
    sparse = sparse_parameters(model)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    largest = max(floating, key=torch.Tensor.numel, default=None)
    found = []
    for name, p in model.named_parameters():
        is_plain = p.dim() > 0 and p.numel() > 0 and p.is_contiguous() and id(p) not in sparse
        if largest is None or not is_plain or p.dtype is not largest.dtype:
            found.append(name)
    return found
