"""Export: a run's model as a file that needs neither the job nor Lockstep, compared with the
run.
"""

from lockstep.export.export_run import Exported, export

__all__ = ["Exported", "export"]
