"""Activation checkpointing: blocks of a model keep only their inputs, and compute the rest again in
backward.

PyTorch's ``checkpoint`` (without reentrance) does it. For the recomputation a block also gets back
what it began its first run with:

- buffers, so that running statistics move once;
- the states of Python's and numpy's generators (PyTorch restores those of torch itself, and
  `lockstep.threads.recompute` those of the threads of ``dp``);
- objects among its arguments that it may write to, such as a cache of keys and values.

Anything else that forward writes, such as a counter in an attribute, is written twice. What a block
has for the time of a call only (weights of ``torch.func.functional_call``, a hook, a global
variable) is not there in the recomputation. PyTorch raises an error where the number or the shapes
of the saved tensors differ.

A block stays the same object of the same class. Only its ``forward`` is replaced, so parameters
keep their names.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lockstep.errors import JobError, LockstepError, StrategyError, first_line, nearest
from lockstep.model.snapshot import reachable
from lockstep.tensors.seeding import other_states, set_other_states

_OF_RECOMPUTATION = (
    "saved tensor hooks",
    "functorch",
    "forward AD level",
    "modified by an inplace operation",
)
"""Words of PyTorch's errors where a block can't be computed again."""


def checkpoint_blocks(model: nn.Module, wanted: str, *, compiled: bool = False) -> list[str]:
    """Make blocks of ``model`` recompute their activations in backward; return the blocks' names.

    Args:
        model: is changed in place.
        wanted: ``"auto"``, or names separated by commas: of a block, or of a list whose members
            are blocks.
        compiled: whether the model will be compiled. The compiler can't follow a checkpoint that
            restores buffers: it leaves the checkpoint as it is, and compiles what is inside.

    Raises:
        JobError: there is no such module (the nearest is offered), or ``auto`` finds no list of
            blocks.
    """
    if wanted == "auto":
        blocks = found_blocks(model)
    else:
        blocks = named_blocks(model, wanted, "activation_checkpointing", JobError)
    if not blocks:
        raise JobError(
            "activation_checkpointing: auto finds no list of like blocks in the model: name "
            'blocks, as "encoder.layers" or "stem,body.3"'
        )
    for name, block in blocks.items():
        if "forward" in vars(block):
            raise JobError(
                f'activation_checkpointing: "{name}" has had its forward replaced: name blocks '
                "inside of it"
            )
    forward: Callable[..., Any] = _checkpointed_forward
    if compiled:
        forward = torch.compiler.disable(forward, recursive=False)  # type: ignore[no-untyped-call]
    for block in blocks.values():
        block.forward = types.MethodType(forward, block)
    return list(blocks)


def found_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the model's blocks: modules of one class and of several layers, two or more of them in
    one list.

    Blocks are the layers of a transformer's encoder and decoder, for example, or the residual
    blocks of each stage of a ResNet. Only outermost lists count.
    """
    found: dict[str, nn.Module] = {}

    def look(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        kinds = Counter(type(child) for _, child in children if _is_composite(child))
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        for child_name, child in children:
            full = f"{name}.{child_name}".lstrip(".")
            if is_list and kinds[type(child)] > 1:
                found.setdefault(full, child)
            else:
                look(full, child)

    look("", model)
    return found


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module is made of several layers, and is no list of blocks itself."""
    if not _has_forward(module):
        return False
    if isinstance(module, nn.Sequential) and any(map(_is_composite, module)):
        return False
    layers = [layer for layer in module.modules() if list(layer.parameters(recurse=False))]
    return len(layers) > 1


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; a ``ModuleList`` or a ``ModuleDict`` can't."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def named_blocks(
    model: nn.Module,
    wanted: str,
    setting: str,
    error: type[LockstepError],
) -> dict[str, nn.Module]:
    """Find the modules that a person named. A list or a dict of modules stands for its members.

    Args:
        model: has the modules.
        wanted: their names, separated by commas.
        setting: where the names were given.
        error: raised for a name that the model doesn't have; the nearest is offered.
    """
    modules = dict(model.named_modules())
    blocks: dict[str, nn.Module] = {}

    def take(name: str, module: nn.Module) -> None:
        if _has_forward(module):
            blocks[name] = module
            return
        for child, block in module.named_children():
            take(f"{name}.{child}", block)

    for word in wanted.split(","):
        name = word.strip()
        if not name:
            continue
        if name not in modules:
            known = [module_name for module_name in modules if module_name]
            raise error(f'{setting}: the model has no module "{name}"; {nearest(name, known)}')
        take(name, modules[name])
    return blocks


def not_checkpointable(error: Exception) -> StrategyError | None:
    """Explain an error that PyTorch raised because of a checkpointed block; None for another
    error.
    """
    is_known = any(words in str(error) for words in _OF_RECOMPUTATION)
    if not is_known and not isinstance(error, CheckpointError):
        return None
    return StrategyError(
        "activation_checkpointing: a block can't be computed a second time as backward needs it "
        "(does it call torch.func, write its input in place, or take another branch?): "
        f"{first_line(error)}",
        fix="name other blocks, or leave activation_checkpointing out",
    )


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of the class of ``self``, and keep only its inputs for backward."""
    forward = type(self).forward
    if not torch.is_grad_enabled():
        return forward(self, *args, **kwargs)
    beginning = _Beginning(self)
    holds_objects = not all(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values()))
    given = _copied((args, kwargs)) if holds_objects else (args, kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if beginning.is_again and holds_objects:
            args, kwargs = _copied(given)
        return forward(self, *args, **kwargs)

    return checkpoint(
        run,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), beginning),
        **kwargs,
    )


# A method is pickled by its name: a saved model has the forward of its class.
_checkpointed_forward.__name__ = "forward"


class _Beginning(contextlib.AbstractContextManager[None]):
    """What a block began its first run with, as a context in which the block has it again.

    The context may be entered several times: backward goes through a graph twice for second
    derivatives. What the block writes to its buffers in the context is lost.

    Args:
        block: about to run for the first time.
    """

    def __init__(self, block: nn.Module) -> None:
        self.is_again = False
        self._buffers = [module._buffers for module in block.modules() if module._buffers]
        self._first_buffers = [_clones(buffers) for buffers in self._buffers]
        self._first_states = other_states()

    def __enter__(self) -> None:
        self.is_again = True
        self._now = [dict(buffers) for buffers in self._buffers]
        self._states = other_states()
        set_other_states(self._first_states)
        for buffers, first in zip(self._buffers, self._first_buffers, strict=True):
            buffers.update(_clones(first))

    def __exit__(self, *raised: object) -> None:
        set_other_states(self._states)
        for buffers, now in zip(self._buffers, self._now, strict=True):
            buffers.update(now)


def _clones(buffers: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if b is None else b.clone() for name, b in buffers.items()}


def _copied(
    given: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy arguments, all but the tensors and modules in them; what can't be copied stays as it is.

    Tensors are left to autograd, which refuses a write to them.
    """
    same = {}
    for one in reachable([given]):
        if isinstance(one, torch.Tensor | nn.Module):
            same[id(one)] = one
    try:
        return copy.deepcopy(given, same)
    except Exception:
        return given
