"""BlockWatch: records which blocks of a sharded model this rank comes to, and which parameters get
a gradient.

Each rank gathers a block's parameters when the block's forward begins. Ranks that come to different
blocks wait for one another, which the hang report explains, or compute with the parameters of
another block, which is found at the end of the update.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.launch.world import World
from lockstep.strategies.sharded.shards import Shards
from lockstep.tensors.pytree import each, tensors

Places = list[tuple[nn.Module, str, str]]
"""Modules, the names that they have for a parameter, and the parameter's name in the model."""


class BlockWatch:
    """Hooks on a model that was cut.

    Args:
        model: the whole model.
        shards: the blocks and parameters of the model.
        world: the ranks.

    Attributes:
        used: the names of the parameters that got a gradient.
        written: the names of parameters that forward writes.
        order: a hash below 2^20 of the blocks that this rank has come to, in their order.
    """

    def __init__(self, model: nn.Module, shards: Shards, world: World) -> None:
        self._shards = shards
        self._world = world
        self._computes: set[str] = set()
        self.used: set[str] = set()
        self.written: set[str] = set()
        self.order = 0
        self._trail: list[str] = []
        world.stall_check = self

        in_blocks: set[nn.Module] = set()
        for number, (name, block) in enumerate(shards.blocks.items(), start=1):
            modules = set(block.modules())
            in_blocks |= modules
            self._watch(block, modules, f'"{name}"', number)

        rest = set(model.modules()) - in_blocks
        self._watch(model, rest, "the model", len(shards.blocks) + 1)
        model.register_forward_hook(lambda *_: self._come_to("its end", 0))

    def _watch(self, block: nn.Module, modules: set[nn.Module], name: str, number: int) -> None:
        """Register hooks on a block that gathers the parameters of these modules."""
        places = [
            (module, key, name)
            for name in self._shards.cut
            for module, key in self._shards.places[name]
            if module in modules
        ]
        place = "its begin" if name == "the model" else name
        # The first one comes before that of ``fully_shard``, which gathers.
        block.register_forward_pre_hook(self._comes_to(place, number), prepend=True)
        block.register_forward_pre_hook(self._watches_gradients(places))
        block.register_forward_hook(self._holds_outputs(name, places), prepend=True)

    def begin(self) -> None:
        """Forget the last update, or the last batch of an evaluation."""
        self.used.clear()
        self.order = 0
        self._trail.clear()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Note what the step computes in this context.

        Args:
            what: ``"stand-in"``, another rank's sample, which uses no parameter; ``"backward"``,
                that of an update, while others are refused; ``"loss"``, which must not call the
                model.
        """
        self._computes.add(what)
        try:
            yield
        finally:
            self._computes.remove(what)

    def refuse_other_orders(self, orders: float, squares: float) -> None:
        """Make sure that all ranks have come to the same blocks, in the same order.

        Args:
            orders: the sum over the ranks of ``order``.
            squares: the sum of the squares.

        Raises:
            StrategyError: they haven't, and have computed with the parameters of other blocks.
        """
        if self._world.size * int(squares) != int(orders) ** 2:
            raise _other_blocks(
                "ranks have come to other blocks in this update, or in another order"
            )

    # ---- the hang report (StallCheck) ------------------------------------------------------------

    def notes(self) -> list[str]:
        """Return the blocks that this rank has come to in this update."""
        return self._trail.copy()

    def refusal(self, notes: Mapping[int, list[str]]) -> StrategyError | None:
        """Return an error where ranks have come to different blocks, not where one is behind."""
        for places in zip(*notes.values(), strict=False):
            if len(set(places)) > 1:
                each = (
                    f"to {place} on rank {rank}" for rank, place in zip(notes, places, strict=True)
                )
                return _other_blocks(f"forward comes {', '.join(each)}")
        return None

    # ---- hooks -----------------------------------------------------------------------------------

    def _comes_to(self, place: str, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if "loss" in self._computes:
                raise StrategyError(
                    "fsdp: the loss calls the model, whose blocks are gathered in forward: take ddp"
                )
            self._come_to(place, number)

        return hook

    def _come_to(self, place: str, number: int) -> None:
        self.order = hash((self.order, number)) % 2**20
        self._trail.append(place)

    def _watches_gradients(self, places: Places) -> Callable[..., None]:
        """Return a hook for when the parameters in these places have just been gathered."""
        watched: set[int] = set()  # the gathered parameters are the same objects each time

        def hook(module: nn.Module, args: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for holder, key, name in places:
                p = holder._parameters[key]
                if p is not None and p.requires_grad and id(p) not in watched:
                    watched.add(id(p))
                    note = functools.partial(self._note_gradient, name)
                    p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        return hook

    def _note_gradient(self, name: str, p: torch.Tensor) -> None:
        if "stand-in" not in self._computes:
            self.used.add(name)

    @torch.no_grad()
    def _write_back(self, places: Places) -> None:
        """Give the shards what a block's forward has written to gathered parameters."""
        for module, key, name in places:
            p = module._parameters[key]
            if name in self.written and p is not None:
                self._shards.local[name].copy_(self._shards.part(name, p))

    def _holds_outputs(self, name: str, places: Places) -> Callable[..., Any]:
        """Return a hook on a block's outputs, whose backward gathers the block's parameters."""

        def hook(module: nn.Module, args: Any, outputs: Any) -> Any:
            self._write_back(places)
            if not torch.is_grad_enabled():
                return outputs
            outputs = each(_apart, outputs, on_packed=lambda packed: packed)
            found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
            if not found and any(p.requires_grad for p in module.parameters()):
                raise StrategyError(
                    f"fsdp: there is no tensor with a gradient in what {name} gives "
                    f"({type(outputs).__name__}): let it give tensors, or lists or dicts of them, "
                    "or take ddp"
                )
            for tensor in found:
                tensor.register_hook(self._refuse_other_backwards)  # type: ignore[no-untyped-call]
            return outputs

        return hook

    def _refuse_other_backwards(self, grad: torch.Tensor) -> None:
        if "backward" not in self._computes:
            raise StrategyError(
                "fsdp: a gradient is computed in forward or in the loss (torch.autograd.grad, a "
                "gradient penalty), for which the parameters of blocks would have to stay: take ddp"
            )


def _other_blocks(what: str) -> StrategyError:
    """Return the refusal of a model in which ranks gather different blocks."""
    return StrategyError(
        f"fsdp: {what}: blocks that depend on the samples can't be gathered on their own",
        fix="name the other blocks: --blocks NAMES, or FSDP(blocks=...)",
    )


def _apart(output: torch.Tensor) -> torch.Tensor:
    """Copy an output that would lose the hook that gathers, or keep it for ever.

    A view loses it when it is written in place, and a parameter keeps those of all forwards.
    """
    is_kept = output._base is not None or isinstance(output, nn.Parameter)
    return output.clone() if output.requires_grad and is_kept else output
