"""Blocks: the parts of a model between which it may be cut, in the order in which forward comes to them.

A block is a module that is called and holds parameters or buffers: a layer, or as much as can't be taken apart (an
attention that uses its output layer's weights without calling it). Everything else that forward does, activations
without parameters, additions, reshaping, belongs to the block before it: it runs where that one left its result. So no
container needs to be called (a ``ModuleList`` never is), and skips, dictionaries and control flow are of no concern.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """A part of a model that stays whole.

    Attributes:
        name: of the module.
        forward: seconds, of the batch it was measured with, or what is estimated to be in proportion to them.
        backward: likewise.
        parameters: bytes of its parameters and buffers.
        trained: bytes of those that get a gradient.
        activations: bytes that it keeps for backward, of that batch.
        crossing: bytes that go on to later blocks if the model is cut behind it, of that batch.
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


def has_state(module: nn.Module) -> bool:
    """Whether a module holds parameters or buffers itself."""
    return any(p is not None for p in (*module._parameters.values(), *module._buffers.values()))


def block_names(
    model: nn.Module, called: Mapping[str, float], repeated: Collection[str] = (), large: float = 0.125
) -> list[str]:
    """The names of a model's blocks, in the order of the model's modules.

    A module is taken apart where all its parameters belong to modules inside that are called. Where some don't (a table
    of positions beside the layers), it stays whole, unless it is large: then those parameters go with the first block
    that uses them.

    Args:
        model: whose blocks they are.
        called: for each module that forward calls, by name, which share of the whole it takes, from 0 to 1.
        repeated: those that it calls more than once. They stay whole: cut inside, each call would go to and fro.
        large: the share above which a module with parameters of its own is taken apart too.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def inside(module: nn.Module) -> tuple[list[str], bool]:
        """The blocks in a module, and whether anything in it that has state belongs to none of them."""
        found: list[str] = []
        left = has_state(module)
        for child in module._modules.values():
            if child is not None and names.get(id(child), "").startswith(names[id(module)]):
                blocks, open_end = inside(child)
                found += [name for name in blocks if name not in found]
                left = left or open_end
        name = names[id(module)]
        if name not in called or module is model:
            return found, left
        if len(found) > 1 and name not in repeated and (not left or called[name] > large):
            return found, False
        return ([name], False) if left or found else ([], False)

    return inside(model)[0] or [""]


@contextmanager
def watched(
    model: nn.Module, names: Sequence[str], before: Callable[[int], None], after: Callable[[int, object], None]
) -> Iterator[None]:
    """Be told of each call of some modules, for a while.

    Args:
        model: whose modules they are.
        names: of the modules.
        before: called with the module's place in ``names``, when it begins.
        after: called with it and the module's outputs, when it ends.
    """
    modules = dict(model.named_modules())
    handles = []
    try:
        for place, name in enumerate(names):
            # Nested functions, so that each hook has its own place.
            def begins(module: nn.Module, args: object, place: int = place) -> None:
                before(place)

            def ends(module: nn.Module, args: object, outputs: object, place: int = place) -> None:
                after(place, outputs)

            handles.append(modules[name].register_forward_pre_hook(begins))
            handles.append(modules[name].register_forward_hook(ends))
        yield
    finally:
        for handle in handles:
            handle.remove()


def device_map(model: nn.Module, stages: Mapping[str, int]) -> dict[str, int]:
    """The map to paste: as few names as say it, each with everything below it on one stage.

    A container whose layers are on several stages is not in it, but its parts are.

    Args:
        model: whose names they are.
        stages: by block the stage, and by parameter or buffer for those that belong to no block.
    """
    names = {id(module): name for name, module in model.named_modules()}
    of_module = {id(module): stages[name] for name, module in model.named_modules() if name in stages}
    found: dict[str, int] = {}

    def held(module: nn.Module, name: str) -> set[int]:
        """The stages of what is in a module."""
        if id(module) in of_module:
            return {of_module[id(module)]}
        first = names[id(module)]
        mine = {stages[key] for key in _own_names(module, first) if key in stages}
        return mine.union(
            *(held(child, f"{name}.{key}") for key, child in module._modules.items() if child is not None)
        )

    def write(module: nn.Module, name: str) -> None:
        all_here = held(module, name)
        if len(all_here) == 1:
            found[name] = all_here.pop()
            return
        for key, own in zip(_own_names(module, name), _own_names(module, names[id(module)]), strict=True):
            if own in stages:
                found[key] = stages[own]
        for key, child in module._modules.items():
            if child is not None:
                write(child, f"{name}.{key}".lstrip("."))

    write(model, "")
    return found


def _own_names(module: nn.Module, name: str) -> list[str]:
    """The full names of the parameters and buffers that a module holds itself."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [f"{name}.{key}".lstrip(".") for key, tensor in own if tensor is not None]
