"""``--profile``: where the time of some steps goes, as a trace for each rank and as one table of
all.

`profiler` (which steps, the trace, the files), `clock` (what is noted), `time_breakdown` (what the
notes of all ranks mean), `profile_table` (for a terminal).
"""

from lockstep.profiling.profiler import Profiler

__all__ = ["Profiler"]
