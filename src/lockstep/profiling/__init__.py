"""``--profile``: where the time of some steps goes, as a trace for each rank and as one table of
all.

`profiler` (which steps, the trace, the telling), `clock` (what is noted). What the notes of all
ranks mean, and the table, are in `lockstep.profiling.time_breakdown`.
"""

from lockstep.profiling.profiler import Profiler

__all__ = ["Profiler"]
