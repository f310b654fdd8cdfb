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
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.errors import StrategyError
from lockstep.model.optimizers.kinds import is_hooked
from lockstep.model.optimizers.state import load_named_optimizer_state, named_optimizer_state
from lockstep.strategies.sharded.fully_sharded import kept_whole, shard_modules
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.tensors.row_shard import RowShard

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
        cut: by every name, the parameters that were cut, as the model holds them.
        local: by name, this rank's part of each.
        mine: by name, what this rank has of every parameter: its part, or all of it.

    Raises:
        StrategyError: something beside the optimizer keeps whole parameters.
    """

    keeps_shards = True

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

        before = dict(model.named_parameters())
        whole = {before[name] for name in self.uncut}
        self._sharded_class = shard_modules(model, blocks.values(), mesh, whole, place)
        self.cut: dict[str, DTensor] = {}
        self.local: dict[str, nn.Parameter] = {}
        self.mine: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            self.mine[name] = p
            if isinstance(p, DTensor):
                part = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)
                self.local[name] = part
                self.mine[name] = part
        for name, p in model.named_parameters(remove_duplicate=False):
            if isinstance(p, DTensor):
                self.cut[name] = p

        # What gives the optimizer's state by name only asks a model for its parameters.
        self._named: Any = SimpleNamespace(named_parameters=self.mine.items)
        replaced = {name: weakref.ref(before[name]) for name in self.local}
        del before, whole
        self._give_parts({before(): name for name, before in replaced.items()})
        _refuse_others(replaced)

    def _give_parts(self, names: Mapping[nn.Parameter | None, str]) -> None:
        """Replace the whole parameters of the optimizer by the local ones, with their state.

        Args:
            names: of the whole parameters that were cut.
        """
        states = self._optimizer.state
        for group in self._optimizer.param_groups:
            group["params"] = list(group["params"])
            for number, p in enumerate(group["params"]):
                if p not in names:
                    continue
                name = names[p]
                local = self.local[name]
                group["params"][number] = local
                if p in states:
                    states[local] = self.cut_state(name, states.pop(p))

    def reshard(self) -> None:
        """Free what is gathered beside the blocks."""
        model: Any = self._model
        own = type(model)
        model.__class__ = self._sharded_class
        model.reshard()
        model.__class__ = own

    # ---- the whole and its parts -----------------------------------------------------------------

    def part_of(self, name: str, whole: Any) -> torch.Tensor:
        """Copy this rank's part of a tensor of the shape of a parameter to this rank's device.

        Args:
            name: of the parameter. Where it isn't cut, the tensor is returned as it is.
            whole: the tensor, or a `RowShard`, which has only this part.
        """
        p = self.cut.get(name)
        if p is None:
            return whole  # type: ignore[no-any-return]
        is_part = isinstance(whole, RowShard)
        rows = whole.local if is_part else whole.detach().narrow(0, *self.span_of(name))
        part = torch.empty(rows.shape, dtype=rows.dtype, device=p.device)
        return part.copy_(rows)

    def span_of(self, name: str) -> tuple[int, int]:
        """Return this rank's first row of a parameter that is cut, and how many rows it has."""
        sizes, number = self.rows_of(self.cut[name])
        return sum(sizes[:number]), sizes[number]

    def as_rows(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the shape of a parameter that has these rows on this rank.

        Args:
            name: of the parameter. Where it isn't cut, the rows are all of the tensor.
            local: the rows, whose memory is shared.
        """
        p = self.cut.get(name)
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
        ranks = self._mesh.size(self._mesh.ndim - 1)
        most = -(-len(tensor) // ranks)
        sizes = []
        for rank in range(ranks):
            left = len(tensor) - rank * most
            sizes.append(max(0, min(most, left)))
        return tuple(sizes), self._coordinate[-1]

    def cut_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's state of a whole parameter.

        Tensors of another shape than the parameter, as counts of steps, are the same on all ranks.
        """
        return self._each(self.cut, name, state, lambda value: self.part_of(name, value))

    def joined_state(self, name: str, state: Mapping[str, Any], whole: bool) -> dict[str, Any]:
        """Return an optimizer's state, gathered, or as rows; every rank calls this.

        Args:
            name: of the parameter.
            state: of this rank's part of the parameter.
            whole: whether it is gathered, else this rank's rows are returned (`RowShard`).
        """
        given = self.joined if whole else self.rows
        return self._each(self.local, name, state, lambda value: given(name, value))

    def _each(
        self,
        parameters: Mapping[str, torch.Tensor],
        name: str,
        state: Mapping[str, Any],
        function: Callable[[Any], Any],
    ) -> dict[str, Any]:
        """Return a state with what a function makes of tensors of the shape of a parameter.

        Args:
            parameters: by name, of which the shape is taken.
            name: of the state's parameter; the state of another one is returned as it is.
            state: of an optimizer.
            function: takes a tensor, or a `RowShard`.
        """
        given = dict(state)
        if name in parameters:
            for key, value in state.items():
                is_tensor = isinstance(value, torch.Tensor | RowShard)
                if is_tensor and value.shape == parameters[name].shape:
                    given[key] = function(value)
        return given

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
        p = self.cut.get(rest)
        if p is None or tuple(p.shape) != tuple(shape):
            return None
        return self.rows_of(p)

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict, gathered on every rank, or this rank's rows."""
        given = self.gathered if whole else self._rows_in
        with self.own():
            held = self._model.state_dict()
            return {name: given(value) for name, value in held.items()}

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over this rank's part of each tensor.

        A tensor of another shape than the parameter is left to ``load_state_dict`` to refuse.
        """
        parts = dict(weights)
        for name, value in weights.items():
            p = self.cut.get(name)
            if p is not None and value.shape == p.shape:
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


def _refuse_others(replaced: Mapping[str, weakref.ref[nn.Parameter]]) -> None:
    """Refuse a model whose whole parameters something keeps beside the optimizer.

    Raises:
        StrategyError: it would use what they were.
    """
    gc.collect()
    for name, before in replaced.items():
        if before() is not None:
            raise StrategyError(
                f'fsdp: parameter "{name}" is referenced outside of its module (by a list, a '
                "closure, a variable of yours, or the graph of a copy), which would keep "
                "the unsharded values: access it through its module, and copy it by "
                "p.detach().clone(); or take ddp"
            )


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
