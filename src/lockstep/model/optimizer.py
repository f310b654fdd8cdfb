"""The optimizer of a job: made over named parameters, fused where that is right, its state kept
by parameter name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

from lockstep.errors import InputError, JobError, told
from lockstep.job import Job, NamedParameters
from lockstep.model.optimizers import Optimizers

REPLACED = (
    "the optimizer has a parameter that the model hasn't any more (a layer was replaced?): give "
    "the model its layers "
    "before the optimizer is made"
)


def build_optimizer(job: Job, model: nn.Module, *, on: str | None = None) -> torch.optim.Optimizer:
    """Make the job's optimizer over the model's named parameters.

    Args:
        job: whose optimizer it is.
        model: whose parameters.
        on: the type of the devices that they will be on; None is that of those where they are.

    Raises:
        JobError: the factory raises, gives no optimizer, or leaves a parameter out (the first is
            named).
    """
    if not isinstance(job.optimizer, Mapping):
        return _build(job.optimizer, model, fused=job.fused, on=on)
    parts = dict(model.named_children())
    for name in job.optimizer:
        if name not in parts:
            raise JobError(
                f'optimizer: the model has no part "{name}": it has {", ".join(parts) or "none"}'
            )
    held = {id(p) for name in job.optimizer for p in parts[name].parameters()}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in held:
            raise JobError(
                f'optimizer: "{name}" is in none of the parts {", ".join(job.optimizer)}: give '
                "its part an optimizer, "
                "or freeze it in the model with requires_grad_(False)"
            )
    made = {
        name: _build(make, parts[name], fused=job.fused, on=on)
        for name, make in job.optimizer.items()
    }
    return Optimizers(made)


def _build(
    make: Callable[[NamedParameters], torch.optim.Optimizer],
    model: nn.Module,
    *,
    fused: bool | None,
    on: str | None,
) -> torch.optim.Optimizer:
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
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise JobError(
            f"optimizer: {name}.step() requires a closure, and is called without one: use one "
            "that needs none, as AdamW"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held - {id(p) for p in model.parameters()}:
        raise JobError(
            "optimizer: it holds parameters that the model doesn't have: make it over those that "
            "it is given, as "
            "lambda parameters: SGD(parameters, ...) (in a loop of your own, over "
            "model.parameters() of the same model)"
        )
    dropped = [name for name, p in named if id(p) not in held]
    if dropped:
        raise JobError(
            f'optimizer: {len(dropped)} of {len(named)} parameters are left out, "{dropped[0]}" '
            "first: "
            "give them a group, or freeze them in the model with requires_grad_(False)"
        )
    if fused is not False and not getattr(
        optimizer, "state", None
    ):  # (one made of others may have none)
        _fuse(optimizer, named, wanted=fused is True, sparse=gives_sparse_gradients(model), on=on)
    return optimizer


def gives_sparse_gradients(model: nn.Module) -> bool:
    """Whether an embedding of the model says so."""
    return bool(sparse_parameters(model))


def sparse_parameters(model: nn.Module) -> set[int]:
    """The ids of the weights whose gradients are sparse: those of embeddings that say so."""
    return {id(m.weight) for m in model.modules() if getattr(m, "sparse", False) is True}


_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_FUSED_ON = {
    "cpu": _FUSED,
    "cuda": _FUSED[:3],
    "mps": _FUSED[:3],
    "xpu": _FUSED[:3],
}


def _fuse(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    *,
    wanted: bool,
    sparse: bool,
    on: str | None,
) -> None:
    """Switch to the fused implementation where there is one for this optimizer, on these
    devices, in these formats.
    """
    places = {on or p.device.type for _, p in named}
    fits = (
        any(
            type(optimizer) is kind and all(kind in _FUSED_ON.get(place, ()) for place in places)
            for kind in _FUSED
        )
        and all(p.is_floating_point() and p.layout == torch.strided for _, p in named)
        # The kernels on CPU go by address, and are silently wrong where a parameter has gaps.
        and all(torch.empty_like(p).stride() == p.stride() for _, p in named)
        # That of SGD on CPU leaves whole vectors of parameters of 16 bits as they are (torch 2.13).
        and not (
            type(optimizer) is torch.optim.SGD
            and "cpu" in places
            and any(p.itemsize == 2 for _, p in named)
        )
        and not sparse
        and "fused" in inspect.signature(type(optimizer).__init__).parameters
        and not any(
            g.get("differentiable") or (g.get("amsgrad") and not wanted)
            for g in optimizer.param_groups
        )
        # Adagrad made its state in the constructor, for the implementation chosen there.
        and not optimizer.state
    )
    if not fits:
        if wanted:
            raise JobError(
                f"fused: there is no fused {type(optimizer).__name__} for this model's parameters "
                "here"
            )
        return
    for group in optimizer.param_groups:
        # A person who chose an implementation keeps it.
        if not wanted and (group.get("foreach") is not None or group.get("fused") is not None):
            continue
        if group.get("dampening"):
            continue
        group["foreach"], group["fused"] = False, True
    if all(group["fused"] for group in optimizer.param_groups):
        # As its constructor would have it: an overflow of fp16 is then seen by the kernel, not by
        # the host.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    begin_momentum(optimizer)


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin the momentum of every parameter of a fused SGD at once, at zero.

    PyTorch's can't begin that of one parameter later than another's (of one that was unused in the
    first step). Without dampening, momentum that begins at zero gives the same numbers.
    """
    if isinstance(optimizer, Optimizers):
        for one in optimizer.by_name.values():
            begin_momentum(one)
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            for p in group["params"]:
                if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def with_modes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Find the optimizers that have ``train()`` and ``eval()``, as schedule-free ones: each writes
    the parameters.

    In training they hold the point where gradients are computed, in evaluation the average that is
    the result.
    """
    every = optimizer.by_name.values() if isinstance(optimizer, Optimizers) else [optimizer]
    return [one for one in every if hasattr(one, "train") and hasattr(one, "eval")]


def has_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``state_dict`` and ``load_state_dict`` are not PyTorch's, as those of one that
    is made of others.
    """
    kind, pytorchs = type(optimizer), torch.optim.Optimizer
    return (
        kind.state_dict is not pytorchs.state_dict
        and kind.load_state_dict is not pytorchs.load_state_dict
    )


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``step`` may draw random numbers: it isn't one of PyTorch's, or calls a
    person's hooks.
    """
    if isinstance(optimizer, Optimizers):
        return may_draw(optimizer.by_name[optimizer.active])
    return is_hooked(optimizer) or not is_of_pytorch(optimizer)


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether more happens at a step than its class does: hooks, on all optimizers too, or
    another ``step``.
    """
    own = vars(optimizer).get("step")
    of_scheduler = (
        hasattr(own, "_wrapped_by_lr_sched")
        and getattr(own, "__wrapped__", None) is type(optimizer).step
    )
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", None)
        or getattr(optimizer, "_optimizer_step_post_hooks", None)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or (own is not None and not of_scheduler)
    )


def is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is one of PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith(
        "torch.optim."
    )  # (Adafactor's is "torch.optim")


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> torch.Tensor:
    """Hold the norm of all gradients together under ``largest``; gives what it was.

    Sparse ones too, which PyTorch's clip refuses.
    """
    if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, largest)
    grads = gradient_values(parameters)
    norm = nn.utils.get_total_norm(grads)
    scale_to_norm(grads, norm, largest)
    return norm


def gradient_values(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The numbers of all gradients; those of sparse ones by row, each row once, as in a dense
    one.
    """
    values = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        if p.grad is not None:
            values.append(p.grad._values() if p.grad.is_sparse else p.grad)
    return values


def scale_to_norm(grads: Iterable[torch.Tensor], norm: torch.Tensor, largest: float) -> None:
    """Scale gradients, in place, whose norm together is ``norm``, so that it is ``largest`` at
    most.
    """
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), some in alike.items():
        torch._foreach_mul_(some, factor.to(device, torch.promote_types(dtype, torch.float32)))


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def named_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """An optimizer's state by parameter name, not number: ``{"kind": "Adam", "state": {name: ...},
    "groups": []}``.

    Of several optimizers, such a state of each, by name. Of one with a ``state_dict`` of its own,
    what that gives: ``{"kind": "Mine", "own": {...}}``.

    Raises:
        InputError: it has a parameter that isn't the model's, or holds other optimizers whose state
            would be lost.
    """
    if isinstance(optimizer, Optimizers):
        parts = {name: model.get_submodule(name) for name in optimizer.by_name}
        return {
            name: named_optimizer_state(one, parts[name]) for name, one in optimizer.by_name.items()
        }
    kind = type(optimizer).__name__
    if has_own_state(optimizer):
        return {"kind": kind, "own": optimizer.state_dict()}
    inner = (
        leaf for leaf in tree_leaves(vars(optimizer)) if isinstance(leaf, torch.optim.Optimizer)
    )
    if (other := next(inner, None)) is not None:
        raise InputError(
            f"optimizer: {kind} holds another optimizer ({type(other).__name__}), whose state "
            "would not be saved: give "
            f"{kind} the methods state_dict() and load_state_dict(), which call those of the other"
        )
    names = _names_of(model)
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise InputError(REPLACED)
    state = {
        names[id(p)]: dict(values)
        for p, values in optimizer.state.items()
        if isinstance(p, torch.Tensor)
    }
    others = {
        key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)
    }
    groups = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    kept = {"kind": kind, "state": state, "groups": groups}
    return {**kept, "others": others} if others else kept


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]
) -> None:
    """Give an optimizer the state that ``named_optimizer_state`` took from one over the same names.

    Raises:
        InputError: the groups hold other parameters, or it is an optimizer of another kind.
    """
    if isinstance(optimizer, Optimizers):
        if sorted(saved) != sorted(optimizer.by_name):
            raise InputError(
                f"the saved optimizers are {', '.join(saved)}, the job has "
                f"{', '.join(optimizer.by_name)}: they differ"
            )
        for part, one in optimizer.by_name.items():
            load_named_optimizer_state(one, model.get_submodule(part), saved[part])
        return
    kind = type(optimizer).__name__
    if (before := saved.get("kind", kind)) != kind:
        raise InputError(
            f"the saved optimizer is {before}, this one {kind}: resume with that one, or start a "
            "run from the saved "
            "weights"
        )
    if "own" in saved:
        optimizer.load_state_dict(saved["own"])
        return
    names = _names_of(model)
    own = optimizer.state_dict()
    number: dict[str, int] = {}
    for i, (group, packed, theirs) in enumerate(
        zip(optimizer.param_groups, own["param_groups"], saved["groups"], strict=False)
    ):
        mine = [names[id(p)] for p in group["params"]]
        if set(mine) != set(theirs["params"]):
            different = sorted(set(mine) ^ set(theirs["params"]))[0]
            raise InputError(
                f'the saved optimizer has other parameters in group {i}: "{different}" is in one '
                "only"
            )
        number.update(zip(mine, packed["params"], strict=True))
        packed.update(
            {
                key: value
                for key, value in theirs.items()
                if key not in ("params", "fused", "foreach")
            }
        )
    if len(optimizer.param_groups) != len(saved["groups"]):
        raise InputError(
            f"the saved optimizer has {len(saved['groups'])} parameter groups, this job's "
            f"{len(optimizer.param_groups)}"
        )
    own["state"] = {number[name]: values for name, values in saved["state"].items()} | saved.get(
        "others", {}
    )
    optimizer.load_state_dict(own)
    for p, its in optimizer.state.items():
        for key, value in saved["state"].get(names.get(id(p)), {}).items():
            if (
                isinstance(value, torch.Tensor) and not value.dim()
            ):  # PyTorch gives it the parameter's format
                its[key] = its[key].to(value.dtype)
    _lay_out_state(optimizer)
    begin_momentum(optimizer)


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give what an optimizer keeps for a parameter that one's memory layout, which files don't
    keep.

    Fused kernels on CPU go through both by address.
    """
    for p, values in optimizer.state.items():
        for name, value in values.items() if isinstance(p, torch.Tensor) else ():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == p.shape
                and value.layout == torch.strided
            ):
                values[name] = torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(
                    value
                )
