"""The sentence at the end of a comparison: which to take, and why."""

from __future__ import annotations

from lockstep.compare.result import Comparison, Row

_SAME = 1.02
"""A ratio up to which two are as fast as one another, whatever their spread."""

_STEADY = 0.2
"""From the lowest to the highest turn, as a part of the median: what an idle machine stays within."""

_ALIKE = 1.5
"""How many times as long updates may take that are clocked apart, and still be like those of the turns."""

_SYSTEM = 0.2
"""A part of one core's time that the system doesn't take where a job computes; each step's new memory may."""


def best_of(found: Comparison) -> Row | None:
    """The row to take: the fastest with the numbers of one device; of equally fast ones the simplest."""
    candidates = [row for row in found.measured if row.role != "peer" and row.is_exact]
    if not candidates:
        return None
    fastest = max(candidates, key=lambda row: row.timing.median)
    return min([row for row in candidates if _is_as_fast(found, fastest, row)], key=_trouble)


def unsteady(found: Comparison) -> str:
    """A warning where turns of the same way differ so much that something else must have been computing; else ""."""
    spans = {row.name: (row.timing.spread[1] - row.timing.spread[0]) / row.timing.median for row in found.measured}
    wide = sorted((name for name in spans if spans[name] > _STEADY), key=lambda name: -spans[name])
    if not wide:
        return ""
    shown = [f"those of {name} by {100 * spans[name]:.0f} %" for name in wide[1:3]] + ["others too"] * (len(wide) > 3)
    said = (
        f"{', '.join([f'The turns of {wide[0]} differ by {100 * spans[wide[0]]:.0f} %', *shown])}: was something else "
        "computing on this machine? Measure again when nothing is, before believing small differences"
    )
    if held := [row.name for row in found.measured if row.name in wide and row.role in ("one device", "all cores")]:
        said += f", or any ratio to {_listed(held)}"
    return f"{said}."


def clocked_apart(found: Comparison) -> str:
    """A warning where the updates that were clocked took much longer, or less, than those of the turns; else ""."""
    ratios = {row.name: row.clocked * row.timing.median / found.samples_of(row) for row in found.measured if row.shares}
    off = [f"{name} {ratio:.1f} times as long" for name, ratio in ratios.items() if not 1 / _ALIKE < ratio < _ALIKE]
    if not off:
        return ""
    return (
        f"The few updates that were clocked for where the time goes took another time than those of the turns: "
        f"{', '.join(off)}. How a step divides may be another there too."
    )


def clearing(found: Comparison) -> str:
    """A hint where one slot spends much of its time in the system, on new memory as a rule; else ""."""
    slow = [row for row in found.measured if row.role == "one device" and row.system > _SYSTEM]
    if not slow or not found.on_slots or found.keeps_memory:
        return ""
    worst = max(slow, key=lambda row: row.system)
    return (
        f"{worst.name} spends {100 * worst.system:.0f} % of its time in the system, which clears what a step "
        "frees before the next one has it: keep_memory=True keeps it, and lockstep tune measures what that gains."
    )


def cautions(found: Comparison) -> list[str]:
    """What to think of before believing the numbers."""
    return [said for said in (unsteady(found), clocked_apart(found), clearing(found)) if said]


def _is_as_fast(found: Comparison, fastest: Row, row: Row) -> bool:
    """Whether ``row`` isn't clearly behind: by its median, or since it was ahead in some rounds."""
    ahead = found.ratio(fastest, row.name)
    assert ahead is not None
    return ahead.median < _SAME or sum(rate > 1.0 for rate in ahead.rates) < 0.75 * len(ahead.rates)


def _trouble(row: Row) -> tuple[bool, int]:
    """``single`` is less trouble than any strategy; of these, what takes least memory."""
    return row.role == "strategy", sum(row.peaks)


def sentence(found: Comparison) -> str:
    """``Take ddp: 1.87 times one slot, 1.14 times all 2 cores, with the numbers of one device; ...``."""
    best = best_of(found)
    if best is None:
        others = [row for row in found.measured if row.role != "peer"]
        if not others:
            return "Nothing here can train this job: each row says why."
        return f"Take none of them for the numbers of one device: {_listed([r.name for r in others])} differ from it."
    said = [f"Take {best.name}: {_why(found, best)}"]
    rest = [row for row in found.measured if row.name != best.name]
    # Of the rows that it is held against only those that come close are worth a word.
    exact = [row for row in rest if row.is_exact and row.role == "strategy"]
    alike = [row.name for row in exact if _is_as_fast(found, best, row)]
    after = [row for row in exact if row.name not in alike]
    if alike and best.role == "strategy":
        said.append(f"{_listed(alike)} {'is' if len(alike) == 1 else 'are'} as fast")
    elif after and best.role == "strategy":
        next_one = max(after, key=lambda row: row.timing.median)
        behind = found.ratio(next_one, best.name)
        assert behind is not None
        said.append(f"{next_one.name} comes next, at {behind.median:.2f} of its rate")
    for row in rest:
        ahead = found.ratio(row, best.name)
        if not row.is_exact and ahead is not None and ahead.median > _SAME:
            said.append(f"{row.name} is {ahead.median:.2f} times as fast, but not with the numbers of one device")
    return "; ".join(said) + "."


def _why(found: Comparison, best: Row) -> str:
    strategies = [row for row in found.measured if row.role == "strategy" and row.is_exact]
    if best.role != "strategy":
        if not strategies:
            asked = [row for row in found.rows if row.role == "strategy"]
            if failed := [row.name for row in asked if not row.rates]:
                others = [row.name for row in asked if row.rates]
                unlike = f", and {_listed(others)} {_differ(others)} from one device" if others else ""
                return f"{_listed(failed)} could not be measured (each row says why){unlike}"
            return f"no strategy {'has the numbers of one device here' if asked else 'was measured'}"
        ahead = max(strategies, key=lambda row: row.timing.median)
        ratio = found.ratio(ahead, best.name)
        assert ratio is not None
        said = "no strategy is clearly faster" if _is_as_fast(found, best, ahead) else "the strategies gain nothing"
        return f"{said} here, {ahead.name} is at {ratio.median:.2f} of its rate"
    why = []
    speed_up, cores = found.speed_up(best), found.against_cores(best)
    if speed_up is not None:
        why.append(f"{speed_up.median:.2f} times {one_device(found, best)}")
    elif (reason := found[best.one].reason) and best.one != best.name:
        why.append(f"one device can't train it ({reason})")
    if cores is not None and best.cores != best.one:
        why.append(f"{cores.median:.2f} times {all_cores(found)} without a strategy")
    if best.agreement is not None and best.agreement.equal:
        cut = best.agreement.micro_batches
        why.append("with the numbers of one device" + (f" in {cut} micro-batches" if cut > 1 else ""))
    return ", ".join(why) if why else "it is the only one that can train this job"


def _differ(names: list[str]) -> str:
    return "differs" if len(names) == 1 else "differ"


def one_device(found: Comparison, row: Row) -> str:
    """``one slot of 1 core``, ``one device``: what a speed-up is over."""
    if not found.on_slots:
        return "one device"
    return found[row.one].where.replace("1 slot", "one slot")


def all_cores(found: Comparison) -> str:
    """``all 2 cores``."""
    return "all cores" if found.machine["cores"] == 1 else f"all {found.machine['cores']} cores"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
