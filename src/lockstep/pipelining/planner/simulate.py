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
from collections.abc import Sequence
from typing import Literal

from lockstep.errors import StrategyError
from lockstep.pipelining.schedule import Schedule, devices_of
from lockstep.report.timeline import Action, Span, Timeline

Times = float | Sequence[float] | Sequence[Sequence[float]]
"""Seconds (or any unit) of an action: one for all, one for each stage, or for each stage one for
each micro-batch.
"""


def simulate(
    schedule: Schedule, forward: Times = 1.0, backward: Times = 1.0, transfer: float = 0.0
) -> Timeline:
    """When each action would begin and end.

    Args:
        schedule: for each device its actions.
        forward: how long a forward takes.
        backward: how long a backward takes.
        transfer: how long what a stage gives is on its way to a stage on another device.

    Raises:
        StrategyError: an action is missing, twice or too early, or the devices would wait for each
            other for ever.
    """
    _check_actions(schedule)
    place = devices_of(schedule)
    last = len(place) - 1
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]

    def ready(action: Action) -> float | None:
        """When what the action needs is on its device; None while that isn't known."""
        need = _before(action, last)
        if need is None or need not in ended:
            return 0.0 if need is None else None
        return ended[need] + (transfer if place[need.stage] != place[action.stage] else 0.0)

    left = sum(map(len, schedule))
    while left:
        before = left
        for device, order in enumerate(schedule):
            mine = spans[device]
            while (
                len(mine) < len(order) and (moment := ready(action := order[len(mine)])) is not None
            ):
                start = max(moment, mine[-1].end if mine else 0.0)
                ended[action] = start + _time_of(
                    action, forward if action.kind == "F" else backward
                )
                mine.append(Span(action, start, ended[action]))
                left -= 1
        if left == before:
            waits = [
                f"device {device} waits with {order[len(mine)]} for "
                f"{_before(order[len(mine)], last)}"
                for device, (order, mine) in enumerate(zip(schedule, spans, strict=True))
                if len(mine) < len(order)
            ]
            raise StrategyError(
                f"schedule: the devices wait for each other for ever: {', '.join(waits)}"
            )
    return Timeline(tuple(map(tuple, spans)))


def ideal(schedule: Schedule, measured: Sequence[Timeline]) -> Timeline:
    """What a schedule would take if nobody waited but for what it needs, with the stage times that
    were measured.

    Args:
        schedule: for each device its actions.
        measured: timelines of it, of equal updates. Several visits of a stage count as one; an
            action that is in none (the backward of a frozen stage) takes no time.
    """
    taken: list[dict[Action, float]] = []
    for timeline in measured:
        taken.append({action: 0.0 for order in schedule for action in order})
        for action, start, end in itertools.chain.from_iterable(timeline.devices):
            taken[-1][action] += end - start
    stages = range(len(devices_of(schedule)))
    microbatches = range(1 + max(action.microbatch for action in taken[0]))

    def times(kind: Literal["F", "B"]) -> list[list[float]]:
        return [
            [statistics.median(one[Action(s, kind, m)] for one in taken) for m in microbatches]
            for s in stages
        ]

    return simulate(schedule, times("F"), times("B"))


def _before(action: Action, last: int) -> Action | None:
    """What has to be done before an action, ``last`` being the last stage."""
    stage, kind, microbatch = action
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage else None
    return Action(stage + 1, "B", microbatch) if stage < last else Action(stage, "F", microbatch)


def _time_of(action: Action, times: Times) -> float:
    """How long an action takes."""
    if isinstance(times, int | float):
        return times
    of_stage = times[action.stage]
    return of_stage if isinstance(of_stage, int | float) else of_stage[action.microbatch]


def _check_actions(schedule: Schedule) -> None:
    """Make sure that each stage has each micro-batch's forward and backward once, and the
    forward first.
    """
    stages = devices_of(schedule)
    if not stages:
        raise StrategyError("schedule: there is no action in it")
    if missing := [s for s in range(max(stages)) if s not in stages]:
        raise StrategyError(f"schedule: there is a stage {max(stages)}, and no stage {missing[0]}")
    seen: set[Action] = set()
    for action in itertools.chain.from_iterable(schedule):
        if action in seen:
            raise StrategyError(f"schedule: {action} is there twice")
        if (
            action.kind == "B"
            and (forward := Action(action.stage, "F", action.microbatch)) not in seen
        ):
            raise StrategyError(f"schedule: {action} comes before {forward}")
        seen.add(action)
    microbatches = 1 + max(action.microbatch for action in seen)
    for action in itertools.starmap(
        Action, itertools.product(sorted(stages), "FB", range(microbatches))
    ):
        if action not in seen:
            raise StrategyError(f"schedule: {action} is missing")
