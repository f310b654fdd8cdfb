"""A schedule made for measured times: whenever a device is free, it takes the first of what it could do at that moment.

A written schedule assumes that all stages take equally long. Where they don't, or where transfers take their time, it
lets a device wait for a certain action while another could be done. What is made here is again a list for each device,
so equal runs still sum in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lockstep.errors import StrategyError
from lockstep.pipelining.planner.simulate import Times, needs, simulate, time_of
from lockstep.pipelining.schedule import Schedule
from lockstep.report.timeline import Action


def fitted(
    places: Sequence[int], microbatches: int, forward: Times = 1.0, backward: Times = 1.0, transfer: float = 0.0
) -> Schedule:
    """The shortest of a few greedy schedules: forwards first or backwards first, with more or fewer micro-batches held.

    With equal times and one stage on each device this is 1F1B. The first stage may hold up to two micro-batches more
    than there are stages: they bridge uneven times, for their memory.

    Args:
        places: for each stage the device that holds it.
        microbatches: how many.
        forward: as in ``simulate``; so are ``backward`` and ``transfer``.

    Raises:
        StrategyError: there is no stage or no micro-batch.
    """
    if not places or microbatches < 1:
        raise StrategyError(
            f"schedule: {len(places)} stages and {microbatches} micro-batches; there is at least one of each"
        )
    tries = [
        _greedy(places, microbatches, forward, backward, transfer, len(places) + more, first)
        for more in range(3)
        for first in ("F", "B")
    ]
    return min(tries, key=lambda schedule: round(simulate(schedule, forward, backward, transfer).makespan, 9))


def _greedy(
    places: Sequence[int],
    microbatches: int,
    forward: Times,
    backward: Times,
    transfer: float,
    in_flight: int,
    first: str,
) -> Schedule:
    """Every device, whenever it is free, takes what it can: of the ``first`` kind, else of the other.

    The first stage holds so many micro-batches ``in_flight``; each stage behind it holds one less, but may hold one. Of
    several stages' forwards on a device the last stage's goes first, of their backwards the first stage's: both are
    nearest to their end. It never comes to a stop: a stage that may hold no more waits for backwards, which wait for
    nothing but the stages behind, and the last one always goes on.
    """
    stages = len(places)
    devices = max(places) + 1
    limits = [max(1, in_flight - stage) for stage in range(stages)]
    schedule: Schedule = [[] for _ in range(devices)]
    free = [0.0] * devices
    ended: dict[Action, float] = {}
    done = {(stage, kind): 0 for stage in range(stages) for kind in "FB"}
    # Moments at which something ends or arrives: only then can a device that waits find something to do.
    moments = [0.0]
    left = 2 * stages * microbatches

    def can(action: Action, now: float) -> bool:
        stage, kind, microbatch = action
        if microbatch == microbatches or (kind == "F" and microbatch - done[stage, "B"] >= limits[stage]):
            return False
        return all(
            need in ended and ended[need] + (transfer if places[need.stage] != places[stage] else 0.0) <= now
            for need in needs(action, stages - 1)
        )

    while left:
        now = heapq.heappop(moments)
        while moments and moments[0] == now:
            heapq.heappop(moments)
        for device in range(devices):
            if free[device] > now:
                continue
            mine = [stage for stage in range(stages) if places[stage] == device]
            forwards = [Action(stage, "F", done[stage, "F"]) for stage in reversed(mine)]
            backwards = [Action(stage, "B", done[stage, "B"]) for stage in mine]
            wanted = [*forwards, *backwards] if first == "F" else [*backwards, *forwards]
            action = next((action for action in wanted if can(action, now)), None)
            if action is None:
                continue
            schedule[device].append(action)
            done[action.stage, action.kind] += 1
            end = now + time_of(action, forward if action.kind == "F" else backward)
            free[device] = ended[action] = end
            left -= 1
            heapq.heappush(moments, end)
            heapq.heappush(moments, end + transfer)
    return schedule
