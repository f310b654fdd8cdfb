"""LentOptimizer: what a person's code sees of an optimizer of shards.

It holds this rank's parts as ordinary parameters, which is fast, and of which a norm would be this rank's. Within
``whole_values`` it holds what it would on one device::

                        outside of whole_values          within
    param_groups        local parts                      the model's parameters (DTensors)
    state               of local parts, of their shapes  of the model's parameters, DTensors of the same memory
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import InputError, StrategyError
from lockstep.launch.events import Caveat
from lockstep.model.inspection import NotedDraws
from lockstep.model.optimizer import is_hooked, may_draw
from lockstep.strategies.sharded.shards import Shards
from lockstep.strategies.sharded.whole_values import WholeValues


class LentOptimizer:
    """Lends an optimizer, and takes it back.

    Args:
        optimizer: it, which has the local parts.
        shards: whose they are.
        model: the sharded one. A forward of it leaves gathered what is in no block, and what is written to that would
            be lost: within ``whole_values`` it is cut again at once, or with gradients, afterwards.
        elementwise: what hooks on its step do, they do to each element by itself.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, shards: Shards, model: nn.Module, *, elementwise: bool
    ) -> None:
        self._optimizer, self._shards, self._model, self._elementwise = optimizer, shards, model, elementwise
        self._names = {id(p): name for of in (shards.local, shards.cut) for name, p in of.items()}
        self._is_lent = False
        self._cut = {id(local): shards.cut[name] for name, local in shards.local.items()}

    @contextlib.contextmanager
    def whole_values(self) -> Iterator[None]:
        """In which a person's code computes with whole values; it may be entered again."""
        if self._is_lent:
            with WholeValues(self._cut):
                yield
            return
        self._lend()
        hook = self._model.register_forward_hook(self._cut_again)
        try:
            with WholeValues(self._cut):
                yield
        finally:
            hook.remove()
            self._keep_gathered()
            self._take_back()

    @contextlib.contextmanager
    def local_values(self) -> Iterator[None]:
        """In which what is computed from local parts is of those, within ``whole_values`` too."""
        before, WholeValues.is_off = WholeValues.is_off, True
        try:
            if self._is_lent:
                self._keep_gathered()
            yield
        finally:
            WholeValues.is_off = before
            WholeValues.changes += 1

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """In which the optimizer has the local parts, wherever that is asked for."""
        was_lent = self._is_lent
        if was_lent:
            self._take_back()
        try:
            yield
        finally:
            if was_lent:
                self._lend()

    def refuse_update(self) -> None:
        """Refuse an update while the optimizer is lent, or has hooks that would be given shards.

        Raises:
            InputError: it is.
            StrategyError: it has.
        """
        if self._is_lent:
            raise InputError("step: it is called within step.whole_values(): call it after that")
        if not self._elementwise:
            refuse_hooks(self._optimizer)

    @contextlib.contextmanager
    def noted_draws(self, *, looks: bool) -> Iterator[list[Caveat]]:
        """In which the optimizer makes its step; afterwards it is said whether that draws, where it is looked at."""
        caveats: list[Caveat] = []
        if not looks or not may_draw(self._optimizer):
            yield caveats
            return
        with NotedDraws() as noted:
            yield caveats
        if noted.drew:
            text = "the optimizer draws random numbers for each rank's shard of a parameter, the same ones on all ranks"
            caveats.append(Caveat("drawing", f"{text}: other ones than on one device", "take ddp"))

    def _keep_gathered(self) -> None:
        """What a forward with gradients has left gathered may have been written to."""
        held = {name: getattr(*self._shards.places[name][0]) for name in self._shards.cut}
        gathered = {name: p for name, p in held.items() if not isinstance(p, DTensor)}
        for name, p in gathered.items():
            self._shards.local[name].detach().copy_(self._shards.part(name, p))
        if gathered:
            self._shards.reshard()

    def _cut_again(self, model: nn.Module, args: object, outputs: object) -> None:
        del model, args, outputs
        if not torch.is_grad_enabled():
            self._shards.reshard()

    def _lend(self) -> None:
        self._replace(self._shards.cut, self._shards.as_rows)
        self._is_lent = True

    def _take_back(self) -> None:
        self._replace(self._shards.local, self._part)
        self._is_lent = False

    def _replace(self, others: Mapping[str, nn.Parameter], other: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Put other parameters, and other tensors of their state, in the place of those that were cut."""
        names, optimizer = self._names, self._optimizer
        for group in optimizer.param_groups:
            group["params"] = [others[names[id(p)]] if id(p) in names else p for p in group["params"]]
        states = list(optimizer.state.items())
        optimizer.state.clear()
        for p, state in states:
            name = names.get(id(p))
            held = p if name is None else others[name]
            if name is not None and held is not p:
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        state[key] = other(name, value)
            # (Asked for by the model's parameter outside of whole_values, it has an entry of both.)
            optimizer.state.setdefault(held, state).update(state)

    def _part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return self._shards.part(name, value)
        p = self._shards.cut[name]
        local: torch.Tensor = value.redistribute(p.device_mesh, p.placements).to_local()
        return local.detach()


def refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of shards that has hooks on its step.

    Raises:
        StrategyError: it has.
    """
    if is_hooked(optimizer):
        raise StrategyError(
            "fsdp: the optimizer has hooks on its step (or another step in its place), which would be given a shard of "
            "each gradient and parameter: where they treat each element by itself, say so by --elementwise true "
            "(FSDP(elementwise=True)), or take ddp"
        )
