"""Blocks: the parts of a model between which it may be cut, in the order in which forward comes to
them.

A block is a module that is called and holds parameters or buffers: a layer, or as much as can't be
taken apart (an attention that uses its output layer's weights without calling it). Everything else
that forward does, activations without parameters, additions, reshaping, belongs to the block before
it: it runs where that one left its result. So no container needs to be called (a ``ModuleList``
    never is), and skips, dictionaries and control flow are of no concern.

What a block costs is estimated from one forward (`trace`): matrix
products and convolutions by their operations, the rest by the bytes that it moves, backward by what
it has to compute. Bytes are exact.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.pipelining.planner.trace import Segment, Trace, bytes_of, named_state

_LARGE = 0.125
"""The share above which a module with parameters of its own is taken apart too."""


@dataclass(frozen=True)
class Block:
    """A part of a model that stays whole: a module. Activations and what crosses are those of a
    batch.

    Attributes:
        name: of the module.
        forward: seconds, or what is estimated to be in proportion to them.
        backward: the same.
        parameters: bytes of its parameters and buffers.
        trained: bytes of those that get a gradient.
        activations: bytes that it keeps for backward.
        crossing: bytes that go on to later blocks if the model is cut behind it.
        calls: how often forward calls it.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    parameters: int = 0
    trained: int = 0
    activations: int = 0
    crossing: int = 0
    calls: int = 1

    @property
    def time(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ModelBlocks:
    """The blocks of a model with their costs, in the order in which forward comes to them.

    Attributes:
        blocks: in that order.
        loose: by parameter or buffer that belongs to no block, the place of the first block that
            uses it.
        measured: whether times were measured, or estimated.
    """

    blocks: tuple[Block, ...]
    loose: dict[str, int]
    measured: bool = False


def blocks_of(model: nn.Module, seen: Trace) -> ModelBlocks:
    """Find a model's blocks in a trace of its forward."""
    names = _names_in_order(model, seen)
    inside = _segments_of(names, seen.segments)
    used = _uses(inside)
    crossing = [0] * len(names)
    first_use: dict[str, int] = {}
    for storage, places in used.items():
        if storage in seen.state:
            first_use.update(dict.fromkeys(seen.state[storage], places[0]))
            continue
        for place in range(places[0], places[-1]):
            crossing[place] += seen.sizes.get(storage, 0)

    blocks = []
    for place, name in enumerate(names):
        block = _block(model, name, inside[place], crossing[place], seen.calls[name])
        blocks.append(block)
    return ModelBlocks(tuple(blocks), loose_of(model, names, first_use))


def _names_in_order(model: nn.Module, seen: Trace) -> list[str]:
    """List a model's blocks, in the order in which forward comes to them."""
    whole = sum(segment.seconds for segment in seen.segments) or 1.0
    shares = {name: seconds / whole for name, seconds in seen.seconds.items()}
    repeated = {name for name, times in seen.calls.items() if times > 1}
    begun: dict[str, int] = {}
    for place, segment in enumerate(seen.segments):
        begun.setdefault(segment.name, place)
    names = block_names(model, shares, repeated)
    return sorted(names, key=lambda name: begun.get(name, 0))


def _segments_of(names: Sequence[str], segments: Sequence[Segment]) -> list[list[Segment]]:
    """List the segments of each block: those of a module that is none belong to the block before."""
    places = {name: place for place, name in enumerate(names)}
    inside: list[list[Segment]] = [[] for _ in names]
    here = 0
    for segment in segments:
        here = places.get(segment.name, here)
        inside[here].append(segment)
    return inside


def _uses(inside: Sequence[Sequence[Segment]]) -> dict[int, list[int]]:
    """Find the places of the blocks that use each storage, in order.

    Args:
        inside: the segments of each block.
    """
    used: dict[int, list[int]] = {}
    for place, segments in enumerate(inside):
        for segment in segments:
            for storage in segment.storages:
                places = used.setdefault(storage, [])
                if place not in places[-1:]:
                    places.append(place)
    return used


def _block(
    model: nn.Module,
    name: str,
    segments: Sequence[Segment],
    crossing: int,
    calls: int,
) -> Block:
    """Estimate what a block costs.

    Args:
        model: whose block it is.
        name: of its module.
        segments: of the forward, those that belong to it.
        crossing: bytes that go on to later blocks.
        calls: how often forward calls it.
    """
    module = model.get_submodule(name)
    trained = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            trained.append(parameter)
    forward = sum(segment.seconds for segment in segments)
    activations = 0
    has_gradient = False
    for segment in segments:
        activations += segment.kept
        if segment.name == name and segment.has_gradient:
            has_gradient = True
    # Backward computes gradients of inputs, where those depend on a parameter, and of weights.
    gradients = has_gradient + bool(trained)
    return Block(
        name,
        forward=forward,
        backward=gradients * forward,
        parameters=bytes_of([*module.parameters(), *module.buffers()]),
        trained=bytes_of(trained),
        activations=activations,
        crossing=crossing,
        calls=max(calls, 1),
    )


def loose_of(
    model: nn.Module,
    names: Sequence[str],
    first_use: Mapping[str, int],
) -> dict[str, int]:
    """Find the parameters and buffers outside of all blocks; one that forward doesn't use goes with
    what is named before.

    Args:
        model: whose they are.
        names: of the blocks.
        first_use: by name of a parameter or buffer, the place of the first block that uses it.

    Returns:
        By name, the place of the block that it goes with.
    """
    of_block: dict[nn.Module, int] = {}
    for place, name in enumerate(names):
        for module in model.get_submodule(name).modules():
            of_block[module] = place
    found: dict[str, int] = {}
    latest = 0
    for prefix, module in model.named_modules():
        if module in of_block:
            latest = of_block[module]
            continue
        for key, _ in _own_state(module):
            name = _joined(prefix, key)
            found[name] = first_use.get(name, latest)
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


def block_names(
    model: nn.Module,
    called: Mapping[str, float],
    repeated: Collection[str] = (),
) -> list[str]:
    """List a model's blocks, in the order of the model's modules.

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
    names = {module: name for name, module in model.named_modules()}

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
        if may_be_cut and (not is_left or called[name] > _LARGE):
            return found, False
        if is_left or found:
            return [name], False
        return [], False

    found, _ = inside(model)
    return found or [""]


def map_of(model: nn.Module, found: ModelBlocks, bounds: Sequence[int]) -> dict[str, int]:
    """Make the device map of a split: as few names as say it, each with everything below it on one
    stage.

    A container whose layers are on several stages is not in it, but its parts are.

    Args:
        model: whose map it is.
        found: its blocks.
        bounds: the place of each stage's first block.
    """
    stages = _Stages({}, {})
    for place, block in enumerate(found.blocks):
        module = model.get_submodule(block.name)
        stages.of_module[module] = _stage_at(place, bounds)
    for name, tensor in named_state(model):
        if name in found.loose:
            place = found.loose[name]
            stages.of_tensor[id(tensor)] = _stage_at(place, bounds)
    device_map: dict[str, int] = {}
    stages.write(model, "", device_map)
    return device_map


@dataclass
class _Stages:
    """The stages of modules, and of the tensors that modules themselves have, by id."""

    of_module: dict[nn.Module, int]
    of_tensor: dict[int, int]

    def within(self, module: nn.Module) -> set[int]:
        """Find the stages of what is in a module."""
        stage = self.of_module.get(module)
        if stage is not None:
            return {stage}
        found = set(self._own(module).values())
        for child in module.children():
            found |= self.within(child)
        return found

    def _own(self, module: nn.Module) -> dict[str, int]:
        """Find the stages of the tensors that a module holds itself, by their names in it."""
        own = {}
        for key, tensor in _own_state(module):
            stage = self.of_tensor.get(id(tensor))
            if stage is not None:
                own[key] = stage
        return own

    def write(self, module: nn.Module, name: str, device_map: dict[str, int]) -> None:
        """Write a module into a device map, or what is in it."""
        all_here = self.within(module)
        if len(all_here) == 1:
            device_map[name] = all_here.pop()
            return
        for key, stage in self._own(module).items():
            device_map[_joined(name, key)] = stage
        for key, child in module._modules.items():  # a child under each of its names
            if child is not None:
                self.write(child, _joined(name, key), device_map)


def _stage_at(place: int, bounds: Sequence[int]) -> int:
    """Find the stage of the block at a place, by where the stages begin."""
    return bisect.bisect_right(bounds, place) - 1
