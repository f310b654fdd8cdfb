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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lockstep.errors import StrategyError
from lockstep.model.optimizers.kinds import is_hooked
from lockstep.model.optimizers.state import load_named_optimizer_state, named_optimizer_state
from lockstep.strategies.sharded.fully_sharded import ShardedModules, kept_whole
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.tensors.row_shard import RowShard

if TYPE_CHECKING:
    from lockstep.strategies.sharded.whole_parameters import WholeParameters

Place = tuple[nn.Module, str]


class Shards(ParameterLayout):
    """A model whose parameters were cut, in place: each rank has some rows of most parameters.

    A name of a parameter, where a method takes one, may be any of a tied parameter, and that of a
    parameter or a buffer which every rank has whole.

    Args:
        model: the same on every rank; it may be on the CPU still.
        optimizer: of the whole parameters, which is given this rank's parts.
        mesh: the ranks.
        blocks: the modules that are gathered on their own, by name; all else is gathered for the
            whole of forward.
        place: this rank's device.

    Attributes:
        blocks: as given.
        uncut: the names of parameters that every rank keeps whole.
        places: by the name of each parameter, the modules that hold it, and its names there.
        modules: the blocks and the model, which ``fully_shard`` has changed.
        cut: by name, the parameters that were cut, as the model holds them.
        local: by name, this rank's part of each.
        mine: by name, what this rank has of every parameter: its part, or all of it.
        first_hook: the number of the first hook that sharding registers.
        gathers: gives the model its whole parameters for a while.
    """

    keeps_shards = True
    gathers: WholeParameters

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        blocks: Mapping[str, nn.Module],
        place: torch.device,
    ) -> None:
        super().__init__(model, optimizer)
        self._mesh = mesh
        self.blocks = dict(blocks)
        self.uncut = kept_whole(model)
        self.places = places_of(model)
        self.first_hook = RemovableHandle.next_id

        before = dict(model.named_parameters())
        whole = {before[name] for name in self.uncut}
        self.modules = ShardedModules(model, blocks.values(), mesh, whole, place)
        self.cut: dict[str, nn.Parameter] = {}
        self.local: dict[str, nn.Parameter] = {}
        self.mine: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):
                self.mine[name] = p
                continue
            part = nn.Parameter(local_part(p), requires_grad=p.requires_grad)
            self.cut[name] = p
            self.local[name] = part
            self.mine[name] = part
        self._by_every_name = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if isinstance(p, DTensor):
                self._by_every_name[name] = p

        self._before = {name: weakref.ref(before[name]) for name in self.cut}
        self._named = _Named(self.mine)
        self._give_parts()

    def _give_parts(self) -> None:
        """Replace the whole parameters of the optimizer by the local ones, with their state."""
        states = self._optimizer.state
        names = {kept(): name for name, kept in self._before.items()}
        for group in self._optimizer.param_groups:
            given = []
            for p in group["params"]:
                name = names.get(p)
                if name is None:
                    given.append(p)
                    continue
                local = self.local[name]
                given.append(local)
                if p in states:
                    whole = states.pop(p)
                    states[local] = self.cut_state(name, whole)
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
                    f'fsdp: parameter "{name}" is referenced outside of its module (by a list, a '
                    "closure, a variable of yours, or the graph of a copy), which would keep "
                    "the unsharded values: access it through its module, and copy it by "
                    "p.detach().clone(); or take ddp"
                )

    # ---- the whole and its parts -----------------------------------------------------------------

    def cut_parameter(self, name: str) -> DTensor | None:
        """Return the parameter of this name, if it was cut."""
        return self._by_every_name.get(name)

    def part_of(self, name: str, whole: Any) -> torch.Tensor:
        """Copy this rank's part of a tensor of the shape of a parameter to this rank's device.

        Args:
            name: of the parameter. Where it isn't cut, the tensor is returned as it is.
            whole: the tensor, or a `RowShard`, which has only this part.
        """
        p = self.cut_parameter(name)
        if p is None:
            return whole  # type: ignore[no-any-return]
        rows = whole.local if isinstance(whole, RowShard) else self.rows_in(name, whole)
        part = torch.empty(rows.shape, dtype=rows.dtype, device=p.device)
        return part.copy_(rows)

    def rows_in(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor of the shape of a parameter, in the same memory."""
        sizes, number = self.rows_of(self.cut[name])
        start = sum(sizes[:number])
        return whole.detach().narrow(0, start, sizes[number])

    def as_rows(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the shape of a parameter that has these rows on this rank.

        Args:
            name: of the parameter. Where it isn't cut, the rows are all of the tensor.
            local: the rows, whose memory is shared.
        """
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

    def _rows_in(self, tensor: torch.Tensor) -> torch.Tensor | RowShard:
        """Return this rank's rows of a tensor, if it is cut.

        Of several replicas, only the first has rows.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        sizes, _ = self.rows_of(tensor)
        others = self._mesh.size() - len(sizes)
        sizes += (0,) * others
        return RowShard(tensor.to_local(), sizes, self._mesh.get_rank())

    def rows_of(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
        """Return how many rows each rank of a replica has, and this rank's number among them.

        They are those of DTensor: as many as fit evenly, rounded up, until none is left.
        """
        number = self._coordinate[-1]
        ranks = self._mesh.size(self._mesh.ndim - 1)
        left = len(tensor)
        most = -(-left // ranks)
        sizes = []
        for _ in range(ranks):
            size = min(most, left)
            sizes.append(size)
            left -= size
        return tuple(sizes), number

    def cut_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state of a whole parameter.

        Tensors of another shape than the parameter, as counts of steps, are the same on all ranks.
        """
        mine = dict(state)
        if name not in self.cut:
            return mine
        shape = self.cut[name].shape
        for key, value in state.items():
            if _has_shape(value, shape):
                mine[key] = self.part_of(name, value)
        return mine

    def joined_state(self, name: str, state: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        """Return an optimizer's state, gathered, or as rows; every rank calls this.

        Args:
            name: of the parameter.
            state: of this rank's part of the parameter.
            whole: whether it is gathered, else this rank's rows are returned (`RowShard`).
        """
        joined = dict(state)
        if name not in self.cut:
            return joined
        given = self.gathered if whole else self._rows_in
        shape = self.local[name].shape
        for key, value in state.items():
            if _has_shape(value, shape):
                cut = self.as_rows(name, value)
                joined[key] = given(cut)
        return joined

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's parts are those of the first replica."""
        return not any(self._coordinate[:-1])

    @property
    def _coordinate(self) -> tuple[int, ...]:
        """The number of this rank's replica, where there are several, and its number in that."""
        return tuple(self._mesh.get_coordinate() or [0])

    @property
    def bytes_here(self) -> int:
        """The size of this rank's parts of the parameters."""
        return sum(p.nbytes for p in self.local.values())

    # ---- the layout ---------------------------------------------------------------------------------

    @property
    def are_gathered(self) -> bool:
        """Whether the model has its whole parameters now."""
        return self.gathers.are_gathered

    def whole(self) -> AbstractContextManager[None]:
        """The model and the optimizer have whole parameters in this context."""
        return self.gathers.gathered()

    def read(self) -> AbstractContextManager[None]:
        """The model has whole parameters in this context; what is written to them is lost."""
        return self.gathers.gathered(keeps=False)

    def own(self) -> AbstractContextManager[None]:
        """The model has this rank's shards in this context, within ``whole`` too.

        State dicts are made and loaded in it.
        """
        return self.gathers.cut()

    def parts(self) -> dict[str, torch.Tensor]:
        """Give, by name, what this process has of each parameter."""
        return dict(self.mine)

    def rows(self, name: str, part: torch.Tensor) -> torch.Tensor | RowShard:
        """Give the whole tensor, or the rows of it that this rank has."""
        return self._rows_in(self.as_rows(name, part))

    def split(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
        """Tell how many rows each rank has of a parameter, or of an optimizer's tensor of the same
        shape.

        Args:
            name: of a tensor in a checkpoint: ``model/0.weight``, or
                ``optimizer/state/0.weight/exp_avg``.
            shape: of the tensor.
        """
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            path = rest.removeprefix("state/")
            rest, _, _ = path.rpartition("/")
        elif kind != "model":
            return None
        p = self.cut_parameter(rest)
        if p is None or tuple(p.shape) != tuple(shape):
            return None
        return self.rows_of(p)

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict, gathered on every rank, or this rank's rows."""
        given = self.gathered if whole else self._rows_in
        weights = {}
        with self.own():
            held = self._model.state_dict()
            for name, value in held.items():
                weights[name] = given(value)
        return weights

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over this rank's part of each tensor.

        A tensor of another shape than the parameter is left to ``load_state_dict`` to refuse.
        """
        parts = dict(weights)
        for name, value in weights.items():
            p = self.cut_parameter(name)
            if p is None or value.shape != p.shape:
                continue
            part = self.part_of(name, value)
            parts[name] = self.as_rows(name, part)
        with self.own():
            super().take_weights(parts)

    def optimizer_state(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the optimizer's state, gathered on every rank, or this rank's rows."""
        with self.own():
            given = named_optimizer_state(self._optimizer, self._named)
            states = given["state"]
            for name, state in states.items():
                states[name] = self.joined_state(name, state, whole)
        return given

    def take_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take over this rank's part of each tensor."""
        states = {}
        for name, state in saved["state"].items():
            states[name] = self.cut_state(name, state)
        mine = {**saved, "state": states}
        with self.own():
            load_named_optimizer_state(self._optimizer, self._named, mine)


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of shards that has hooks on its step.

    Args:
        optimizer: isn't known to treat each element by itself.

    Raises:
        StrategyError: it has one.
    """
    if is_hooked(optimizer):
        raise StrategyError(
            "fsdp: the optimizer has hooks on its step (or another step in its place), which "
            "would get a shard of each gradient and parameter: if they treat each element by "
            "itself, confirm it by --elementwise true (FSDP(elementwise=True)), or take ddp"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is cut, in the same memory."""
    held = tensor.detach()
    assert isinstance(held, DTensor)
    return held.to_local()


def _has_shape(value: Any, shape: torch.Size) -> bool:
    """Return whether a value of an optimizer's state is a tensor of a shape, or rows of one."""
    return isinstance(value, torch.Tensor | RowShard) and value.shape == shape


def places_of(model: nn.Module) -> dict[str, list[Place]]:
    """Find the modules that hold each parameter, and its names there, by its name in the model.

    A tied parameter has several places.
    """
    names = {p: name for name, p in model.named_parameters()}
    found: dict[str, list[Place]] = defaultdict(list)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            name = names[p]
            found[name].append((module, key))
    return found


class _Named(nn.Module):
    """Stands for a model whose parameters have these names, where only names are asked for.

    Args:
        named: this rank's part of each parameter, as the optimizer has it.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters as they were given."""
        return self._named.items()
