"""The figures of a sweep: the speed-up of each strategy over the values that were tried, beside the
rows without that setting.

::

    --sweep microbatches=1,2,4,8       pp     a line through its four rows
                                       mp     a level: one row for all values
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.compare.comparison_table import one_device
from lockstep.compare.result import Comparison, Row
from lockstep.compare.timing import Timing
from lockstep.report.charts import Lines
from lockstep.report.page import Figure

_AXES = {
    "microbatches": "micro-batches",
    "split_size": "samples of a micro-batch, at most",
    "batch_size": "samples of a global batch",
}
"""What the axis of a sweep is called where the setting's own name says too little."""


def sweeps_of(found: Comparison) -> Iterator[Figure]:
    """Yield a figure for each setting that some strategy was measured with several numbers of.

    A line is named by its rows without that setting. A row without it is a level line.
    """
    rows = []
    keys: dict[str, None] = {}
    for row in found.measured:
        ratio = found.speed_up(row)
        if row.role != "one device" and ratio is not None:
            numbers = _numbers_of(row)
            rows.append((row, numbers, ratio))
            keys |= dict.fromkeys(numbers)

    for key in keys:
        lines: dict[str, dict[float, Timing]] = {}
        levels = {}
        for row, numbers, ratio in rows:
            if key in numbers:
                line = lines.setdefault(_name_without(key, row), {})
                line[numbers[key]] = ratio
            elif key not in row.settings:
                levels[row.name] = ratio.median
        if any(len(line) > 1 for line in lines.values()):
            yield _sweep(found, key, lines, levels)


def _name_without(key: str, row: Row) -> str:
    """Return the name of a row without one of its settings: ``pp`` of ``pp microbatches=4``."""
    words = []
    for word in row.name.split(" "):
        if not word.startswith(f"{key}="):
            words.append(word)
    return " ".join(words)


def _sweep(
    found: Comparison,
    key: str,
    lines: dict[str, dict[float, Timing]],
    levels: dict[str, float],
) -> Figure:
    """Return the figure of one setting.

    Args:
        found: the comparison.
        key: the setting.
        lines: by name, the speed-ups by value.
        levels: by name, the speed-up of a row without that setting.
    """
    series = {}
    spreads = {}
    values: set[float] = set()
    for name, line in lines.items():
        places = sorted(line)
        series[name] = [(value, line[value].median) for value in places]
        spreads[name] = [line[value].spread for value in places]
        values.update(places)
    for name, level in levels.items():
        series[name] = [(value, level) for value in sorted(values)]

    to = one_device(found)
    axis = _AXES.get(key, key.replace("_", " "))
    title = f"Speed-up over {to}, by {axis}"
    caption = "Each at the median of its turns, from the lowest to the highest; higher is faster."
    if levels:
        caption += " Lines that are level all the way are of rows without that setting."
    chart = Lines(axis, f"times {to}", series, spreads, chosen=True)
    return Figure(f"sweep-{key}", title, chart, caption)


def _numbers_of(row: Row) -> dict[str, float]:
    """Return the settings of a row that are numbers; the number of devices too, where the names of
    the rows have it.
    """
    numbers = {}
    for key, value in row.settings.items():
        if type(value) in (int, float):
            numbers[key] = float(value)
    if " devices=" in row.name:
        numbers["devices"] = float(len(row.devices))
    return numbers
