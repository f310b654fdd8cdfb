"""What a training may change and no checkpoint keeps, so that a resumed run begins anew with it."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.errors import is_own_code
from lockstep.model.inspection import HOOKS, OutsideVariables, attribute_place, attribute_prints, changed_attributes
from lockstep.model.losses.loss import Totalled
from lockstep.model.optimizer import optimizer_prints

_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The dictionaries of hooks that each has, or None."""


class Unsaved:
    """What that is, as it was when the training began.

    Args:
        outside: the variables that the model uses and doesn't own.
    """

    def __init__(
        self, model: nn.Module, loss: Totalled, optimizer: torch.optim.Optimizer, outside: OutsideVariables
    ) -> None:
        self._model, self._loss, self._optimizer, self._outside = model, loss, optimizer, outside
        self._attributes, self._layers = attribute_prints(model), _layers(model)
        self._variables, self._state = outside.prints(), loss.state(model)
        self._of_optimizer, self._step_hooks = optimizer_prints(optimizer, model), _step_hooks(optimizer)

    def changed(self) -> Iterator[tuple[str, str]]:
        """What has changed since, and what to do instead."""
        of_model = "make it a buffer of the model"
        objects = dict[int, str]()  # one may be an attribute of many layers
        for name in changed_attributes(self._model, self._attributes)[1]:
            of, own = attribute_place(self._model, name)
            objects.setdefault(id(of[own]), name)
        yield from ((f'the model\'s attribute "{name}"', of_model) for name in objects.values())
        for name, its in _layers(self._model).items():
            if self._layers.get(name) != its:
                what = f'layer "{name}" of the model, or its hooks,' if name else "the model itself, or its hooks,"
                yield what, "change it where the model is built, or in on_start of a callback"
        if _step_hooks(self._optimizer) != self._step_hooks:
            yield "what hooks the optimizer has", "register them where it is built, or in on_start of a callback"
        variables = self._outside.prints()
        for name, was in self._variables.items():
            if variables[name] != was:
                yield f'"{name}", which is outside of the model,', of_model
        if self._loss.state(self._model) != self._state:
            yield "what the loss remembers", of_model
        for name, value in optimizer_prints(self._optimizer, self._model).items():
            if self._of_optimizer.get(name) != value:
                yield f'"{name}" of the optimizer', "keep it in the optimizer's state or groups"


def _layers(model: nn.Module) -> dict[str, Any]:
    """Each module, with its hooks, those of its parameters, and a forward in place of its class's.

    As far as these are of a person's own code, or not written in Python.
    """
    found = {}
    for name, module in model.named_modules():
        hooks = [getattr(module, kind) for kind in HOOKS]
        hooks += [getattr(p, kind) or {} for p in module.parameters(recurse=False) for kind in _OF_PARAMETERS]
        its = itertools.chain(*(of.values() for of in hooks), [vars(module).get("forward")])
        found[name] = weakref.ref(module), [function for function in its if _is_own(function)]
    return found


def _step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    every = (getattr(optimizer, kind, {}).values() for kind in _OF_OPTIMIZERS)
    return [hook for hook in itertools.chain(*every) if _is_own(hook)]


def _is_own(function: Any) -> bool:
    if isinstance(function, types.BuiltinFunctionType):
        return True
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and is_own_code(code.co_filename)
