"""A timeline: when each device did what, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


class Span(NamedTuple):
    """An action, and when it began and ended."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each device did what, simulated or measured.

    Attributes:
        devices: the spans of each device, in order.
    """

    devices: Sequence[Sequence[Span]]

    @property
    def start(self) -> float:
        """The time when the first action began."""
        return min((spans[0].start for spans in self.devices if spans), default=0.0)

    @property
    def end(self) -> float:
        """The time when the last action ended."""
        return max((spans[-1].end for spans in self.devices if spans), default=0.0)

    @property
    def makespan(self) -> float:
        """The time from the begin of the first action to the end of the last one."""
        return self.end - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each device computed."""
        times = []
        for spans in self.devices:
            time = sum(span.end - span.start for span in spans)
            times.append(time)
        return tuple(times)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they waited, from 0 to 1."""
        whole = self.makespan * len(self.devices)
        if not whole:
            return 0.0
        return 1 - sum(self.busy) / whole

    @property
    def speed_up(self) -> float:
        """The time of one device that does the same actions one after another, over this one's."""
        makespan = self.makespan
        if not makespan:
            return 1.0
        return sum(self.busy) / makespan

    def plain(self) -> list[list[list[Any]]]:
        """Return what a file can hold: for each device a list of (word of the action, start, end),
        from the first action on.
        """
        first = self.start
        kept = []
        for spans in self.devices:
            rows = []
            for action, start, end in spans:
                rows.append([str(action), start - first, end - first])
            kept.append(rows)
        return kept

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
