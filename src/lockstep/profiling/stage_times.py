"""Where layers take turns on the devices: when each stage computed, beside when it ideally would have.

::

    measured    0  F0── F1── B0─── ·· B1───          ideal    0  F0── F1── B0─── B1───
                1  ···· F0── ·B0── F1── B1──                  1  ···· F0── B0── F1── B1──
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from lockstep.pipelining.planner.schedule_picture import draw
from lockstep.pipelining.planner.simulate import ideal
from lockstep.pipelining.runner import Runner
from lockstep.report.timeline import Timeline


def timelines_of(runner: Runner) -> dict[str, Timeline]:
    """The measured timeline of a usual update, and the ideal one; empty where nothing was noted.

    Usual is the one of middle length, among those with as many micro-batches as most have.
    """
    noted = [timeline for timeline in runner.timelines or () if any(timeline.devices)]
    if not noted:
        return {}
    counts = [1 + max(span.action.microbatch for mine in one.devices for span in mine) for one in noted]
    count = Counter(counts).most_common(1)[0][0]
    equal = [timeline for timeline, its in zip(noted, counts, strict=True) if its == count]
    middle = sorted(equal, key=lambda timeline: timeline.makespan)[(len(equal) - 1) // 2]
    return {"measured": middle, "ideal, with the same stage times": ideal(runner.schedule(count), equal)}


def save(timelines: Mapping[str, Timeline], folder: Path) -> list[str]:
    """Write them as ``timeline.json``, and ``timeline.png`` where matplotlib is; gives what should be said.

    Raises:
        OSError: they can't be written.
    """
    told = {title: one.plain() for title, one in timelines.items()}
    (folder / "timeline.json").write_text(json.dumps({"unit": "seconds", "timelines": told}))
    if find_spec("matplotlib") is None:
        return ["timeline.png needs matplotlib: pip install 'torch-lockstep[pictures]'"]
    in_ms = {title: one.times(1e3) for title, one in timelines.items()}
    draw(in_ms, folder / "timeline.png", "ms")
    return []
