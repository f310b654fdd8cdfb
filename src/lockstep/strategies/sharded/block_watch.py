"""BlockWatch: which blocks of a sharded model the ranks come to, and which of its parameters get a
gradient.

Each rank gathers a block's parameters when its forward begins, so ranks that come to different
blocks would wait for one another for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data.shares import over_ranks
from lockstep.errors import StrategyError
from lockstep.launch.hang_report import other_blocks, parting
from lockstep.launch.world import World
from lockstep.strategies.sharded.loss_reads import of_shards
from lockstep.strategies.sharded.shards import Shards
from lockstep.tensors.pytree import each, tensors


class BlockWatch:
    """Hooks on a model that was cut.

    Args:
        model: the whole of it.
        shards: its blocks and parameters.
        world: the ranks.
        compares: whether ranks compare in this forward to which blocks they come; the same on all
            of them.

    Attributes:
        used: names of the parameters that got a gradient.
        written: names of parameters that forward writes, which are written back to their shards.
        order: a hash below 2^20 of which blocks this rank has come to, in which order.
    """

    def __init__(
        self, model: nn.Module, shards: Shards, world: World, compares: Callable[[], bool]
    ) -> None:
        self._shards, self._world, self._compares = shards, world, compares
        self.used: set[str] = set()
        self.written: set[str] = set()
        self.order = 0
        self._names = ["its end", *(f'"{name}"' for name in shards.blocks), "its begin"]
        self._now: set[str] = set()
        self._given: list[Any] = []  # of each block whose forward is under way
        self._gathered: dict[
            tuple[int, str], Any
        ] = {}  # what stands in the place of a parameter in forward
        within = {m for block in shards.blocks.values() for m in block.modules()}
        places = [(m, key, name) for name in shards.cut for m, key in shards.places[name]]
        for number, (name, block) in enumerate((*shards.blocks.items(), ("", model)), start=1):
            own = set(block.modules()) if name else set(model.modules()) - within
            mine = [place for place in places if place[0] in own]
            block.register_forward_pre_hook(
                self._comes_to(number, mine), prepend=True, with_kwargs=True
            )
            block.register_forward_pre_hook(self._notes_uses(mine))
            block.register_forward_hook(self._gives(name, mine), prepend=True, with_kwargs=True)
        model.register_forward_hook(self._ends)

    def begin_update(self) -> None:
        """Forget what was of the last one."""
        self.used.clear()
        self.order = 0
        self._world.trail.clear()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """In which the step computes this.

        Args:
            what: ``"stand-in"``, another rank's sample, which uses nothing; ``"backward"``, that of
                an update, others are refused; ``"loss"``, and what it calls of the model is
                refused.
        """
        self._now.add(what)
        try:
            yield
        finally:
            self._now.remove(what)

    def _comes_to(
        self, number: int, places: list[tuple[nn.Module, str, str]]
    ) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            for m, key, name in places:
                p = m._parameters.get(key)
                if p is not self._shards.cut[name] and p is not self._gathered.get(
                    (id(m), key), self
                ):
                    raise StrategyError(
                        f'fsdp: forward gives a block another "{name}" for a call '
                        "(torch.func.functional_call), and "
                        "the block would compute with its own, which are gathered then",
                        fix="name blocks without it: --blocks NAMES, or FSDP(blocks=...); or take "
                        "ddp",
                    )
            if number > len(
                self._shards.blocks
            ):  # the whole model; an earlier forward may have raised
                self._given.clear()
            self._given.append((args, kwargs))
            if "loss" in self._now:
                raise StrategyError(
                    "fsdp: the loss calls the model, whose blocks are gathered in forward: take ddp"
                )
            self._compare(number)

        return hook

    def _ends(self, module: nn.Module, args: Any, outputs: Any) -> None:
        del module, args, outputs
        self._compare(0)

    def _compare(self, number: int) -> None:
        """Make sure that all ranks come to the same block now; 0 is the end of forward.

        Raises:
            StrategyError: they don't; ``fully_shard`` would wait for ever.
        """
        self.order = hash((self.order, number)) % 2**20
        if torch.is_grad_enabled():  # (an evaluation has no updates)
            self._world.trail.append((self._world.step, self._names[number]))
        if not self._compares():
            return
        numbers = [theirs for (theirs,) in over_ranks(self._world, number)]
        if apart := parting({rank: [self._names[one]] for rank, one in enumerate(numbers)}):
            raise other_blocks(apart)

    def refuse_other_orders(self, orders: float, squares: float) -> None:
        """Make sure that all ranks have come to the same blocks, given the sums over them of
        ``order`` and its square.

        Raises:
            StrategyError: they haven't, and have taken another block's parameters for their own.
        """
        if self._world.size * int(squares) != int(orders) ** 2:
            raise other_blocks(
                "ranks have come to other blocks in this update, or in another order"
            )

    @torch.no_grad()
    def _write_back(self, places: list[tuple[nn.Module, str, str]]) -> None:
        """Give the shards what a block's forward has written to gathered parameters."""
        for module, key, name in places:
            p = module._parameters[key]
            if name in self.written and p is not None:
                self._shards.local[name].copy_(self._shards.part(name, p))

    def _gives(self, name: str, places: list[tuple[nn.Module, str, str]]) -> Callable[..., Any]:
        """A hook on what a block gives, whose backward is to gather the block's parameters
        again.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
            self._write_back(places)
            _written_back((args, kwargs), self._given.pop())
            what = f'"{name}"' if name else "the model"
            if any(isinstance(t, DTensor) for t in tensors(outputs)):
                raise of_shards(f"what {what} gives is computed from a parameter of a block")
            if not torch.is_grad_enabled():
                return outputs
            # (A view that is written in place would lose the hook that gathers.)
            outputs = each(_copied_if_a_view, outputs, on_packed=lambda packed: packed)
            found = [t for t in tensors(outputs) if t.requires_grad]
            if not found and any(p.requires_grad for p in module.parameters()):
                raise StrategyError(
                    f"fsdp: there is no tensor with a gradient in what {what} gives "
                    f"({type(outputs).__name__}): let it give tensors, or lists or dicts of them, "
                    "or take ddp"
                )
            for tensor in found:
                if not isinstance(
                    tensor, nn.Parameter
                ):  # (which would keep the hook of each forward)
                    tensor.register_hook(self._refuse_other_backwards)  # type: ignore[no-untyped-call]
            return outputs

        return hook

    def _refuse_other_backwards(self, grad: torch.Tensor) -> None:
        del grad
        if "backward" not in self._now:
            raise StrategyError(
                "fsdp: a gradient is computed in forward or in the loss (torch.autograd.grad, a "
                "gradient penalty), for "
                "which the parameters of blocks would have to stay: take ddp"
            )

    def _notes_uses(self, places: list[tuple[nn.Module, str, str]]) -> Callable[..., None]:
        """A hook of a block whose parameters have just been gathered; they are the same objects
        each time.
        """
        known: set[int] = set()

        def hook(module: nn.Module, args: Any) -> None:
            del module, args
            for m, key, name in places:
                p = self._gathered[id(m), key] = m._parameters[key]
                if not torch.is_grad_enabled():
                    continue
                if p is not None and p.requires_grad and id(p) not in known:
                    known.add(id(p))
                    p.register_post_accumulate_grad_hook(self._notes_use(name))  # type: ignore[no-untyped-call]

        return hook

    def _notes_use(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(p: torch.Tensor) -> None:
            del p
            if "stand-in" not in self._now:
                self.used.add(name)

        return hook


def _copied_if_a_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor


def _written_back(now: Any, given: Any) -> Any:
    """What a block was given, with what it wrote to ``now``, which ``fully_shard`` made of it."""
    if now is given or type(now) is not type(given):
        return now
    if dataclasses.is_dataclass(given) and hasattr(given, "__dict__"):
        _written_back(vars(now), vars(given))
    elif isinstance(given, list):
        given[:] = [_written_back(one, its) for one, its in zip(now, given, strict=False)] + now[
            len(given) :
        ]
    elif isinstance(given, dict):
        made = {key: _written_back(one, given.get(key)) for key, one in now.items()}
        given.clear()
        given.update(made)
    elif isinstance(given, tuple):
        for one, its in zip(now, given, strict=False):
            _written_back(one, its)
        return now
    else:
        return now
    return given
