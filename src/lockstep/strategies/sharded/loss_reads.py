"""What a loss reads of a sharded model beside its outputs: by a global, a closure or an attribute.

Where the loss is called after forward, what is in no block is whole still. Anything else there is a
shard. A function of shards waits for the other ranks, and these may not compute it: a loss is
checked on some ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lockstep.errors import StrategyError
from lockstep.model.losses.loss import Totalled

_FIX = (
    "name blocks that keep theirs to themselves: --blocks NAMES, or FSDP(blocks=...); or take ddp"
)


class LossReads(TorchFunctionMode):
    """Refuses functions of shards.

    Args:
        cut: the parameters that were cut, by name.
    """

    def __init__(self, cut: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in cut.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``.

        Raises:
            StrategyError: it is given a shard.
        """
        del types
        args, kwargs = tree_map_only(DTensor, self._refused, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _refused(self, shard: DTensor) -> torch.Tensor:
        name = self._names.get(id(shard), "")
        if not name:
            raise of_shards("what the loss is given is computed from a parameter of a block")
        how = f'the loss uses "{name}" of the model (by a global, a closure or a reference)'
        raise StrategyError(f"fsdp: {how}, which is a shard there", fix=_FIX)


def of_shards(what: str) -> StrategyError:
    """The refusal of what is made of shards."""
    return StrategyError(
        f"fsdp: {what} outside of the block's forward, where it is a shard", fix=_FIX
    )


def refuse_other_shards(loss: Totalled, cut: Mapping[str, nn.Parameter]) -> None:
    """Refuse a loss that holds or uses a model which another step has sharded: not every rank calls
    it as often.

    Args:
        loss: it.
        cut: the parameters of this step's model.

    Raises:
        StrategyError: it does.
    """
    own = set(map(id, cut.values()))
    held = getattr(loss.loss, "__dict__", {})
    closure = getattr(loss.loss, "__closure__", None) or ()
    closed_over = [cell.cell_contents for cell in closure]
    for module in (*held.values(), *held.get("_modules", {}).values(), *closed_over):
        for name, p in module.named_parameters() if isinstance(module, nn.Module) else ():
            if isinstance(p, DTensor) and id(p) not in own:
                raise StrategyError(
                    f'fsdp: the loss uses "{name}" of a model that another step has sharded, and '
                    "ranks would wait for "
                    "one another in it",
                    fix="take ddp for both",
                )


def explain_shards(error: Exception) -> None:
    """Raise an error that explains one of PyTorch's on shards."""
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        raise of_shards("a parameter of a block is used") from error
