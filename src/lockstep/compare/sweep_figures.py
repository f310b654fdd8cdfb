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
    ratios = {}
    numbers = {}
    for row in found.measured:
        ratio = found.speed_up(row)
        if row.role != "one device" and ratio is not None:
            ratios[row.name] = ratio
            numbers[row.name] = _numbers_of(row)

    for key in dict.fromkeys(key for settings in numbers.values() for key in settings):
        lines: dict[str, list[tuple[float, Timing]]] = {}
        for name, ratio in ratios.items():
            if key in numbers[name]:
                words = [word for word in name.split(" ") if not word.startswith(f"{key}=")]
                points = lines.setdefault(" ".join(words), [])
                points.append((numbers[name][key], ratio))
        if any(len(points) > 1 for points in lines.values()):
            levels = {
                name: ratio.median
                for name, ratio in ratios.items()
                if key not in numbers[name] and key not in found[name].settings
            }
            yield _sweep(found, key, lines, levels)


def _sweep(
    found: Comparison,
    key: str,
    lines: dict[str, list[tuple[float, Timing]]],
    levels: dict[str, float],
) -> Figure:
    """Return the figure of one setting.

    Args:
        found: the comparison.
        key: the setting.
        lines: by name, its values with the speed-ups.
        levels: by name, the speed-up of a row without that setting.
    """
    series = {}
    spreads = {}
    values = set()
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        series[name] = [(value, ratio.median) for value, ratio in points]
        spreads[name] = [ratio.spread for _, ratio in points]
        values |= {value for value, _ in points}
    for name, level in levels.items():
        series[name] = [(value, level) for value in sorted(values)]

    axis = _AXES.get(key, key.replace("_", " "))
    chart = Lines(axis, f"times {one_device(found)}", series, spreads, chosen=True)
    caption = "Each at the median of its turns, from the lowest to the highest; higher is faster."
    if levels:
        caption += " Lines that are level all the way are of rows without that setting."
    return Figure(f"sweep-{key}", f"Speed-up over {one_device(found)}, by {axis}", chart, caption)


def _numbers_of(row: Row) -> dict[str, float]:
    """Return the settings of a row that are numbers; the number of devices too, where the names of
    the rows have it.
    """
    numbers = {key: float(v) for key, v in row.settings.items() if type(v) in (int, float)}
    if " devices=" in row.name:
        numbers["devices"] = float(len(row.devices))
    return numbers
