"""ShardedModules: the modules that PyTorch's ``fully_shard`` gathers on their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError
from lockstep.model.optimizers.fused import sparse_parameters
from lockstep.tensors.placing import place_tensor
from lockstep.tensors.pytree import tensors


class ShardedModules:
    """The blocks of a model, and the model, whose parameters ``fully_shard`` cuts in place.

    ``fully_shard`` changes the classes of modules. Outside of ``of_pytorch`` they have their own,
    since a forward may ask whether ``type(layer) is Block``.

    Args:
        model: the same on every rank; it may be on the CPU still.
        blocks: the modules that are gathered on their own.
        mesh: the ranks.
        whole: the parameters that aren't cut.
        place: this rank's device. It holds one block's whole parameters at a time while the model
            is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        mesh: DeviceMesh,
        whole: set[nn.Parameter],
        place: torch.device,
    ) -> None:
        self._model = model
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        for module in (*blocks, model):
            own = type(module)
            _cut(module, mesh, whole, place)
            self._classes.append((module, type(module)))
            module.__class__ = own
            vars(module)["__deepcopy__"] = _refuse_copy

    @contextmanager
    def of_pytorch(self) -> Iterator[FSDPModule]:
        """Give the model and its blocks the methods of ``FSDPModule`` in this context."""
        own = [(module, type(module)) for module, _ in self._classes]
        for module, sharded in self._classes:
            module.__class__ = sharded
        assert isinstance(self._model, FSDPModule)
        yield self._model
        for module, kind in own:
            module.__class__ = kind

    def reshard(self) -> None:
        """Free what is gathered beside the blocks."""
        with self.of_pytorch() as model:
            model.reshard()

    def sum_in_backward(self, sums: bool) -> None:
        """Choose whether the next backward sums gradients over the ranks, or keeps them whole."""
        with self.of_pytorch() as model:
            model.set_requires_gradient_sync(sums)


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
    _sum_gradients(fully_shard(module, mesh=mesh, ignored_params=whole))
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


def _sum_gradients(module: FSDPModule) -> None:
    """Sum gradients over the ranks, and send zeros for those that this rank doesn't have.

    The mean over ranks isn't that over samples, and ranks may lack gradients of other parameters.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        _send_zeros(module)


def _send_zeros(module: FSDPModule) -> None:
    """Begin the backward of a block with gradients of zero, in torch 2.11 and 2.12."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return

    def begin_with_zeros(grad: torch.Tensor) -> None:
        for p in group.fsdp_params:
            whole = getattr(p, "_unsharded_param", None)
            if whole is None or whole.grad is not None:
                continue
            if whole.requires_grad:
                whole.grad = torch.zeros_like(whole)

    def hook(module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(begin_with_zeros)  # type: ignore[no-untyped-call]

    assert isinstance(module, nn.Module)
    nn.Module.register_forward_hook(module, hook)


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
