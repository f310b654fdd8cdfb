"""Callbacks that come with Lockstep, by their public names: ``Job(callbacks=[lockstep.callbacks.EMA(0.999)])``.

One's own derive from ``lockstep.Callback``.
"""

from lockstep.training.callbacks.averages import EMA, SWA
from lockstep.training.callbacks.callback import Callback, TrainingContext

__all__ = ["EMA", "SWA", "Callback", "TrainingContext"]
