"""What each block costs, from a look at one forward (see `trace`): without a run, so without a device.

Times are estimates: matrix products and convolutions by their operations, the rest by the bytes that it moves, backward
by what it has to compute (gradients of inputs, of weights). Bytes are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.pipelining.planner.blocks import Block, block_names
from lockstep.pipelining.planner.trace import Begins, Ends, Keeps, Operator, Trace


@dataclass(frozen=True)
class Look:
    """The blocks of a model, in the order in which forward comes to them.

    Attributes:
        blocks: with estimated times.
        loose: by parameter or buffer that belongs to no block, the place of the first block that uses it.
        fake: whether the forward was followed without running.
    """

    blocks: tuple[Block, ...]
    loose: dict[str, int]
    fake: bool


def blocks_of(model: nn.Module, seen: Trace) -> Look:
    """Find a model's blocks in what was seen of its forward."""
    shares, calls = _shares(seen)
    names = block_names(model, shares, {name for name, times in calls.items() if times > 1})
    first = {name: i for i, name in reversed([*enumerate(e.name for e in seen.events if isinstance(e, Begins))])}
    names.sort(key=lambda name: first.get(name, 0))
    modules = dict(model.named_modules())
    costs = _Costs(seen, names)
    blocks = []
    for place, name in enumerate(names):
        state = {id(t): t for t in (*modules[name].parameters(), *modules[name].buffers())}
        trained = [p for p in modules[name].parameters() if p.requires_grad]
        kinds = costs.has_gradient[place] + bool(trained)
        blocks.append(
            Block(
                name=name,
                forward=costs.seconds[place],
                backward=kinds * costs.seconds[place],
                parameters=sum(t.numel() * t.element_size() for t in state.values()),
                trained=sum(p.numel() * p.element_size() for p in trained),
                activations=costs.kept[place],
                crossing=costs.crossing[place],
                calls=max(calls[name], 1),
            )
        )
    return Look(tuple(blocks), _loose(model, names, costs.first_use), seen.fake)


def _shares(seen: Trace) -> tuple[dict[str, float], Counter[str]]:
    """By module the share of the forward that it takes, and how often it is called."""
    spent: dict[str, float] = {}
    calls: Counter[str] = Counter()
    inside: list[str] = []
    whole = 0.0
    for event in seen.events:
        if isinstance(event, Begins):
            inside.append(event.name)
            calls[event.name] += 1
            spent.setdefault(event.name, 0.0)
        elif isinstance(event, Ends) and event.name in inside:
            while inside.pop() != event.name:  # a module that raised, and was caught, hasn't ended
                pass
        elif isinstance(event, Operator):
            seconds = seen.seconds(event)
            whole += seconds
            for name in set(inside):
                spent[name] += seconds
    return {name: seconds / whole if whole else 0.0 for name, seconds in spent.items()}, calls


class _Costs:
    """What happens from the begin of each block to the begin of the next.

    Args:
        seen: one forward.
        names: of the blocks, in order.
    """

    def __init__(self, seen: Trace, names: Sequence[str]) -> None:
        self.seconds = [0.0] * len(names)
        self.kept = [0] * len(names)
        self.has_gradient = [False] * len(names)
        self.crossing = [0] * len(names)
        self.first_use: dict[str, int] = {}
        places = {name: i for i, name in enumerate(names)}
        sizes = dict(seen.given)
        span = {storage: [0, 0] for storage in seen.given}
        kept: set[int] = set()
        here = 0
        for event in seen.events:
            if isinstance(event, Begins):
                if event.name in places:
                    here = places[event.name]
                    self.has_gradient[here] |= event.has_gradient
            elif isinstance(event, Keeps):
                if event.storage not in kept and event.storage not in seen.state:
                    self.kept[here] += event.size
                kept.add(event.storage)
            elif isinstance(event, Operator):
                self.seconds[here] += seen.seconds(event)
                sizes.update((storage, size) for storage, size in event.writes if storage not in sizes)
                for storage in (*event.reads, *(storage for storage, _ in event.writes)):
                    for name in seen.state.get(storage, ()):
                        self.first_use.setdefault(name, here)
                    if storage not in seen.state:
                        where = span.setdefault(storage, [here, here])
                        where[:] = min(where[0], here), max(where[1], here)
        for storage, (begin, end) in span.items():
            for place in range(begin, end):
                self.crossing[place] += sizes.get(storage, 0)


def _loose(model: nn.Module, names: Sequence[str], first_use: Mapping[str, int]) -> dict[str, int]:
    """The parameters and buffers outside of all blocks; one that forward doesn't use goes with what is named before."""
    of_block = {id(m): place for place, name in enumerate(names) for m in model.get_submodule(name).modules()}
    found: dict[str, int] = {}
    latest = 0
    for prefix, module in model.named_modules():
        if id(module) in of_block:
            latest = of_block[id(module)]
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                name = f"{prefix}.{key}".lstrip(".")
                found[name] = first_use.get(name, latest)
    return found
