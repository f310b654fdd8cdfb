"""ShardedModules: the modules that PyTorch's ``fully_shard`` gathers on their own."""

from __future__ import annotations

from collections import Counter
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

    _classes: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]]
    """Each module, its own class, and the class that ``fully_shard`` gave it; the model is last."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        mesh: DeviceMesh,
        whole: set[nn.Parameter],
        place: torch.device,
    ) -> None:
        self._classes = []
        for module in (*blocks, model):
            own = type(module)
            _cut(module, mesh, whole, place)
            assert isinstance(module, FSDPModule)
            _sum_gradients(module)
            vars(module)["__deepcopy__"] = _refuse_copy
            sharded = type(module)
            self._classes.append((module, own, sharded))
        self._give_classes_back()

    @contextmanager
    def of_pytorch(self) -> Iterator[FSDPModule]:
        """Give the model and its blocks the methods of ``FSDPModule`` in this context."""
        for module, _, sharded in self._classes:
            module.__class__ = sharded
        model, _, _ = self._classes[-1]
        assert isinstance(model, FSDPModule)
        try:
            yield model
        finally:
            self._give_classes_back()

    def _give_classes_back(self) -> None:
        for module, own, _ in self._classes:
            module.__class__ = own

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
    fully_shard(module, mesh=mesh, ignored_params=whole)
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
        fix="copy it within `with step.whole_parameters():`, or let lockstep.callbacks.EMA or SWA "
        "average it",
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


def kept_whole(model: nn.Module) -> dict[str, str]:
    """Find the parameters that ``fully_shard`` can't cut, with the reasons.

    Returns:
        The reasons, by the names of the parameters.
    """
    sparse = sparse_parameters(model)
    usual = _usual_format(model)
    found = {}
    for name, p in model.named_parameters():
        if p.dim() == 0:
            found[name] = "it is a single number"
        elif not p.numel():
            found[name] = "it is empty"
        elif id(p) in sparse:
            found[name] = "its gradients are sparse"
        elif p.dtype is not usual:
            dtype = str(p.dtype).removeprefix("torch.")
            found[name] = f"it is {dtype}, unlike most of the model"
        elif not p.is_contiguous():
            found[name] = "its memory isn't contiguous"
    return found


def _usual_format(model: nn.Module) -> torch.dtype | None:
    """Find the floating-point format that most elements of a model's parameters have."""
    elements: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        if p.is_floating_point():
            elements[p.dtype] += p.numel()
    return max(elements, key=elements.__getitem__, default=None)
