"""TrainedParameters: the parameters that the optimizer of a step moves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lockstep.errors import StrategyError


class TrainedParameters:
    """The model's parameters that the optimizer has, and which of them are frozen now.

    Args:
        model: has the parameters.
        optimizer: moves them.
        own: by name, what this process has of each parameter, and has given to the optimizer.
        with_frozen: whether frozen parameters count as trained, since they may be thawed within an
            update.

    Attributes:
        held: by name, the model's parameters that the optimizer has, frozen or not.
        others: by name, those that were frozen from the beginning, and that the optimizer hasn't.
        names: the names of those that are trained.
        values: what this process has of each of those.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: Mapping[str, nn.Parameter],
        *,
        with_frozen: bool,
    ) -> None:
        self._optimizer = optimizer
        self._own = own
        self._with_frozen = with_frozen
        self._optimized = self._in_optimizer()
        optimized = set(self._optimized)
        self.held: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if id(own[name]) in optimized:
                self.held[name] = p
            elif not p.requires_grad:
                self.others[name] = p
        self.find()

    def _in_optimizer(self) -> list[int]:
        """List the ids of the optimizer's parameters."""
        found: list[int] = []
        for group in self._optimizer.param_groups:
            found += map(id, group["params"])
        return found

    def find(self) -> None:
        """Find the parameters that aren't frozen now."""
        self._flags = [p.requires_grad for p in self.held.values()]
        self.names: list[str] = []
        self.values: list[nn.Parameter] = []
        for name, p in self.held.items():
            own = self._own[name]
            if own is not p:
                own.requires_grad_(p.requires_grad)
            if p.requires_grad or self._with_frozen:
                self.names.append(name)
                self.values.append(own)

    def changed(self, fix: str) -> str | None:
        """Give the first parameter that was frozen or thawed since ``find``; None without one.

        Args:
            fix: what to do where the optimizer was given other parameters.

        Raises:
            StrategyError: it was.
        """
        if self._in_optimizer() != self._optimized:
            raise StrategyError(
                f"the optimizer has other parameters than when the step was made: {fix}"
            )
        for (name, p), flag in zip(self.held.items(), self._flags, strict=True):
            if p.requires_grad != flag:
                return name
        return None
