"""BlockWatch: hooks on the blocks of a sharded model, for what PyTorch's own leave open.

They find which parameters got a gradient and in which order this rank comes to the blocks, keep
what forward writes to gathered parameters, and refuse what would compute with parameters that
aren't gathered any more.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import StrategyError
from lockstep.strategies.sharded.shards import Shards
from lockstep.tensors.pytree import each, tensors

_SENDS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether ``fully_shard`` sums zeros for parameters that this rank didn't use (torch 2.13)."""

_computing: list[str] = []
"""What the sharded steps of this process compute now."""


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Note what a step computes in this context.

    Args:
        what: ``"backward"``, that of an update, while others are refused; ``"loss"``, which must
            not call a sharded model.
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
        order: a hash below 2^20 of the blocks that this rank has come to, in their order.
    """

    def __init__(self, model: nn.Module, shards: Shards) -> None:
        self._shards = shards
        self.used: set[str] = set()
        self.order = 0

        rest = set(model.modules())
        for number, block in enumerate(shards.blocks.values(), start=1):
            modules = set(block.modules())
            rest -= modules
            self._register(block, modules, number)
        self._register(model, rest, 0)

    def _register(self, block: nn.Module, modules: set[nn.Module], number: int) -> None:
        """Register hooks on a block.

        Args:
            block: the block, or the model.
            modules: those whose parameters the block gathers.
            number: of the block, the same on all ranks.
        """
        places = []
        for name in self._shards.cut:
            for module, key in self._shards.places[name]:
                if module in modules:
                    places.append((name, module, key))
        # The gathered parameters are the same objects each time, and have other memory.
        gathered: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        watched: set[nn.Parameter] = set()

        def begin(module: nn.Module, args: Any) -> None:
            if "loss" in _computing:  # ranks call a loss unequally often, to check it
                raise StrategyError(
                    "fsdp: the loss calls a sharded model, whose blocks are gathered in forward "
                    "only: take ddp"
                )
            self.order = hash((self.order, number)) % 2**20
            for name, holder, key in places:
                p = holder._parameters[key]
                assert p is not None
                gathered[name] = p, p.data
                if p.requires_grad and p not in watched:
                    watched.add(p)
                    note = functools.partial(self._note_gradient, name)
                    p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

        def begin_backward(grad: torch.Tensor) -> None:
            if "backward" not in _computing:
                raise StrategyError(
                    "fsdp: a gradient is computed in forward or in the loss (torch.autograd.grad, "
                    "a gradient penalty), which needs parameters of blocks that are freed "
                    "already: take ddp"
                )
            for p, _ in gathered.values():
                if p.requires_grad and p.grad is None and not _SENDS_ZEROS:
                    p.grad = torch.zeros_like(p)

        def end(module: nn.Module, args: Any, outputs: Any) -> Any:
            if gathered:
                self._keep_written(gathered)
            if not torch.is_grad_enabled():
                return outputs
            outputs = each(_apart, outputs, on_packed=lambda packed: packed)
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]
            return outputs

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, prepend=True)

    @torch.no_grad()
    def _keep_written(self, gathered: dict[str, tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Give shards what forward may have written to their gathered parameters.

        Args:
            gathered: by name, the parameters, and the memory that they were gathered in.
        """
        parts = []
        rows = []
        for name, (p, data) in gathered.items():
            if p.data_ptr() != data.data_ptr():  # forward has assigned other memory
                p.data = data.copy_(p.data)
            parts.append(self._shards.local[name])
            rows.append(self._shards.rows_in(name, data))
        torch._foreach_copy_(parts, rows)

    def begin(self) -> None:
        """Forget the last update, or the last batch of an evaluation."""
        self.used.clear()
        self.order = 0

    def _note_gradient(self, name: str, p: torch.Tensor) -> None:
        """Note that a parameter of this name got a gradient."""
        self.used.add(name)


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
