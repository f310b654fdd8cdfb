"""The whole model on every rank for a while, for a person's code that expects the model of one
device.

::

                  outside                            within
    model         shards (DTensors), gathered by     whole parameters and gradients,
                  hooks when forward comes to them   without those hooks
    optimizer     this rank's part of parameters,    the same parameters, which are whole,
                  with their state                   with their whole state

Every rank gathers when the context begins, and keeps its part when it ends. Within, the model is an
ordinary module with ordinary parameters, so what a person computes with them is what one device
computes. They are the parameters that the optimizer has, whose memory is exchanged: a callback may
keep them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lockstep.errors import InputError, RunError, StrategyError
from lockstep.launch.world import END_OF_CALLBACKS, World
from lockstep.model.build import differing_tensors
from lockstep.model.hooks import is_hooked
from lockstep.model.optimizers.state import REPLACED
from lockstep.run.events import Caveat
from lockstep.strategies.sharded.shards import Shards

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
"""The attributes of a module in which sharding registers hooks."""

OF_OWN_LOOP = Caveat(
    "state",
    "between updates the model's parameters and gradients are shards (DTensors): a number "
    "computed from a DTensor is of this rank's shard only, and writes to a slice are lost",
    "do both within `with step.whole_parameters():`, on every rank",
)


@dataclass
class _Kept:
    """What this rank keeps of a parameter while the model has the whole one.

    Attributes:
        part: this rank's part.
        grad: the gradient of the part.
        state: the optimizer's state of the part.
    """

    part: torch.Tensor
    grad: torch.Tensor | None
    state: dict[str, Any] | None


class ShardedLayout(Shards):
    """Shards that are gathered for a while, with the optimizer's state, and cut again.

    Args:
        model: the same on every rank; it may be on the CPU still.
        optimizer: of the whole parameters, which is given this rank's parts.
        mesh: the ranks.
        blocks: the modules that are gathered on their own, by name.
        world: the ranks.

    Attributes:
        are_gathered: whether the model has its whole parameters now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        blocks: Mapping[str, nn.Module],
        world: World,
    ) -> None:
        first = RemovableHandle.next_id
        super().__init__(model, optimizer, mesh, blocks, world.device.torch)
        self._world = world
        self._kept: dict[str, _Kept] = {}  # while parameters are whole
        self.are_gathered = False
        for module in model.modules():
            for kind in HOOKS:
                hooks = getattr(module, kind)
                for number, hook in hooks.items():
                    if number >= first:
                        hooks[number] = self.unless_whole(hook)

    def unless_whole(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that does nothing while parameters are whole."""

        def wrapped(*given: Any) -> Any:
            return None if self.are_gathered else hook(*given)

        return wrapped

    def whole(self) -> AbstractContextManager[None]:
        """The model and the optimizer have whole parameters in this context."""
        return self._whole(keeps=True)

    def read(self) -> AbstractContextManager[None]:
        """The model has whole parameters in this context; what is written to them is lost."""
        return self._whole(keeps=False)

    @contextlib.contextmanager
    def _whole(self, *, keeps: bool) -> Iterator[None]:
        """The model has its whole parameters in this context, which every rank enters.

        Args:
            keeps: what is written to them is written back to the shards at the end, unless an
                exception ends the context. Else it is lost, and only the values are gathered.

        Raises:
            RunError: ranks have written other values.
            StrategyError, InputError: a parameter was replaced, converted, or has a hook.
        """
        if self.are_gathered:
            yield
            return
        self._gather(only_values=not keeps)
        try:
            yield
            if keeps:
                self._write_back()
        finally:
            self._cut()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """The model has this rank's shards in this context, within ``whole`` too.

        State dicts are made and loaded in it.
        """
        if not self.are_gathered:
            yield
            return
        whole = {name: p.data for name, p in self.local.items()}
        self._write_back()
        self._cut()
        yield
        self._gather()
        # Somebody may have a view of the memory that they had before.
        for name, p in self.local.items():
            p.data = whole[name].copy_(p.data)

    @torch.no_grad()
    def _gather(self, *, only_values: bool = False) -> None:
        """Gather all parameters.

        Args:
            only_values: leave gradients and the optimizer's state.
        """
        state = self._optimizer.state
        self.reshard()  # what a forward of the person's has left gathered
        for name, p in self.local.items():
            cut = self.cut[name]
            state.pop(cut, None)  # an empty one, made by asking for it
            kept = _Kept(p.data, p.grad, state.get(p))
            self._kept[name] = kept
            if kept.state is not None and not only_values:
                # This looks at the shape of the parameter, which is this rank's part still.
                state[p] = self.joined_state(name, kept.state, whole=True)
            p.grad = None
            p.data = self.joined(name, kept.part)
            p.requires_grad_(cut.requires_grad)
            if kept.grad is not None and not only_values:
                p.grad = self.joined(name, kept.grad)
            for module, key in self.places[name]:
                setattr(module, key, p)  # an LSTM has a list of its weights, which follows
        self.are_gathered = True

    @torch.no_grad()
    def _write_back(self) -> None:
        """Keep this rank's part of what was written to whole parameters, gradients and state.

        Raises:
            RunError: ranks have written other values.
            StrategyError, InputError: a parameter was replaced, converted, or has a hook.
        """
        self._refuse_changes()
        self._refuse_differences()
        state = self._optimizer.state
        for name, p in self.local.items():
            kept = self._kept[name]
            part = self.part_of(name, p)
            kept.part.copy_(part)
            kept.grad = None
            if p.grad is not None:
                kept.grad = self.part_of(name, p.grad)
            kept.state = None
            if p in state:
                kept.state = self.cut_state(name, state[p])
            self.cut[name].requires_grad_(p.requires_grad)

    def _cut(self) -> None:
        """Give model and optimizer the parts that this rank has kept."""
        state = self._optimizer.state
        for name, p in self.local.items():
            kept = self._kept.pop(name)
            p.grad = None
            p.data = kept.part
            p.grad = kept.grad
            state.pop(p, None)
            if kept.state is not None:
                state[p] = kept.state
            for module, key in self.places[name]:
                if module._parameters.get(key) is p:
                    setattr(module, key, self.cut[name])
        self.are_gathered = False

    # ---- what can't be kept ----------------------------------------------------------------------

    def _refuse_changes(self) -> None:
        """Refuse what the parts can't follow.

        Raises:
            InputError: a parameter was replaced.
            StrategyError: a parameter has got a hook, or was converted.
        """
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for name, p in self.local.items():
            if now.get(name) is not p:
                raise InputError(REPLACED)
            if is_hooked(p):
                raise StrategyError(
                    f'fsdp: parameter "{name}" has a hook, which its shards lose: take ddp'
                )
            part = self._kept[name].part
            if p.dtype != part.dtype or p.device != part.device:
                raise StrategyError(
                    f'fsdp: parameter "{name}" was converted to {p.dtype} on {p.device}: convert '
                    "its state_dict()"
                )

    def _refuse_differences(self) -> None:
        """Refuse whole parameters that aren't the same on all ranks.

        Raises:
            RunError: one differs.
        """
        self._world.meet(END_OF_CALLBACKS)
        different = differing_tensors(self.local.items(), self._world)
        if different is not None:
            raise RunError(
                f'callbacks change parameter "{different}" differently on some ranks: what they '
                "change must be the same on every rank"
            )
