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

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import StrategyError
from lockstep.pipelining.schedule import Action, Schedule, devices_of


class Span(NamedTuple):
    """An action, and when it began and ended."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each device did what.

    Attributes:
        devices: the spans of each device, in order.
    """

    devices: Sequence[Sequence[Span]]

    @property
    def makespan(self) -> float:
        """The time when the last action ended."""
        return max((spans[-1].end for spans in self.devices if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they waited, from 0 to 1."""
        if not self.makespan:
            return 0.0
        return 1 - self.speed_up / len(self.devices)

    @property
    def speed_up(self) -> float:
        """The time of one device that does the same actions one after another, over this one's."""
        if not self.makespan:
            return 1.0
        busy = sum(span.end - span.start for spans in self.devices for span in spans)
        return busy / self.makespan

    def held(self, sizes: Mapping[int, float] | None = None) -> tuple[float, ...]:
        """Return what each device holds at most, of micro-batches after their forward and before
        their backward.

        Args:
            sizes: by stage, what one micro-batch leaves there (bytes, say); None counts
                micro-batches of stages.
        """
        peaks = []
        for spans in self.devices:
            now = peak = 0.0
            for action, _, _ in spans:
                size = 1.0
                if sizes is not None:
                    size = sizes[action.stage]
                if action.kind == "B":
                    size = -size
                now += size
                peak = max(peak, now)
            peaks.append(peak)
        return tuple(peaks)


def simulate(
    schedule: Schedule,
    seconds: Callable[[Action], float] = lambda action: 1.0,
    transfer: float = 0.0,
) -> Timeline:
    """Find when each action would begin and end.

    Args:
        schedule: for each device its actions.
        seconds: gives how long an action takes.
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
                end = start + seconds(action)
                free[device] = end
                ended[action] = end
                spans[device].append(Span(action, start, end))
    if any(waiting):
        raise StrategyError("schedule: the devices wait for each other for ever")
    return Timeline(spans)


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
