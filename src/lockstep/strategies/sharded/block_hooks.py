"""BlockWatch: hooks on the blocks of a sharded model, for what PyTorch's own leave open.

They find which parameters got a gradient, keep what forward writes to gathered parameters, and
refuse what would compute with parameters that aren't gathered any more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.world import World
from lockstep.strategies.sharded.block_order import BlockOrder
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

    Args:
        model: the whole model.
        shards: the blocks and parameters of the model.
        world: the ranks.

    Attributes:
        order: the blocks that this rank has come to.
        used: the names of the parameters that got a gradient.
        written: the names of parameters that forward writes.
    """

    def __init__(self, model: nn.Module, shards: Shards, world: World) -> None:
        self._shards = shards
        self.order = BlockOrder(world)
        self.used: set[str] = set()
        self.written: set[str] = set()

        in_blocks: set[nn.Module] = set()
        for number, (name, block) in enumerate(shards.blocks.items(), start=1):
            modules = set(block.modules())
            in_blocks |= modules
            self._register(block, modules, f'"{name}"', number)

        rest = set(model.modules()) - in_blocks
        self._register(model, rest, "the model", len(shards.blocks) + 1)
        model.register_forward_hook(lambda *_: self.order.come_to("its end", 0))

    def _register(
        self,
        block: nn.Module,
        modules: set[nn.Module],
        name: str,
        number: int,
    ) -> None:
        """Register hooks on a block.

        Args:
            block: the block, or the model.
            modules: those whose parameters the block gathers.
            name: what messages call the block.
            number: of the block, the same on all ranks.
        """
        places: Places = []
        for of_model in self._shards.cut:
            for module, key in self._shards.places[of_model]:
                if module in modules:
                    places.append((module, key, of_model))
        place = "its begin" if name == "the model" else name
        # The first one comes before that of ``fully_shard``, which gathers.
        block.register_forward_pre_hook(self._comes_to(place, number), prepend=True)
        block.register_forward_pre_hook(self._watches_gradients(places))
        block.register_forward_hook(self._holds_outputs(name, places), prepend=True)

    def begin(self) -> None:
        """Forget the last update, or the last batch of an evaluation."""
        self.used.clear()
        self.order.begin()

    def _comes_to(self, place: str, number: int) -> Callable[..., None]:
        """Return a hook for when forward comes to a block."""

        def hook(module: nn.Module, args: Any) -> None:
            if "loss" in _computing:
                # Ranks call a loss unequally often, to check it.
                raise StrategyError(
                    "fsdp: the loss calls a sharded model, whose blocks are gathered in forward "
                    "only: take ddp"
                )
            self.order.come_to(place, number)

        return hook

    def _watches_gradients(self, places: Places) -> Callable[..., None]:
        """Return a hook for when the parameters in these places have just been gathered."""
        watched: set[int] = set()  # the gathered parameters are the same objects each time

        def hook(module: nn.Module, args: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for holder, key, name in places:
                p = holder._parameters[key]
                if p is None or not p.requires_grad or id(p) in watched:
                    continue
                watched.add(id(p))
                note = functools.partial(self._note_gradient, name)
                p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        return hook

    def _note_gradient(self, name: str, p: torch.Tensor) -> None:
        """Note that a parameter of this name got a gradient, unless it is a stand-in's."""
        if "stand-in" not in _computing:
            self.used.add(name)

    @torch.no_grad()
    def _write_back(self, places: Places) -> None:
        """Give the shards what a block's forward has written to gathered parameters."""
        for module, key, name in places:
            if name in self.written:
                whole = module._parameters[key]
                part = self._shards.part(name, whole)
                self._shards.local[name].copy_(part)

    def _holds_outputs(self, name: str, places: Places) -> Callable[..., Any]:
        """Return a hook on a block's outputs, whose backward gathers the block's parameters.

        Args:
            name: what messages call the block.
            places: of the parameters that the block gathers.
        """

        def hook(module: nn.Module, args: Any, outputs: Any) -> Any:
            if self.written:
                self._write_back(places)
            if not torch.is_grad_enabled():
                return outputs
            outputs = each(_apart, outputs, on_packed=lambda packed: packed)
            found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
            if not found:
                _refuse_no_gradient(name, module, outputs)
            for tensor in found:
                tensor.register_hook(_refuse_other_backwards)  # type: ignore[no-untyped-call]
            return outputs

        return hook


def _refuse_no_gradient(name: str, block: nn.Module, outputs: Any) -> None:
    """Refuse outputs without a tensor whose backward would gather the block's parameters.

    Args:
        name: what the message calls the block.
        block: may have no parameter that needs gradients, which is no reason to refuse it.
        outputs: of the block.

    Raises:
        StrategyError: a parameter of the block needs a gradient.
    """
    if any(p.requires_grad for p in block.parameters()):
        raise StrategyError(
            f"fsdp: the outputs of {name} ({type(outputs).__name__}) have no tensor with a "
            "gradient: return tensors, or lists or dicts of them, or take ddp"
        )


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
