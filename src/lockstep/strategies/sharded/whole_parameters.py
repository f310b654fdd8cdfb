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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.errors import InputError, RunError, StrategyError
from lockstep.launch.events import Caveat
from lockstep.launch.world import END_OF_CALLBACKS, World
from lockstep.model.hooks import is_hooked
from lockstep.model.optimizer import REPLACED
from lockstep.strategies.sharded.shards import HOOKS, Shards
from lockstep.tensors.digest import digest

OF_OWN_LOOP = Caveat(
    "state",
    "between updates the model's parameters and gradients are shards (DTensors): a number made of "
    "one is of this rank's part, and what is written to a part of one is lost",
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


class WholeParameters:
    """Gathers a sharded model and its optimizer, and cuts them again.

    Args:
        model: the sharded model, with all hooks that sharding needs.
        optimizer: of the local parts.
        shards: of the model.
        world: the ranks.

    Attributes:
        are_gathered: whether the model has its whole parameters now.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, shards: Shards, world: World
    ) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._world = world
        self._of_sharding = [_OfSharding(module, shards) for module in model.modules()]
        self._kept: dict[str, _Kept] = {}  # while parameters are whole
        self.are_gathered = False

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """The model has its whole parameters in this context, which every rank enters.

        What is written to them is written back to the shards at the end, unless an exception ends
        the context.

        Raises:
            RunError: ranks have written other values.
            StrategyError, InputError: a parameter was replaced, converted, or has a hook.
        """
        if self.are_gathered:
            yield
            return
        self._gather()
        try:
            yield
            self._write_back()
        finally:
            self._cut()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """The model has its whole parameters in this context, which every rank enters.

        What is written to them is lost.
        """
        if self.are_gathered:
            yield
            return
        self._gather(only_values=True)
        try:
            yield
        finally:
            self._cut()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The model has its shards in this context, also within ``gathered``."""
        if not self.are_gathered:
            yield
            return
        whole = {name: p.data for name, p in self._shards.local.items()}
        self._write_back()
        self._cut()
        yield
        self._gather(whole)

    @torch.no_grad()
    def _gather(
        self, into: Mapping[str, torch.Tensor] | None = None, *, only_values: bool = False
    ) -> None:
        """Gather all parameters.

        Args:
            into: the memory that they had before, since somebody may have a view of it.
            only_values: leave gradients and the optimizer's state.
        """
        shards = self._shards
        state = self._optimizer.state
        shards.reshard()  # what a forward of the person's has left gathered
        for of_module in self._of_sharding:
            of_module.take_off()

        for name, p in shards.local.items():
            state.pop(shards.cut[name], None)  # an empty one, made by asking for it
            kept = _Kept(p.data, p.grad, state.get(p))
            self._kept[name] = kept
            whole = shards.joined(name, p)
            if kept.state is not None and not only_values:
                state[p] = shards.joined_state(name, kept.state, whole=True)
            p.grad = None
            p.data = whole if into is None else into[name].copy_(whole)
            p.requires_grad_(shards.cut[name].requires_grad)
            if kept.grad is not None and not only_values:
                p.grad = shards.joined(name, kept.grad)
            for module, key in shards.places[name]:
                setattr(module, key, p)  # an LSTM has a list of its weights, which follows
        self.are_gathered = True

    @torch.no_grad()
    def _write_back(self) -> None:
        self._refuse_changes()
        self._refuse_differences()
        shards = self._shards
        state = self._optimizer.state
        for name, p in shards.local.items():
            kept = self._kept[name]
            kept.part.copy_(shards.part(name, p))
            kept.grad = None if p.grad is None else shards.part(name, p.grad)
            kept.state = shards.cut_state(name, state[p]) if p in state else None
            shards.cut[name].requires_grad_(p.requires_grad)

    def _cut(self) -> None:
        shards = self._shards
        state = self._optimizer.state
        for name, p in shards.local.items():
            kept = self._kept.pop(name)
            p.grad = None
            p.data = kept.part
            p.grad = kept.grad
            state.pop(p, None)
            if kept.state is not None:
                state[p] = kept.state
            for module, key in shards.places[name]:
                if module._parameters.get(key) is p:
                    setattr(module, key, shards.cut[name])
        for of_module in self._of_sharding:
            of_module.put_back()
        self.are_gathered = False

    # ---- what can't be kept ----------------------------------------------------------------------

    def _refuse_changes(self) -> None:
        for name, p in self._shards.local.items():
            for module, key in self._shards.places[name]:
                if module._parameters.get(key) is not p:
                    raise InputError(REPLACED)
            if is_hooked(p):
                raise StrategyError(
                    f'fsdp: parameter "{name}" has a hook, which its shards lose: take ddp'
                )
            part = self._kept[name].part
            if p.dtype != part.dtype or p.device != part.device:
                raise StrategyError(
                    f'fsdp: parameter "{name}" was converted to {p.dtype} on {p.device}: convert '
                    "a copy of the model"
                )

    def _refuse_differences(self) -> None:
        self._world.meet(END_OF_CALLBACKS)
        mine = {name: (digest(p), p.requires_grad) for name, p in self._shards.local.items()}
        first, *others = self._world.gather_objects(mine)
        for rank, theirs in enumerate(others, 1):
            for name in first:
                if first[name] != theirs[name]:
                    raise RunError(
                        f'callbacks change parameter "{name}" on rank 0 and rank {rank} '
                        "differently: what they change must be the same on every rank"
                    )


class _OfSharding:
    """The hooks and attributes that sharding gave to a module.

    Args:
        module: which has all of them.
        shards: which know what the module had before.
    """

    def __init__(self, module: nn.Module, shards: Shards) -> None:
        self._held = vars(module)
        before = shards.before[module]
        self._names = self._held.keys() - before.names
        self._own = {
            number for kind in HOOKS for number in self._held[kind] if number not in before.hooks
        }
        self._hooks_then: list[dict[int, Any]] = []
        self._held_then: dict[str, Any] = {}

    def take_off(self) -> None:
        """Take them off."""
        self._hooks_then = [dict(self._held[kind]) for kind in HOOKS]
        for hooks in map(self._held.__getitem__, HOOKS):
            for number in self._own & hooks.keys():
                del hooks[number]
        self._held_then = {name: self._held.pop(name) for name in self._names}

    def put_back(self) -> None:
        """Put them back, in their order, before hooks that came meanwhile."""
        for kind, then in zip(HOOKS, self._hooks_then, strict=True):
            hooks = self._held[kind]
            now = dict(hooks)
            hooks.clear()
            for number, hook in then.items():
                if number in self._own or number in now:
                    hooks[number] = hook
            hooks.update(now)
        self._held.update(self._held_then)
