"""What a sweep shows: the speed-up of each strategy over the values that were tried, beside what has no such setting.

::

    --sweep microbatches=1,2,4,8       pp     a line through its four rows
                                       mp     a level: one row for all values
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.compare.result import Comparison, Row
from lockstep.compare.timing import Timing

AXES = {
    "microbatches": "micro-batches",
    "split_size": "samples of a micro-batch, at most",
    "batch_size": "samples of a global batch",
    "loader_workers": "loader workers",
}
"""What an axis is called where the setting's own name says too little."""


@dataclass
class Swept:
    """One setting with the values that were tried.

    Attributes:
        key: the setting's name, or ``devices``.
        lines: by the rest of the row's name, its speed-up at each value, from the smallest value on.
        levels: by name, the speed-up of what has one row for all values.
    """

    key: str
    lines: dict[str, list[tuple[float, Timing]]] = field(default_factory=dict)
    levels: dict[str, Timing] = field(default_factory=dict)

    @property
    def axis(self) -> str:
        """What its axis is called."""
        return AXES.get(self.key, self.key.replace("_", " "))


def sweeps_of(found: Comparison) -> Iterator[Swept]:
    """Each setting of which some strategy was measured with several numbers, in the order of the rows."""
    rows = [row for row in found.measured if row.role != "one device"]
    for key in dict.fromkeys(key for row in rows for key in _numbers_of(row)):
        sweep = Swept(key)
        for row in rows:
            ratio = found.speed_up(row)
            if ratio is None:
                continue
            value = _numbers_of(row).get(key)
            if value is not None:
                sweep.lines.setdefault(_without(row, key), []).append((value, ratio))
            elif key not in row.settings:
                sweep.levels[row.name] = ratio
        sweep.lines = {name: sorted(points, key=lambda p: p[0]) for name, points in sweep.lines.items()}
        if any(len(points) > 1 for points in sweep.lines.values()):
            yield sweep


def _numbers_of(row: Row) -> dict[str, float]:
    """The settings of a row that are numbers; the number of devices too, where the rows' names have it."""
    numbers = {
        key: float(value)
        for key, value in row.settings.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return numbers | ({"devices": float(len(row.devices))} if " devices=" in row.name else {})


def _without(row: Row, key: str) -> str:
    """The row's name without what is swept: ``pp microbatches=4`` is ``pp``."""
    return " ".join(word for word in row.name.split(" ") if not word.startswith(f"{key}="))
