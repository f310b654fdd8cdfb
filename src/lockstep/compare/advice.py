"""The sentence at the end of a comparison: which row to take, and why; and a warning about turns
that differ.
"""

from __future__ import annotations

from lockstep.compare.result import Comparison, Row

_SAME = 1.02
"""A ratio up to which two are as fast as one another, whatever their spread."""

_STEADY = 0.2
"""The span of the turns of a row on an idle machine, at most, as a part of their median."""


def best_of(found: Comparison) -> Row | None:
    """Return the row to take: the fastest with single-device results; of equally fast ones the
    least trouble.

    ``single`` is less trouble than any strategy; of strategies, one whose BatchNorm has the whole
    batch; of these, the one with the least memory.
    """
    candidates = [row for row in found.measured if row.is_exact]
    if not candidates:
        return None
    fastest = max(candidates, key=lambda row: row.timing.median)
    alike = [row for row in candidates if _is_as_fast(row, fastest)]
    return min(alike, key=_trouble)


def _trouble(row: Row) -> tuple[bool, bool, int]:
    """Return what the least is taken of, where rows are as fast as one another."""
    agreement = row.agreement
    norms_cut = agreement is not None and agreement.norms_cut
    return row.role == "strategy", norms_cut, sum(row.peaks)


def _is_as_fast(row: Row, fastest: Row) -> bool:
    """Return whether a row isn't clearly behind: by its median, or since it was ahead in some
    rounds.

    Args:
        row: of the comparison.
        fastest: the row that it is held against.
    """
    ahead = fastest.timing.over(row.timing)
    rounds = sum(rate > 1.0 for rate in ahead.rates)
    return ahead.median < _SAME or rounds < 0.75 * len(ahead.rates)


def unsteady(found: Comparison) -> str:
    """Return a warning where turns of the same row differ so much that something else must have
    been computing; else "".
    """
    spans = []
    for row in found.measured:
        lowest, highest = row.timing.spread
        span = (highest - lowest) / row.timing.median
        if span > _STEADY:
            spans.append(f"{row.name} differ by {100 * span:.0f} %")
    if not spans:
        return ""
    return (
        f"The turns of {', those of '.join(spans)}: was something else running on this machine? "
        "Measure again on an idle machine before relying on these rows."
    )


def sentence(found: Comparison) -> str:
    """Return ``Take ddp: 1.87 times one CPU device, 1.14 times all 2 cores, with single-device
    results; ...``.
    """
    best = best_of(found)
    names = [row.name for row in found.measured]
    if not names:
        return "Nothing here can train this job: each row has the reason."
    if best is None:
        return f"Take none: the results of {', '.join(names)} differ from single-device training."
    parts = [f"Take {best.name}: {_why(found, best)}"]
    for row in found.measured:
        if not row.is_exact and row.timing.over(best.timing).median > _SAME:
            times = _times(row, best)
            parts.append(
                f"{row.name} is {times} times as fast, but with other results than one device"
            )
    return "; ".join(parts) + "."


def _why(found: Comparison, best: Row) -> str:
    """Return why the best row is the one to take.

    Args:
        found: the comparison.
        best: a strategy, or ``single``.
    """
    if best.role != "strategy":
        return _why_no_strategy(found, best)
    why = []
    speed_up = found.speed_up(best)
    cores = found.against_cores(best)
    one = found[best.one]
    if speed_up is None:
        why.append(f"one device can't train it ({one.reason})")
    elif found.on_slots:
        words = one.where.replace("1 CPU device", "one CPU device")
        why.append(f"{speed_up.median:.2f} times {words}")
    else:
        why.append(f"{speed_up.median:.2f} times one device")
    if cores is not None and best.cores != best.one:
        why.append(f"{cores.median:.2f} times {all_cores(found)} without a strategy")
    agreement = best.agreement
    if agreement is not None and agreement.equal:
        results = "with single-device results"
        cut = f"in {agreement.micro_batches} micro-batches"
        if agreement.norms_cut:
            results = f"with the results of single {cut} (BatchNorm normalizes over each of them)"
        elif agreement.micro_batches > 1:
            results += f" {cut}"
        if agreement.without_dropout:
            results += " but for the masks of dropout"
        why.append(results)
    return ", ".join(why)


def _why_no_strategy(found: Comparison, best: Row) -> str:
    """Return why ``single`` is the row to take."""
    exact = [row for row in found.measured if row.role == "strategy" and row.is_exact]
    if not exact:
        return "no strategy with single-device results was measured"
    ahead = max(exact, key=lambda row: row.timing.median)
    return (
        f"no strategy is clearly faster here, {ahead.name} is at {_times(ahead, best)} of its rate"
    )


def _times(row: Row, other: Row) -> str:
    """Return how many times as fast as another row a row is: ``1.14``."""
    ratio = row.timing.over(other.timing)
    return f"{ratio.median:.2f}"


def all_cores(found: Comparison) -> str:
    """Return ``all 2 cores``."""
    cores = found.machine["cores"]
    if cores == 1:
        return "all cores"
    return f"all {cores} cores"
