"""Blocks: the parts of a model between which it may be cut, in the order in which forward comes to
them.

A block is a module that is called and holds parameters or buffers: a layer, or as much as can't be
taken apart (an attention that uses its output layer's weights without calling it). Everything else
that forward does, activations without parameters, additions, reshaping, belongs to the block before
it: it runs where that one left its result. So no container needs to be called (a ``ModuleList``
    never is), and skips, dictionaries and control flow are of no concern.

What a block costs is estimated from a look at one forward (`trace`), so without a run: matrix
products and convolutions by their operations, the rest by the bytes that it moves, backward by what
it has to compute. Bytes are exact.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.pipelining.planner.trace import Segment, Trace, bytes_of

_LARGE = 0.125
"""The share above which a module with parameters of its own is taken apart too."""


@dataclass(frozen=True)
class Block:
    """A part of a model that stays whole: a module. Activations and what crosses are those of a
    batch.
    """

    name: str
    forward: float = 0.0  # seconds, or what is estimated to be in proportion to them
    backward: float = 0.0
    parameters: int = 0  # bytes of its parameters and buffers
    trained: int = 0  # bytes of those that get a gradient
    activations: int = 0  # bytes that it keeps for backward
    crossing: int = 0  # bytes that go on to later blocks if the model is cut behind it
    calls: int = 1  # how often forward calls it

    @property
    def time(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Look:
    """The blocks of a model with their costs, in the order in which forward comes to them."""

    blocks: tuple[Block, ...]
    loose: dict[
        str, int
    ]  # by parameter or buffer that belongs to no block, the place of the first block that uses it
    fake: bool  # whether the forward was followed without running
    measured: bool = False  # whether times were measured, or estimated


def blocks_of(model: nn.Module, seen: Trace) -> Look:
    """Find a model's blocks in what was seen of its forward."""
    whole = sum(segment.seconds for segment in seen.segments)
    shares = {name: seconds / whole if whole else 0.0 for name, seconds in seen.seconds.items()}
    names = block_names(model, shares, {name for name, times in seen.calls.items() if times > 1})
    begun = [segment.name for segment in seen.segments]
    names.sort(key=lambda name: begun.index(name) if name in begun else 0)
    places = {name: place for place, name in enumerate(names)}
    inside: list[list[Segment]] = [[] for _ in names]
    here = 0
    for segment in seen.segments:
        here = places.get(segment.name, here)
        inside[here].append(segment)
    used: dict[int, list[int]] = {}  # by storage the places where it is used, in order
    for place, segments in enumerate(inside):
        for storage in set().union(*(segment.storages for segment in segments)):
            used.setdefault(storage, []).append(place)
    crossing = [0] * len(names)
    for storage in used.keys() - seen.state.keys():
        for place in range(used[storage][0], used[storage][-1]):
            crossing[place] += seen.sizes.get(storage, 0)

    def block(name: str, segments: list[Segment], crossing: int) -> Block:
        module = model.get_submodule(name)
        trained = [p for p in module.parameters() if p.requires_grad]
        forward = sum(segment.seconds for segment in segments)
        # Backward computes gradients of inputs, where those depend on a parameter, and of weights.
        kinds = any(segment.has_gradient for segment in segments if segment.name == name) + bool(
            trained
        )
        parameters = bytes_of([*module.parameters(), *module.buffers()])
        kept = sum(segment.kept for segment in segments)
        calls = max(seen.calls[name], 1)
        return Block(
            name, forward, kinds * forward, parameters, bytes_of(trained), kept, crossing, calls
        )

    blocks = tuple(map(block, names, inside, crossing))
    first_use = {
        name: used[storage][0]
        for storage, names in seen.state.items()
        if storage in used
        for name in names
    }
    return Look(blocks, loose_of(model, names, first_use), seen.fake)


def loose_of(
    model: nn.Module, names: Sequence[str], first_use: Mapping[str, int]
) -> dict[str, int]:
    """The parameters and buffers outside of all blocks; one that forward doesn't use goes with
    what is named before.
    """
    of_block = {
        id(m): place
        for place, name in enumerate(names)
        for m in model.get_submodule(name).modules()
    }
    found: dict[str, int] = {}
    latest = 0
    for prefix, module in model.named_modules():
        latest = of_block.get(id(module), latest)
        if id(module) not in of_block:
            for key, _ in _own_state(module):
                name = f"{prefix}.{key}".lstrip(".")
                found[name] = first_use.get(name, latest)
    return found


def _own_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a module holds itself."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield key, tensor


def block_names(
    model: nn.Module, called: Mapping[str, float], repeated: Collection[str] = ()
) -> list[str]:
    """The names of a model's blocks, in the order of the model's modules.

    A module is taken apart where all its parameters belong to modules inside that are called. Where
    some don't (a table of positions beside the layers), it stays whole, unless it is large: then
    those parameters go with the first block that uses them.

    Args:
        model: whose blocks they are.
        called: for each module that forward calls, by name, which share of the whole it takes, from
            0 to 1.
        repeated: those that it calls more than once. They stay whole: cut inside, each call would
            go to and fro.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def inside(module: nn.Module) -> tuple[list[str], bool]:
        """The blocks in a module, and whether anything in it that has state belongs to none of
        them.
        """
        found: list[str] = []
        left = any(True for _ in _own_state(module))
        for child in module._modules.values():
            if child is not None and names.get(id(child), "").startswith(names[id(module)]):
                blocks, open_end = inside(child)
                found += [name for name in blocks if name not in found]
                left = left or open_end
        name = names[id(module)]
        if name not in called or module is model:
            return found, left
        if len(found) > 1 and name not in repeated and (not left or called[name] > _LARGE):
            return found, False
        return ([name], False) if left or found else ([], False)

    return inside(model)[0] or [""]


def map_of(model: nn.Module, look: Look, bounds: Sequence[int]) -> dict[str, int]:
    """The device map of a split: as few names as say it, each with everything below it on one
    stage.

    A container whose layers are on several stages is not in it, but its parts are.
    """
    places = {**{block.name: place for place, block in enumerate(look.blocks)}, **look.loose}
    stages = {name: bisect.bisect_right(bounds, place) - 1 for name, place in places.items()}
    of_module = {
        id(module): stages[name] for name, module in model.named_modules() if name in stages
    }
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    loose = {id(tensor): stages[name] for name, tensor in every if name in stages}
    found: dict[str, int] = {}

    def held(module: nn.Module) -> set[int]:
        """The stages of what is in a module."""
        if id(module) in of_module:
            return {of_module[id(module)]}
        own = {loose[id(tensor)] for _, tensor in _own_state(module) if id(tensor) in loose}
        return own.union(*map(held, module.children()))

    def write(module: nn.Module, name: str) -> None:
        all_here = held(module)
        if len(all_here) == 1:
            found[name] = all_here.pop()
            return
        for key, tensor in _own_state(module):
            if id(tensor) in loose:
                found[f"{name}.{key}".lstrip(".")] = loose[id(tensor)]
        for key, child in module._modules.items():
            if child is not None:
                write(child, f"{name}.{key}".lstrip("."))

    write(model, "")
    return found
