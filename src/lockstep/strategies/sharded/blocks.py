"""Choose which modules of a model are gathered on their own."""

from __future__ import annotations

from torch import nn

from lockstep.errors import StrategyError
from lockstep.model.activation_checkpointing import found_blocks, named_blocks


def blocks_of(model: nn.Module, wanted: str) -> dict[str, nn.Module]:
    """Find the modules that are to be gathered on their own.

    Args:
        model: the whole model.
        wanted: ``"auto"`` takes repeated layers; names, with commas between, of modules or lists of
            them; ``""`` none.

    Raises:
        StrategyError: there is no such module, or one is within another or tied to another.
    """
    if wanted == "auto":
        found = found_blocks(model)
        return {name: block for name, block in found.items() if not _tied(model, block)}

    named = named_blocks(model, wanted, "blocks", StrategyError)
    for name, block in named.items():
        tied = _tied(model, block)
        if tied is not None:
            raise StrategyError(
                f'blocks: "{name}" has "{tied}", which the model uses elsewhere too: leave it out'
            )
        for other in named:
            if other.startswith(f"{name}."):
                raise StrategyError(f'blocks: "{other}" is within "{name}": name one of them')
    return named


def _tied(model: nn.Module, block: nn.Module) -> str | None:
    """Return the name of a parameter of a block that is elsewhere in the model too."""
    elsewhere: set[nn.Parameter] = set()
    for _, module in model.named_modules(memo={block}):  # goes around the block
        elsewhere.update(module.parameters(recurse=False))
    for name, p in block.named_parameters():
        if p in elsewhere:
            return name
    return None
