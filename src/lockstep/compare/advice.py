"""The sentence at the end of a comparison: which to take, and why; and what to think of before
believing it.
"""

from __future__ import annotations

from lockstep.compare.result import Comparison, Row

_SAME = 1.02
"""A ratio up to which two are as fast as one another, whatever their spread."""

_STEADY = 0.2
"""From the lowest to the highest turn, as a part of the median: what an idle machine stays
within.
"""

_ALIKE = 1.5
"""How many times as long updates may take that are clocked apart, and still be like those of the
turns.
"""

_SYSTEM = 0.2
"""A part of one core's time that the system doesn't take where a job computes; each step's new
memory may.
"""


def best_of(found: Comparison) -> Row | None:
    """The row to take: the fastest with single-device results; of equally fast ones the least
    trouble.

    ``single`` is less trouble than any strategy; of these, what takes least memory.
    """
    candidates = [row for row in found.measured if row.is_exact]
    if not candidates:
        return None
    fastest = max(candidates, key=lambda row: row.timing.median)
    alike = [row for row in candidates if _is_as_fast(row, fastest)]
    return min(alike, key=lambda row: (row.role == "strategy", sum(row.peaks)))


def _is_as_fast(row: Row, fastest: Row) -> bool:
    """Whether ``row`` isn't clearly behind: by its median, or since it was ahead in some rounds."""
    ahead = fastest.timing.over(row.timing)
    return ahead.median < _SAME or sum(rate > 1.0 for rate in ahead.rates) < 0.75 * len(ahead.rates)


def cautions(found: Comparison) -> list[str]:
    """What to think of before believing the numbers."""
    return [said for said in (unsteady(found), clocked_apart(found), clearing(found)) if said]


def unsteady(found: Comparison) -> str:
    """A warning where turns of the same way differ so much that something else must have been
    computing; else "".
    """
    spans = {
        row.name: (row.timing.spread[1] - row.timing.spread[0]) / row.timing.median
        for row in found.measured
    }
    wide = sorted((name for name in spans if spans[name] > _STEADY), key=lambda name: -spans[name])
    if not wide:
        return ""
    shown = ", those of ".join(f"{name} differ by {100 * spans[name]:.0f} %" for name in wide[:3])
    held = [
        row.name
        for row in found.measured
        if row.name in wide and row.role in ("one device", "all cores")
    ]
    doubtful = f"any ratio to {_listed(held)}" if held else "small differences"
    return (
        f"The turns of {shown}: was something else computing on this machine? Measure again when "
        "nothing is, before "
        f"believing {doubtful}."
    )


def clocked_apart(found: Comparison) -> str:
    """A warning where the updates that were clocked took much longer, or less, than those of the
    turns; else "".
    """
    ratios = {
        row.name: row.clocked * row.timing.median / found.samples_of(row)
        for row in found.measured
        if row.shares
    }
    off = [
        f"{name} {ratio:.1f} times as long"
        for name, ratio in ratios.items()
        if not 1 / _ALIKE < ratio < _ALIKE
    ]
    if not off:
        return ""
    return (
        "The few updates that were clocked took another time than those of the turns: "
        f"{', '.join(off)}."
    )


def clearing(found: Comparison) -> str:
    """A hint where one CPU device spends much of its time in the system, on new memory as a
    rule; else "".
    """
    slow = [row for row in found.measured if row.role == "one device" and row.system > _SYSTEM]
    if not slow or not found.on_slots or found.keeps_memory:
        return ""
    worst = max(slow, key=lambda row: row.system)
    return (
        f"{worst.name} spends {100 * worst.system:.0f} % of its time in the system, which clears "
        "what a step "
        "frees before the next one has it: keep_memory=True keeps it, and lockstep tune measures "
        "what that gains."
    )


def sentence(found: Comparison) -> str:
    """``Take ddp: 1.87 times one CPU device, 1.14 times all 2 cores, with single-device results;
    ...``.
    """
    best = best_of(found)
    if best is None:
        others = [row.name for row in found.measured]
        if not others:
            return "Nothing here can train this job: each row says why."
        return (
            f"Take none of them: the results of {_listed(others)} differ from single-device "
            "training."
        )
    said = [f"Take {best.name}: {_why(found, best)}"]
    rest = [row for row in found.measured if row.name != best.name]
    exact = [row for row in rest if row.is_exact and row.role == "strategy"]
    if exact and best.role == "strategy":
        if alike := [row.name for row in exact if _is_as_fast(row, best)]:
            said.append(f"{_listed(alike)} {'is' if len(alike) == 1 else 'are'} as fast")
        else:
            second = max(exact, key=lambda row: row.timing.median)
            said.append(f"{second.name} comes next, at {_times(second, best)} of its rate")
    for row in rest:
        if not row.is_exact and row.timing.over(best.timing).median > _SAME:
            said.append(
                f"{row.name} is {_times(row, best)} times as fast, but with other results than "
                "one device"
            )
    return "; ".join(said) + "."


def _why(found: Comparison, best: Row) -> str:
    asked = [row for row in found.rows if row.role == "strategy"]
    if best.role != "strategy":
        if exact := [row for row in asked if row.rates and row.is_exact]:
            ahead = max(exact, key=lambda row: row.timing.median)
            said = (
                "no strategy is clearly faster"
                if _is_as_fast(ahead, best)
                else "the strategies gain nothing"
            )
            return f"{said} here, {ahead.name} is at {_times(ahead, best)} of its rate"
        if failed := [row.name for row in asked if not row.rates]:
            return f"{_listed(failed)} could not be measured (each row says why)"
        return f"no strategy {'has single-device results here' if asked else 'was measured'}"
    why = []
    speed_up, cores = found.speed_up(best), found.against_cores(best)
    if speed_up is None:
        why.append(f"one device can't train it ({found[best.one].reason})")
    else:
        one = (
            found[best.one].where.replace("1 CPU device", "one CPU device")
            if found.on_slots
            else "one device"
        )
        why.append(f"{speed_up.median:.2f} times {one}")
    if cores is not None and best.cores != best.one:
        why.append(f"{cores.median:.2f} times {all_cores(found)} without a strategy")
    if best.agreement is not None and best.agreement.equal:
        cut = best.agreement.micro_batches
        why.append("with single-device results" + (f" in {cut} micro-batches" if cut > 1 else ""))
    return ", ".join(why)


def _times(row: Row, other: Row) -> str:
    return f"{row.timing.over(other.timing).median:.2f}"


def all_cores(found: Comparison) -> str:
    """``all 2 cores``."""
    return "all cores" if found.machine["cores"] == 1 else f"all {found.machine['cores']} cores"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
