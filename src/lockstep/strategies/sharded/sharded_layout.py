"""The layout of ``fsdp``: each rank has some rows of most parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lockstep.launch.world import World
from lockstep.model.optimizers.state import load_named_optimizer_state, named_optimizer_state
from lockstep.strategies.sharded.shards import Shards
from lockstep.strategies.sharded.whole_parameters import WholeParameters
from lockstep.strategies.steps.parameter_layout import ParameterLayout
from lockstep.tensors.row_shard import RowShard


class ShardedLayout(ParameterLayout):
    """Shards of parameters over the ranks.

    Args:
        model: the model that was cut.
        optimizer: of this rank's parts.
        shards: of the model.
        world: the ranks.
    """

    keeps_shards = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: Shards,
        world: World,
    ) -> None:
        super().__init__(model, optimizer)
        self._shards = shards
        self._named = _Named(shards.mine)
        self._whole = WholeParameters(model, optimizer, shards, world)

    @property
    def are_gathered(self) -> bool:
        """Whether the model has its whole parameters now."""
        return self._whole.are_gathered

    def whole(self) -> AbstractContextManager[None]:
        """The model and the optimizer have whole parameters in this context."""
        return self._whole.gathered()

    def read(self) -> AbstractContextManager[None]:
        """The model has whole parameters in this context; what is written to them is lost."""
        return self._whole.gathered(keeps=False)

    def own(self) -> AbstractContextManager[None]:
        """The model has this rank's shards in this context, within ``whole`` too.

        State dicts are made and loaded in it.
        """
        return self._whole.cut()

    def parts(self) -> dict[str, torch.Tensor]:
        """Give, by name, what this process has of each parameter."""
        return dict(self._shards.mine)

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Give this rank's part of a tensor of the shape of a parameter, or all of a buffer."""
        return self._shards.part(name, whole)

    def joined(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Join the parts that the ranks have of a tensor."""
        return self._shards.joined(name, part)

    def rows(self, name: str, part: torch.Tensor) -> torch.Tensor | RowShard:
        """Give the whole tensor, or the rows of it that this rank has."""
        cut = self._shards.as_rows(name, part)
        return self._shards.rows(cut)

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
        p = self._shards.cut_parameter(rest)
        if p is None or tuple(p.shape) != tuple(shape):
            return None
        return self._shards.rows_of(p)

    def weights(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the model's state dict, gathered on every rank, or this rank's rows."""
        given = self._shards.gathered if whole else self._shards.rows
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
            p = self._shards.cut_parameter(name)
            if p is None or value.shape != p.shape:
                continue
            part = self._shards.part(name, value)
            parts[name] = self._shards.as_rows(name, part)
        with self.own():
            super().take_weights(parts)

    def optimizer_state(self, *, whole: bool = True) -> dict[str, Any]:
        """Give the optimizer's state, gathered on every rank, or this rank's rows."""
        with self.own():
            given = named_optimizer_state(self._optimizer, self._named)
            states = given["state"]
            for name, state in states.items():
                states[name] = self._shards.joined_state(name, state, whole)
        return given

    def take_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take over this rank's part of each tensor."""
        states = {}
        for name, state in saved["state"].items():
            states[name] = self._shards.cut_state(name, state)
        mine = {**saved, "state": states}
        with self.own():
            load_named_optimizer_state(self._optimizer, self._named, mine)


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
