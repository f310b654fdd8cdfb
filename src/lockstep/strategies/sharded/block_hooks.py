"""BlockWatch: hooks on the blocks of a sharded model, for what PyTorch's own leave open.

They find which parameters got a gradient and in which order this rank comes to the blocks, keep
what forward writes to gathered parameters, and refuse what would compute with parameters that
aren't gathered any more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.strategies.sharded.shards import Shards
from lockstep.tensors.pytree import each, tensors

Places = list[tuple[nn.Module, str, str]]
"""Modules, the names that they have for a parameter, and the parameter's name in the model."""

_computing: list[str] = []
"""What the sharded steps of this process compute now."""


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Note what a step computes in this context.

    Args:
        what: ``"stand-in"``, another rank's sample, which uses no parameter; ``"backward"``, that
            of an update, while others are refused; ``"loss"``, which must not call a sharded model.
    """
    _computing.append(what)
    try:
        yield
    finally:
        _computing.remove(what)


class BlockWatch:
    """Hooks on a model that was cut.

    Each rank gathers a block's parameters when the block's forward begins. Ranks that come to
    different blocks wait for one another, or compute with the parameters of another block.

    Args:
        model: the whole model.
        shards: the blocks and parameters of the model.

    Attributes:
        used: the names of the parameters that got a gradient.
        written: the names of parameters that forward writes.
        order: a hash below 2^20 of the blocks that this rank has come to, in their order.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        self.used: set[str] = set()
        self.written: set[str] = set()
        self.order = 0

        in_blocks: set[nn.Module] = set()
        for number, (name, block) in enumerate(shards.blocks.items(), start=1):
            modules = set(block.modules())
            in_blocks |= modules
            self._register(shards, block, modules, f'"{name}"', number)

        rest = set(model.modules()) - in_blocks
        self._register(shards, model, rest, "the model", len(shards.blocks) + 1)

    def _register(
        self, shards: Shards, block: nn.Module, modules: set[nn.Module], name: str, number: int
    ) -> None:
        """Register hooks on a block.

        Args:
            shards: of the model.
            block: the block, or the model.
            modules: those whose parameters the block gathers.
            name: what messages call the block.
            number: of the block, the same on all ranks.
        """
        places: Places = []
        for of_model in shards.cut:
            for module, key in shards.places[of_model]:
                if module in modules:
                    places.append((module, key, of_model))
        watched: set[int] = set()  # the gathered parameters are the same objects each time

        def when_gathered(module: nn.Module, args: Any) -> None:
            self.order = hash((self.order, number)) % 2**20
            if not torch.is_grad_enabled():
                return
            for holder, key, of_model in places:
                p = holder._parameters[key]
                if p is None or not p.requires_grad or id(p) in watched:
                    continue
                watched.add(id(p))
                note = functools.partial(self._note_gradient, of_model)
                p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        # The first one comes before that of ``fully_shard``, which gathers.
        block.register_forward_pre_hook(_refuse_in_loss, prepend=True)
        block.register_forward_pre_hook(when_gathered)
        block.register_forward_hook(self._keeps_written(shards, places), prepend=True)
        block.register_forward_hook(_holds_outputs(name), prepend=True)

    def _keeps_written(self, shards: Shards, places: Places) -> Callable[..., None]:
        """Return a hook that gives the shards what a block's forward has written."""

        @torch.no_grad()
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            if not self.written:
                return
            for holder, key, of_model in places:
                if of_model in self.written:
                    part = shards.part_of(of_model, holder._parameters[key])
                    shards.local[of_model].copy_(part)

        return hook

    def begin(self) -> None:
        """Forget the last update, or the last batch of an evaluation."""
        self.used.clear()
        self.order = 0

    def _note_gradient(self, name: str, p: torch.Tensor) -> None:
        """Note that a parameter of this name got a gradient, unless it is a stand-in's."""
        if "stand-in" not in _computing:
            self.used.add(name)


def _refuse_in_loss(block: nn.Module, args: Any) -> None:
    """Refuse a loss that calls a sharded model: ranks call a loss unequally often, to check it.

    Raises:
        StrategyError: a loss is being computed.
    """
    if "loss" in _computing:
        raise StrategyError(
            "fsdp: the loss calls a sharded model, whose blocks are gathered in forward only: take "
            "ddp"
        )


def _holds_outputs(name: str) -> Callable[..., Any]:
    """Return a hook on a block's outputs, whose backward gathers the block's parameters.

    Args:
        name: what messages call the block.
    """

    def hook(block: nn.Module, args: Any, outputs: Any) -> Any:
        """Raise StrategyError where no output would gather parameters that need gradients."""
        if not torch.is_grad_enabled():
            return outputs
        outputs = each(_apart, outputs, on_packed=lambda packed: packed)
        found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
        if not found and any(p.requires_grad for p in block.parameters()):
            raise StrategyError(
                f"fsdp: the outputs of {name} ({type(outputs).__name__}) have no tensor with a "
                "gradient: return tensors, or lists or dicts of them, or take ddp"
            )
        for tensor in found:
            tensor.register_hook(_refuse_other_backwards)  # type: ignore[no-untyped-call]
        return outputs

    return hook


def _refuse_other_backwards(grad: torch.Tensor) -> None:
    """Refuse a backward through a block that isn't that of an update.

    Raises:
        StrategyError: it is another one.
    """
    if "backward" not in _computing:
        raise StrategyError(
            "fsdp: a gradient is computed in forward or in the loss (torch.autograd.grad, a "
            "gradient penalty), which needs parameters of blocks that are freed already: take ddp"
        )


def _apart(output: torch.Tensor) -> torch.Tensor:
    """Copy an output that would lose the hook that gathers, or keep it for ever.

    A view loses it when it is written in place, and a parameter keeps those of all forwards.
    """
    is_parameter = isinstance(output, nn.Parameter)
    is_kept = output._base is not None or is_parameter
    if not is_kept or not output.requires_grad:
        return output
    copied = output.clone()
    copied._is_param = is_parameter  # it has no rows of samples
    return copied
