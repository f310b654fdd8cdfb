"""Schedules: which stage computes which micro-batch, in which order, as data.

A schedule is a list of actions for each stage. ``2F0`` is stage 2's forward of micro-batch 0,
``2B0`` its backward. Who writes a schedule writes computing only: what moves between the stages
follows from it. Whoever runs or simulates a schedule reads the same lists.

Each list belongs to a device. Usually that is a stage too; where a device holds several stages
(`interleaved`) their actions stand mixed in its list, and ``devices_of`` tells who holds which.

Backwards of a stage go in the order of the micro-batches, so gradients are summed in the order in
which one device that accumulates would sum them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]
"""Forward or backward."""


class Action(NamedTuple):
    """One turn of a stage: the forward (``"F"``) or the backward (``"B"``) of a micro-batch,
    each from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]
"""For each device its actions, in order."""


class Visit(NamedTuple):
    """One stay of a micro-batch on a stage."""

    stage: int
    kind: Kind


Route = tuple[Visit, ...]
"""The visits of a micro-batch, forwards and back. It is seen, not traced: the first one goes alone,
and notes them.

::

    straight     0F 1F 2F   2B 1B 0B
    U-Net        0F 1F 0F   0B 1B 0B        the decoder beside the encoder
    frozen stem  0F 1F 2F   2B 1B
"""

Key = tuple[int, int]
"""The number of a visit on the route, and that of the micro-batch."""


def straight(stages: int) -> Route:
    """Go through all stages and back."""
    there = [Visit(stage, "F") for stage in range(stages)]
    back = [Visit(stage, "B") for stage in reversed(range(stages))]
    return tuple(there + back)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Compute every forward, then every backward; each stage holds all micro-batches in between.

    ::

        stage 0   F0 F1 F2 F3  .  .  .  .  .  . B0 B1 B2 B3
        stage 1    . F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3  .
        stage 2    .  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .  .
        stage 3    .  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .  .

    Huang et al., GPipe, 2019, https://arxiv.org/abs/1811.06965
    """
    return forwards_first(one_f_one_b(stages, microbatches))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Compute as many forwards as it takes to reach the last stage, then one backward for each
    forward.

    ::

        stage 0   F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
        stage 1    . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
        stage 2    .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
        stage 3    .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .

    As long as GPipe's where all stages take equally long, but stage s holds at most ``stages - s``
    micro-batches. Narayanan et al., PipeDream, 2019, https://arxiv.org/abs/1806.03377
    """
    return interleaved(stages, microbatches, chunks=1)


def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Compute as 1F1B, but each device holds several short stages, so that filling and draining
    take a part of the time.

    Stage s is on device ``s % devices``. Two devices with two chunks each, so four stages, each
    half as long::

        device 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3  .  0B2  .  0B3
        device 1    .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3  .  1B2  .  1B3  .

    Micro-batches go through in groups of as many as there are devices. A last group that is smaller
    is planned as a whole one, and what isn't there left out: planned small, it can make the devices
    wait for each other for ever. Narayanan et al., 2021, https://arxiv.org/abs/2104.04473

    Args:
        devices: how many; the schedule has ``devices * chunks`` stages.
        microbatches: how many.
        chunks: stages on each device, one at least.
    """
    groups = [range(first, first + devices) for first in range(0, microbatches, devices)]
    schedule: Schedule = []
    for device in range(devices):
        stages = range(device, devices * chunks, devices)
        forwards = []
        backwards = []
        for group in groups:
            forwards += [Action(stage, "F", m) for stage in stages for m in group]
            backwards += [Action(stage, "B", m) for stage in stages[::-1] for m in group]
        # So many forwards ahead, then a forward and a backward in turns while there are forwards,
        # then what is left.
        ahead = devices - device - 1
        if chunks > 1:
            ahead = 2 * ahead + (chunks - 1) * devices
        pairs = itertools.zip_longest(forwards[ahead:], backwards)
        order = filter(None, [*forwards[:ahead], *itertools.chain(*pairs)])
        schedule.append([action for action in order if action.microbatch < microbatches])
    return schedule


def forwards_first(schedule: Schedule) -> Schedule:
    """Move each device's forwards before its backwards, both in their order."""
    return [sorted(order, key=lambda action: action.kind == "B") for order in schedule]


def is_forward_first(schedule: Schedule) -> bool:
    """Return whether every forward comes before the first backward."""
    kinds = [action.kind for action in schedule[-1]]
    return "B" not in kinds[: len(kinds) // 2]


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
}
"""By the word that a person gives, a function of devices and micro-batches."""


def devices_of(schedule: Schedule) -> dict[int, int]:
    """Find for each stage the device whose list has its actions."""
    found: dict[int, int] = {}
    for device, order in enumerate(schedule):
        for action in order:
            found[action.stage] = device
    return found


# ---- routes --------------------------------------------------------------------------------------


def whole(route: Route, stages: int) -> Route:
    """Add to a straight route the visits that it leaves out; leave another one as it is."""
    way = straight(stages)
    return way if has_way(way, route) else route


def has_way(route: Route, other: Route) -> bool:
    """Return whether a route has all visits of another one, in their order."""
    rest = iter(route)
    return all(visit in rest for visit in other)


def merged(route: Route, orders: Sequence[Sequence[Key]]) -> list[Key]:
    """Put the visits of all devices in one list, each device's in its order, as they would begin.

    A forward takes one tick, a backward two. Of visits that begin together, what others wait for
    comes first.
    """
    began: dict[Key, float] = {}
    ended: dict[Key, float] = {}
    rest = list(map(deque, orders))
    free = [0.0] * len(orders)
    while any(rest):
        for device, order in enumerate(rest):
            while order:
                place, number = key = order[0]
                before = place - 1, number
                if place and before not in ended:
                    break
                order.popleft()
                began[key] = max(free[device], ended.get(before, 0.0))
                free[device] = ended[key] = began[key] + _TICKS[route[place].kind]
    return sorted(began, key=lambda key: began[key])


def orders_of(route: Route, schedule: Schedule, microbatches: int) -> list[list[Key]]:
    """Order the visits of each device, by a schedule for a number of micro-batches.

    A straight route takes its turns by the schedule. For another one they are found by letting the
    micro-batches go through stages that take equally long: a forward one tick, a backward two.
    """
    places = devices_of(schedule)
    if route != straight(len(places)):  # one may be as long: 1F 0F 0B 1B
        return _greedy(route, places, schedule, microbatches)
    orders = []
    for actions in schedule:
        order = []
        for stage, kind, number in actions:
            place = route.index((stage, kind))
            order.append((place, number))
        orders.append(order)
    return orders


def _greedy(
    route: Route,
    places: Mapping[int, int],
    schedule: Schedule,
    microbatches: int,
) -> list[list[Key]]:
    """Order the visits of each device: whenever it is free, it takes what it can at that moment.

    Of several visits a backward goes first, then the one that is nearest to the end of the route,
    each in the order of micro-batches. All forwards go first where the schedule has it so, else a
    micro-batch starts while no more are under way than the schedule would have, or than it visits
    stages.

    Args:
        route: of each micro-batch.
        places: for each stage the device that holds it.
        schedule: of a straight route.
        microbatches: how many.
    """
    forward_first = microbatches > 1 and is_forward_first(schedule)
    forwards = [i for i, visit in enumerate(route) if visit.kind == "F"]
    most = microbatches
    if not forward_first:
        steps = [1 if a.kind == "F" else -1 for a in schedule[0] if a.stage == 0]
        most = max(*itertools.accumulate(steps), len(forwards))
    begun = [0] * len(route)
    ended: dict[Key, float] = {}

    def can(i: int, now: float) -> bool:
        """Return whether the next micro-batch may begin this visit."""
        m = begun[i]
        if m == microbatches:
            return False
        if i == 0:
            return m - begun[-1] < most
        if route[i].kind == "B" and forward_first and begun[forwards[-1]] < microbatches:
            return False
        return ended.get((i - 1, m), math.inf) <= now

    orders: list[list[Key]] = [[] for _ in schedule]
    free = [0.0] * len(orders)
    wanted = sorted(range(len(route)), key=lambda i: (route[i].kind == "B", i), reverse=True)
    moments = [0.0]  # when something ends: only then can a device that waits find something to do
    while moments:
        now = heapq.heappop(moments)
        for device, order in enumerate(orders):
            mine = [i for i in wanted if places[route[i].stage] == device]
            i = next((i for i in mine if can(i, now)), None)
            if i is None or free[device] > now:
                continue
            key = i, begun[i]
            order.append(key)
            begun[i] += 1
            free[device] = ended[key] = now + _TICKS[route[i].kind]
            heapq.heappush(moments, free[device])
    return orders


_TICKS = {"F": 1.0, "B": 2.0}
"""How long a visit is taken to be."""
