"""The reader of schedules: when each action begins and ends, how much waiting that leaves, what is
held meanwhile.

The rules are few. A device does its actions in order, one at a time. A forward waits for the
forward of the stage before it, a backward for the backward of the stage behind it, at the last
stage for its own forward. What goes from device to device may take a time, in which both compute
on. So::

    a stage's forward of micro-batch m    0F0 -> 1F0 -> 2F0
    its backward                          0B0 <- 1B0 <- 2B0
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from lockstep.errors import StrategyError
from lockstep.pipelining.schedule import Schedule, devices_of
from lockstep.pipelining.timeline import Action, Span, Timeline

Times = float | Sequence[float] | Sequence[Sequence[float]]
"""Seconds (or any unit) of an action: one for all, one for each stage, or for each stage one for
each micro-batch.
"""


def simulate(
    schedule: Schedule,
    forward: Times = 1.0,
    backward: Times = 1.0,
    transfer: float = 0.0,
) -> Timeline:
    """Find when each action would begin and end.

    Args:
        schedule: for each device its actions.
        forward: how long a forward takes.
        backward: how long a backward takes.
        transfer: how long what a stage gives is on its way to a stage on another device.

    Raises:
        StrategyError: the devices would wait for each other for ever.
    """
    place = devices_of(schedule)
    last = len(place) - 1
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    waiting = [deque(order) for order in schedule]
    free = [0.0] * len(schedule)
    done = -1
    while len(ended) > done:
        done = len(ended)
        for device, order in enumerate(waiting):
            while order:
                action = order[0]
                start = free[device]
                need = _before(action, last)
                if need is not None:
                    if need not in ended:
                        break
                    ready = ended[need]
                    if place[need.stage] != device:
                        ready += transfer
                    start = max(start, ready)
                order.popleft()
                times = backward
                if action.kind == "F":
                    times = forward
                end = start + _time_of(action, times)
                free[device] = end
                ended[action] = end
                spans[device].append(Span(action, start, end))
    _refuse_waiting(waiting, last)
    return Timeline(spans)


def _refuse_waiting(waiting: Sequence[Sequence[Action]], last: int) -> None:
    """Refuse a schedule whose devices have actions left, which wait for each other.

    Args:
        waiting: the actions that are left, for each device.
        last: the last stage.

    Raises:
        StrategyError: there are some.
    """
    waits = []
    for device, order in enumerate(waiting):
        if order:
            action = order[0]
            waits.append(f"device {device} waits with {action} for {_before(action, last)}")
    if waits:
        raise StrategyError(
            f"schedule: the devices wait for each other for ever: {', '.join(waits)}"
        )


def ideal(schedule: Schedule, measured: Sequence[Timeline]) -> Timeline:
    """Find what a schedule would take if nobody waited but for what it needs, with the stage times
    that were measured.

    Args:
        schedule: for each device its actions.
        measured: timelines of it, of equal updates. Several visits of a stage count as one; an
            action that is in none (the backward of a frozen stage) takes no time.
    """
    taken = [_seconds_of_actions(timeline) for timeline in measured]
    actions = list(itertools.chain(*schedule))
    stages = len(devices_of(schedule))
    microbatches = 1 + max(action.microbatch for action in actions)
    forward = [[0.0] * microbatches for _ in range(stages)]
    backward = [[0.0] * microbatches for _ in range(stages)]
    for action in actions:
        times = backward
        if action.kind == "F":
            times = forward
        of_updates = [of_update[action] for of_update in taken]
        times[action.stage][action.microbatch] = statistics.median(of_updates)
    return simulate(schedule, forward, backward)


def _seconds_of_actions(timeline: Timeline) -> defaultdict[Action, float]:
    """Add up the visits that make each action."""
    seconds: defaultdict[Action, float] = defaultdict(float)
    for action, start, end in itertools.chain(*timeline.devices):
        seconds[action] += end - start
    return seconds


def _before(action: Action, last: int) -> Action | None:
    """Give what has to be done before an action, ``last`` being the last stage."""
    stage, kind, microbatch = action
    if kind == "F":
        if stage == 0:
            return None
        return Action(stage - 1, "F", microbatch)
    if stage == last:
        return Action(stage, "F", microbatch)
    return Action(stage + 1, "B", microbatch)


def _time_of(action: Action, times: Times) -> float:
    """Tell how long an action takes."""
    if isinstance(times, int | float):
        return times
    of_stage = times[action.stage]
    if isinstance(of_stage, int | float):
        return of_stage
    return of_stage[action.microbatch]
