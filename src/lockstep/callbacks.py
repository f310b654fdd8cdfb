"""Callbacks that come with Lockstep, by their public names:
``Job(callbacks=[lockstep.callbacks.EMA(0.999)])``.

One's own derive from ``lockstep.Callback``.
"""

from lockstep.training.callbacks.averages import EMA, SWA
from lockstep.training.callbacks.callback import Callback, TrainingContext
from lockstep.training.callbacks.freeze import Freeze
from lockstep.training.callbacks.monitors import LearningRateMonitor, Sampler
from lockstep.training.callbacks.stopping import EarlyStopping, TimeLimit
from lockstep.training.callbacks.trackers import MLflow, WandB

__all__ = [
    "EMA",
    "SWA",
    "Callback",
    "EarlyStopping",
    "Freeze",
    "LearningRateMonitor",
    "MLflow",
    "Sampler",
    "TimeLimit",
    "TrainingContext",
    "WandB",
]
