"""The optimizer of a job: made over named parameters, fused where that is right, its state saved by
parameter name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from lockstep.errors import InputError, JobError, told
from lockstep.model.optimizers import Optimizers, optimizers_in
from lockstep.recipe import NamedParameters, Recipe

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that have a fused implementation, where they were given none."""

_FUSED_ON = ("cpu", "cuda", "mps", "xpu")
"""Types of device that have the kernels."""

REPLACED = (
    "the optimizer has a parameter that the model hasn't any more (a layer was replaced?): give "
    "the model its layers before the optimizer is made"
)


def build_optimizer(
    job: Recipe, model: nn.Module, *, on: str | None = None
) -> torch.optim.Optimizer:
    """Make the job's optimizer over the model's named parameters.

    Args:
        job: has the optimizer's factory.
        model: has the parameters.
        on: the type of the devices that the parameters will be on; None if they are there already.

    Raises:
        JobError: the factory raises, gives no optimizer, or leaves a parameter out (the first is
            named).
    """
    if job.optimizer is None:
        return NoUpdates(model.parameters())
    if not isinstance(job.optimizer, Mapping):
        return _build(job.optimizer, model, fused=job.fused, on=on)
    parts = dict(model.named_children())
    optimized = set[int]()
    for name in job.optimizer:
        if name not in parts:
            known = ", ".join(parts) or "none"
            raise JobError(f'optimizer: the model has no part "{name}": it has {known}')
        optimized.update(map(id, parts[name].parameters()))
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in optimized:
            raise JobError(
                f'optimizer: "{name}" is in none of the parts {", ".join(job.optimizer)}: give '
                "its part an optimizer, or freeze it in the model with requires_grad_(False)"
            )
    by_name = {}
    for name, make in job.optimizer.items():
        by_name[name] = _build(make, parts[name], fused=job.fused, on=on)
    return Optimizers(by_name)


class NoUpdates(torch.optim.Optimizer):
    """The optimizer of a model that isn't trained.

    PyTorch's own constructor isn't called: it imports the compiler, which takes 0.8 s.
    """

    elementwise = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": [p for p in parameters if p.requires_grad]}]
        self.state = {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters as they are."""


def _build(
    make: Callable[[NamedParameters], torch.optim.Optimizer],
    model: nn.Module,
    *,
    fused: bool | None,
    on: str | None,
) -> torch.optim.Optimizer:
    """Make one optimizer, check it, and fuse it where that is right.

    Args:
        make: the person's factory.
        model: has the parameters, or is the part of the model that has them.
        fused: True requires the fused implementation, None takes it where it is right.
        on: as in ``build_optimizer``.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        optimizer = make(named)
    except Exception as error:
        pairs = " (it is given pairs of a name and a parameter)" if "tuple" in str(error) else ""
        raise JobError(f"optimizer: making it raised {told(error)}{pairs}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            f"optimizer: it gave a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    _refuse_closure(optimizer)
    _refuse_other_parameters(optimizer, model, named)
    # An optimizer made of others may have no state. Adagrad made its state in the constructor, for
    # the implementation chosen there.
    if fused is False or getattr(optimizer, "state", None):
        return optimizer
    if not _can_be_fused(optimizer, model, on=on, wanted=fused is True):
        if fused:
            raise JobError(
                f"fused: there is no fused {type(optimizer).__name__} for this model's parameters "
                "here"
            )
        return optimizer
    _fuse(optimizer, wanted=fused is True)
    return optimizer


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` requires a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"optimizer: {type(optimizer).__name__}.step() requires a closure, and is called "
            "without one: use one that needs none, as AdamW"
        )


def _refuse_other_parameters(
    optimizer: torch.optim.Optimizer, model: nn.Module, named: NamedParameters
) -> None:
    """Refuse an optimizer over more parameters than the model's, or fewer than ``named``.

    Args:
        optimizer: just made.
        model: has the parameters that the optimizer may hold.
        named: the parameters that the optimizer was given, and has to hold.
    """
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if optimized - {id(p) for p in model.parameters()}:
        raise JobError(
            "optimizer: it holds parameters that the model doesn't have: make it over those that "
            "it is given, as lambda parameters: SGD(parameters, ...) (in a loop of your own, over "
            "model.parameters() of the same model)"
        )
    left_out = [name for name, p in named if id(p) not in optimized]
    if left_out:
        raise JobError(
            f"optimizer: {len(left_out)} of {len(named)} parameters are left out, "
            f'"{left_out[0]}" first: give them a group, or freeze them in the model with '
            "requires_grad_(False)"
        )


def sparse_parameters(model: nn.Module) -> set[int]:
    """Find the ids of weights whose gradients are sparse, those of embeddings with
    ``sparse=True``.
    """
    return {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) is True}


def _can_be_fused(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, on: str | None, wanted: bool
) -> bool:
    """Whether PyTorch has a fused implementation of this optimizer for these parameters.

    Args:
        optimizer: just made.
        model: has the parameters.
        on: the type of the devices that the parameters will be on; None if they are there already.
        wanted: whether the person asked for it; then ``amsgrad`` is no obstacle.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    devices = {on or p.device.type for p in parameters}
    if type(optimizer) not in _FUSED or not devices.issubset(_FUSED_ON):
        return False
    if sparse_parameters(model):
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable") or (group.get("amsgrad") and not wanted):
            return False
    # The kernel of SGD on CPU skips whole vectors of parameters of 16 bits (torch 2.13).
    refuses_halves = type(optimizer) is torch.optim.SGD and "cpu" in devices
    for p in parameters:
        if not p.is_floating_point() or p.layout != torch.strided:
            return False
        # The kernels on CPU go by address, and are silently wrong where a parameter has gaps.
        if torch.empty_like(p).stride() != p.stride():
            return False
        if refuses_halves and p.itemsize == 2:
            return False
    return True


def _fuse(optimizer: torch.optim.Optimizer, *, wanted: bool) -> None:
    """Switch to the fused implementation.

    Groups with dampening keep theirs: momentum that begins at zero would have other numbers then.
    """
    for group in optimizer.param_groups:
        is_chosen = group.get("foreach") is not None or group.get("fused") is not None
        if is_chosen and not wanted:  # a person who chose an implementation keeps it
            continue
        if group.get("dampening"):
            continue
        group["foreach"] = False
        group["fused"] = True
    if all(group["fused"] for group in optimizer.param_groups):
        # The constructor would set it. The kernel then detects an overflow of fp16, not the host.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    begin_momentum(optimizer)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin the momentum of every parameter of a fused SGD at once, at zero.

    PyTorch's fused SGD can't begin the momentum of one parameter later than another's (one that was
    unused in the first step). Without dampening, momentum that begins at zero gives the same
    numbers.
    """
    for one in optimizers_in(optimizer):
        if not isinstance(one, torch.optim.SGD):
            continue
        for group in one.param_groups:
            if not group["fused"] or not group["momentum"]:
                continue
            for p in group["params"]:
                if p.requires_grad and one.state[p].get("momentum_buffer") is None:
                    one.state[p]["momentum_buffer"] = torch.zeros_like(p)


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Find the optimizers that have ``train()`` and ``eval()``, which write the parameters.

    Schedule-free optimizers have them: in training the parameters are the point where gradients
    are computed, in evaluation the average that is the result.
    """
    return [
        one for one in optimizers_in(optimizer) if hasattr(one, "train") and hasattr(one, "eval")
    ]


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a ``state_dict`` and a ``load_state_dict`` of its own."""
    kind = type(optimizer)
    base = torch.optim.Optimizer
    if kind.state_dict is base.state_dict:
        return False
    return kind.load_state_dict is not base.load_state_dict


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` may draw random numbers: the optimizer isn't one of PyTorch's, or calls a
    person's hooks.
    """
    if isinstance(optimizer, Optimizers):
        optimizer = optimizer.by_name[optimizer.active]
    return is_hooked(optimizer) or not is_of_pytorch(optimizer)


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step does more than the optimizer's class does, by hooks or another ``step``."""
    hooks = (  # an optimizer made of others may have no hooks
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    if any(hooks):
        return True
    own = vars(optimizer).get("step")
    if own is None:
        return False
    is_wrapped_by_scheduler = hasattr(own, "_wrapped_by_lr_sched")
    wraps_class_step = getattr(own, "__wrapped__", None) is type(optimizer).step
    return not (is_wrapped_by_scheduler and wraps_class_step)


def is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class is one of PyTorch's own."""
    # Adafactor's module is "torch.optim" itself.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> torch.Tensor:
    """Scale gradients so that their norm together is at most ``largest``; return what it was.

    Unlike PyTorch's function it takes sparse gradients too.

    Args:
        parameters: have the gradients, which are scaled in place.
        largest: the norm that all gradients together may have.
    """
    if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, largest)
    grads = gradient_values(parameters)
    norm = nn.utils.get_total_norm(grads)
    scale_to_norm(grads, norm, largest)
    return norm


def gradient_values(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """List the numbers of all gradients. A sparse gradient gives its rows, each row once."""
    values = []
    for p in parameters:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            values.append(p.grad.values())
        else:
            values.append(p.grad)
    return values


def scale_to_norm(grads: Iterable[torch.Tensor], norm: torch.Tensor, largest: float) -> None:
    """Scale gradients in place so that their norm together is at most ``largest``.

    Args:
        grads: on any devices, of any dtypes.
        norm: their norm together, before.
        largest: the norm that they may have.
    """
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch's clip_grad_norm_ has it
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), some in alike.items():
        torch._foreach_mul_(some, factor.to(device, torch.promote_types(dtype, torch.float32)))


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
        settings = {key: group[key] for key in group if key not in ("params", "param_names")}
        groups.append({**settings, "params": [names[id(p)] for p in group["params"]]})

    state = {}
    others = dict[Any, Any]()
    for key, values in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            state[names[id(key)]] = dict(values)
        else:
            others[key] = values

    saved = {"kind": kind, "state": state, "groups": groups}
    return {**saved, "others": others} if others else saved


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
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]
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
    state = {numbers[name]: values for name, values in saved["state"].items()}
    state_dict["state"] = {**state, **saved.get("others", {})}
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
        different = sorted({*own_names} ^ {*saved[i]["params"]})
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
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]
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
                value = torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)
            values[key] = value
