"""Routes: which stages a micro-batch visits, forwards and back, and the order of turns that follows from it.

The route is seen, not traced: the first micro-batch goes alone, and notes where it goes::

    straight     0F 1F 2F   2B 1B 0B
    U-Net        0F 1F 0F   0B 1B 0B        the decoder beside the encoder
    frozen stem  0F 1F 2F   2B 1B

A straight route, some visits left out perhaps, takes its turns by the schedule. For another one the turns are found by
letting the micro-batches go through stages that take equally long, each choosing as the schedule would.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from lockstep.pipelining.schedule import Schedule, devices_of
from lockstep.pipelining.turns import Key
from lockstep.report.timeline import Action


class Visit(NamedTuple):
    """One stay on a stage."""

    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


Route = tuple[Visit, ...]


def action_of(visit: Visit, microbatch: int) -> Action:
    """What a micro-batch does in a visit."""
    return Action(visit.stage, "F" if visit.kind == "F" else "B", microbatch)


def whole(route: Route, stages: int) -> Route:
    """A straight route with the visits that it leaves out; another one as it is."""
    forwards = [visit.stage for visit in route if visit.kind == "F"]
    backs = [visit.stage for visit in route if visit.kind == "B"]
    return _straight(stages) if _rises(forwards) and _rises(backs[::-1]) else route


def _straight(stages: int) -> Route:
    return (*(Visit(s, "F") for s in range(stages)), *(Visit(s, "B") for s in reversed(range(stages))))


def _rises(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def merged(route: Route, other: Route) -> Route:
    """A short route that has the visits of both in their orders."""
    together: list[Visit] = []
    for kind in ("F", "B"):
        ours, theirs = ([v for v in r if v.kind == kind] for r in (route, other))
        for same, start, end, its_start, its_end in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            together += ours[start:end]
            if same != "equal":
                together += theirs[its_start:its_end]
    return tuple(together)


def orders_of(route: Route, schedule: Schedule, microbatches: int) -> list[list[Key]]:
    """For each device the visits in their order, as numbers within the route and of micro-batches.

    Args:
        route: of every micro-batch; made ``whole``.
        schedule: for the stages there are, and so many micro-batches.
        microbatches: how many go.
    """
    places = devices_of(schedule)
    stages = len(places)
    if route == _straight(stages):  # another one may be as long: 1F 0F 0B 1B
        at = {visit: i for i, visit in enumerate(route)}
        return [[(at[Visit(a.stage, a.kind)], a.microbatch) for a in actions] for actions in schedule]
    return _tried(route, schedule, microbatches, places)


def _tried(route: Route, schedule: Schedule, microbatches: int, places: Mapping[int, int]) -> list[list[Key]]:
    """Let micro-batches go through the route; a backward takes two ticks, a forward one.

    A micro-batch starts while no more are under way than the schedule would have, or than it visits stages.
    """
    devices = len(schedule)
    kinds = [action.kind for action in schedule[-1]]
    forward_first = microbatches > 1 and "B" not in kinds[: len(kinds) // 2]
    most = microbatches if forward_first else max(_held(schedule), sum(visit.kind == "F" for visit in route))
    orders: list[list[Key]] = [[] for _ in range(devices)]
    at = [0] * microbatches  # the next visit of each
    free = [0] * devices  # from which tick on
    ready = [0] * microbatches
    tick = 0
    first = started = 0  # those before the first are done
    while first < microbatches:
        for device in range(devices):
            if free[device] > tick:
                continue
            forwards = forward_first and any(route[a].kind == "F" for a in at[first:])
            able = [
                m
                for m in range(first, min(started + 1, first + most, microbatches))
                if at[m] < len(route) and ready[m] <= tick and places[route[at[m]].stage] == device
                # In the order of micro-batches, as one device would: running statistics, sums.
                if (m == 0 or at[m - 1] > at[m]) and not (forwards and route[at[m]].kind == "B")
            ]
            if not able:
                continue
            m = min(able, key=lambda m: (route[at[m]].kind == "F", m))
            orders[device].append((at[m], m))
            free[device] = ready[m] = tick + (1 if route[at[m]].kind == "F" else 2)
            at[m] += 1
            started = max(started, m + 1)
            while first < microbatches and at[first] == len(route):
                first += 1
        tick += 1
    return orders


def _held(schedule: Schedule) -> int:
    """The most micro-batches that the schedule has under way at once: those that its first stage holds."""
    held = most = 0
    for action in schedule[0]:
        if action.stage == 0:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
    return most
