"""What modules hold beside parameters and buffers: extra state, and plain attributes.

Extra state is what PyTorch's ``get_extra_state`` gives and ``set_extra_state`` takes. Replicas may
have different extra state (the hidden state for their own rows of a batch), so it is read from each
replica and given back to each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights import EXTRA_STATE
from lockstep.errors import is_own_code
from lockstep.launch.events import Caveat
from lockstep.tensors.digest import digest
from lockstep.tensors.state_tree import encoded

_OF_EVERY_MODULE = set(vars(nn.Module()))

_SHOWN = 3
"""Names that a line has at most."""


def extra_state_of(model: nn.Module) -> dict[str, Any]:
    """Copy the extra state of each module to the CPU, by its name in a state dict."""
    return {name: _on_cpu(module.get_extra_state()) for name, module in _with_extra_state(model)}


def set_extra_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give modules the extra state that ``extra_state_of`` read."""
    for name, module in _with_extra_state(model):
        if name in state:
            module.set_extra_state(state[name])


def are_alike(states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all replicas have the same extra state."""
    (tree, tensors), *others = map(encoded, states)
    for other, theirs in others:
        if other != tree or not all(map(_is_same, tensors.values(), theirs.values())):
            return False
    return True


def plain_attributes_of(model: nn.Module) -> dict[str, str]:
    """Describe plain attributes of a person's own modules, and what is frozen.

    An attribute is plain that is a number, a text, a switch, None, a tensor, or a list, tuple or
    dict of them. A module with extra state looks after its attributes itself.
    """
    found = {f"{name}.requires_grad": str(p.requires_grad) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if model.training:
            found[f"{name}.training"] = str(module.training)
        for key, value in _own_attributes(module):
            described = _described(value)
            if described is not None:
                found[f"{name}.{key}".removeprefix(".")] = described
    return found


def set_flags(model: nn.Module, described: Mapping[str, str]) -> None:
    """Freeze and train parameters, and set the modes of modules, as ``plain_attributes_of``
    described them.
    """
    for name, p in model.named_parameters():
        flag = described.get(f"{name}.requires_grad")
        if flag is not None:
            p.requires_grad_(flag == str(True))
    for name, module in model.named_modules():
        mode = described.get(f"{name}.training")
        if mode is not None:
            module.training = mode == str(True)


def note_on_attributes(names: Sequence[str]) -> Caveat:
    """Say which attributes had changed when a checkpoint was written that doesn't keep them."""
    shown = ", ".join(f'"{name}"' for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    what, are = ("attribute", "is") if len(names) == 1 else ("attributes", "are")
    text = f"{what} {shown}{more} of the model had changed when this checkpoint was written"
    fix = "keep state in a buffer, or by get_extra_state and set_extra_state"
    return Caveat("state", f"{text}, and {are} not kept", fix)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if _has_extra_state(module):
            yield f"{name}.{EXTRA_STATE}".removeprefix("."), module


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _on_cpu(value: Any) -> Any:
    """Copy a nest of tensors and plain values, so that later updates leave it alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    if isinstance(value, dict):
        copied = value.copy()
        copied.update((key, _on_cpu(item)) for key, item in value.items())
        return copied
    return value


def _is_same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Go through the attributes that a person's own class gives a module."""
    if not _is_persons(type(module)) or _has_extra_state(module):
        return
    bases = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    of_library = not all(_is_persons(kind) for kind in bases if kind is not nn.Module)
    for key, value in vars(module).items():
        is_librarys = of_library and key.startswith("_")
        if key not in _OF_EVERY_MODULE and not is_librarys:
            yield key, value


def _is_persons(kind: type[nn.Module]) -> bool:
    """Whether a class is of a person's own code."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_own_code(file)


def _described(value: Any) -> str | None:
    """Describe a plain value, so that another value has another text; None where it isn't plain."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value)}"
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        items = [_described(item) for item in value]
        return None if None in items else str(items)
    return repr(value) if isinstance(value, bool | int | float | str | None) else None
