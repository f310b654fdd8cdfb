"""Shards: the parameters of a model that ``fully_shard`` cuts, and this rank's part of each.

Each parameter is cut along its first dimension. The model holds DTensors, which are gathered block
by block while forward and backward need them. The optimizer is given the local parts as ordinary
parameters: what it does to each element is the same, and costs no dispatch of DTensors.

::

    block 0   gathered | forward | freed | ... | gathered | backward | gradients summed, cut, freed
    the rest  gathered | forward of the whole model ... backward      | gradients summed, cut, freed
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError
from lockstep.model.activation_checkpointing import found_blocks, named_blocks
from lockstep.model.optimizer import sparse_parameters
from lockstep.tensors.placing import place_tensor
from lockstep.tensors.pytree import tensors
from lockstep.tensors.row_shard import RowShard

Place = tuple[nn.Module, str]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
"""The attributes of a module in which sharding registers hooks."""


@dataclass(frozen=True)
class Before:
    """What a module had before it was sharded.

    Attributes:
        names: of its attributes.
        hooks: the numbers of its hooks.
    """

    names: set[str]
    hooks: set[int]


class Shards:
    """A model whose parameters were cut, in place.

    Args:
        model: the same on every rank; it may be on the CPU still.
        mesh: the ranks.
        blocks: the modules that are gathered on their own, by name; all else is gathered for the
            whole of forward.
        place: this rank's device. It holds one block's whole parameters at a time while the model
            is cut.

    Attributes:
        blocks: as given.
        whole: the names of parameters that every rank keeps whole, with the reasons.
        places: by the name of each parameter, the modules that hold it, and its names there.
        cut: by name, the parameters that were cut, as the model holds them.
        local: by name, this rank's part of each.
        before: what each module had before.
        first_names: by each name of a parameter that was cut, the one that it has in ``cut``.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        blocks: Mapping[str, nn.Module],
        place: torch.device,
    ) -> None:
        self._mesh = mesh
        self.blocks = dict(blocks)
        self.before = {module: _before(module) for module in model.modules()}
        self.whole = _kept_whole(model)
        self.places = places_of(model)

        before = dict(model.named_parameters())
        self._cut_blocks(model, {before[name] for name in self.whole}, place)
        self._sharded: list[tuple[nn.Module, type[nn.Module]]] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _sum_gradients(module)
                vars(module)["__deepcopy__"] = _refuse_copy
                self._sharded.append((module, type(module)))
        self._give_classes_back()

        now = dict(model.named_parameters())
        self.cut = {name: p for name, p in now.items() if isinstance(p, DTensor)}
        names = {id(p): name for name, p in self.cut.items()}
        every = model.named_parameters(remove_duplicate=False)
        self.first_names = {name: names[id(p)] for name, p in every if id(p) in names}
        self.local = {
            name: nn.Parameter(_local(p), requires_grad=p.requires_grad)
            for name, p in self.cut.items()
        }

        self._storages = {name: p.untyped_storage()._cdata for name, p in self.cut.items()}
        self._before = {name: weakref.ref(before[name]) for name in self.cut}
        self._names_before = {id(before[name]): name for name in self.cut}
        self._shown: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def _cut_blocks(
        self, model: nn.Module, ignored: set[nn.Parameter], place: torch.device
    ) -> None:
        for block in (*self.blocks.values(), model):
            whole = [p for p in block.parameters() if not isinstance(p, DTensor)]
            for tensor in (*block.parameters(), *block.buffers()):
                if tensor.device != place:
                    place_tensor(tensor, place)
            fully_shard(block, mesh=self._mesh, ignored_params=ignored)
            # The optimizer has the whole parameters until it is given the local ones.
            for p in whole:
                if p not in ignored:
                    p.data = torch.empty(0, dtype=p.dtype, device=place)

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the whole parameters of an optimizer by the local ones, with their state."""
        for group in optimizer.param_groups:
            given = []
            for p in group["params"]:
                name = self._names_before.get(id(p))
                given.append(p if name is None else self.local[name])
                if name is not None and p in optimizer.state:
                    state = optimizer.state.pop(p)
                    optimizer.state[self.local[name]] = self.cut_state(name, state)
            group["params"] = given

    def refuse_others(self) -> None:
        """Refuse a model whose whole parameters something keeps beside the optimizer.

        Raises:
            StrategyError: it would use what they were.
        """
        gc.collect()
        for name, kept in self._before.items():
            if kept() is not None:
                raise StrategyError(
                    f'fsdp: something beside its module holds parameter "{name}" (a list, a '
                    "closure, a variable of yours, or the graph of a copy), and would go on with "
                    "what it was before it was cut: reach it by its module, and make copies by "
                    "p.detach().clone(); or take ddp"
                )

    # ---- the whole and its parts -----------------------------------------------------------------

    def refuse_assigned(self) -> None:
        """Refuse what was assigned to ``parameter.data``, which PyTorch loses.

        Raises:
            StrategyError: something was.
        """
        for name, p in self.cut.items():
            if p.untyped_storage()._cdata != self._storages[name]:
                raise StrategyError(
                    f'fsdp: something was assigned to the data of "{name}", of which each rank '
                    "has a shard: write it in place, under torch.no_grad(): "
                    "parameter.copy_(value)"
                )

    def cut_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state of a whole parameter."""
        shape = self.cut[name].shape
        mine = dict(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor | RowShard) and value.shape == shape:
                mine[key] = self.part(name, value)
        return mine

    def joined_state(self, name: str, state: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        """Return the state of the whole parameter, or this rank's rows; every rank calls this."""
        shape = self.local[name].shape
        given = self.gathered if whole else self.rows
        joined = dict(state)
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                joined[key] = given(self.as_rows(name, value))
        return joined

    def part(self, name: str, whole: torch.Tensor | RowShard) -> torch.Tensor:
        """Copy this rank's part of a tensor of the shape of a parameter to this rank's device."""
        if isinstance(whole, RowShard):
            rows = whole.local
        else:
            sizes, number = self.rows_of(whole)
            rows = whole.detach().narrow(0, sum(sizes[:number]), sizes[number])
        part = torch.empty(rows.shape, dtype=rows.dtype, device=self.cut[name].device)
        return part.copy_(rows)

    def as_cut(self, name: str, whole: torch.Tensor | RowShard) -> DTensor:
        """Cut a tensor of the shape of a parameter as the parameter is cut."""
        return self.as_rows(name, self.part(name, whole))

    def as_rows(self, name: str, local: torch.Tensor) -> DTensor:
        """Return the tensor of the shape of a parameter that has these rows on this rank."""
        p = self.cut[name]
        return DTensor.from_local(
            local.detach(),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )

    def joined(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Gather the whole tensor from the parts of the ranks; every rank calls this."""
        return self.gathered(self.as_rows(name, local))

    @staticmethod
    def gathered(tensor: DTensor) -> torch.Tensor:
        """Gather a tensor; every rank calls this."""
        whole: torch.Tensor = tensor.full_tensor()
        return whole

    def rows(self, tensor: DTensor) -> RowShard:
        """Return this rank's rows of a tensor; of several replicas, only the first has rows."""
        sizes, _ = self.rows_of(tensor)
        others = self._mesh.size() - len(sizes)
        return RowShard(tensor.to_local(), (*sizes, *[0] * others), self._mesh.get_rank())

    def rows_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """Return how many rows each rank of a replica has, and this rank's number among them."""
        *_, number = self._mesh.get_coordinate() or [0]
        ranks = self._mesh.size(self._mesh.ndim - 1)
        sizes = [len(piece) for piece in torch.empty(len(tensor), 0).chunk(ranks)]
        return (*sizes, *[0] * (ranks - len(sizes))), number

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's parts are those of the first replica."""
        *others, _ = self._mesh.get_coordinate() or [0]
        return not any(others)

    @property
    def bytes_here(self) -> int:
        """The size of this rank's parts of the parameters."""
        return sum(p.nbytes for p in self.local.values())

    # ---- gradients in a loop of a person's own ---------------------------------------------------

    def show_gradients(self) -> None:
        """Give the model's parameters the gradients of the local parts, in the same memory."""
        for name, p in self.cut.items():
            grad = self.local[name].grad
            p.grad = None if grad is None else self.as_rows(name, grad)
            self._shown[name] = p.grad, grad

    def take_gradients(self) -> None:
        """Take over gradients that were assigned to the model's parameters since, or set to None.

        Where the optimizer's own were set (``optimizer.zero_grad()``), these are shown instead.
        """
        for name, p in self.cut.items():
            shown, grad = self._shown[name]
            local = self.local[name]
            if p.grad is not shown and local.grad is grad:
                local.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        self.show_gradients()

    # ---- the modules of PyTorch's fully_shard ----------------------------------------------------

    @contextmanager
    def fsdp_module(self) -> Iterator[FSDPModule]:
        """Give the model and its blocks the methods of ``FSDPModule`` in this context.

        ``fully_shard`` changes the classes of modules. Outside of this context they have their own,
        since a forward may ask whether ``type(layer) is Block``.
        """
        for module, kind in self._sharded:
            module.__class__ = kind
        model, _ = self._sharded[0]
        assert isinstance(model, FSDPModule)
        try:
            yield model
        finally:
            self._give_classes_back()

    def _give_classes_back(self) -> None:
        for module, kind in self._sharded:
            _, _, own, *_ = kind.__mro__  # after the class of both, and FSDPModule
            module.__class__ = own

    def reshard(self) -> None:
        """Free what is gathered beside the blocks."""
        with self.fsdp_module() as model:
            model.reshard()


def _before(module: nn.Module) -> Before:
    held = vars(module)
    hooks = {number for kind in HOOKS for number in held[kind]}
    return Before(set(held), hooks)


def _refuse_copy(memo: dict[int, Any]) -> NoReturn:
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
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)

    def hook(module: nn.Module, args: Any, outputs: Any) -> None:
        for tensor in tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(begin_with_zeros)  # type: ignore[no-untyped-call]

    assert isinstance(module, nn.Module)
    nn.Module.register_forward_hook(module, hook)


def _local(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, in the same memory."""
    held = p.detach()
    assert isinstance(held, DTensor)
    return held.to_local()


class NamedParameters(nn.Module):
    """Stands for a model whose parameters have these names, where only names are asked for."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._named = list(named)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters as they were given."""
        return iter(self._named)


def blocks_of(model: nn.Module, wanted: str) -> dict[str, nn.Module]:
    """Find the modules that are to be gathered on their own.

    Args:
        model: the whole model.
        wanted: ``"auto"`` takes repeated layers; names, with commas between, of modules or lists of
            them; ``""`` none.

    Raises:
        StrategyError: there is no such module, or one is within another or tied to another.
    """
    if wanted == "auto":
        found = found_blocks(model)
        return {name: block for name, block in found.items() if not _tied(model, block)}

    named = named_blocks(model, wanted, "blocks", StrategyError)
    for name, block in named.items():
        tied = _tied(model, block)
        if tied is not None:
            raise StrategyError(
                f'blocks: "{name}" has "{tied}", which the model uses elsewhere too: leave it out'
            )
        inner = next((other for other in named if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise StrategyError(f'blocks: "{inner}" is within "{name}": name one of them')
    return named


def _tied(model: nn.Module, block: nn.Module) -> str | None:
    """Return the name of a parameter of a block that is elsewhere in the model too."""
    outside: set[nn.Module] = set()
    reached = [model]
    while reached:
        module = reached.pop()
        if module is not block and module not in outside:
            outside.add(module)
            reached += module.children()

    elsewhere = {id(p) for module in outside for p in module._parameters.values()}
    return next((name for name, p in block.named_parameters() if id(p) in elsewhere), None)


def places_of(model: nn.Module) -> dict[str, list[Place]]:
    """Find the modules that hold each parameter, and its names there, by its name in the model.

    A tied parameter has several places.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[Place]] = defaultdict(list)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                found[names[id(p)]].append((module, key))
    return found


def _kept_whole(model: nn.Module) -> dict[str, str]:
    """Find the parameters that ``fully_shard`` can't cut, with the reasons."""
    sparse = sparse_parameters(model)
    elements: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        if p.is_floating_point():
            elements[p.dtype] += p.numel()
    usual = max(elements, key=lambda dtype: elements[dtype], default=None)

    found = {}
    for name, p in model.named_parameters():
        if p.dim() == 0:
            found[name] = "it is a single number"
        elif not p.numel():
            found[name] = "it is empty"
        elif id(p) in sparse:
            found[name] = "its gradients are sparse"
        elif p.dtype is not usual:
            found[name] = f"it is {str(p.dtype).removeprefix('torch.')}, unlike most of the model"
        elif not p.is_contiguous():
            found[name] = "its memory isn't contiguous"
    return found
