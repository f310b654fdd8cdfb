"""Blocks: the parts of a model between which it may be cut, in the order in which forward comes to
them.

A block is a module that is called and holds parameters or buffers: a layer, or as much as can't be
taken apart (an attention that uses its output layer's weights without calling it). Everything else
that forward does, activations without parameters, additions, reshaping, belongs to the block before
it: it runs where that one left its result. So no container needs to be called (a ``ModuleList``
never is), and skips, dictionaries and control flow are of no concern.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_LARGE = 0.125
"""The share of all parameters above which a module with some of its own is taken apart too."""


@dataclass(frozen=True)
class Block:
    """A part of a model that stays whole: a module. Activations are those of a micro-batch.

    Attributes:
        name: of the module.
        forward: seconds, or what is in proportion to them.
        backward: the same.
        parameters: bytes of its parameters and buffers.
        trained: bytes of those that get a gradient.
        activations: bytes that it keeps for backward.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    parameters: int = 0
    trained: int = 0
    activations: int = 0

    @property
    def time(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def elements(parameters: Iterable[nn.Parameter]) -> int:
    """Count the elements of some parameters together."""
    return sum(parameter.numel() for parameter in parameters)


def block_names(
    model: nn.Module,
    called: Collection[str],
    repeated: Collection[str] = (),
) -> list[str]:
    """List a model's blocks, in the order of the model's modules.

    A module is taken apart where all its parameters belong to modules inside that are called. Where
    some don't (a table of positions beside the layers), it stays whole, unless it is large.

    Args:
        model: whose blocks they are.
        called: the names of the modules that forward calls.
        repeated: those that it calls more than once. They stay whole: cut inside, each call would
            go to and fro.
    """
    names = {module: name for name, module in model.named_modules()}
    large = _LARGE * elements(model.parameters())

    def inside(module: nn.Module) -> tuple[list[str], bool]:
        """Find the blocks in a module, and whether anything in it that has state belongs to none of
        them.
        """
        name = names[module]
        found: list[str] = []
        is_left = any(True for _ in _own_state(module))
        for child in module.children():
            if not names[child].startswith(name):
                continue
            blocks, leaves_some = inside(child)
            for block in blocks:
                if block not in found:
                    found.append(block)
            is_left = is_left or leaves_some
        if name not in called or module is model:
            return found, is_left
        may_be_cut = len(found) > 1 and name not in repeated
        if may_be_cut and (not is_left or elements(module.parameters()) > large):
            return found, False
        if is_left or found:
            return [name], False
        return [], False

    found, _ = inside(model)
    return found or [""]


def map_of(model: nn.Module, blocks: Sequence[Block], bounds: Sequence[int]) -> dict[str, int]:
    """Make the device map of a split: as few names as say it, each with everything below it on one
    stage.

    A container whose layers are on several stages is not in it, but its parts are; what it holds
    itself is on the first of these stages. A layer that is no block goes with what is registered
    before it.

    Args:
        model: whose map it is.
        blocks: all of it, in the order of execution.
        bounds: the place of each stage's first block.
    """
    stage_of: dict[nn.Module, int] = {}
    for place, block in enumerate(blocks):
        module = model.get_submodule(block.name)
        stage_of[module] = bisect.bisect_right(bounds, place) - 1
    device_map: dict[str, int] = {}
    latest = 0

    def write(module: nn.Module, name: str) -> None:
        """Write a module into the map, or what is in it."""
        nonlocal latest
        stages = _stages_in(module, stage_of)
        if len(stages) > 1:
            for key, _ in _own_state(module):
                device_map[_joined(name, key)] = min(stages)
            for key, child in module._modules.items():  # a child under each of its names
                if child is not None:
                    write(child, _joined(name, key))
            return
        if stages:
            latest = stages.pop()
        elif not any(True for _ in itertools.chain(module.parameters(), module.buffers())):
            return
        device_map[name] = latest

    write(model, "")
    return device_map


def _stages_in(module: nn.Module, stage_of: Mapping[nn.Module, int]) -> set[int]:
    """Find the stages of the blocks in a module, by those of blocks."""
    if module in stage_of:
        return {stage_of[module]}
    found = set()
    for child in module.children():
        found |= _stages_in(child, stage_of)
    return found


def _joined(prefix: str, key: str) -> str:
    """Give the name of what a module of that name holds."""
    if not prefix:
        return key
    return f"{prefix}.{key}"


def _own_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module holds itself."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)
