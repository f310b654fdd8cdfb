"""The state of an optimizer by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import InputError, JobError
from lockstep.model.optimizers.fused import begin_momentum
from lockstep.model.optimizers.kinds import has_own_state
from lockstep.model.optimizers.several import Optimizers

REPLACED = (
    "the optimizer has a parameter that is no longer in the model (a layer was replaced?): "
    "replace layers before the optimizer is made"
)


def _names_of(model: nn.Module) -> dict[int, str]:
    """Give the names of parameters by their ids."""
    return {id(p): name for name, p in model.named_parameters()}


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Give an optimizer's state by parameter name, where PyTorch's ``state_dict`` has numbers::

        {
            "kind": "Adam",
            "state": {"0.weight": {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}},
            "groups": [{"lr": 0.1, ..., "params": ["0.weight", "0.bias"]}],
            "others": {...},  # state that belongs to no parameter, where there is some
        }

    Several optimizers give such a state each, by name. An optimizer with a ``state_dict`` of its
    own gives that: ``{"kind": "Mine", "own": {...}}``.

    Args:
        optimizer: has the state.
        model: has the names.

    Raises:
        InputError: the optimizer has a parameter that isn't the model's, or holds another optimizer
            whose state would be lost.
    """
    if isinstance(optimizer, Optimizers):
        by_name = {}
        for name, one in optimizer.by_name.items():
            by_name[name] = named_optimizer_state(one, model.get_submodule(name))
        return by_name

    kind = type(optimizer).__name__
    if has_own_state(optimizer):
        return {"kind": kind, "own": optimizer.state_dict()}
    _refuse_held_optimizer(optimizer)

    names = _names_of(model)
    groups = []
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            raise InputError(REPLACED)
        settings = dict(group)
        settings.pop("param_names", None)
        settings["params"] = [names[id(p)] for p in group["params"]]
        groups.append(settings)

    state = {}
    others = dict[Any, Any]()
    for key, values in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            state[names[id(key)]] = dict(values)
        else:
            others[key] = values

    saved = {"kind": kind, "state": state, "groups": groups}
    if others:
        saved["others"] = others
    return saved


def _refuse_held_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to save an optimizer that holds another one."""
    kind = type(optimizer).__name__
    for held in tree_leaves(vars(optimizer)):
        if isinstance(held, torch.optim.Optimizer):
            raise JobError(
                f"optimizer: {kind} holds another optimizer ({type(held).__name__}), whose state "
                f"would not be saved: give {kind} the methods state_dict() and load_state_dict(), "
                "which call those of the other"
            )


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    saved: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that ``named_optimizer_state`` took from one over the same names.

    Args:
        optimizer: is given the state.
        model: has the names.
        saved: the state.

    Raises:
        InputError: the groups hold other parameters, or it is an optimizer of another kind.
    """
    if isinstance(optimizer, Optimizers):
        if sorted(saved) != sorted(optimizer.by_name):
            raise InputError(
                f"the saved optimizers are {', '.join(saved)}, the job has "
                f"{', '.join(optimizer.by_name)}: they differ"
            )
        for name, one in optimizer.by_name.items():
            load_named_optimizer_state(one, model.get_submodule(name), saved[name])
        return

    kind = type(optimizer).__name__
    saved_kind = saved.get("kind", kind)
    if saved_kind != kind:
        raise InputError(
            f"the saved optimizer is {saved_kind}, this one {kind}: resume with that one, or start "
            "a run from the saved weights"
        )
    if "own" in saved:
        optimizer.load_state_dict(saved["own"])
        return

    names = _names_of(model)
    state_dict = optimizer.state_dict()
    numbers = _load_groups(optimizer, state_dict, saved["groups"], names)
    state = dict(saved.get("others", {}))
    for name, values in saved["state"].items():
        state[numbers[name]] = values
    state_dict["state"] = state
    optimizer.load_state_dict(state_dict)
    _restore_formats(optimizer, names, saved["state"])
    begin_momentum(optimizer)


def _load_groups(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    saved: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> dict[str, int]:
    """Write the settings of saved groups to a state dict; return the numbers of parameters in it,
    by name.

    The choice of an implementation (``fused``, ``foreach``) is left as it is here.

    Args:
        optimizer: has the groups.
        state_dict: PyTorch's, of this optimizer.
        saved: the saved groups.
        names: of parameters, by their ids.
    """
    groups = optimizer.param_groups
    if len(groups) != len(saved):
        raise InputError(
            f"the saved optimizer has {len(saved)} parameter groups, this job's {len(groups)}"
        )
    numbers: dict[str, int] = {}
    for i, group in enumerate(groups):
        own_names = [names[id(p)] for p in group["params"]]
        different = sorted(set(own_names).symmetric_difference(saved[i]["params"]))
        if different:
            raise InputError(
                f'the saved optimizer has other parameters in group {i}: "{different[0]}" is in '
                "one only"
            )
        packed = state_dict["param_groups"][i]
        numbers.update(zip(own_names, packed["params"], strict=True))
        for key, value in saved[i].items():
            if key not in ("params", "fused", "foreach"):
                packed[key] = value
    return numbers


def _restore_formats(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Any],
) -> None:
    """Give loaded state the dtype that it was saved in, and its parameter's memory layout.

    PyTorch converts numbers to the parameter's dtype. Files don't keep a layout, and fused kernels
    on CPU go through parameter and state by address.
    """
    for p, values in optimizer.state.items():
        if not isinstance(p, torch.Tensor):
            continue
        saved_values = saved.get(names[id(p)], {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            saved_value = saved_values.get(key)
            if isinstance(saved_value, torch.Tensor) and not saved_value.dim():
                value = value.to(saved_value.dtype)
            if value.shape == p.shape and value.layout == torch.strided:
                laid_out = torch.empty_like(p, dtype=value.dtype, device=value.device)
                value = laid_out.copy_(value)
            values[key] = value
