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
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lockstep.errors import StrategyError
from lockstep.model.optimizers.kinds import is_hooked
from lockstep.strategies.sharded.sharded_modules import ShardedModules, kept_whole
from lockstep.tensors.row_shard import RowShard

Place = tuple[nn.Module, str]


class Shards:
    """A model whose parameters were cut, in place.

    A name of a parameter, where a method takes one, may be any of a tied parameter, and that of a
    parameter or a buffer which every rank has whole.

    Args:
        model: the same on every rank; it may be on the CPU still.
        mesh: the ranks.
        blocks: the modules that are gathered on their own, by name; all else is gathered for the
            whole of forward.
        place: this rank's device.

    Attributes:
        blocks: as given.
        whole: the names of parameters that every rank keeps whole, with the reasons.
        places: by the name of each parameter, the modules that hold it, and its names there.
        modules: the blocks and the model, which ``fully_shard`` has changed.
        cut: by name, the parameters that were cut, as the model holds them.
        local: by name, this rank's part of each.
        mine: by name, what this rank has of every parameter: its part, or all of it.
        first_hook: the number of the first hook that sharding registers.
        attributes_before: of each module, the names of the attributes that it had before.
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
        self.whole = kept_whole(model)
        self.places = places_of(model)
        self.first_hook = RemovableHandle.next_id
        self.attributes_before = {module: set(vars(module)) for module in model.modules()}

        before = dict(model.named_parameters())
        whole = {before[name] for name in self.whole}
        self.modules = ShardedModules(model, blocks.values(), mesh, whole, place)
        self.cut: dict[str, nn.Parameter] = {}
        self.local: dict[str, nn.Parameter] = {}
        self.mine: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            self.mine[name] = p
            if isinstance(p, DTensor):
                self.cut[name] = p
                part = nn.Parameter(local_part(p), requires_grad=p.requires_grad)
                self.local[name] = self.mine[name] = part
        self._by_every_name = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if isinstance(p, DTensor):
                self._by_every_name[name] = p

        self._names_before = {id(before[name]): name for name in self.cut}
        self._before = {name: weakref.ref(before[name]) for name in self.cut}
        self._shown: dict[str, torch.Tensor | None] = {}

    def give_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the whole parameters of an optimizer by the local ones, with their state."""
        for group in optimizer.param_groups:
            given = []
            for p in group["params"]:
                name = self._names_before.get(id(p))
                if name is None:
                    given.append(p)
                    continue
                local = self.local[name]
                given.append(local)
                if p in optimizer.state:
                    optimizer.state[local] = self.cut_state(name, optimizer.state.pop(p))
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

    def cut_parameter(self, name: str) -> DTensor | None:
        """Return the parameter of this name, if it was cut."""
        return self._by_every_name.get(name)

    def part(self, name: str, whole: Any) -> torch.Tensor:
        """Copy this rank's part of a tensor of the shape of a parameter to this rank's device.

        The tensor may be a `RowShard`, which has only this part.
        """
        p = self.cut_parameter(name)
        if p is None:
            return whole  # type: ignore[no-any-return]
        if isinstance(whole, RowShard):
            rows = whole.local
        else:
            sizes, number = self.rows_of(p)
            rows = whole.detach().narrow(0, sum(sizes[:number]), sizes[number])
        return torch.empty(rows.shape, dtype=rows.dtype, device=p.device).copy_(rows)

    def as_rows(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the shape of a parameter that has these rows on this rank."""
        p = self.cut_parameter(name)
        if p is None:
            return local
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
    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        """Gather a tensor, if it is cut; every rank calls this."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole: torch.Tensor = tensor.full_tensor()
        return whole

    def rows(self, tensor: torch.Tensor) -> torch.Tensor | RowShard:
        """Return this rank's rows of a tensor, if it is cut.

        Of several replicas, only the first has rows.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        sizes, _ = self.rows_of(tensor)
        others = self._mesh.size() - len(sizes)
        return RowShard(tensor.to_local(), (*sizes, *[0] * others), self._mesh.get_rank())

    def rows_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """Return how many rows each rank of a replica has, and this rank's number among them."""
        *_, number = self._coordinate
        ranks = self._mesh.size(self._mesh.ndim - 1)
        most = -(-len(tensor) // ranks)
        sizes = []
        left = len(tensor)
        for _ in range(ranks):
            sizes.append(min(most, left))
            left -= sizes[-1]
        return tuple(sizes), number

    def cut_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state of a whole parameter."""
        mine = dict(state)
        if name in self.cut:
            for key, value in state.items():
                if _has_shape(value, self.cut[name].shape):
                    mine[key] = self.part(name, value)
        return mine

    def joined_state(self, name: str, state: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        """Return the state of the whole parameter, or this rank's rows; every rank calls this."""
        given = self.gathered if whole else self.rows
        joined = dict(state)
        if name in self.cut:
            for key, value in state.items():
                if _has_shape(value, self.local[name].shape):
                    joined[key] = given(self.as_rows(name, value))
        return joined

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's parts are those of the first replica."""
        *replica, _ = self._coordinate
        return not any(replica)

    @property
    def _coordinate(self) -> tuple[int, ...]:
        return tuple(self._mesh.get_coordinate() or [0])

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
            self._shown[name] = p.grad

    def take_gradients(self) -> None:
        """Take over gradients that were assigned to the model's parameters since, or set to None.

        The other ones may have been set to None in the optimizer.
        """
        for name, p in self.cut.items():
            if p.grad is not self._shown[name]:
                self.local[name].grad = None if p.grad is None else local_part(p.grad)
        self.show_gradients()


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of shards that has hooks on its step.

    Raises:
        StrategyError: it has one.
    """
    if is_hooked(optimizer):
        raise StrategyError(
            "fsdp: the optimizer has hooks on its step (or another step in its place), which "
            "would be given a shard of each gradient and parameter: where they treat each element "
            "by itself, say so by --elementwise true (FSDP(elementwise=True)), or take ddp"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is cut, in the same memory."""
    held = tensor.detach()
    assert isinstance(held, DTensor)
    return held.to_local()


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor | RowShard) and value.shape == shape


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
