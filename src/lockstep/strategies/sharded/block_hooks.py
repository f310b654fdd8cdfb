"""BlockWatch: hooks on the blocks of a sharded model, for what PyTorch's own leave open.

They find which parameters got a gradient and in which order this rank comes to the blocks, keep
what forward writes to gathered parameters, and refuse what would compute with parameters that
aren't gathered any more.

::

    fully_shard   gathers                               frees
    these hooks            note the order    keep what
                           of blocks         it wrote
                           | forward of the block     |

    fully_shard   gathers                               sums, frees
    these hooks            refuse another    note which
                           backward          were used
                           | backward of the block    |

The values are kept in evaluation, too, as on one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.errors import StrategyError
from lockstep.strategies.sharded.fully_sharded import sends_zeros
from lockstep.strategies.sharded.whole_parameters import ShardedLayout
from lockstep.tensors.pytree import each, tensors

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

    def __init__(self, model: nn.Module, shards: ShardedLayout) -> None:
        self.used: set[str] = set()
        self.order = 0

        rest = set(model.modules())
        for number, (name, block) in enumerate(shards.blocks.items(), start=1):
            modules = set(block.modules())
            rest -= modules
            _BlockHooks(self, shards, block, modules, number, f'"{name}"')
        _BlockHooks(self, shards, model, rest, 0, "the model")

    def begin(self) -> None:
        """Forget the last update."""
        self.used.clear()
        self.order = 0


class _BlockHooks:
    """The hooks of a block, or of the model.

    Args:
        watch: notes what they find.
        shards: of the model.
        block: the block, or the model.
        modules: those whose parameters the block gathers.
        number: of the block, the same on all ranks.
        name: what messages call the block.
    """

    def __init__(
        self,
        watch: BlockWatch,
        shards: ShardedLayout,
        block: nn.Module,
        modules: set[nn.Module],
        number: int,
        name: str,
    ) -> None:
        self._name = name
        self._watch = watch
        self._shards = shards
        self._number = number
        self._places = []
        for parameter in shards.local:
            for module, key in shards.places[parameter]:
                if module in modules:
                    self._places.append((parameter, module, key))
        # By name, the gathered parameters, which are the same objects each time, and the memory
        # that they are gathered in.
        self._gathered: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        self._spans = {one: shards.span_of(one) for one, _, _ in self._places}
        self._watched: set[nn.Parameter] = set()
        # The first one comes before that of ``fully_shard``, which gathers.
        block.register_forward_pre_hook(shards.unless_whole(_refuse_in_loss), prepend=True)
        block.register_forward_pre_hook(shards.unless_whole(self._begin))
        block.register_forward_hook(shards.unless_whole(self._end), prepend=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Note that this rank has come to the block, and watch its gathered parameters."""
        self._watch.order = hash((self._watch.order, self._number)) % 2**20
        for name, holder, key in self._places:
            p = holder._parameters[key]
            assert p is not None
            self._gathered[name] = p, p.data
            if p.requires_grad and p not in self._watched:
                self._watched.add(p)
                note = functools.partial(self._note_gradient, name)
                p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _note_gradient(self, name: str, p: torch.Tensor) -> None:
        self._watch.used.add(name)

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Keep what forward wrote, and hook the outputs, whose backward gathers the block.

        Raises:
            StrategyError: no output would gather parameters that need gradients.
        """
        if self._gathered:
            self._keep_written()
        if not torch.is_grad_enabled():
            return outputs
        outputs = each(_apart, outputs, on_packed=lambda packed: packed)
        found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
        if not found and any(p.requires_grad for p, _ in self._gathered.values()):
            raise StrategyError(
                f"fsdp: the outputs of {self._name} ({type(outputs).__name__}) have no tensor with "
                "a gradient: return tensors, or lists or dicts of them, or take ddp"
            )
        for tensor in found:
            tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return outputs

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Give shards what forward may have written to their gathered parameters.

        It isn't known what was written: ``p.data.lerp_(...)`` leaves no trace.
        """
        parts: list[torch.Tensor] = []
        rows = []
        for name, (p, data) in self._gathered.items():
            if p.data_ptr() != data.data_ptr():  # forward has assigned other memory
                p.data = data.copy_(p.data)
            parts.append(self._shards.local[name])
            rows.append(data.narrow(0, *self._spans[name]))
        torch._foreach_copy_(parts, rows)

    def _begin_backward(self, grad: torch.Tensor) -> None:
        """Refuse a backward through the block that isn't that of an update.

        Raises:
            StrategyError: it is another one.
        """
        if "backward" not in _computing:
            raise StrategyError(
                "fsdp: a gradient is computed in forward or in the loss (torch.autograd.grad, a "
                "gradient penalty), which needs parameters of blocks that are freed already: take "
                "ddp"
            )
        if sends_zeros():
            return
        for p, _ in self._gathered.values():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


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
